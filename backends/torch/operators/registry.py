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


def operator(
    fake: Kernel = lambda x, *_: torch.empty_like(x), schema: str = ""
) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as an operator, for every device.

    Args:
        fake: Takes the same arguments and returns empty results with the sizes, strides and types
            of the operator's; without it, that is one as the first argument.
        schema: ``"name(Tensor x, ...) -> Tensor"``; "" for that of the function's annotations.
    """

    def register(kernel: Kernel) -> Kernel:
        text = schema or torch.library.infer_schema(
            kernel, mutates_args=(), op_name=kernel.__name__
        )
        name = text.partition("(")[0]
        LIBRARY.define(text)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partitioner::{name}", fake, lib=LIBRARY)
        KERNELS[getattr(torch.ops.partitioner, name).default] = kernel
        return kernel

    return register


def gradient(name: str, save: Kernel) -> Callable[[Kernel], None]:
    """Register the decorated function as an operator's gradient; `save` sets up its context."""
    key = f"partitioner::{name}"
    return lambda f: torch.library.register_autograd(key, f, setup_context=save, lib=LIBRARY)


def saving(operands: int, results: Sequence[int] = (), constants: Sequence[int] = ()) -> Kernel:
    """Save operands, results and other `settings`; `constants` are results without gradients."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.settings = inputs[operands:]
        ctx.save_for_backward(*inputs[:operands], *(outputs[place] for place in results))
        ctx.mark_non_differentiable(*(outputs[place] for place in constants))

    return save


c10d = torch.ops._c10d_functional

#: A collective: the operator, its arguments, the group's name.
Call = tuple[Any, tuple[Any, ...], str]
Steps = Generator[Call, Any, tuple[Tensor, ...]]
#: The generators of the operators, by operator.
SENDING: dict[Any, Callable[..., Steps]] = {}


def group_name(ranks: Sequence[int]) -> str:
    """Name under which the process group of these ranks is registered."""
    return "ranks_" + "_".join(map(str, ranks))


def sending(fake: Callable[..., Any], schema: str) -> Callable[[Callable[..., Steps]], Any]:
    """Register the decorated generator as an operator; `fake` and `schema` as of `operator`."""

    def register(steps: Callable[..., Steps]) -> Callable[..., Steps]:
        name = schema.partition("(")[0]

        @operator(fake, schema)
        def send(*call: Any) -> tuple[Tensor, ...]:
            running, answer = steps(*call), None
            while True:  # torch.distributed carries the rows
                try:
                    collective, arguments, _ = running.send(answer)
                except StopIteration as stop:
                    results: tuple[Tensor, ...] = stop.value
                    return results
                answer = c10d.wait_tensor(collective(*arguments))

        SENDING[getattr(torch.ops.partitioner, name).default] = steps
        return steps

    return register


def all_to_all(
    rows: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str
) -> Generator[Call, Any, Tensor]:
    """Receive what the ranks of a group have for this one, as flat tensors."""
    call = rows, list(arriving), list(leaving), group
    result: Tensor = yield c10d.all_to_all_single.default, call, group
    return result


def packed(columns: Sequence[Tensor], chosen: Sequence[Tensor]) -> Tensor:
    """The chosen rows of matrices as bytes: by receiver, and of each matrix after the other."""
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
    start, by_sender = 0, []
    for count in counts:
        matrices = []
        for dtype, columns in like:
            part = flat[start : start + count * columns * dtype.itemsize]
            start += len(part)
            if part.storage_offset() % dtype.itemsize:  # no element may begin there
                part = part.clone()
            matrices.append(part.view(dtype).view(count, columns))
        by_sender.append(matrices)
    return by_sender
