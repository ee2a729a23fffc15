"""Bags of rows of a table, of which a device may have a shard, and their gradients.

A bag is a run of indices: it begins at its offset, and ends where the next one begins. Its result
is the sum, mean or maximum of the rows of its indices, each times a weight in sums, and 0 if it has
none; indices that are `padding` count as none. A device has pieces of the rows, as in `vocabulary`,
the indices from `first` on, and the bags in `bag_starts` and `bag_lengths`; sums and maxima over
the devices are the whole result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from partitioner.backends.torch.operators.registry import gradient, operator, saving
from partitioner.backends.torch.operators.vocabulary import check_ids, local_places

SUM, MEAN, MAX = 0, 1, 2  #: PyTorch's numbers of modes.

_CALL = "Tensor indices, Tensor offsets, Tensor? weights"
_SETTINGS = (
    "int mode, int bags, int padding, int size, int total, int[] starts, int[] lengths, "
    "int[] index_starts, int[] index_lengths, int[] bag_starts, int[] bag_lengths"
)


@dataclass(frozen=True)
class _Bags:
    """A call: operands as above."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    mode: int
    bags: int  #: Bags of the whole call.
    padding: int
    size: int  #: Rows of the whole table.
    total: int  #: Indices of the whole call.
    starts: Sequence[int]
    lengths: Sequence[int]
    index_starts: Sequence[int]
    index_lengths: Sequence[int]
    bag_starts: Sequence[int]
    bag_lengths: Sequence[int]

    @property
    def is_whole(self) -> bool:
        indices = list(self.index_starts), list(self.index_lengths)
        bags = list(self.bag_starts), list(self.bag_lengths)
        return indices == ([0], [self.total]) and bags == ([0], [self.bags])

    def in_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """(place, row) as of `chosen`, and the first of them of each bag, if it `is_whole`."""
        rows, counts = self.counting()
        begins, ends = self.intervals()
        torch.ops.aten._assert_async.msg((begins <= ends).all(), "embedding_bag: offsets decrease")
        before = F.pad(counts.cumsum(0), (1, 0))
        kept = counts.nonzero().squeeze(1)
        return kept, rows[kept], before[begins]

    def chosen(self) -> tuple[Tensor, Tensor, Tensor]:
        """(place among the device's indices, row of the shard, bag), of what the device adds."""
        rows, counts = self.counting()
        bags = self.bag_of()
        if not self.is_whole:
            bags, here = local_places(bags, self.bag_starts, self.bag_lengths)
            counts = counts & here
        kept = counts.nonzero().squeeze(1)
        return kept, rows[kept], bags[kept]

    def counting(self) -> tuple[Tensor, Tensor]:
        """The row of the shard of each of the device's indices, and whether it counts there."""
        check_ids(self.indices, self.size, "embedding_bag index")
        rows, inside = local_places(self.indices, self.starts, self.lengths)
        return rows, inside if self.padding < 0 else inside & (self.indices != self.padding)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """The first index of each bag, and the one behind its last."""
        begins, end = self.offsets[: self.bags].contiguous(), self.offsets[self.bags :]
        check, text = torch.ops.aten._assert_async.msg, "embedding_bag: the {} offset is not {}"
        check((begins[:1] == 0).all(), text.format("first", 0))
        check(
            (end == self.total).all(), text.format("last", f"the number of indices, {self.total}")
        )
        return begins, torch.cat([begins[1:], begins.new_full((1,), self.total)])

    def bag_of(self) -> Tensor:
        """The bag of each of the device's indices, among all bags."""
        begins, ends = self.intervals()
        bags = torch.repeat_interleave(
            torch.arange(self.bags, device=begins.device), ends - begins, output_size=self.total
        )
        if self.is_whole:
            return bags
        pieces = zip(self.index_starts, self.index_lengths, strict=True)
        return torch.cat([bags[:0], *(bags[at : at + size] for at, size in pieces)])

    def counted(self) -> Tensor:
        return self.bag_of()[self.indices != self.padding]

    def factors(self, kept: Tensor, bags: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Compute what each kept row is multiplied by; None if by 1."""
        if self.mode == MEAN:
            counts = torch.bincount(self.counted(), minlength=self.bags).to(dtype)
            local = [
                counts[start : start + length]
                for start, length in zip(self.bag_starts, self.bag_lengths, strict=True)
            ]
            return torch.cat(local)[bags].reciprocal() if local else counts[:0]
        return None if self.weights is None else self.weights[kept]


@operator(
    lambda table, *call: table.new_empty((sum(call[-1]), table.shape[1])),
    f"embedding_bag(Tensor table, {_CALL}, {_SETTINGS}) -> Tensor",
)
def embedding_bag(table: Tensor, *call: Any) -> Tensor:
    """(bags, channels)."""
    bags = _Bags(*call)
    if bags.mode == SUM and bags.is_whole:
        kept, rows, begins = bags.in_order()
        factors = bags.factors(kept, begins, table.dtype)
        return F.embedding_bag(rows, table, begins, mode="sum", per_sample_weights=factors)
    kept, rows, at = bags.chosen()
    if bags.mode != MAX:
        factors = bags.factors(kept, at, table.dtype)
        if any(list(s) != sorted(s) for s in (bags.index_starts, bags.bag_starts)):
            order = at.argsort(stable=True)
            rows, at = rows[order], at[order]
            factors = None if factors is None else factors[order]
        begins = torch.searchsorted(at, torch.arange(sum(bags.bag_lengths), device=at.device))
        return F.embedding_bag(rows, table, begins, mode="sum", per_sample_weights=factors)
    found = table.index_select(0, rows)
    out = table.new_full((sum(bags.bag_lengths), table.shape[1]), float("-inf"))
    out.scatter_reduce_(0, at.unsqueeze(1).expand_as(found), found, "amax")
    # A bag without an index is 0 on every device: all have all indices.
    filled = torch.zeros(bags.bags, dtype=torch.bool, device=table.device)
    filled[bags.counted()] = True
    empty = filled.logical_not().nonzero().squeeze(1)
    here, inside = local_places(empty, bags.bag_starts, bags.bag_lengths)
    out[here[inside]] = 0
    return out


@operator(
    lambda grad, *call: grad.new_empty((sum(call[9]), grad.shape[1])),
    f"embedding_bag_backward(Tensor grad, {_CALL}, {_SETTINGS}) -> Tensor",
)
def embedding_bag_backward(grad: Tensor, *call: Any) -> Tensor:
    """Gradient of the shard's rows, of sums and means."""
    bags = _Bags(*call)
    kept, rows, at = bags.chosen()
    table = grad.new_zeros((sum(bags.lengths), grad.shape[1]))
    factors = bags.factors(kept, at, grad.dtype)
    added = grad.index_select(0, at)
    return table.index_add_(0, rows, added if factors is None else added * factors.unsqueeze(1))


@operator(
    lambda grad, _table, indices, *_: grad.new_empty(indices.shape),
    f"embedding_bag_weights_backward(Tensor grad, Tensor table, {_CALL}, {_SETTINGS}) -> Tensor",
)
def embedding_bag_weights_backward(grad: Tensor, table: Tensor, *call: Any) -> Tensor:
    """Gradient of the weights of indices."""
    kept, rows, at = _Bags(*call).chosen()
    found = grad.new_zeros(call[0].shape)
    found[kept] = (grad.index_select(0, at) * table.index_select(0, rows)).sum(1)
    return found


@operator(
    lambda out, _table, indices, *_: torch.empty_like(out, dtype=indices.dtype),
    f"embedding_bag_places(Tensor out, Tensor table, {_CALL}, {_SETTINGS}) -> Tensor",
)
def embedding_bag_places(out: Tensor, table: Tensor, *call: Any) -> Tensor:
    """Find the first index in each bag that has its maximum; `total` if none has."""
    bags = _Bags(*call)
    kept, rows, at = bags.chosen()
    pieces = zip(bags.index_starts, bags.index_lengths, strict=True)
    own = [torch.arange(at, at + size, device=kept.device) for at, size in pieces]
    among_all = torch.cat([bags.indices[:0], *own])  # the place of each of the device's indices
    found = among_all[kept].to(bags.indices.dtype).unsqueeze(1).expand(-1, out.shape[1])
    equal = table.index_select(0, rows) == out.index_select(0, at)
    found = found.where(equal, bags.total)
    places = torch.full_like(out, bags.total, dtype=bags.indices.dtype)
    return places.scatter_reduce_(0, at.unsqueeze(1).expand_as(found), found, "amin")


@operator(
    lambda grad, _places, *call: grad.new_empty((sum(call[9]), grad.shape[1])),
    f"embedding_bag_max_backward(Tensor grad, Tensor places, {_CALL}, {_SETTINGS}) -> Tensor",
)
def embedding_bag_max_backward(grad: Tensor, places: Tensor, *call: Any) -> Tensor:
    """Gradient of the shard's rows, of maxima."""
    bags = _Bags(*call)
    rows, inside = local_places(bags.indices, bags.starts, bags.lengths)
    count = sum(bags.lengths)
    # rows elsewhere, and bags without indices, add to one more row, which is cut off
    rows = torch.cat([rows.masked_fill(inside.logical_not(), count), rows.new_full((1,), count)])
    table = grad.new_zeros((count + 1, grad.shape[1]))
    return table.scatter_add_(0, rows[places], grad)[:count]


@gradient("embedding_bag", saving(4, results=(0,)))
def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    operators = torch.ops.partitioner
    table, *call, out = ctx.saved_tensors
    call = (*call, *ctx.settings)
    of_weights = None
    if ctx.settings[0] == MAX:
        places = operators.embedding_bag_places(out, table, *call)
        of_table = operators.embedding_bag_max_backward(grad, places, *call)
    else:
        of_table = operators.embedding_bag_backward(grad, *call)
    if ctx.needs_input_grad[3]:
        of_weights = operators.embedding_bag_weights_backward(grad, table, *call)
    return (of_table, None, None, of_weights, *(None,) * len(ctx.settings))
