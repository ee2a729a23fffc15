"""Values that are kept from step to step, what is read and written of them, and random draws.

`partitioner::state` gives a stored value (a parameter, a buffer) as it is stored: its cut is the
plan's choice of storage. `partitioner::update` takes the value's gradient, or its next value, to
where it is stored. `partitioner::alias` is the same value in another pass, which may read it from
the storage or from the copy that an earlier pass has made. `partitioner::either` is a value that
was kept or, if there is a second operand and the plan says so, computed again. `partitioner::rest`
is a stored value as it lies between steps, where that is not where the optimizer's state of it
lies: the value of the operand, whose own bytes are then a part of the result's. `partitioner::keep`
takes a gradient to where such a value lies. The numbers that a
part of `partitioner::dropout` or `partitioner::uniform` draws follow from its position in the whole
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from partitioner.ir.exchange import Region, nested
from partitioner.ir.ops.local import interval_attrs, other_node, same_node
from partitioner.ir.ops.signature import pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

ALIAS, EITHER = "partitioner::alias", "partitioner::either"
STATE, REST = "partitioner::state", "partitioner::rest"
UPDATE, KEEP = "partitioner::update", "partitioner::keep"

#: FLOPs an element that is drawn: integer operations.
RANDOM = 8.0


def _local_dropout(view: OpView, local: LocalView) -> LocalOp:
    """Give the local operator the offset of its part in the whole tensor."""
    if local.shapes[0] == view.shape():
        return same_node(view)
    attrs = {"shape": view.shape(), **view.node.attrs, **_where(view, local.regions[0])}
    return other_node(view, "partitioner::dropout_part", **attrs)


def _local_uniform(view: OpView, local: LocalView) -> LocalOp:
    if local.out_shapes[0] == view.out_shape:
        return same_node(view)
    attrs = {**view.node.attrs, **_where(view, local.out_regions[0])}
    return other_node(view, "partitioner::uniform_part", **attrs)


def _where(view: OpView, region: Region) -> dict[str, tuple[int, ...]]:
    """Number of pieces of each dim, and start and length of each piece.

    The region of an operator of a part is one of that part.
    """
    if counts := view.ints("pieces"):
        intervals = zip(view.ints("starts") or (), view.ints("lengths") or (), strict=True)
        region = nested(tuple(tuple(itertools.islice(intervals, n)) for n in counts), region)
    pieces = tuple(len(dim) for dim in region)
    return {"pieces": pieces, **interval_attrs(itertools.chain(*region))}


def _update(view: OpView) -> Rule:
    """Keep the matrix of an optimizer that looks at all of it whole, with that one's iterations."""
    iterations = view.int_attr("whole", 0)
    if not iterations:
        return pattern("d.., d.. -> d..")(view)
    few, many = sorted(view.shape())  # x xt, its square, and the product of both sums with x
    flops = iterations * (4.0 * few + 2.0 * few * few / many)
    return pattern("m n, m n -> m n", whole="m n", flops=flops)(view)


ROWS: Mapping[str, OpRow] = {
    ALIAS: OpRow(pattern("d.. -> d..", linear=[0]), view=True, again=True),
    **{
        f"partitioner::dropout{part}": OpRow(  # the second operand is the seed
            pattern("d.., -> d.., d..", flops=RANDOM), _local_dropout, where=True, draw="index"
        )
        for part in ("", "_part")
    },
    EITHER: OpRow(pattern("d.., d.. -> d.."), view=True, either=True),
    KEEP: OpRow(pattern("d.., d.. -> d.."), view=True, in_place=1),
    REST: OpRow(pattern("d.. -> d.."), stored=True, again=True, moved=lambda *_: 0),
    STATE: OpRow(pattern("-> d.."), stored=True, moved=lambda *_: 0),
    **{
        f"partitioner::uniform{part}": OpRow(
            pattern("-> d..", flops=RANDOM), _local_uniform, where=True, draw="index"
        )
        for part in ("", "_part")
    },
    # The first operand is the gradient or next value, the second the stored one.
    UPDATE: OpRow(
        _update,
        view=True,
        moved=lambda ins, _: ins[0] + 2 * ins[1],  # and the state of an optimizer twice
        in_place=1,
    ),
}
