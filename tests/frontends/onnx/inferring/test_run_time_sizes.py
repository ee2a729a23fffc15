"""Sizes and axes that are computed at run time: never guessed, and a declaration decides."""

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx

F32, I64 = "float32", "int64"


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def split(first: om.Dims, second: om.Dims) -> onnx.ModelProto:
    nodes = [node("Split", "x s", "y z", axis=-1)]
    inputs = {"x": (F32, [2, 6]), "s": (I64, [2])}
    return om.model(nodes, inputs, {"y": (F32, first), "z": (F32, second)})


def squeeze(dims: om.Dims) -> onnx.ModelProto:
    nodes = [node("Squeeze", "x s", "h"), node("Relu", "h", "y")]
    proto = om.model(nodes, {"x": (F32, [1, 1, 6]), "s": (I64, [1])}, {"y": (F32, dims)})
    proto.graph.value_info.extend(om.infos({"h": (F32, dims)}))
    return proto


def pad(dims: om.Dims) -> onnx.ModelProto:
    weights = {"p": np.array([1, 1]), "c": np.array(0, np.float32)}
    nodes = [node("Pad", "x p c a", "y")]
    inputs = {"x": (F32, [1, 6]), "a": (I64, [1])}
    return om.model(nodes, inputs, {"y": (F32, dims)}, weights, opset=18)


@pytest.mark.parametrize(
    ("proto", "shown"),
    [
        (split(None, None), r"tensor 'y' of node 'Split_0' \(Split\) has shape \[2, \?\]"),
        (split([2, 2], None), r"tensor 'z' of node 'Split_0' \(Split\) has shape \[2, \?\]"),
        (squeeze(None), r"tensor 'h' of node 'Squeeze_0' \(Squeeze\) has no known shape"),
        (pad(None), r"tensor 'y' of node 'Pad_0' \(Pad\) has shape \[\?, \?\]"),
    ],
)
def test_what_is_not_declared_is_unknown(proto: onnx.ModelProto, shown: str) -> None:
    with pytest.raises(FrontendError, match=f"{shown}, which is not static"):
        load_onnx(proto)


def test_a_declaration_that_cannot_be_does_not_tell() -> None:
    with pytest.raises(FrontendError, match=r"'y' .* has shape \[2, \?\], which is not static"):
        load_onnx(split([3, 2], [2, 4]))


def test_declared_parts() -> None:
    traced = load_onnx(split([2, 2], [2, 4]))
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(2, 6), "s": np.array([2, 4])}
    om.assert_same(traced, feeds)


def test_declared_dims_that_stay() -> None:
    feeds = {"x": np.ones((1, 1, 6), np.float32), "s": np.array([1])}
    om.assert_same(load_onnx(squeeze([1, 6])), feeds)


def test_declared_padding() -> None:
    feeds = {"x": np.ones((1, 6), np.float32), "a": np.array([1])}
    om.assert_same(load_onnx(pad([1, 8])), feeds)


def test_constant_and_absent_sizes_are_still_inferred() -> None:
    nodes = [node("Split", "x s", "a b"), node("Split", "x", "c d"), node("Squeeze", "a", "e")]
    outputs = dict.fromkeys(("b", "c", "d", "e"), (F32, None))
    proto = om.model(nodes, {"x": (F32, [6])}, outputs, {"s": np.array([1, 5])})
    types = load_onnx(proto).graph.types
    assert [types[name].shape for name in "bcde"] == [(5,), (3,), (3,), ()]


def test_one_branch_does_not_tell_the_shape_of_both() -> None:
    """The other is as long as its data says."""
    then = om.body([node("Relu", "x", "t")], {}, {"t": (F32, None)})
    other = om.body([node("Expand", "x s", "e")], {}, {"e": (F32, None)})
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    inputs = {"x": (F32, [1, 6]), "s": (I64, [2]), "c": ("bool", [])}
    with pytest.raises(FrontendError, match=r"'y' of node 'If_0' \(If\) has no known shape"):
        load_onnx(om.model([chosen], inputs, {"y": (F32, None)}))
