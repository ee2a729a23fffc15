"""Results of finished communications as nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partitioner.backends.torch.by_hand.wire import Leaving

Tensors = Sequence[Tensor]
#: Takes the gradients of the results and gives those of the operands, on any device.
Transposed = Callable[[Tensors], Tensors]


def tie(x: Tensor, others: Tensors) -> Tensor:
    """`x`; its backward pass also reaches the others, with gradients of 0."""

    def transposed(gradients: Tensors) -> Tensors:
        return [gradients[0], *(torch.zeros_like(other) for other in others)]

    needs = any(map(needs_gradient, (x, *others)))
    return linked(transposed, [x.detach()], [x, *others], needs=needs)[0]


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transposed: Transposed, results: Tensors, _anchor: Tensor, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transposed, ctx.devices = transposed, [x.device for x in operands]
        return tuple(x.detach() for x in results)  # no views of each other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        moved = zip(ctx.transposed(gradients), ctx.devices, strict=True)
        return None, None, None, *(gradient.to(device) for gradient, device in moved)


def linked(
    transposed: Transposed, results: Tensors, operands: Tensors, *, needs: bool
) -> tuple[Tensor, ...]:
    """The results, with `transposed` as their backward if any rank needs one."""
    if not needs:
        return tuple(results)
    # Makes the results need a gradient on ranks without an operand that needs one.
    anchor = torch.empty(0, requires_grad=True)
    outputs: tuple[Tensor, ...] = _Linked.apply(  # type: ignore[no-untyped-call]
        transposed, results, anchor, *operands
    )
    return outputs


def wait_at_end(leaving: Leaving) -> None:
    """Wait at the end of backward: ranks that wait for each other's gradients could not go on."""
    torch.autograd.Variable._execution_engine.queue_callback(leaving.wait)


def needs_gradient(x: Tensor) -> bool:
    """Test whether autograd would record an operation on the tensor."""
    return x.requires_grad and torch.is_grad_enabled()
