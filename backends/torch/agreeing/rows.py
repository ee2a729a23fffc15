"""The memory in which the rows of all ranks meet, kept from one meeting to the next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from struct import Struct

import torch
from torch import Tensor

from partitioner.backends.torch.graphs.eager import ROW_BYTES


class Rows:
    """A row of each rank: numbers, and behind them its part of a small all-reduce.

    Attributes:
        numbers: How many numbers a row has.
        sent: This rank's row, once for each rank.
        brought: The rows of all ranks, in order, once they are there.
    """

    def __init__(self, ranks: int, numbers: int) -> None:
        with torch.inference_mode(False):
            self.sent = torch.zeros(ranks, numbers + ROW_BYTES // 8, dtype=torch.int64)
            self.brought = torch.zeros_like(self.sent)
        self.numbers = numbers
        self._row = Struct(f"{numbers}q")
        # a few numbers are written and read sooner so than by PyTorch
        self._written, self._read = (
            rows.numpy().data.cast("B") for rows in (self.sent, self.brought)
        )
        self._starts = range(0, self.sent.nbytes, self.sent.nbytes // ranks)
        self._parts: dict[tuple[torch.dtype, int], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def write(self, row: Sequence[int], part: Tensor | None) -> None:
        """Write this rank's row, with its part of an all-reduce if there is one."""
        packed = self._row.pack(*row)
        for start in self._starts:
            self._written[start : start + len(packed)] = packed
        if part is not None:
            self._places(part)[0].copy_(part.reshape(-1))

    @property
    def table(self) -> list[list[int]]:
        """The numbers of all ranks."""
        return [[*self._row.unpack_from(self._read, start)] for start in self._starts]

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, which are as this rank's `part` is."""
        return reduce(torch.add, self._places(part)[1]).reshape(part.shape)

    def _places(self, part: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Where parts lie: those that are sent as one tensor, and those that came."""
        key = part.dtype, part.numel()
        if key not in self._parts:
            sent, brought = (
                rows[:, self.numbers :].view(part.dtype)[:, : part.numel()]
                for rows in (self.sent, self.brought)
            )
            self._parts[key] = sent, brought.unbind()
        return self._parts[key]
