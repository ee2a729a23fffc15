"""Small files that would take minutes or gigabytes: refused, or read at once."""

import itertools
import re
import time

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.frontends.onnx.rewriting.fold import MAX_GROWN_BYTES

F32, I64 = "float32", "int64"
MOST_S = 5


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def doubled(first: str, count: int) -> list[onnx.NodeProto]:
    """`count` Concats, each of the one before with itself; the last makes `d`."""
    names = [first, *(f"d{k}" for k in range(count - 1)), "d"]
    return [node("Concat", f"{a} {a}", b, axis=0) for a, b in itertools.pairwise(names)]


def within_time(proto: onnx.ModelProto) -> Traced:
    start = time.monotonic()
    traced = load_onnx(proto)
    assert time.monotonic() - start < MOST_S
    return traced


@pytest.mark.parametrize("dtype", [F32, I64])
def test_a_vector_that_doubles(dtype: str) -> None:
    nodes = [*doubled("x", 40), node("Identity", "d", "y")]
    traced = within_time(om.model(nodes, {"x": (dtype, [2])}, {"y": (dtype, None)}))
    assert traced.graph.types["y"].shape == (2**41,)


def test_a_constant_that_doubles() -> None:
    nodes = [*doubled("w", 22), node("Add", "d x", "y")]
    weights = {"w": np.zeros(1, np.float32)}
    traced = within_time(om.model(nodes, {"x": (F32, [1])}, {"y": (F32, None)}, weights))
    assert traced.graph.types["y"].shape == (2**22,)


def test_a_shape_that_doubles() -> None:
    nodes = [*doubled("x", 24), node("Reshape", "z d", "y")]
    proto = om.model(nodes, {"x": (I64, [2]), "z": (F32, [2])}, {"y": (F32, None)})
    with pytest.raises(FrontendError, match=r"Reshape_0.*has 33554432 dims; at most 64 are supp"):
        load_onnx(proto)


def test_parts_beyond_number() -> None:
    parts = node("Split", "x", "y", num_outputs=10**9)
    proto = om.model([parts], {"x": (F32, [4])}, {"y": (F32, None)}, opset=18)
    message = "(Split) has num_outputs 1000000000 and 1 results; they must be as many"
    with pytest.raises(FrontendError, match=re.escape(message)):
        load_onnx(proto)


@pytest.mark.parametrize("op", ["ConstantOfShape s", "Expand w s", "Tile w s"])
def test_constants_that_the_file_does_not_hold(op: str) -> None:
    name, _, reads = op.partition(" ")
    nodes = [node(name, reads, "v"), node("Add", "v x", "y")]
    weights = {"s": np.array([2**29 - 1]), "w": np.zeros(1, np.float32)}
    traced = within_time(om.model(nodes, {"x": (F32, [1])}, {"y": (F32, None)}, weights))
    assert sum(constant.type.nbytes for constant in traced.graph.constants.values()) < 1000


def test_many_constants_that_grow() -> None:
    """Each is within the limit, all together are not."""
    size = MAX_GROWN_BYTES // 16
    nodes = [node("ConstantOfShape", "s", "v0"), node("Add", "v0 x", "y0")]
    for k in range(1, 10):
        value = helper.make_tensor("v", 1, [1], [float(k)])
        nodes.append(helper.make_node("ConstantOfShape", ["s"], [f"v{k}"], value=value))
        nodes.append(node("Add", f"y{k - 1} v{k}", f"y{k}"))
    proto = om.model(nodes, {"x": (F32, [1])}, {"y9": (F32, None)}, {"s": np.array([size])})
    constants = within_time(proto).graph.constants.values()
    assert 0 < sum(constant.type.nbytes for constant in constants) <= MAX_GROWN_BYTES + 1000
