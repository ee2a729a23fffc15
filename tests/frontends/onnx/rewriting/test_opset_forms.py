"""Folding in old opsets: what it writes has the forms of the model's opset."""

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.onnx.load import load_onnx

OPSETS = (11, 12, 13, 17, 18)
FEEDS = {name: np.random.default_rng(0).random((3, 4), np.float32) for name in "xz"}


def node(op: str, reads: str, makes: str, **attrs: object) -> NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def check(nodes: list[NodeProto], shape: list[int], opset: int, inputs: str = "x") -> None:
    numbers = {name: np.array(n) for n, name in enumerate(("zero", "one", "two"))}
    proto = om.model(
        nodes,
        {name: ("float32", [3, 4]) for name in inputs},
        {"y": ("float32", shape)},
        {**numbers, "sizes": np.array([1, 2])},
        opset=opset,
    )
    om.assert_same(load_onnx(proto), {name: FEEDS[name] for name in inputs})


@pytest.mark.parametrize("opset", OPSETS)
def test_a_stack(opset: int) -> None:
    stack = node("ConcatFromSequence", "s", "y", axis=1, new_axis=1)
    check([node("SequenceConstruct", "x z", "s"), stack], [3, 2, 4], opset, "xz")


@pytest.mark.parametrize("opset", OPSETS)
def test_two_stacks_of_one_tensor(opset: int) -> None:
    nodes = [
        node("SequenceConstruct", "x z", "s"),
        node("ConcatFromSequence", "s", "a", axis=0, new_axis=1),
        node("ConcatFromSequence", "s", "b", axis=1, new_axis=1),
        node("Transpose", "b", "t", perm=[1, 0, 2]),
        node("Add", "a t", "y"),
    ]
    check(nodes, [2, 3, 4], opset, "xz")


@pytest.mark.parametrize(
    ("sizes", "axis", "keepdims", "shape"),
    [
        pytest.param("one", 0, 0, [4], id="rows"),
        pytest.param("one", 0, 1, [1, 4], id="equal parts"),
        pytest.param("two", 1, 1, [3, 2], id="equal halves"),
        pytest.param("two", 0, 1, [2, 4], id="a shorter last part"),
        pytest.param("sizes", 0, 1, [2, 4], id="a list of sizes"),
    ],
)
@pytest.mark.parametrize("opset", OPSETS)
def test_a_split(sizes: str, axis: int, keepdims: int, shape: list[int], opset: int) -> None:
    nodes = [
        node("SplitToSequence", f"x {sizes}", "s", axis=axis, keepdims=keepdims),
        node("SequenceAt", "s zero", "a"),
        node("SequenceAt", "s one", "b"),
        node("Add", "a b", "y"),
    ]
    check(nodes, shape, opset)


@pytest.mark.parametrize("opset", [11, 17])
def test_a_constant_in_a_body(opset: int) -> None:
    """Size becomes a Constant, which has no integer form below opset 12."""
    outs = [helper.make_tensor_value_info("n", TensorProto.INT64, ())]
    then = helper.make_graph([node("Size", "x", "n")], "then", [], outs)
    outs = [helper.make_tensor_value_info("m", TensorProto.INT64, ())]
    other = helper.make_graph([node("ReduceProd", "k", "m", keepdims=0)], "other", [], outs)
    choose = node("If", "c", "y", then_branch=then, else_branch=other)
    proto = om.model(
        [node("Shape", "z", "k"), choose],
        {"x": ("float32", [3, 4]), "z": ("float32", [5, 2]), "c": ("bool", [])},
        {"y": ("int64", [])},
        opset=opset,
    )
    feeds = {"x": FEEDS["x"], "z": np.zeros((5, 2), np.float32)}
    traced = load_onnx(proto)
    for flag in (True, False):
        om.assert_same(traced, {**feeds, "c": np.array(flag)})


def test_a_cast_keeps_how_it_rounds() -> None:
    """Beyond float8's range, a cast that does not saturate gives NaN."""
    nodes = [
        node("Cast", "z", "like", to=TensorProto.FLOAT8E4M3FN),
        node("CastLike", "x like", "h", saturate=0),
        node("Cast", "h", "y", to=TensorProto.FLOAT),
    ]
    types = {name: ("float32", [2]) for name in "xz"}
    traced = load_onnx(om.model(nodes, types, {"y": ("float32", [2])}, opset=19))
    feeds = {"x": np.array([1, 1000], np.float32), "z": np.zeros(2, np.float32)}
    (y,) = om.assert_same(traced, feeds)
    np.testing.assert_array_equal(y, np.array([1, np.nan], np.float32))


def test_a_row_of_a_matrix_of_sizes_is_no_size() -> None:
    """Of an unknown size, so that the matrix is no constant: a row of it is two elements."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Unsqueeze", ["places", "axes"], ["deep"]),
        helper.make_node("Shape", ["deep"], ["sizes"]),
        helper.make_node("Reshape", ["sizes", "two"], ["matrix"]),
        helper.make_node("Gather", ["matrix", "first"], ["row"], axis=0),
        helper.make_node("Cast", ["row"], ["y"], to=1),
    ]
    weights = {"axes": np.array([0, 1]), "two": np.array([2, 2]), "first": np.array([0])}
    proto = om.model(nodes, {"x": ("float32", [3])}, {"y": ("float32", [1, 2])}, weights)
    shapes = {"places": ("int64", [1, 2]), "deep": ("int64", [1, 1, 1, 2])}
    proto.graph.value_info.extend(om.infos(shapes))
    om.assert_same(load_onnx(proto), {"x": np.array([1, 0, 2], np.float32)})


@pytest.mark.parametrize(("sizes", "shape"), [(np.array([1, 1, 1]), (1, 2)), (np.array(1), (2,))])
def test_sizes_of_parts_as_a_vector_overrule_keepdims(
    sizes: om.Array, shape: tuple[int, ...]
) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x", "sizes"], ["parts"], axis=0, keepdims=0),
        helper.make_node("SequenceAt", ["parts", "one"], ["part"]),
        helper.make_node("Relu", ["part"], ["y"]),
    ]
    weights = {"sizes": sizes, "one": np.array(1)}
    proto = om.model(nodes, {"x": ("float32", [3, 2])}, {"y": ("float32", None)}, weights)
    traced = load_onnx(proto)
    assert traced.graph.types["y"].shape == shape
    om.assert_same(traced, {"x": np.ones((3, 2), np.float32)})
