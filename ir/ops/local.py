"""Ways to make a node local to one device that several rows share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from partitioner.ir.exchange import Intervals, nested
from partitioner.ir.graph import Attr, Node
from partitioner.ir.layout import Interval
from partitioner.ir.ops.table import Localize, LocalOp, LocalView, OpView
from partitioner.ir.types import numpy_dtype


def same_node(view: OpView, **attrs: Attr) -> LocalOp:
    """The node with some attributes replaced."""
    return LocalOp((replace(view.node, attrs={**view.node.attrs, **attrs}),))


def other_node(view: OpView, op: str, **attrs: Attr) -> LocalOp:
    """Another operator on the node's operands, with these attributes alone."""
    return LocalOp((replace(view.node, op=op, attrs=attrs),))


def mean_of_part(
    view: OpView, local: LocalView, reduced: Iterable[int], empty: Callable[[], LocalOp]
) -> LocalOp:
    """The node on a device's part, a mean, times the part's share of the elements of reduced dims.

    A sum that is divided later would overflow half precision where the mean does not. A device
    without elements adds an `empty` sum.
    """
    node, dims = view.node, tuple(reduced)
    total = math.prod(view.shape()[dim] for dim in dims)
    part = math.prod(local.shapes[0][dim] for dim in dims)
    if part == total:
        return same_node(view)
    if part == 0:
        return empty()
    mean, share = f"{node.name}.mean", f"{node.name}.share"
    whole = replace(node, name=mean, outputs=(mean,))
    types = {mean: view.out_type.with_shape(local.out_shapes[0])}
    if node.op.startswith("aten::"):
        number: dict[str, Attr] = {"other": part / total}
        scale = Node(node.name, "aten::mul.Tensor", (mean, ""), node.outputs, number)
        return LocalOp((whole, scale), types=types)
    constant = np.array(part / total, numpy_dtype(view.out_type.dtype))
    scale = Node(node.name, "Mul", (mean, share), node.outputs)
    return LocalOp((whole, scale), {share: constant}, types)


def with_constant(view: OpView, index: int, array: np.ndarray) -> LocalOp:
    """The node with operand `index` replaced by a new constant."""
    name = f"{view.node.name}.{index}.local"
    inputs = tuple(name if i == index else v for i, v in enumerate(view.node.inputs))
    return LocalOp((replace(view.node, inputs=inputs),), {name: array})


def interval_attrs(intervals: Iterable[Interval]) -> dict[str, tuple[int, ...]]:
    """Attributes `starts` and `lengths` of the pieces that a device has of dims."""
    starts, lengths = [*zip(*intervals, strict=True)] or ((), ())
    return {"starts": starts, "lengths": lengths}


def in_whole(view: OpView, pieces: Intervals, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Attributes `starts` and `lengths` of the pieces that a device has of a dim of the whole.

    The operator may be one of a part itself, of which the same attributes tell: then its `pieces`
    are pieces of that part.
    """
    starts, lengths = (view.ints(f"{prefix}{name}") for name in ("starts", "lengths"))
    if starts is not None and lengths is not None:
        (pieces,) = nested((tuple(zip(starts, lengths, strict=True)),), (pieces,))
    return {f"{prefix}{name}": ends for name, ends in interval_attrs(pieces).items()}


def local_shape(attr: str) -> Localize:
    """Sets an attribute that is the result's shape to the local one."""
    return lambda view, local: same_node(view, **{attr: local.out_shapes[0]})


def local_shape_operand(index: int) -> Localize:
    """Replaces a constant operand that is the result's shape by the local one."""
    return lambda view, local: with_constant(view, index, np.array(local.out_shapes[0], np.int64))


def own_groups(local: LocalView, attr: str) -> dict[str, Attr]:
    """The attribute that counts groups, factor g, for a device's own."""
    return {attr: local.sizes["g"]} if "g" in local.sizes else {}


def local_groups(attr: str) -> Localize:
    """Sets an attribute that counts groups to the number of the device's own."""
    return lambda view, local: same_node(view, **own_groups(local, attr))
