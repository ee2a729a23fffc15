"""Rotary embeddings: channels are whole; batch, heads and places are cut."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.attention import heads_of, local_heads
from partitioner.ir.ops.spatial import compound
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule


def rotary(view: OpView) -> Rule:
    """RotaryEmbedding: ``b heads place d`` or ``b place (heads d)``; channels are whole.

    Operands: x, cos, sin, places; the caches are by place if places are given.
    """
    places = view.type(3)
    cache = ["p", "e"] if places is not None else ["b", "s", "e"]
    return _rotary(view, view.int_attr("num_heads", 0), [cache, cache, ["b", "s"]])


def microsoft_rotary(view: OpView) -> Rule:
    """The same in com.microsoft: x, places (or the first one), cos, sin."""
    if view.int_attr("is_packed_batching", 0):
        raise OpaqueError("is_packed_batching is set")
    shape, places = view.shape(0), view.shape(1)
    heads = view.int_attr("num_heads", 0)
    if len(shape) == 3 and not heads:
        heads = shape[2] // (2 * view.shape(2)[1])
    offset = len(places) == 1
    cache = ["p", "e"]
    operands = [["1"] if offset else ["b", "s"], cache, cache]
    return _rotary(view, heads, operands, ordered=offset)


def _rotary(view: OpView, heads: int, operands: list[list[str]], *, ordered: bool = False) -> Rule:
    shape = view.shape(0)
    x = ["b", "h", "s", "d"]
    sizes: dict[str, int] = {}
    if len(shape) == 3:
        heads_of(heads, heads)
        sizes = {"h": heads, "d": shape[2] // heads}
        x = ["b", "s", compound(**sizes)]
    whole = {"d", "e", "p"} | ({"s"} if ordered else set())
    return Rule.of(
        view.present([x, *operands]),
        [x],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        points=[name for name in ("b", "h", "s", "d") if name in " ".join(x)],
        flops=3,
    )


ROWS: Mapping[str, OpRow] = {
    "RotaryEmbedding": OpRow(rotary, local_heads),
    "com.microsoft::RotaryEmbedding": OpRow(microsoft_rotary, local_heads),
}
