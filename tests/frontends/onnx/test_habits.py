"""Habits of exporters that ONNX Runtime takes: such files are read, planned and verified."""

import numpy as np
import onnx
import onnx_models as om
import pytest
from onnx import helper

import partitioner
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx

F32 = "float32"


def floats(*shape: int) -> om.Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def node(op: str, reads: str, makes: str, domain: str = "", **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), domain=domain, **attrs)


def assert_right(
    proto: onnx.ModelProto, shapes: dict[str, tuple[int, ...]] | None = None
) -> Traced:
    """The model is read as ONNX Runtime runs it, and its ranks compute the same."""
    traced = load_onnx(proto, shapes=shapes or {})
    feeds = random_inputs(traced.graph, 0)
    results = om.assert_same(traced, feeds, tolerance=1e-6)
    for mine, theirs in zip(results, om.run(proto, feeds), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for strategy in ("inter", "auto"):
        compiled = partitioner.compile(
            proto, devices=2, strategy=strategy, cluster="ideal", shapes=shapes
        )
        assert compiled.verify().equal
    return traced


def test_a_size_of_minus_one_is_not_known() -> None:
    """So old exports of Paddle write it, in inputs, outputs and results."""
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "y")]
    inputs, outputs = {"x": (F32, [-1, 4])}, {"y": (F32, [-1, 6])}
    proto = om.model(nodes, inputs, outputs, {"w": floats(4, 6)})
    proto.graph.value_info.extend(om.infos({"h": (F32, [-1, 6])}))
    with pytest.raises(FrontendError, match=r"dims without a size: x\[\?, 4\]; pass --shape x=N,4"):
        load_onnx(proto)
    assert assert_right(proto, {"x": (8, 4)}).graph.types["h"].shape == (8, 6)


def test_initializers_of_ir_version_3_need_not_be_inputs() -> None:
    """ONNX Runtime saves an old model so: what it fuses is in no input."""
    proto = om.model(
        [node("MatMul", "x w", "y")], {"x": (F32, [4, 4])}, {"y": (F32, [4, 6])}, {"w": floats(4, 6)}
    )
    proto.ir_version = 3
    assert_right(proto)


def test_nodes_stand_in_any_order() -> None:
    """The order is the least changed one; what bodies read counts."""
    then = om.body([node("Abs", "h", "t"), node("Neg", "t", "u")], {}, {"u": (F32, [4, 6])})
    other = om.body([node("Abs", "g", "v")], {}, {"v": (F32, [4, 6])})
    branch = helper.make_node("If", ["c"], ["b"], then_branch=then, else_branch=other)
    nodes = [
        node("Relu", "b", "y"),
        branch,
        node("Exp", "h", "g"),
        node("MatMul", "x w", "h"),
        node("Cos", "x", "z"),
    ]
    inputs = {"x": (F32, [4, 4]), "c": ("bool", [])}
    outputs = {"y": (F32, [4, 6]), "z": (F32, [4, 4])}
    proto = om.model(nodes, inputs, outputs, {"w": floats(4, 6)})
    traced = assert_right(proto)
    assert [n.op for n in traced.graph.nodes] == ["MatMul", "Exp", "If", "Relu", "Cos"]


def test_nodes_in_a_circle_are_refused() -> None:
    nodes = [node("Add", "x b", "a"), node("Relu", "a", "b")]
    with pytest.raises(FrontendError, match="must be topologically sorted"):
        load_onnx(om.model(nodes, {"x": (F32, [2])}, {"b": (F32, [2])}))


@pytest.mark.parametrize(
    ("op", "opset", "weights"),
    [
        ("SimplifiedLayerNormalization", 13, "s"),
        ("SimplifiedLayerNormalization", 20, "s"),
        ("LayerNormalization", 12, "s b"),
        ("LayerNormalization", 16, "s b"),
    ],
)
def test_norms_that_only_onnx_runtime_has_in_this_opset(op: str, opset: int, weights: str) -> None:
    """They are in ONNX's own domain, where the version that ONNX has is newer, or none."""
    nodes = [
        node("MatMul", "x w", "h"),
        node(op, f"h {weights}", "n", axis=-1, epsilon=1e-5),
        node("MatMul", "n v", "y"),
    ]
    arrays = {"w": floats(8, 16), "v": floats(16, 4), "s": floats(16), "b": floats(16)}
    kept = {name: array for name, array in arrays.items() if name in f"w v {weights}".split()}
    proto = om.model(nodes, {"x": (F32, [4, 8])}, {"y": (F32, [4, 4])}, kept, opset=opset)
    traced = assert_right(proto)
    assert traced.graph.types["n"].shape == (4, 16)
    assert [n.op for n in traced.graph.nodes] == ["MatMul", op, "MatMul"]


def test_an_operator_that_nobody_has_is_refused() -> None:
    proto = om.model([node("Unheard", "x", "y")], {"x": (F32, [2])}, {"y": (F32, [2])})
    with pytest.raises(FrontendError, match="No Op registered for Unheard"):
        load_onnx(proto)


@pytest.mark.parametrize("dims", [[2, 4], [2, 3, 1], [7, "n"]])
def test_a_stale_declaration_is_a_note(dims: om.Dims) -> None:
    """The inferred shape is taken, as ONNX Runtime takes it."""
    nodes = [node("Relu", "x", "h"), node("Neg", "h", "y")]
    proto = om.model(nodes, {"x": (F32, [2, 3])}, {"y": (F32, [2, 3])})
    proto.graph.value_info.extend(om.infos({"h": (F32, dims)}))
    traced = assert_right(proto)
    assert traced.graph.types["h"].shape == (2, 3)
    assert [note for note in traced.notes if "'h'" in note and "which is taken" in note]


def test_a_stale_output_is_a_note() -> None:
    proto = om.model([node("Relu", "x", "y")], {"x": (F32, [2, 3])}, {"y": (F32, [2, 4])})
    assert load_onnx(proto).notes == (
        "tensor 'y' of node 'Relu_0' (Relu) is declared [2, 4] but works out as [2, 3], "
        "which is taken",
    )
    assert partitioner.compile(proto, devices=2).verify().equal


def test_outputs_that_are_inputs_or_weights_keep_their_names() -> None:
    """In one process, between processes, and in micro-batches."""
    proto = om.model(
        [node("MatMul", "x w", "y"), node("Identity", "x", "z")],
        {"x": (F32, [4, 4])},
        {"x": (F32, [4, 4]), "y": (F32, [4, 6]), "w": (F32, [4, 6]), "z": (F32, [4, 4])},
        {"w": floats(4, 6)},
    )
    feeds = {"x": floats(4, 4)}
    expected = dict(zip(("x", "y", "w", "z"), om.run(proto, feeds), strict=True))
    assert load_onnx(proto).notes == ()
    for options in ({}, {"micro_batches": 2}, {"strategy": "inter"}):
        compiled = partitioner.compile(proto, devices=2, cluster="ideal", **options)
        results = compiled.run(feeds)
        assert list(results) == list(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(results[name], array, rtol=1e-6)
        verification = compiled.verify()
        assert verification.equal
        assert [output.name for output in verification.outputs] == list(expected)
