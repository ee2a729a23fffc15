"""Operators in which the ranks of a group send each other rows.

Such an operator is a generator: it yields an all-to-all and is sent its result. A process drives it
with torch.distributed; `all_ranks` drives those of all ranks in lock-step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

c10d = torch.ops._c10d_functional

#: An all-to-all of a flat tensor: elements that arrive from and leave to each rank, and the group.
Exchange = tuple[Tensor, list[int], list[int], str]
Steps = Generator[Exchange, Tensor, tuple[Tensor, ...]]
#: The generators of the operators, by operator.
SENDING: dict[Any, Callable[..., Steps]] = {}


def sending(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Steps]], Any]:
    """Register the decorated generator as an operator; `schema` and `fake` as of `operator`."""

    def register(steps: Callable[..., Steps]) -> Callable[..., Steps]:
        name = schema.partition("(")[0]
        operator(schema, fake)(lambda *call: _driven(steps(*call)))
        SENDING[getattr(torch.ops.partitioner, name).default] = steps
        return steps

    return register


def _driven(steps: Steps) -> tuple[Tensor, ...]:
    """The results of an operator whose rows torch.distributed carries."""
    answer: Any = None
    while True:
        try:
            exchange = steps.send(answer)
        except StopIteration as stop:
            results: tuple[Tensor, ...] = stop.value
            return results
        answer = c10d.wait_tensor(c10d.all_to_all_single(*exchange))


def packed(columns: Sequence[Tensor]) -> Tensor:
    """Tensors of as many rows side by side, as bytes."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in columns], 1)


def unpacked(rows: Tensor, like: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """The tensors of `packed`, of these types and columns."""
    widths = [dtype.itemsize * columns for dtype, columns in like]
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)  # begins where a type may
        for part, (dtype, _) in zip(torch.split(rows, widths, 1), like, strict=True)
    ]
