"""Layers of experts as single nodes, which `frontends.torch.patterns.experts` puts there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from partitioner.ir.exchange import intersect, localize
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
    tokens = localize(inside, intersect(local.regions[up - 3][0], inside))
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


def _rule(view: OpView, build: Callable[..., Rule], *, biased: bool) -> Rule:
    """Columns are operands by their places where the activation is a program."""
    loads = view.attr(LOADS, ())
    assert isinstance(loads, tuple)
    whole = "%" in str(view.attr("activation", ""))
    return build(view, tuple(map(float, loads)), biased=biased, whole=whole)


ROWS: Mapping[str, OpRow] = {
    row: OpRow(
        partial(_rule, build=build, biased=biased), partial(_local_experts, up=up), where=True
    )
    for name, biased in (("experts", False), ("experts_biased", True))
    for row, build, up in (
        (f"partitioner::{name}", experts, 3),
        (f"partitioner::{name}_backward", experts_backward, 4),
    )
}
