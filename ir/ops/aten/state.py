"""Values that are kept from step to step, and what is read and written of them.

`partitioner::state` gives a stored value (a parameter, a buffer) as it is stored: its cut is the
plan's choice of storage. `partitioner::update` takes the value's gradient, or its next value, to
where it is stored. `partitioner::alias` is a value again, in another pass: what reads it there is
free to read it from the storage or from the copy that an earlier pass has made.
`partitioner::either` is a value again that was kept or, if it has a second operand and the plan
wants that, computed again.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: Bytes that are read and written of a stored value and its gradient, over those of the value:
#: an optimizer with two moments reads four tensors and writes three.
UPDATE_PASSES = 7


def state(view: OpView) -> Rule:
    """No operands; every dim may be cut."""
    return Rule.of([], [names("d", len(view.out_shape()))], [], view.out_shapes)


def update(view: OpView) -> Rule:
    """``value, stored -> value``, all cut alike."""
    dims = names("d", len(view.out_shape()))
    return Rule.of([dims, dims], [dims], view.shapes, view.out_shapes)


def alias(view: OpView) -> Rule:
    """The same value."""
    dims = names("d", len(view.out_shape()))
    return Rule.of([dims], [dims], view.shapes, view.out_shapes, linear={0})


def either(view: OpView) -> Rule:
    """``value, ... -> value``, all cut alike."""
    dims = names("d", len(view.out_shape()))
    return Rule.of(view.present([dims] * len(view.shapes)), [dims], view.shapes, view.out_shapes)


def _update_bytes(ins: tuple[int, ...], _: tuple[int, ...]) -> int:
    return UPDATE_PASSES * ins[1]


ROWS: Mapping[str, OpRow] = {
    "partitioner::alias": OpRow(alias, view=True, again=True),
    "partitioner::either": OpRow(either, view=True, either=True),
    "partitioner::state": OpRow(state, stored=True, moved=lambda *_: 0),
    "partitioner::update": OpRow(update, view=True, moved=_update_bytes, in_place=1),
}
