"""Results of communications that have run, linked into autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from partitioner.backends.torch.by_hand.wire import Leaving

#: From the gradients of results to those of what was given; None where none is needed.
Transposed = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]


def tie(x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor `x`, and backward runs through the others too, with gradients of 0."""

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        return [gradients[0], *(torch.zeros_like(other) for other in others)]

    needs = needs_gradient(x) or any(map(needs_gradient, others))
    return linked(transposed, [x.detach()], [x, *others], needs=needs)[0]


class _Linked(torch.autograd.Function):
    """Results of a communication that has run, linked to what it was given."""

    @staticmethod
    def forward(
        ctx: Any,
        transposed: Transposed,
        results: Sequence[torch.Tensor],
        _anchor: torch.Tensor,
        *_given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.transposed = transposed
        return tuple(x.detach() for x in results)  # no views of each other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.transposed(gradients)


def linked(
    transposed: Transposed,
    results: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    *,
    needs: bool,
) -> tuple[torch.Tensor, ...]:
    """Results whose backward is `transposed`: from their gradients to those of what was given."""
    if not needs:
        return tuple(results)
    # Makes the results need a gradient on ranks that gave nothing, or nothing that needs one.
    anchor = torch.empty(0, requires_grad=True)
    found: tuple[torch.Tensor, ...] = _Linked.apply(  # type: ignore[no-untyped-call]
        transposed, results, anchor, *given
    )
    return found


def wait_at_end(leaving: Leaving) -> None:
    """Wait at the end of backward: ranks that wait for each other's gradients could not go on."""
    torch.autograd.Variable._execution_engine.queue_callback(leaving.wait)


def needs_gradient(x: torch.Tensor) -> bool:
    """Whether autograd would record what is done with a tensor."""
    return x.requires_grad and torch.is_grad_enabled()
