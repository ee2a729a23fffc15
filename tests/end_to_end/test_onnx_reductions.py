"""ONNX's reductions and softmaxes cut along what they reduce: equal to ONNX Runtime whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from helpers.plans.cost_cases import SLOW, flat
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.program import CommKind
from partitioner.strategies.constraints import Constraints, Pin

ROWS, CLASSES = 9, 1031  # a prime: parts are uneven
MESHES: Sequence[Mapping[str, int]] = ({"a": 2}, {"a": 3}, {"a": 5}, {"a": 2, "b": 3})


def node(
    name: str, op: str, opset: int, axes: Sequence[int] | None = None, **attrs: Any
) -> tuple[onnx.NodeProto, dict[str, np.ndarray]]:
    """A node over x, with its axes as the opset has them, and its constants."""
    first = 13 if op == "ReduceSum" else 18
    if axes is None or opset < first:
        given = {} if axes is None else {"axes": axes}
        return helper.make_node(op, ["x"], [name], name=name, **given, **attrs), {}
    axes_name = f"{name}_axes"
    made = helper.make_node(op, ["x", axes_name], [name], name=name, **attrs)
    return made, {axes_name: np.array(axes, np.int64)}


def every(opset: int) -> list[tuple[onnx.NodeProto, dict[str, np.ndarray]]]:
    """A node of every kind that has parts."""
    return [
        node("softmax", "Softmax", opset, axis=1),
        node("log_softmax", "LogSoftmax", opset, axis=1 if opset < 13 else -1),
        node("arg_max", "ArgMax", opset, axis=-1, keepdims=0),
        node("arg_min", "ArgMin", opset, axis=1, keepdims=1),
        node("l2", "ReduceL2", opset, [-1], keepdims=0),
        node("log_sum", "ReduceLogSum", opset, [1]),
        node("log_sum_exp", "ReduceLogSumExp", opset, [-1], keepdims=1),
        node("log_sum_exp_flat", "ReduceLogSumExp", opset, [1], keepdims=0),
    ]


def model(
    nodes: Sequence[tuple[onnx.NodeProto, dict[str, np.ndarray]]],
    opset: int,
    shape: Sequence[int] = (ROWS, CLASSES),
    dtype: str = "float32",
) -> onnx.ModelProto:
    """Nodes that read one input, all results of which are outputs."""
    weights = {name: array for _, constants in nodes for name, array in constants.items()}
    outputs = {made.output[0]: (_result(made, dtype), None) for made, _ in nodes}
    return onnx_models.model(
        [made for made, _ in nodes], {"x": (dtype, [*shape])}, outputs, weights, opset=opset
    )


def _result(made: onnx.NodeProto, dtype: str) -> str:
    return "int64" if made.op_type.startswith("Arg") else dtype


def cut(proto: onnx.ModelProto, mesh: Mapping[str, int], dim: int = 1) -> Compiled:
    """The model with all that reads x cut along a dim over all axes."""
    pins = tuple(Pin("cut", tensor="x", dim=dim, axis=axis, side="read") for axis in mesh)
    ranks = int(np.prod([*mesh.values()]))
    return partitioner.compile(
        proto,
        cluster=f"{ranks}xideal",
        strategy="intra",
        mesh=mesh,
        constraints=Constraints(pins),
        time_limit_s=5,
    )


def drawn(dtype: type = np.float32) -> np.ndarray:
    """Rows with ties, infinities, zeros and NaN at the begin, the end and in between."""
    x = np.random.default_rng(0).normal(size=(ROWS, CLASSES)).astype(dtype)
    x[1, [3, 700, 1030]] = x[1].max() + 1  # ties, on several devices
    x[1, [5, 701]] = x[1].min() - 1
    x[2] = -np.inf
    x[3, [0, 600]] = np.inf
    x[4, 10:] = -np.inf
    x[5] = 0
    x[6, 1030] = np.nan
    x[7, 0] = np.nan
    x[8, [2, 500]] = np.nan
    x[8, 3:] = np.where(np.isnan(x[8, 3:]), np.nan, -np.inf)
    return x


def whole(proto: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [value.name for value in proto.graph.output]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        if array.dtype == np.int64:
            np.testing.assert_array_equal(found[name], array, name)
        else:
            np.testing.assert_allclose(found[name], array, 2e-5, 2e-6, err_msg=name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("opset", "mesh"), [*zip((11, 12, 13, 18), MESHES, strict=True)], ids=str)
def test_cut_along_classes(opset: int, mesh: Mapping[str, int]) -> None:
    proto, x = model(every(opset), opset), drawn()
    program = cut(proto, mesh)
    assert not {"ReduceL2", "Softmax", "ArgMax"} & {made.op for made in program.graph.nodes}
    readers = {n.name for n in program.graph.nodes if "x" in n.inputs}
    cuts = {name: program.plan.nodes[name].cuts for name in readers}
    assert all(cuts.values()), cuts
    assert_equal(program.run({"x": x}), whole(proto, x))
    assert program.verify(seed=3).equal


def test_integers_and_two_dims() -> None:
    """Places of integers, and a softmax over two dims, as before opset 13."""
    x = np.random.default_rng(0).integers(-5, 5, (3, 1031))
    kinds = [node(op, op, 13, axis=1) for op in ("ArgMax", "ArgMin")]
    program = cut(proto := model(kinds, 13, x.shape, "int64"), {"a": 3})
    assert_equal(program.run({"x": x}), whole(proto, x))
    y = np.random.default_rng(0).normal(size=(4, 35, 31)).astype(np.float32)
    kinds = [node(op, op, 12, axis=1) for op in ("Softmax", "LogSoftmax")]
    proto = model(kinds, 12, y.shape)
    flags = np.random.default_rng(0).random((4, 13)) < 0.1
    kinds = [node(op, op, 20, [1], keepdims=0) for op in ("ReduceMax", "ReduceMin")]
    proto_of_flags = model(kinds, 20, flags.shape, "bool")
    assert_equal(cut(proto_of_flags, {"a": 3}).run({"x": flags}), whole(proto_of_flags, flags))
    for dim in (1, 2):
        assert_equal(cut(proto, {"a": 3}, dim).run({"x": y}), whole(proto, y))


def ops(graph: Graph) -> list[str]:
    return [made.op for made in graph.nodes]


def test_what_keeps_its_operator() -> None:
    """Half precision, short dims, dims with more rows, a reduction of nothing."""
    last = node("last", "ArgMax", 18, axis=1, select_last_index=1)
    assert len(load_onnx(model([last], 18)).forms) == 1
    long = node("softmax", "Softmax", 18, axis=1)
    for shape, dtype, parts in (
        ((4, 1024), "float32", True),
        ((4, 1023), "float32", False),
        ((1025, 1024), "float32", False),
        ((4, 1024), "float16", False),
    ):
        forms = load_onnx(model([long], 18, shape, dtype)).forms
        assert (len(forms) > 1) == parts, (shape, dtype)
    norm = node("l2", "ReduceL2", 18, [1])
    assert ops(load_onnx(model([norm], 18)).graph) == ["ReduceSumSquare", "Sqrt"]
    assert ops(load_onnx(model([norm], 18, dtype="float16")).graph) == ["ReduceL2"]
    nothing = node("l2", "ReduceL2", 18, [], noop_with_empty_axes=1)
    assert ops(load_onnx(model([nothing], 18)).graph) == ["ReduceL2"]
    every_dim = node("l2", "ReduceL2", 18, [], noop_with_empty_axes=0, keepdims=0)
    program = cut(proto := model([every_dim], 18, (4, 30)), {"a": 3})
    x = np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32)
    assert_equal(program.run({"x": x}), whole(proto, x))


def test_weights_of_attention_keep_their_operator() -> None:
    """Many queries over many keys: what few queries have is another form."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["weights"], name="weights", axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["y"], name="y"),
    ]
    values = {"x": ("float32", [1024, 1024]), "v": ("float32", [1024, 8])}
    proto = onnx_models.model(nodes, values, {"y": ("float32", [1024, 8])}, opset=18)
    assert len(load_onnx(proto).forms) == 1


def head(hidden: int = 64, classes: int = 4096) -> onnx.ModelProto:
    """A product with a vocabulary, and the likeliest word."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(hidden, classes)).astype(np.float32)}
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["logits"], name="logits"),
        helper.make_node("Softmax", ["logits"], ["likely"], name="likely", axis=-1),
        helper.make_node("ArgMax", ["likely"], ["word"], name="word", axis=-1, keepdims=0),
    ]
    inputs = {"h": ("float32", [1, hidden])}
    return onnx_models.model(nodes, inputs, {"word": ("int64", [1])}, weights, opset=18)


def test_the_likeliest_word_of_a_vocabulary_that_is_cut() -> None:
    """Over slow links logits stay where they are; over fast ones ONNX Runtime's kernels do."""
    slow = Cluster("slow", (SLOW,) * 2, (LinkLevel("link", 2, 1e6, 1e-6),))
    program = partitioner.compile(head(), cluster=slow, time_limit_s=5)
    assert program.plan.nodes["logits"].cuts
    assert "ArgMax" not in ops(program.graph)
    sent = [comm for comm in program.programs.ranks[0].comms if len(comm.ranks) > 1]
    assert {comm.kind for comm in sent} == {CommKind.ALL_REDUCE}
    assert program.verify(seed=0).equal
    kept = partitioner.compile(head(), cluster=slow, constraints=program.plan, time_limit_s=5)
    assert kept.plan.nodes == program.plan.nodes
    fast = partitioner.compile(head(), cluster=flat(2), time_limit_s=5)
    assert fast.plan.nodes["logits"].cuts
    assert {"likely", "word"} <= fast.plan.nodes.keys()
