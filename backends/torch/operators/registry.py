"""Registration of operators under ``torch.ops.partitioner``; some send rows among ranks.

Such an operator is a generator: it yields a collective and is sent its result. A process carries
out each with torch.distributed; `all_ranks` yields those of all ranks in lock-step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

#: Kept alive: PyTorch drops a library's operators with the library.
LIBRARY: Any = torch.library.Library("partitioner", "DEF")  # type: ignore[no-untyped-call]

Kernel = Callable[..., Any]

#: The kernel of each operator, by its only overload; it takes the operator's arguments.
KERNELS: dict[torch._ops.OpOverload, Kernel] = {}


def operator(schema: str, fake: Kernel) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as an operator, for every device.

    Args:
        schema: ``"name(Tensor x, ...) -> Tensor"``.
        fake: Takes the same arguments and returns empty results with the sizes, strides and types
            of the operator's.
    """

    def register(kernel: Kernel) -> Kernel:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partitioner::{name}", fake, lib=LIBRARY)
        KERNELS[getattr(torch.ops.partitioner, name).default] = kernel
        return kernel

    return register


def gradient(name: str, backward: Kernel, setup_context: Kernel) -> None:
    """Register an operator's gradient, in the form of `torch.library.register_autograd`."""
    torch.library.register_autograd(
        f"partitioner::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )


c10d = torch.ops._c10d_functional

#: A collective: the operator, its arguments, the group's name.
Call = tuple[Any, tuple[Any, ...], str]
Steps = Generator[Call, Any, tuple[Tensor, ...]]
#: The generators of the operators, by operator.
SENDING: dict[Any, Callable[..., Steps]] = {}


def group_name(ranks: Sequence[int]) -> str:
    """Name under which the process group of these ranks is registered."""
    return "ranks_" + "_".join(map(str, ranks))


def sending(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Steps]], Any]:
    """Register the decorated generator as an operator; `schema` and `fake` as of `operator`."""

    def register(steps: Callable[..., Steps]) -> Callable[..., Steps]:
        name = schema.partition("(")[0]

        @operator(schema, fake)
        def send(*call: Any) -> tuple[Tensor, ...]:
            return _driven(steps(*call))

        SENDING[getattr(torch.ops.partitioner, name).default] = steps
        return steps

    return register


def _driven(steps: Steps) -> tuple[Tensor, ...]:
    """The results of an operator whose rows torch.distributed carries."""
    answer: Any = None
    while True:
        try:
            collective, arguments, _ = steps.send(answer)
        except StopIteration as stop:
            results: tuple[Tensor, ...] = stop.value
            return results
        answer = c10d.wait_tensor(collective(*arguments))


def all_to_all(
    rows: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str
) -> Generator[Call, Any, Tensor]:
    """Receive what the ranks of a group have for this one, as flat tensors."""
    call = rows, list(arriving), list(leaving), group
    result: Tensor = yield c10d.all_to_all_single.default, call, group
    return result


def packed(columns: Sequence[Tensor], chosen: Sequence[Tensor]) -> Tensor:
    """The chosen rows of matrices, for one receiver after another, as bytes.

    A receiver's are those of the first matrix, then those of the next one.
    """
    size = sum(map(len, chosen)) * sum(column.shape[1] * column.itemsize for column in columns)
    flat = columns[0].new_empty(size, dtype=torch.uint8)
    start = 0
    for rows in chosen:
        for column in columns:
            end = start + len(rows) * column.shape[1] * column.itemsize
            part = flat[start:end]
            if start % column.itemsize:  # no element of this type may begin here
                part.copy_(column.index_select(0, rows).view(-1).view(torch.uint8))
            else:
                out = part.view(column.dtype).view(len(rows), column.shape[1])
                torch.index_select(column, 0, rows, out=out)
            start = end
    return flat


def unpacked(
    flat: Tensor, counts: Sequence[int], like: Sequence[tuple[torch.dtype, int]]
) -> list[list[Tensor]]:
    """The matrices of `packed`, by sender: of so many rows, of these types and columns."""
    widths = [dtype.itemsize * columns for dtype, columns in like]
    parts = iter(torch.split(flat, [count * width for count in counts for width in widths]))
    return [
        [_typed(next(parts), dtype).view(count, columns) for dtype, columns in like]
        for count in counts
    ]


def _typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements of a type, copied if none may begin where they do."""
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
