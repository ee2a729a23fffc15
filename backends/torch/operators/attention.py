"""Scaled dot product attention and its gradients, one node each, the same for every device.

Queries are (batch, heads, rows, d), keys (batch, kv heads, columns, d), values (batch, kv heads,
columns, v); each kv head serves a group of consecutive query heads. A mask is added to the scores,
or is true where a column may be seen; it broadcasts to the scores. The second result is the log of
the sum of exponentials of each row's scores, from which the gradients are computed. In a row that
may see no column both results are 0.

A device that has some of the rows or columns of a causal attention runs an operator of a part,
which takes their positions. It computes only blocks in which rows see columns, with the kernel of
whole attention, and joins their results by log-sum-exp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.fused_attention import Call, kernel_for
from partitioner.backends.torch.operators.registry import gradient, operator, saving
from partitioner.backends.torch.operators.vocabulary import widened

_SAVED = "Tensor out, Tensor logsumexp"
#: A log-sum-exp below this has lost the number of its columns (a float32 keeps 7 digits).
_LOST = -1e3
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask"


class _Attention(Call):
    """A call that the plain form, which is right on all devices, can compute."""

    @property
    def factor(self) -> float:
        return float(self.query.shape[-1]) ** -0.5 if self.scale is None else self.scale

    def grouped(self, x: Tensor) -> Tensor:
        """A tensor by query heads as (batch, kv heads, group, ...), in at least float32."""
        heads = self.key.shape[1]
        return widened(x).reshape((x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]))

    def scores(self) -> Tensor:
        """(batch, kv heads, group, rows, columns)."""
        scores = self.grouped(self.query) @ widened(self.key).unsqueeze(2).mT * self.factor
        if self.is_causal:
            scores = _before(scores)
        mask = self.added_mask
        if mask is None:
            return scores
        return (scores.flatten(1, 2) + mask).view(scores.shape)

    def probabilities(self, scores: Tensor, logsumexp: Tensor | None) -> Tensor:
        """The softmax of the scores, over more columns than these if their log-sum-exp is given.

        A log-sum-exp has lost the number of the columns where all have the same large negative
        number in the mask: it is not used if there is another way.
        """
        if logsumexp is None:
            hidden = scores.amax(-1, keepdim=True) == float("-inf")
            return torch.softmax(scores, -1).masked_fill_(hidden, 0.0)
        return torch.exp(scores - self.grouped(logsumexp.unsqueeze(-1)))

    def slope(
        self, grad: Tensor, out: Tensor, logsumexp: Tensor, *, is_whole: bool
    ) -> tuple[Tensor, Tensor]:
        """(probabilities, gradient of the scaled and masked scores)."""
        scores = self.scores()
        weights = self.probabilities(scores, logsumexp)
        if is_whole and self.mask is not None:
            lost = self.grouped(logsumexp.unsqueeze(-1)) < _LOST
            weights = torch.where(lost, self.probabilities(scores, None), weights)
        grouped = self.grouped(grad)
        rows = (grouped * self.grouped(out)).sum(-1, keepdim=True)
        return weights, weights * (grouped @ widened(self.value).unsqueeze(2).mT - rows)


def _before(scores: Tensor) -> Tensor:
    """Scores, those of columns that come after their row minus infinity."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(seen.logical_not(), float("-inf"))


def _rows_first(x: Tensor, depth: int) -> Tensor:
    """An empty tensor with the strides of PyTorch's kernel: rows before heads."""
    batch, heads, rows, _ = x.shape
    return x.new_empty((batch, rows, heads, depth)).transpose(1, 2)


def _empty_results(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Results with the strides of PyTorch's kernel: the query's, and rows before heads."""
    batch, heads, rows, depth = query.shape
    same = value.shape[-1] == depth
    out = torch.empty_like(query) if same else _rows_first(query, value.shape[-1])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((batch, rows, heads), dtype=wide).transpose(1, 2)


def _forward(call: _Attention) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp of the scores)."""
    query, key, value = call.query, call.key, call.value
    if (kernel := kernel_for(call)) is not None:
        return kernel.forward(call)
    scores = call.scores()
    lse = torch.logsumexp(scores, -1).flatten(1, 2)
    lse.masked_fill_(lse == float("-inf"), 0.0)
    result = call.probabilities(scores, None) @ widened(value).unsqueeze(2)
    out, logsumexp = _empty_results(query, key, value)
    return out.copy_(result.flatten(1, 2)), logsumexp.copy_(lse)


@operator(
    _empty_results, f"attention({_OPERANDS}, bool is_causal, float? scale) -> (Tensor, Tensor)"
)
def attention(*call: Any) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp of the scores)."""
    return _forward(_Attention(*call))


def _empty_gradients(_: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_rows_first(x, x.shape[-1]) for x in operands[:3])
    return query, key, value


def _backward(
    call: _Attention, grad: Tensor, out: Tensor, logsumexp: Tensor, *, is_whole: bool
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value.

    Unless the call is the whole one, `out` and `logsumexp` are over more columns than its own:
    then these are the call's shares of the gradients.
    """
    query, key, value = call.query, call.key, call.value
    if (kernel := kernel_for(call)) is not None:
        return kernel.backward(call, grad, out, logsumexp)
    weights, slope = call.slope(grad, out, logsumexp, is_whole=is_whole)
    gradients = (
        (slope @ widened(key).unsqueeze(2) * call.factor).flatten(1, 2),
        (slope.mT @ call.grouped(query) * call.factor).sum(2),
        (weights.mT @ call.grouped(grad)).sum(2),
    )
    empty = _empty_gradients(grad, query, key, value)
    return tuple(target.copy_(x) for target, x in zip(empty, gradients, strict=True))


@operator(
    _empty_gradients,
    f"attention_backward(Tensor grad, {_OPERANDS}, {_SAVED}, bool is_causal, float? scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def attention_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    query, key, value, mask, out, logsumexp, is_causal, scale = call
    whole = _Attention(query, key, value, mask, is_causal, scale)
    return _backward(whole, grad, out, logsumexp, is_whole=True)


@operator(
    lambda _grad, _query, _key, _value, mask, *_: mask.new_empty(mask.shape),
    "attention_mask_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor mask, "
    f"{_SAVED}, float? scale) -> Tensor",
)
def attention_mask_backward(grad: Tensor, *call: Any) -> Tensor:
    """Gradient of a mask of numbers (a learned bias)."""
    query, key, value, mask, out, logsumexp, scale = call
    whole = _Attention(query, key, value, mask, False, scale)
    _, slope = whole.slope(grad, out, logsumexp, is_whole=True)
    return slope.flatten(1, 2).sum_to_size(mask.shape).to(mask.dtype)


@dataclass(frozen=True)
class _Block:
    """Rows and columns of a part, in local positions; `is_causal`: of the same whole positions."""

    rows: slice
    columns: slice
    is_causal: bool


_Pieces = Sequence[tuple[int, int]]


def _blocks(rows: Sequence[int], columns: Sequence[int]) -> Iterator[_Block]:
    """The blocks in which rows see columns; both are start and length of each whole interval."""
    of_both = _pairs(rows), _pairs(columns)
    ends = sorted({end for of in of_both for start, size in of for end in (start, start + size)})
    split: list[_Pieces] = []
    for pieces in of_both:
        cuts = ([at, *(e for e in ends if at < e < at + n), at + n] for at, n in pieces)
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, cuts))
        split.append([(low, high - low) for low, high in pairs if high > low])
    met, seen = split
    return _met(met, seen, _packed(met), _packed(seen), True)


def _pairs(intervals: Sequence[int]) -> _Pieces:
    return tuple(zip(intervals[::2], intervals[1::2], strict=True))


def _of_block(call: _Attention, block: _Block) -> _Attention:
    mask = call.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.shape[2] == 1 else mask[:, :, block.rows]
        mask = mask if mask.shape[3] == 1 else mask[:, :, :, block.columns]
    return _Attention(
        call.query[:, :, block.rows],
        call.key[:, :, block.columns],
        call.value[:, :, block.columns],
        mask,
        block.is_causal,
        call.scale,
    )


def _visible(call: _Attention, logsumexp: Tensor) -> Tensor:
    """The log-sum-exp; that of rows that see no column is minus infinity."""
    mask = call.added_mask
    if mask is None:
        return logsumexp
    scores = mask.expand(*mask.shape[:2], call.query.shape[2], call.key.shape[2])
    if call.is_causal:
        scores = _before(scores)
    return logsumexp.masked_fill(scores.amax(-1) == float("-inf"), float("-inf"))


def _part(whole: _Attention, blocks: Iterable[_Block]) -> tuple[Tensor, Tensor]:
    """Results over some blocks; the log-sum-exp of rows that see no column is minus infinity."""
    out, logsumexp = _empty_results(whole.query, whole.key, whole.value)
    out.zero_()
    logsumexp.fill_(float("-inf"))
    for block in blocks:
        call = _of_block(whole, block)
        part, lse = _forward(call)
        target, total = out[:, :, block.rows], logsumexp[:, :, block.rows]
        joined = _joined(target, total, part, _visible(call, lse))
        target.copy_(joined[0])
        total.copy_(joined[1])
    return out, logsumexp


def _joined(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse_a, lse_b)
    finite = total.masked_fill(total == float("-inf"), 0.0)
    shares = (torch.exp(lse - finite).unsqueeze(-1) for lse in (lse_a, lse_b))
    out = sum(widened(x) * share for x, share in zip((a, b), shares, strict=True))
    assert isinstance(out, Tensor)
    return out.to(a.dtype), total


def _closed(logsumexp: Tensor) -> Tensor:
    return logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)


def _part_backward(
    whole: _Attention, blocks: Iterable[_Block], grad: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    """Shares of some blocks in the gradients."""
    operands = whole.query, whole.key, whole.value
    totals = tuple(x.zero_() for x in _empty_gradients(grad, *operands))
    for block in blocks:
        call = _of_block(whole, block)
        saved = (x[:, :, block.rows] for x in (grad, out, logsumexp))
        places = block.rows, block.columns, block.columns
        parts = _backward(call, *saved, is_whole=False)
        for total, place, part in zip(totals, places, parts, strict=True):
            total[:, :, place] += part
    return totals


@operator(
    _empty_results,
    f"attention_part({_OPERANDS}, float? scale, int[] rows, int[] columns) -> (Tensor, Tensor)",
)
def attention_part(*call: Any) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp) of causal attention over these rows and columns of a whole one."""
    query, key, value, mask, scale, rows, columns = call
    whole = _Attention(query, key, value, mask, False, scale)
    out, logsumexp = _part(whole, _blocks(rows, columns))
    return out, logsumexp.copy_(_closed(logsumexp))


@operator(
    _empty_gradients,
    f"attention_part_backward(Tensor grad, {_OPERANDS}, {_SAVED}, float? scale, int[] rows, "
    "int[] columns) -> (Tensor, Tensor, Tensor)",
)
def attention_part_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Shares of these rows and columns in the gradients of query, key and value."""
    query, key, value, mask, out, logsumexp, scale, rows, columns = call
    whole = _Attention(query, key, value, mask, False, scale)
    return _part_backward(whole, _blocks(rows, columns), grad, out, logsumexp)


def _step_blocks(
    intervals: Sequence[int], counts: Sequence[int], step: int, is_causal: bool
) -> Iterator[_Block]:
    """The blocks of a step of a ring (`rewrites.ring`), in places of its operands.

    The rows lie as in the sequence, as keys of step 0 do; later keys lie part by part.

    Args:
        intervals: Start and length of the pieces of the sequence, part by part.
        counts: Pieces of each part.
        step: Rows of part i meet keys of part i + step; -1 if there is one part of each, the rows'
            pieces first.
        is_causal: Whether columns that come after a row are left out.
    """
    parts = _parts(intervals, counts)
    if step < 0:
        rows, columns = parts
        yield from _met(rows, columns, _packed(rows), _packed(columns), is_causal)
        return
    ends = itertools.accumulate((sum(size for _, size in parts[(i + step) % len(parts)])
                                 for i in range(len(parts))), initial=0)  # fmt: skip
    for part, start in zip(range(len(parts)), ends, strict=False):
        rows, columns = parts[part], parts[(part + step) % len(parts)]
        lie = columns if step == 0 else [(start + at, size) for at, size in _packed(columns)]
        yield from _met(rows, columns, rows, lie, is_causal)


def _parts(intervals: Sequence[int], counts: Sequence[int]) -> list[_Pieces]:
    pieces = iter(_pairs(intervals))
    return [[*itertools.islice(pieces, count)] for count in counts]


def _packed(pieces: _Pieces) -> _Pieces:
    """Where pieces lie if they lie one after the other."""
    sizes = [size for _, size in pieces]
    return [*zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)]


def _met(
    rows: _Pieces, columns: _Pieces, row_places: _Pieces, places: _Pieces, is_causal: bool
) -> Iterator[_Block]:
    """The blocks of pieces of rows and of columns, which are equal or apart; few large ones."""
    if rows == columns and is_causal:
        one = _runs(row_places), _runs(places)
        if all(len(runs) == 1 for runs in one):  # in order: a row sees what lies before it
            yield _Block(one[0][0], one[1][0], True)
            return
    blocks: list[_Block] = []
    for (start, _), row in zip(rows, row_places, strict=True):
        here = _runs([row])[0]
        pairs = [*zip(columns, places, strict=True)]
        full = [at for (first, _), at in pairs if not is_causal or first < start]
        blocks += [_Block(here, run, False) for run in _runs(full)]
        if is_causal:
            same = [at for (first, _), at in pairs if first == start]
            blocks += [_Block(here, run, True) for run in _runs(same)]
    for columns_seen, some in itertools.groupby(blocks, key=lambda b: (b.columns, b.is_causal)):
        column, causal = columns_seen
        for run in [b.rows for b in some] if causal else _runs_of([b.rows for b in some]):
            yield _Block(run, column, causal)


def _runs(places: _Pieces) -> list[slice]:
    """Places as slices, neighbours as one."""
    return _runs_of([slice(start, start + size) for start, size in places])


def _runs_of(slices: Sequence[slice]) -> list[slice]:
    runs: list[slice] = []
    for one in slices:
        if runs and runs[-1].stop == one.start:
            runs[-1] = slice(runs[-1].start, one.stop)
        else:
            runs.append(one)
    return runs


@operator(
    _empty_results,
    f"attention_step({_OPERANDS}, bool is_causal, float? scale, "
    "int[] intervals, int[] counts, int step) -> (Tensor, Tensor)",
)
def attention_step(*call: Any) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp) of a step of a ring; see `_step_blocks`."""
    return _part(*_step(call))


def _step(call: Sequence[Any]) -> tuple[_Attention, Iterator[_Block]]:
    """A step of a ring, without what is saved of it, as an attention and its blocks."""
    query, key, value, mask, is_causal, scale, intervals, counts, step = call
    if mask is not None and mask.dtype != torch.bool:
        # 0 as the largest of each row changes no softmax; large negative numbers throughout a row
        # would leave nothing of its scores, and of the number of its columns, in the log-sum-exp
        largest = mask.amax(-1, keepdim=True)
        mask = mask - largest.masked_fill(largest == float("-inf"), 0.0)
    if mask is not None and mask.shape[-1] != 1 and step != 0:  # columns in the order of the keys
        parts = _parts(intervals, counts)
        turned = parts[1:] if step < 0 else [*parts[step:], *parts[:step]]
        columns = [mask[..., start : start + size] for part in turned for start, size in part]
        mask = torch.cat(columns, -1)
        assert mask.shape[-1] == key.shape[2]
    whole = _Attention(query, key, value, mask, False, scale)
    return whole, _step_blocks(intervals, counts, step, is_causal)


@operator(
    _empty_gradients,
    f"attention_step_backward(Tensor grad, {_OPERANDS}, {_SAVED}, bool is_causal, float? scale, "
    "int[] intervals, int[] counts, int step) -> (Tensor, Tensor, Tensor)",
)
def attention_step_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Shares of a step of a ring in the gradients of query, key and value."""
    (*operands, out, logsumexp), settings = call[:6], call[6:]
    return _part_backward(*_step((*operands, *settings)), grad, out, logsumexp)


@operator(lambda a, lse_a, *_: (torch.empty_like(a), torch.empty_like(lse_a)))
def attention_join(
    a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, last: bool
) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp) over the columns of two; after the last, as of whole attention."""
    out, total = _joined(a, lse_a, b, lse_b)
    results = torch.empty_like(a), torch.empty_like(lse_a)
    return results[0].copy_(out), results[1].copy_(_closed(total) if last else total)


@operator(lambda x, *_: x.new_empty(x.shape))
def turn(
    x: Tensor, intervals: Sequence[int], held: Sequence[int], made: Sequence[int], parts: int
) -> Tensor:
    """Intervals of dim 2 one after the other; where they lie on devices is of `ir.loops.parts`."""
    del held, made, parts
    return torch.cat([x[:, :, start : start + size] for start, size in _pairs(intervals)], 2)


@gradient("attention", saving(4, results=(0, 1), constants=(1,)))
def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    operators, saved, bias = torch.ops.partitioner, ctx.saved_tensors, None
    gradients = operators.attention_backward(grad, *saved, *ctx.settings)
    if ctx.needs_input_grad[3]:
        bias = operators.attention_mask_backward(grad, *saved, ctx.settings[1])
    return (*gradients, bias, None, None)
