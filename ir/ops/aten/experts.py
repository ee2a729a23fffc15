"""Layers of experts as single nodes, which `frontends.torch.patterns.experts` puts there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from partitioner.ir.exchange import Intervals, intersect
from partitioner.ir.graph import LOADS, Attr
from partitioner.ir.ops.local import in_whole, same_node
from partitioner.ir.ops.rules.experts import experts, experts_backward
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule


def _local_experts(view: OpView, local: LocalView, up: int) -> LocalOp:
    """A device is told which experts it has; `up` is the operand of their first products.

    Where tokens are sent to experts, it is told too which device has which expert, and where the
    tokens of each device lie among those of all.
    """
    experts_here = in_whole(view, local.regions[up][0])
    if not local.group:
        return same_node(view, **experts_here)
    inside = tuple(sorted(piece for regions in local.held for piece in regions[up - 3][0]))
    owners = [-1] * view.int_attr("size", view.shape(up)[0])
    for place, regions in enumerate(local.held):
        pieces = in_whole(view, regions[up][0])
        for start, length in zip(pieces["starts"], pieces["lengths"], strict=True):
            owners[start : start + length] = [place] * length
    member = local.held.index(local.regions)
    tokens = _within(local.regions[up - 3][0], inside)
    sent: dict[str, Attr] = {
        "ranks": local.group,
        "member": member,
        "owners": tuple(owners),
        "token_starts": tuple(start for start, _ in tokens),
        "token_lengths": tuple(length for _, length in tokens),
        "all_tokens": sum(length for _, length in inside),
    }
    (node,) = same_node(view, **experts_here, **sent).nodes
    return LocalOp((replace(node, op=f"{node.op}_sent"),))


def _within(part: Intervals, whole: Intervals) -> Sequence[tuple[int, int]]:
    """Intervals of a part, in places of the concatenation of the intervals that contain it."""
    places, before = [], 0
    for start, length in whole:
        for first, count in intersect(part, ((start, length),)):
            places.append((before + first - start, count))
        before += length
    return places


def _loads(view: OpView) -> tuple[float, ...]:
    loads = view.attr(LOADS, ())
    assert isinstance(loads, tuple)
    return tuple(map(float, loads))


def _experts(view: OpView) -> Rule:
    return experts(view, _loads(view))


def _experts_backward(view: OpView) -> Rule:
    return experts_backward(view, [0], _loads(view))


ROWS: Mapping[str, OpRow] = {
    "partitioner::experts": OpRow(_experts, partial(_local_experts, up=3), where=True),
    "partitioner::experts_backward": OpRow(
        _experts_backward, partial(_local_experts, up=4), where=True
    ),
}
