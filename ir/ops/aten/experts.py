"""Layers of experts and their gradients: which experts a token meets is known only at run time.

They are single nodes, which `frontends.torch.patterns.experts` puts there. Loops are tokens t,
choices k a token, experts e, channels h and, in each expert, columns (u i): u is 2 if the layer is
gated. A device that lacks experts adds nothing for their tokens, so that results without experts
are sums over e, and over i. FLOPs are those of all experts together: each token meets k of them. A
device has those of its experts' loads, or of equal ones.

Tokens and experts may be cut over the same axis: tokens, with their ids and weights, are sent to
the devices that have some of their experts, and partial results are sent back. The first products
stay where they were computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from partitioner.ir.exchange import intersect, localize
from partitioner.ir.graph import AMONG, LOADS, Attr
from partitioner.ir.loops.factors import Dispatch
from partitioner.ir.ops.local import in_whole, same_node
from partitioner.ir.ops.signature import Dims
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import item_bytes


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
        AMONG: local.group,
        "member": member,
        "owners": tuple(owners),
        "token_starts": tuple(start for start, _ in tokens),
        "token_lengths": tuple(length for _, length in tokens),
        "all_tokens": sum(length for _, length in inside),
    }
    (node,) = same_node(view, **experts_here, **sent).nodes
    return LocalOp((replace(node, op=f"{node.op}_sent"),))


TOKENS, CHOICES, BEFORE = "t h", "t k", ["t", "k", "(u i)"]
UP, DOWN = ("e", "(u i)", "h"), ("e", "h", "i")
BIASES = [("e", "(u i)"), ("e", "h")]


def _rule(view: OpView, *, backward: bool, biased: bool) -> Rule:
    """``t h, t k, t k, e (u i) h, e h i -> t h, t k (u i)``: the result, and the first products.

    With biases, ``e (u i), e h`` are behind the weights. Gradients are of ``t h, (operands), t k
    (u i)``, and each device has the first products of its own experts, and zeros for others: a sum
    over e. Columns are operands by their places where the activation is a program; then, and with
    biases, each device has all columns of its experts.
    """
    first, biases = int(backward), BIASES if biased else []
    width = view.shape(first + 4)[2]
    gates = {"u": view.shape(first + 3)[1] // max(width, 1), "i": width}
    columns = "" if biased or "%" in str(view.attr("activation", "")) else "i"
    options: dict[str, Any] = {
        "sizes": gates,
        "whole": "k h u" if columns else "k h u i",
        "points": "t k e h i",
        "dispatch": _dispatch(view, first, 6 + len(biases)),
    }
    layer = [TOKENS, CHOICES, CHOICES, UP, DOWN, *biases]
    flops = 2 * (gates["u"] + 1) / max(view.shape(first + 3)[0], 1)
    if not backward:
        reduce = f"e {columns}"
        results: list[Dims] = [TOKENS, BEFORE]
        return view.rule(layer, results, reduce=reduce, summed=columns, flops=flops, **options)
    return view.rule(
        [TOKENS, *layer, BEFORE],
        [TOKENS, CHOICES, UP, DOWN, *biases],
        summed=f"t e {columns}",
        addends={6 + len(biases)},
        flops=2 * flops,
        sums=[0],
        **options,
    )


def _dispatch(view: OpView, first: int, inside: int) -> Dispatch:
    """Count the bytes sent of a token: rows of channels, ids, weights and its place.

    Back come a row of channels and, of gradients, those of the weights. Ids and places are int32.
    """
    rows, weights, loads = view.type(first), view.type(first + 2), view.attr(LOADS, ())
    assert rows is not None
    assert weights is not None
    assert isinstance(loads, tuple)
    row, chosen = rows.shape[1] * item_bytes(rows.dtype), weights.shape[1]
    scales = chosen * item_bytes(weights.dtype)
    there = (1 + first) * row + scales + 4 * (chosen + 1)
    back = row + first * scales
    return Dispatch("t", "e", chosen, there, back, frozenset({inside}), tuple(map(float, loads)))


ROWS: Mapping[str, OpRow] = {
    f"partitioner::experts{suffix}": OpRow(
        partial(_rule, backward=backward, biased=biased),
        partial(_local_experts, up=3 + backward),
        where=True,
    )
    for suffix, backward, biased in (
        *(("", False, False), ("_backward", True, False)),
        *(("_biased", False, True), ("_biased_backward", True, True)),
    )
}
