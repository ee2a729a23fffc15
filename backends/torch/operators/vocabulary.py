"""Tables and logits of which a device has some rows or classes only.

A device's part of a vocabulary consists of pieces, each of a start and a length in the whole one.
Ids outside the part add nothing, so that the sum over the devices is the whole result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partitioner.backends.torch.operators.registry import gradient, operator

_PIECES = "int size, int[] starts, int[] lengths"


def local_places(
    ids: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ids lie in the part (0 for those outside), and which are inside."""
    places = torch.zeros_like(ids)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    before = 0
    for start, length in zip(starts, lengths, strict=True):
        here = (ids >= start) & (ids < start + length)
        places = torch.where(here, ids - (start - before), places)
        inside |= here
        before += length
    return places, inside


def _check(ids: torch.Tensor, size: int, ignored: int | None, what: str) -> None:
    """Ids are of the whole vocabulary; without waiting for the device."""
    right = (ids >= 0) & (ids < size)
    if ignored is not None:
        right |= ids == ignored
    torch.ops.aten._assert_async.msg(right.all(), f"{what} out of range: not in 0 to {size - 1}")


def _embedding_fake(weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return weight.new_empty((*ids.shape, *weight.shape[1:]))


@operator(
    f"embedding_part(Tensor weight, Tensor ids, {_PIECES}) -> Tensor",
    _embedding_fake,
)
def embedding_part(
    weight: torch.Tensor,
    ids: torch.Tensor,
    size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Rows of a table of `size` rows, of which `weight` has some; zeros for the others."""
    _check(ids, size, None, "embedding index")
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, *weight.shape[1:]))
    places, inside = local_places(ids, starts, lengths)
    rows = torch.ops.aten.embedding(weight, places)
    found: torch.Tensor = rows.masked_fill_(inside.logical_not().unsqueeze(-1), 0)
    return found


def _embedding_backward_fake(
    grad: torch.Tensor,
    ids: torch.Tensor,  # noqa: ARG001 - the operator's signature
    padding_idx: int,  # noqa: ARG001
    starts: Sequence[int],  # noqa: ARG001
    lengths: Sequence[int],
) -> torch.Tensor:
    return grad.new_empty((sum(lengths), grad.shape[-1]))


@operator(
    "embedding_part_backward(Tensor grad, Tensor ids, int padding_idx, int[] starts, "
    "int[] lengths) -> Tensor",
    _embedding_backward_fake,
)
def embedding_part_backward(
    grad: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Gradient of the part's rows."""
    rows = sum(lengths)
    places, inside = local_places(ids, starts, lengths)
    kept = inside & (ids != padding_idx)
    outside = places.masked_fill_(kept.logical_not(), rows)  # a row more, that stays zero
    found: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, outside, rows + 1, rows, False
    )
    return found[:rows]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _class_dim(logits: torch.Tensor) -> int:
    return min(1, logits.dim() - 1)


def _parts_fake(
    logits: torch.Tensor, maximum: torch.Tensor, target: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if torch.float64 in (logits.dtype, maximum.dtype) else torch.float32
    empty = logits.new_empty(target.shape, dtype=wide)
    return empty, torch.empty_like(empty)


@operator(
    "cross_entropy_parts(Tensor logits, Tensor maximum, Tensor target, int ignore_index, "
    f"{_PIECES}) -> (Tensor, Tensor)",
    _parts_fake,
)
def cross_entropy_parts(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of exp of logits, the target's logit), both less the row's maximum, in float32.

    The classes are dim 1, or dim 0 of a single row, and `maximum` keeps it with size 1. The loss
    of a row is ``log(sum) - target``, whatever the maximum.
    """
    _check(target, size, ignore_index, "cross entropy target")
    dim = _class_dim(logits)
    places, inside = local_places(target, starts, lengths)
    less = _wide(logits) - _wide(maximum)
    if logits.shape[dim]:
        chosen = less.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    else:
        chosen = less.new_zeros(target.shape)
    chosen = chosen.masked_fill(inside.logical_not(), 0)
    return less.exp_().sum(dim), chosen


def _grad_fake(
    grad_sum: torch.Tensor,  # noqa: ARG001 - the operator's signature
    grad_target: torch.Tensor,  # noqa: ARG001
    logits: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    return torch.empty_like(logits)


@operator(
    "cross_entropy_grad(Tensor grad_sum, Tensor grad_target, Tensor logits, Tensor maximum, "
    "Tensor target, int[] starts, int[] lengths) -> Tensor",
    _grad_fake,
)
def cross_entropy_grad(
    grad_sum: torch.Tensor,
    grad_target: torch.Tensor,
    logits: torch.Tensor,
    maximum: torch.Tensor,
    target: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Gradient of the logits from those of both parts: the maximum is a constant."""
    dim = _class_dim(logits)
    found = (_wide(logits) - _wide(maximum)).exp_().mul_(grad_sum.unsqueeze(dim))
    if logits.shape[dim]:
        places, inside = local_places(target, starts, lengths)
        own = grad_target.masked_fill(inside.logical_not(), 0)
        found.scatter_add_(dim, places.unsqueeze(dim), own.unsqueeze(dim))
    return found.to(logits.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    del output
    logits, maximum, target, _, _, ctx.starts, ctx.lengths = inputs
    ctx.save_for_backward(logits, maximum, target)


def _gradient(
    ctx: Any, grad_sum: torch.Tensor, grad_target: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    found = torch.ops.partitioner.cross_entropy_grad(
        grad_sum, grad_target, *ctx.saved_tensors, ctx.starts, ctx.lengths
    )
    return (found, *(None,) * 6)


gradient("cross_entropy_parts", _gradient, _save)
