"""Writes of rows to the memory of a stored value, in place of a copy of it.

Graphs are functional: an operator that writes rows makes a new value. Where a program does it in
place (`RankProgram.in_place`), a pass calls what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.caches import write_part

aten = torch.ops.aten


def _slice_write(data: Tensor, source: Tensor, *place: Any, **named: Any) -> Tensor:
    aten.slice.Tensor(data, *place, **named).copy_(source)
    return data


def _select_write(data: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    data.select(dim, index).copy_(source)
    return data


#: By operator that writes rows to a copy of its first operand: writes to that one, and returns it.
WRITES: Mapping[Any, Callable[..., Tensor]] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.select_scatter.default: _select_write,
    aten.slice_scatter.default: _slice_write,
    torch.ops.partitioner.index_write_part.default: write_part,
}
