"""Control flow is kept whole, with what its bodies read from outside."""

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from partitioner.backends.onnx.files.messages import node_proto
from partitioner.frontends.onnx.load import load_onnx

RNG = np.random.default_rng(0)
F32 = "float32"


def floats(*shape: int) -> om.Array:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def _with_if() -> onnx.ModelProto:
    inner = node("If", "flag", "deep", then_branch=_branch("k", "p"), else_branch=_branch("w", "q"))
    then = om.body(
        [node("Mul", "h w", "tmp"), inner, node("Add", "tmp deep", "t")], {}, {"t": (F32, [2])}
    )
    other = om.body([node("Neg", "x", "e")], {}, {"e": (F32, [2])})
    return om.model(
        [
            node("Relu", "x", "h"),
            node("Exp", "h", "k"),
            node("If", "flag", "y", then_branch=then, else_branch=other),
        ],
        {"x": (F32, [2]), "flag": ("bool", [])},
        {"y": (F32, [2])},
        {"w": floats(2)},
    )


def _branch(read: str, makes: str) -> onnx.GraphProto:
    return om.body([node("Identity", read, makes)], {}, {makes: (F32, [2])})


@pytest.mark.parametrize("flag", [True, False])
def test_if_is_kept_whole_with_its_captures(flag: bool) -> None:
    traced = load_onnx(_with_if())
    graph = traced.graph
    kept = graph.nodes[-1]
    assert (kept.op, kept.inputs) == ("If", ("flag",))
    assert set(kept.captures) == {"flag", "h", "w", "k", "x"}
    assert "w" in graph.constants
    assert "node 'If_0' (If) holds subgraphs and is kept whole" in traced.notes
    om.assert_same(traced, {"x": floats(2), "flag": np.array(flag)})


def test_captured_names_are_renamed_in_bodies_and_inner_names_stay() -> None:
    kept = load_onnx(_with_if()).graph.nodes[-1]
    proto = node_proto(kept, {"h": "h2", "k": "k2", "x": "x2", "tmp": "no"})
    then = next(a.g for a in proto.attribute if a.name == "then_branch")
    assert list(then.node[0].input) == ["h2", "w"]
    assert list(then.node[0].output) == ["tmp"]
    deep = next(a.g for a in then.node[1].attribute if a.name == "then_branch")
    assert list(deep.node[0].input) == ["k2"]


@pytest.mark.parametrize("condition", ["yes", ""])
def test_a_loop_with_steady_shapes(condition: str) -> None:
    loop = om.body(
        [
            node("Mul", "v w", "next"),
            node("Identity", "cond", "go"),
            node("ReduceMax", "v", "top", keepdims=0),
        ],
        {"i": ("int64", []), "cond": ("bool", []), "v": (F32, [2])},
        {"go": ("bool", []), "next": (F32, [2]), "top": (F32, [])},
    )
    proto = om.model(
        [helper.make_node("Loop", ["trips", condition, "x"], ["y", "tops"], body=loop)],
        {"x": (F32, [2])},
        {"y": (F32, [2]), "tops": (F32, None)},
        {"trips": np.array(3), **({"yes": np.array(True)} if condition else {}), "w": floats(2)},
    )
    traced = load_onnx(proto)
    assert traced.graph.nodes[0].captures == ("w",)
    assert traced.graph.types["tops"].shape == (3,)
    om.assert_same(traced, {"x": floats(2)})


def test_a_scan() -> None:
    scan = om.body(
        [node("Add", "s e", "n"), node("Mul", "e w", "o")],
        {"s": (F32, [2]), "e": (F32, [2])},
        {"n": (F32, [2]), "o": (F32, [2])},
    )
    proto = om.model(
        [node("Scan", "x rows", "y z", body=scan, num_scan_inputs=1)],
        {"x": (F32, [2]), "rows": (F32, [4, 2])},
        {"y": (F32, None), "z": (F32, None)},
        {"w": floats(2)},
    )
    traced = load_onnx(proto)
    assert traced.graph.types["z"].shape == (4, 2)
    om.assert_same(traced, {"x": floats(2), "rows": floats(4, 2)})


def test_an_if_of_a_constant_becomes_its_branch() -> None:
    then = om.body([node("Mul", "x x", "t"), node("Exp", "t", "o")], {}, {"o": (F32, [2])})
    proto = om.model(
        [
            node("Relu", "x", "q"),
            node("If", "c", "y", then_branch=then, else_branch=_branch("x", "e")),
            node("Add", "q y", "z"),
        ],
        {"x": (F32, [2])},
        {"y": (F32, [2]), "z": (F32, [2])},
        {"c": np.array(True)},
    )
    traced = load_onnx(proto)
    assert [n.name for n in traced.graph.nodes] == ["Relu_0", "If_0_Mul_0", "If_0_Exp_0", "Add_0"]
    om.assert_same(traced, {"x": floats(2)})
