"""Writes of rows to the memory of a stored value, in place of a copy of it, and their undoing.

Graphs are functional: an operator that writes rows makes a new value. Where a program does it in
place (`RankProgram.in_place`), a pass calls what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.caches import write_part, write_part_undoably

aten = torch.ops.aten


@dataclass(frozen=True)
class Write:
    """A way to write rows, with the arguments of the functional operator.

    Attributes:
        write: Writes to the first argument, which is returned.
        undoably: Writes too, and returns what puts the rows back that lay there.
    """

    write: Callable[..., Tensor]
    undoably: Callable[..., Callable[[], object]]

    @classmethod
    def of(
        cls, write: Callable[..., Tensor], undoing: Callable[..., Callable[[], object]]
    ) -> Write:
        """The write before which `undoing` returns what puts the rows back."""

        def undoably(*args: Any, **settings: Any) -> Callable[[], object]:
            undo = undoing(*args, **settings)
            write(*args, **settings)
            return undo

        return cls(write, undoably)

    @classmethod
    def through(cls, view: Callable[..., Tensor]) -> Write:
        """The write to the rows that a view of the first argument shows."""

        def write(data: Tensor, source: Tensor, *place: Any, **named: Any) -> Tensor:
            view(data, *place, **named).copy_(source)
            return data

        def undo(data: Tensor, _source: Tensor, *place: Any, **named: Any) -> Callable[[], object]:
            rows = view(data, *place, **named)
            return partial(rows.copy_, rows.clone())

        return cls.of(write, undo)


def _undo_index_copy(
    data: Tensor, dim: int, index: Tensor, _source: Tensor
) -> Callable[[], object]:
    return partial(data.index_copy_, dim, index, data.index_select(dim, index))


def _undo_index_put(
    data: Tensor,
    indices: Sequence[Tensor | None],
    _source: Tensor,
    accumulate: bool = False,  # noqa: ARG001 - the old rows are put back in any case
) -> Callable[[], object]:
    rows = aten.index.Tensor(data, indices)
    return partial(aten.index_put_.default, data, indices, rows)


_INDEX_PUT = Write.of(aten.index_put_.default, _undo_index_put)
#: By operator that writes rows to a copy of its first operand.
WRITES: Mapping[Any, Write] = {
    aten.index_copy.default: Write.of(aten.index_copy_.default, _undo_index_copy),
    aten.index_put.default: _INDEX_PUT,
    aten._unsafe_index_put.default: _INDEX_PUT,
    aten.select_scatter.default: Write.through(aten.select.int),
    aten.slice_scatter.default: Write.through(aten.slice.Tensor),
    torch.ops.partitioner.index_write_part.default: Write(write_part, write_part_undoably),
}
