"""Weights in bodies of If, Loop and Scan: counted, written and loaded like others."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import partitioner
from helpers.drawn.drawn_bodies import drawn_bodies
from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.rank_files import assert_rank_files_run
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.solver.outcome import Infeasible

F32 = "float32"
WIDTH = 512


def weight(seed: int = 0) -> om.Array:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH


def with_if() -> onnx.ModelProto:
    """Both branches multiply by a weight of their own of 1 MiB, by the same name."""
    branches = []
    for seed, products in ((0, 1), (1, 2)):
        names = ["h", *(f"t{seed}{index}" for index in range(products))]
        nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in itertools.pairwise(names)]
        branches.append(om.body(nodes, {}, {names[-1]: (F32, [2, WIDTH])}, {"w": weight(seed)}))
    choice = helper.make_node(
        "If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1]
    )
    return om.model(
        [helper.make_node("Relu", ["x"], ["h"]), choice],
        {"x": (F32, [2, WIDTH]), "flag": ("bool", [])},
        {"y": (F32, [2, WIDTH])},
    )


def feeds(flag: bool) -> dict[str, om.Array]:
    x = np.random.default_rng(2).standard_normal((2, WIDTH)).astype(np.float32)
    return {"x": x, "flag": np.array(flag)}


def test_weights_of_branches_are_planned() -> None:
    traced = load_onnx(with_if())
    choice = traced.graph.by_name["If_0"]
    weights = [name for name in choice.captures if name in traced.graph.constants]
    assert [traced.graph.types[name].nbytes for name in weights] == [2**20, 2**20]
    for flag in (True, False):
        om.assert_same(traced, feeds(flag))
    compiled = partitioner.compile(with_if(), devices=2, strategy="inter", memory="3MiB")
    assert max(compiled.summary["peak_bytes"]) > 2 * 2**20


@pytest.mark.slow
def test_weights_of_branches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Infeasible, match=r"at 'If_0'.* 2 MiB weights"):
        partitioner.compile(with_if(), devices=2, strategy="inter", memory="1MiB")


def test_flops_are_those_of_the_dearer_branch() -> None:
    graph = load_onnx(with_if()).graph
    assert estimated_flops(graph, graph.by_name["If_0"]) == 2 * 2 * (2 * WIDTH * WIDTH)


@pytest.mark.parametrize(("trips", "runs"), [(5, 5), (0, 0), (2**63 - 1, 1), (None, 1)], ids=str)
def test_flops_of_a_loop_are_those_of_all_iterations(trips: int | None, runs: int) -> None:
    """The largest number stands for no limit: the condition alone ends the loop."""
    state = (F32, [2, WIDTH])
    body = om.body(
        [helper.make_node("MatMul", ["v", "w"], ["n"]), helper.make_node("Not", ["c"], ["go"])],
        {"i": ("int64", []), "c": ("bool", []), "v": state},
        {"go": ("bool", []), "n": state},
        {"w": weight()},
    )
    loop = helper.make_node("Loop", ["" if trips is None else "m", "yes", "x"], ["y"], body=body)
    count = {} if trips is None else {"m": np.array(trips)}
    graph = load_onnx(
        om.model([loop], {"x": state}, {"y": state}, {"yes": np.array(True), **count})
    ).graph
    once = 2 * 2 * WIDTH * WIDTH
    flops = estimated_flops(graph, graph.nodes[0])
    assert flops == pytest.approx(runs * once, rel=1e-5) if runs else flops < 2 * once


def test_flops_of_nested_bodies_are_those_of_all_runs() -> None:
    """A Loop of 4 in a Scan over 3 rows."""
    state = (F32, [2, WIDTH])
    inner = om.body(
        [helper.make_node("MatMul", ["v", "w"], ["n"]), helper.make_node("Identity", ["c"], ["g"])],
        {"i": ("int64", []), "c": ("bool", []), "v": state},
        {"g": ("bool", []), "n": state},
    )
    outer = om.body(
        [
            helper.make_node("Loop", ["m", "", "s"], ["t"], body=inner),
            helper.make_node("Add", ["t", "row"], ["u"]),
        ],
        {"s": state, "row": state},
        {"u": state},
        {"w": weight()},
    )
    scan = helper.make_node("Scan", ["x", "rows"], ["y"], body=outer, num_scan_inputs=1)
    inputs = {"x": state, "rows": (F32, [3, 2, WIDTH])}
    graph = load_onnx(om.model([scan], inputs, {"y": state}, {"m": np.array(4)})).graph
    product = 2 * 2 * WIDTH * WIDTH
    assert estimated_flops(graph, graph.nodes[0]) == 3 * (4 * product + 2 * WIDTH)


@pytest.mark.parametrize("attributes", [True, False])
def test_weights_of_bodies_in_files(tmp_path: Path, attributes: bool) -> None:
    """Rank files, run and loaded again without the model, compute what it does."""
    proto = with_if()
    if attributes:  # a branch returns a Constant node's value
        tensor = numpy_helper.from_array(feeds(True)["x"])
        branch = om.body(
            [helper.make_node("Constant", [], ["k"], value=tensor)], {}, {"k": (F32, [2, WIDTH])}
        )
        next(a for a in proto.graph.node[1].attribute if a.name == "then_branch").g.CopyFrom(branch)
    right = [om.run(proto, feeds(flag))[0] for flag in (True, False)]
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    onnx.save(
        proto,
        path,
        save_as_external_data=True,
        location="model.data",
        convert_attribute=attributes,
    )
    stored = onnx.load(path, load_external_data=False)
    assert "model.data" in str(stored.graph.node[1])
    compiled = partitioner.compile(path, devices=2, strategy="inter")
    assert compiled.verify().equal
    compiled.save(tmp_path / "plan")
    assert_rank_files_run(tmp_path / "plan")
    loaded = partitioner.load(tmp_path / "plan")
    for flag, whole in zip((True, False), right, strict=True):
        np.testing.assert_array_equal(loaded.run(feeds(flag))["y"], whole)


def test_files_of_bodies_may_be_missing_when_only_planning(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(with_if(), path, save_as_external_data=True, location="model.data")
    (tmp_path / "model.data").unlink()
    with pytest.raises(FrontendError, match=r"external file .*model.data is missing"):
        load_onnx(path)
    graph = load_onnx(path, plan_only=True).graph
    assert sum(constant.type.nbytes for constant in graph.constants.values()) == 2 * 2**20
    with pytest.raises(FrontendError, match=r"weight 'w.*' lies in .*model.data, which is missing"):
        next(iter(graph.constants.values())).load()


def test_a_sparse_weight_of_a_body_is_refused() -> None:
    proto = with_if()
    branch = next(a for a in proto.graph.node[1].attribute if a.name == "then_branch").g
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    del branch.initializer[:]
    sparse = helper.make_sparse_tensor(values, indices, [WIDTH, WIDTH])
    branch.sparse_initializer.append(sparse)
    with pytest.raises(FrontendError, match="initializer 'w' is sparse; store it as a dense"):
        load_onnx(proto)


def test_small_constants_of_one_name_in_branches_that_are_taken() -> None:
    """Names that are made distinct leave the model as it was given alone."""
    nodes = []
    for index in range(2):
        then = om.body(
            [helper.make_node("Add", ["x", "b"], [f"t{index}"])],
            {},
            {f"t{index}": (F32, [2])},
            {"b": np.full(2, index + 1, np.float32)},
        )
        other = om.body(
            [helper.make_node("Neg", ["x"], [f"e{index}"])], {}, {f"e{index}": (F32, [2])}
        )
        nodes.append(
            helper.make_node("If", ["yes"], [f"y{index}"], then_branch=then, else_branch=other)
        )
    nodes.append(helper.make_node("Mul", ["y0", "y1"], ["z"]))
    proto = om.model(nodes, {"x": (F32, [2])}, {"z": (F32, [2])}, {"yes": np.array(True)})
    traced = load_onnx(proto)
    assert not any(node.op == "If" for node in traced.graph.nodes)
    om.assert_same(traced, {"x": np.ones(2, np.float32)})


def test_weights_in_bodies_of_functions() -> None:
    """A function whose If holds a Constant, called twice."""
    tensor = numpy_helper.from_array(weight())
    branch = [
        om.body(
            [
                helper.make_node("Constant", [], [f"{name}w"], value=tensor),
                helper.make_node("MatMul", ["a", f"{name}w"], [name]),
            ],
            {},
            {name: (F32, None)},
        )
        for name in ("p", "q")
    ]
    choice = helper.make_node("If", ["f"], ["r"], then_branch=branch[0], else_branch=branch[1])
    function = helper.make_function(
        "mine", "Choose", ["a", "f"], ["r"], [choice], [helper.make_opsetid("", 17)]
    )
    calls = [helper.make_node("Choose", [a, "flag"], [b], domain="mine") for a, b in ("xh", "hy")]
    state = (F32, [2, WIDTH])
    inputs = {"x": state, "flag": ("bool", [])}
    proto = om.model(calls, inputs, {"y": state}, domains=["mine"], functions=[function])
    traced = load_onnx(proto)
    assert sum(constant.type.nbytes for constant in traced.graph.constants.values()) >= 2**21
    om.assert_same(traced, feeds(True))
    compiled = partitioner.compile(proto, devices=2, strategy="inter")
    assert compiled.verify().equal


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_drawn_bodies(tmp_path: Path, count: int) -> None:
    """Weights of bodies inside bodies, in the file and beside it, on two devices."""
    lifted = 0
    for seed, drawn in enumerate(drawn_bodies(count)):
        traced = load_onnx(drawn.proto)
        om.assert_same(traced, drawn.inputs)
        lifted += sum(c.type.nbytes >= 1024 for c in traced.graph.constants.values())
        path = tmp_path / f"{seed}.onnx"
        onnx.save(
            drawn.proto,
            path,
            save_as_external_data=True,
            location=f"{seed}.data",
            size_threshold=16,
            convert_attribute=bool(seed % 2),
        )
        om.assert_same(load_onnx(path), drawn.inputs)
        compiled = partitioner.compile(path, devices=2, strategy=("inter", "auto")[seed % 2])
        assert compiled.verify().equal
        compiled.save(tmp_path / f"plan{seed}")
        assert_rank_files_run(tmp_path / f"plan{seed}")
    assert lifted > count
