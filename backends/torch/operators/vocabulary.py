"""Embeddings, cross entropy and writes of rows on a shard of the vocabulary, or of another dim.

A device's shard consists of pieces, each of a start and a length in the whole vocabulary. Ids
outside the shard add nothing, so that the sum over the devices is the whole result. Rows are
written so to a cache of keys and values that is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import gradient, operator, saving

#: Logits of a block of rows: 1 MiB of float32, within the second cache of most processors.
_BLOCK = 1 << 18


def local_places(
    ids: Tensor, starts: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Positions of ids in the shard (0 for those outside), and a mask of those inside."""
    if len(starts) == 1:
        (start,), (length,) = starts, lengths
        inside = (ids >= start) & (ids < start + length)
        return torch.where(inside, ids - start, 0), inside
    places = torch.zeros_like(ids)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    before = 0
    for start, length in zip(starts, lengths, strict=True):
        here = (ids >= start) & (ids < start + length)
        places = torch.where(here, ids - (start - before), places)
        inside |= here
        before += length
    return places, inside


def check_ids(ids: Tensor, size: int, name: str, ignored: int | None = None) -> None:
    """Assert that ids are of the whole vocabulary, without waiting for the device."""
    if are_within(ids, 0, size):
        return
    right = (ids >= 0) & (ids < size)
    if ignored is not None:
        right |= ids == ignored
    torch.ops.aten._assert_async.msg(right.all(), f"{name} out of range: not in 0 to {size - 1}")


def are_within(ids: Tensor, start: int, length: int) -> bool:
    """Test whether all ids are of a piece, if the device need not be waited for."""
    if ids.device.type != "cpu" or not ids.numel():
        return False
    least, largest = ids.aminmax()
    return start <= int(least) and int(largest) < start + length


def _places_and_others(
    ids: Tensor, starts: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Positions of ids in the shard, and a mask of those outside; None if there are none."""
    if len(starts) == 1 and are_within(ids, starts[0], lengths[0]):
        return ids - starts[0] if starts[0] else ids, None
    places, inside = local_places(ids, starts, lengths)
    return places, inside.logical_not()


@operator(lambda weight, ids, *_: weight.new_empty((*ids.shape, *weight.shape[1:])))
def embedding_part(
    weight: Tensor, ids: Tensor, size: int, starts: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Rows of a table of `size` rows, of which `weight` has a shard; zeros for other rows."""
    check_ids(ids, size, "embedding index")
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, *weight.shape[1:]))
    places, inside = local_places(ids, starts, lengths)
    rows: Tensor = torch.ops.aten.embedding(weight, places)
    return rows.masked_fill_(inside.logical_not().unsqueeze(-1), 0)


@operator(lambda grad, *call: grad.new_empty((sum(call[-1]), grad.shape[-1])))
def embedding_part_backward(
    grad: Tensor, ids: Tensor, padding_idx: int, starts: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Gradient of the shard's rows."""
    rows = sum(lengths)
    places, inside = local_places(ids, starts, lengths)
    kept = inside & (ids != padding_idx)
    # ids outside add to one more row, which is cut off
    indices = places.masked_fill_(kept.logical_not(), rows)
    table: Tensor = torch.ops.aten.embedding_dense_backward(grad, indices, rows + 1, rows, False)
    return table[:rows]


def widened(x: Tensor) -> Tensor:
    """The elements in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _is_in_blocks(logits: Tensor) -> bool:
    """Test whether rows of logits are taken some at a time, so that they stay in the cache."""
    is_matrix = logits.dim() == 2 and logits.device.type == "cpu"
    return is_matrix and logits.shape[1] > 0 and logits.numel() > _BLOCK


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    count = max(1, _BLOCK // logits.shape[1])
    for start in range(0, logits.shape[0], count):
        yield slice(start, start + count)


def _class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def _parts_fake(
    logits: Tensor, maximum: Tensor, target: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if torch.float64 in (logits.dtype, maximum.dtype) else torch.float32
    empty = logits.new_empty(target.shape, dtype=wide)
    return empty, torch.empty_like(empty)


@operator(_parts_fake)
def cross_entropy_parts(
    logits: Tensor,
    maximum: Tensor,
    target: Tensor,
    ignore_index: int,
    size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(sum of exp of logits, the target's logit), both less the row's maximum, in float32.

    The classes are dim 1, or dim 0 of a single row, and `maximum` keeps it with size 1. The loss
    of a row is ``log(sum) - target``, whatever the maximum.
    """
    dim = _class_dim(logits)
    places, others = _places_and_others(target, starts, lengths)
    if others is not None:
        check_ids(target, size, "cross entropy target", ignore_index)
    highest = widened(maximum)
    if logits.shape[dim]:
        chosen = widened(logits.gather(dim, places.unsqueeze(dim))) - highest
        chosen = chosen.squeeze(dim)
        chosen = chosen if others is None else chosen.masked_fill_(others, 0)
    else:
        wide = torch.promote_types(widened(logits).dtype, highest.dtype)
        chosen = highest.new_zeros(target.shape, dtype=wide)
    if not _is_in_blocks(logits):
        return (widened(logits) - highest).exp_().sum(dim), chosen
    sums = torch.empty_like(chosen)
    for rows in _row_blocks(logits):
        less = widened(logits[rows]) - highest[rows]
        torch.sum(less.exp_(), 1, out=sums[rows])
    return sums, chosen


@operator(lambda _grad_sum, _grad_target, logits, *_: torch.empty_like(logits))
def cross_entropy_grad(
    grad_sum: Tensor,
    grad_target: Tensor,
    logits: Tensor,
    maximum: Tensor,
    target: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Gradient of the logits from those of both results: the maximum is a constant."""
    dim = _class_dim(logits)
    places, others = _places_and_others(target, starts, lengths)
    inner = grad_target if others is None else grad_target.masked_fill(others, 0)
    call = (
        *(widened(maximum), grad_sum.unsqueeze(dim), places.unsqueeze(dim)),
        inner.unsqueeze(dim),
    )
    slopes = torch.empty_like(logits)
    is_wide = slopes.dtype == torch.promote_types(logits.dtype, call[0].dtype)
    for rows in _row_blocks(logits) if _is_in_blocks(logits) else (None,):
        data, out = (logits, slopes) if rows is None else (logits[rows], slopes[rows])
        highest, of_sum, at, added = call if rows is None else (tensor[rows] for tensor in call)
        # computed at least in float32
        less = torch.sub(widened(data), highest, out=out if is_wide else None)
        computed = less.exp_().mul_(of_sum)
        if logits.shape[dim]:
            computed.scatter_add_(dim, at, added)
        if not is_wide:
            out.copy_(computed)
    return slopes


@gradient("cross_entropy_parts", saving(3))
def _gradient(ctx: Any, grad_sum: Tensor, grad_target: Tensor) -> tuple[Tensor | None, ...]:
    _, _, *pieces = ctx.settings
    slopes = torch.ops.partitioner.cross_entropy_grad(
        grad_sum, grad_target, *ctx.saved_tensors, *pieces
    )
    return (slopes, *(None,) * 6)


@operator(
    schema="index_write_part(Tensor data, Tensor index, Tensor source, int dim, bool from_end, "
    "int size, int[] starts, int[] lengths) -> Tensor"
)
def index_write_part(data: Tensor, *rows: Any) -> Tensor:
    """The part with rows of the source at those positions that lie in it, as `write_part` does."""
    return write_part(data.clone(), *rows)


def write_part(
    data: Tensor,
    index: Tensor,
    source: Tensor,
    dim: int,
    from_end: bool,
    size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Write rows of the source to a part, at those positions that lie in it; returns the part.

    No position waits for the device: one outside the part writes again what the last one inside
    writes or, if none is inside, what is there.

    Args:
        index: Positions in the whole dim.
        source: The rows; they broadcast to one for each position.
        from_end: Whether negative positions count from the end; they are out of range otherwise.
        size: Size of the whole dim.
        starts: First position of each piece of the part.
        lengths: Positions of each piece.
    """
    wanted = (torch.where(index < 0, index + size, index) if from_end else index).long()
    check_ids(wanted, size, "index of a write")
    shape = [*data.shape]
    if not shape[dim] or not index.numel():
        return data
    shape[dim] = index.numel()
    places, inside = local_places(wanted, starts, lengths)
    order = torch.arange(index.numel(), device=index.device)
    last = torch.where(inside, order, 0).amax()
    chosen = torch.where(inside, order, last)
    places = places[chosen]
    there = data.index_select(dim, places)
    rows = source.expand(shape).index_select(dim, chosen)
    return data.index_copy_(dim, places, torch.where(inside.any(), rows, there))
