"""A layer of experts on a shard of them: tokens are sorted by expert, and each expert runs once.

``out[t] = sum over k of weights[t, k] * down[e] @ act(up[e] @ x[t])`` with ``e = ids[t, k]``.
Tokens are (tokens, channels), ids and weights (tokens, chosen), `up` (experts, width or twice the
width, channels), `down` (experts, channels, width). A gated layer has the gate's rows before the
others: ``act(gate) * other``. No token is dropped, whatever the number that an expert gets.

A device's shard consists of pieces of experts, each of a start and a length among all of them;
tokens of other experts add nothing, so that the sum over the devices is the whole result.

In the forms with biases, `up_bias` (experts, rows of `up`) is added before the activation and
`down_bias` (experts, channels) behind the second product. The activation is one of those named here
or a program (`activations`), which tells the gate's columns from the others itself.

Tokens and experts have one type; weights of choices may have another one, as of a router in float32
beside experts in bfloat16. The result then has the wider type, in which choices are added up.

The first products of all choices, (tokens, chosen, columns), are a second result for the gradients,
with zeros for experts elsewhere. Rows that are missing there are computed again.

In the forms that end in ``_sent`` the ranks of a group have tokens of their own, and send each to
the ranks that have some of its experts; the results for it are sent back and added up. There the
first products are (tokens of all ranks, chosen, columns).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.activations import activation, with_gradient
from partitioner.backends.torch.operators.registry import (
    Call,
    Steps,
    all_to_all,
    gradient,
    group_name,
    operator,
    packed,
    saving,
    sending,
    unpacked,
)
from partitioner.backends.torch.operators.vocabulary import check_ids, local_places

_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down"
_BIASES = ", Tensor up_bias, Tensor down_bias"
_SETTINGS = "str activation, bool gated, bool keep, int size, int[] starts, int[] lengths"

#: Steps that are activations by themselves; others are programs.
ACTIVATIONS = frozenset({"gelu", "gelu-tanh", "relu", "silu"})


@dataclass(frozen=True)
class _Layer:
    """A call: operands as above, and the experts of the shard."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    activation: str
    gated: bool
    keep: bool
    size: int
    starts: Sequence[int]
    lengths: Sequence[int]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    #: Place of each token among those whose first products are kept; None if it is the same.
    places: Tensor | None = None

    @classmethod
    def of(cls, operands: Sequence[Any], settings: Sequence[Any]) -> _Layer:
        return cls(*operands[:5], *settings[:6], *operands[5:])

    @property
    def has_gate(self) -> bool:
        """Tell whether the gate's columns are told apart here, not by a program."""
        return self.gated and self.activation in ACTIVATIONS

    @property
    def result_type(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, self.weights.dtype)

    def kept_at(self, choices: Tensor) -> Tensor:
        """Places of choices among the first products."""
        if self.places is None:
            return choices
        chosen = self.ids.shape[1]
        tokens = choices.div(chosen, rounding_mode="floor")
        return self.places[tokens].mul_(chosen).add_(choices.remainder(chosen))

    def results(self, kept: Tensor) -> Tensor:
        """The sum of the results of the shard's experts; first products are put into `kept`."""
        wide = self.result_type
        out = self.x.new_zeros((self.x.shape[0], self.down.shape[1]), dtype=wide)
        weights, rows = self.weights.reshape(-1), kept.flatten(0, 1)
        for place, tokens, choices in self.routed():
            before = self.before(place, self.x.index_select(0, tokens))
            if self.keep:
                rows.index_copy_(0, self.kept_at(choices), before)
            result = self.inner(before) @ self.down[place].T
            if self.down_bias is not None:
                result += self.down_bias[place]
            out.index_add_(0, tokens, result.to(wide).mul_(weights[choices].unsqueeze(-1)))
        return out

    def gradients(self, grad: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """Gradients of tokens, weights, `up`, `down` and, if there are any, biases."""
        operands = (self.x, self.weights, self.up, self.down, *self.biases)
        of_x, of_weights, of_up, of_down, *of_biases = (x.new_zeros(x.shape) for x in operands)
        weights, products = self.weights.reshape(-1), kept.flatten(0, 1)
        for place, tokens, choices in self.routed():
            rows, of_rows = self.x.index_select(0, tokens), grad.index_select(0, tokens)
            held = products.index_select(0, self.kept_at(choices))
            before = self.first_products(place, rows, held)
            inner = self.inner(before)
            of_inner = of_rows.to(inner.dtype) @ self.down[place]
            of_choices = (of_inner.to(of_rows.dtype) * inner).sum(-1)
            if self.down_bias is not None:
                of_choices = of_choices + of_rows @ self.down_bias[place].to(of_rows.dtype)
            of_weights.view(-1)[choices] = of_choices.to(of_weights.dtype)
            factors = weights[choices].unsqueeze(-1)
            torch.mm(of_rows.mul_(factors).to(inner.dtype).T, inner, out=of_down[place])
            of_before = self.inner_gradient(of_inner.mul_(factors), before)
            torch.mm(of_before.T, rows, out=of_up[place])
            of_x.index_add_(0, tokens, of_before @ self.up[place])
            if of_biases:
                of_biases[0][place] = of_before.sum(0)
                of_biases[1][place] = of_rows.sum(0)  # already times their weights
        return of_x, of_weights, of_up, of_down, *of_biases

    @property
    def biases(self) -> tuple[Tensor, ...]:
        pair = self.up_bias, self.down_bias
        return tuple(bias for bias in pair if bias is not None)

    def before(self, place: int, rows: Tensor) -> Tensor:
        """The first product of an expert's rows."""
        product = rows @ self.up[place].T
        return product if self.up_bias is None else product.add_(self.up_bias[place])

    def routed(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """List the shard's chosen experts: place, tokens, choices (places in `ids`)."""
        check_ids(self.ids, self.size, "expert")
        experts = self.up.shape[0]
        places, inside = local_places(self.ids.reshape(-1), self.starts, self.lengths)
        places.masked_fill_(inside.logical_not(), experts)
        counts = torch.bincount(places, minlength=experts + 1)[:experts].tolist()
        order = torch.sort(places, stable=True)[1][: sum(counts)]
        for place, choices in enumerate(torch.split(order, counts)):
            if choices.numel():
                yield place, choices.div(self.ids.shape[1], rounding_mode="floor"), choices

    def inner(self, before: Tensor) -> Tensor:
        """The activation of the first product."""
        act = activation(self.activation)
        if not self.has_gate:
            return act(before)
        gate, other = before.chunk(2, -1)
        return act(gate).mul_(other)

    def first_products(self, place: int, rows: Tensor, kept: Tensor) -> Tensor:
        """The first products of an expert's rows, as kept, or again where they are missing.

        A row that begins with 0 may be missing: a plan may have moved what is kept. Computing one
        again that is not gives the same.
        """
        missing = (kept[:, 0] == 0).nonzero().squeeze(1) if kept.numel() else kept.new_empty(0)
        if missing.numel():
            kept[missing] = self.before(place, rows[missing])
        return kept

    def inner_gradient(self, grad: Tensor, before: Tensor) -> Tensor:
        """The gradient of the first product from that of the activation."""
        act = activation(self.activation)
        if not self.has_gate:
            return with_gradient(act, before, grad)[1]
        gate, other = before.chunk(2, -1)
        acted, of_gate = with_gradient(act, gate, grad * other)
        return torch.cat([of_gate, grad * acted], -1)


def _split(call: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Operands of a call, and its settings."""
    count = sum(isinstance(one, Tensor) for one in call)
    return call[:count], call[count:]


def _empty_results(*call: Any) -> tuple[Tensor, Tensor]:
    layer = _Layer.of(*_split(call))
    columns = layer.up.shape[1] if layer.keep else 0
    sizes = layer.x.shape[0], layer.down.shape[1]
    out = layer.x.new_empty(sizes, dtype=layer.result_type)
    return out, layer.x.new_empty((*layer.ids.shape, columns))


def _empty_gradients(_grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    (x, _, *others, _), _ = _split(call)
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, *others))


def _experts(*call: Any) -> tuple[Tensor, Tensor]:
    """((tokens, channels), first products of each choice: without columns unless they are kept)."""
    kept = _empty_results(*call)[1].zero_()
    return _Layer.of(*_split(call)).results(kept), kept


def _experts_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    (*operands, kept), settings = _split(call)
    return _Layer.of(operands, settings).gradients(grad, kept)


# Tokens that are sent to their experts -----------------------------------------------------------

_SENT = (
    ", int[] ranks, int member, int[] owners, int[] token_starts, int[] token_lengths, "
    "int all_tokens"
)


@dataclass(frozen=True)
class _Group:
    """The ranks among which tokens are sent, and where the tokens of this one lie."""

    ranks: Sequence[int]  #: The group.
    member: int  #: The place of this rank in it.
    owners: Sequence[int]  #: By expert, the place of the rank that has it; -1 if none has.
    #: Pieces of this rank's tokens, among those of all ranks of the group.
    starts: Sequence[int]
    lengths: Sequence[int]

    def others(self, of_ranks: Sequence[Any]) -> list[Any]:
        return [one for rank, one in enumerate(of_ranks) if rank != self.member]

    def passed(
        self, flat: Tensor, width: int, arriving: Sequence[int], leaving: Sequence[int]
    ) -> Generator[Call, Any, Tensor]:
        """The bytes that other ranks have for this one, of so many rows: own ones stay here."""
        awaited, going = (
            [0 if rank == self.member else count * width for rank, count in enumerate(counts)]
            for counts in (arriving, leaving)
        )
        got: Tensor = yield from all_to_all(flat, awaited, going, group_name(self.ranks))
        return got

    def sent(
        self, layer: _Layer, grads: Sequence[Tensor]
    ) -> Generator[Call, Any, tuple[_Layer, list[Tensor], list[Tensor], list[int]]]:
        """Send tokens, and gradients of their results, to the ranks that have their experts.

        Returns the layer on the tokens that this rank gets, its own first, their gradients, this
        rank's tokens that went to each, and how many came from each.
        """
        check_ids(layer.ids, layer.size, "expert")
        device, count = layer.x.device, len(self.ranks)
        pieces = zip(self.starts, self.lengths, strict=True)
        places = torch.cat([torch.arange(at, at + size, device=device) for at, size in pieces])
        places = places.to(torch.int32).unsqueeze(1)
        narrow = [layer.weights, layer.ids.to(torch.int32), places]
        bytes_of = [part.contiguous().view(torch.uint8) for part in narrow]
        columns = [layer.x.contiguous(), *(g.contiguous() for g in grads), torch.cat(bytes_of, 1)]
        owners = torch.tensor(self.owners, device=device)[layer.ids]
        leaving = [(owners == rank).any(1).nonzero().squeeze(1) for rank in range(count)]
        numbers = torch.tensor([len(tokens) for tokens in leaving], device=device)
        counts = yield from all_to_all(numbers, [1] * count, [1] * count, group_name(self.ranks))
        arriving = counts.tolist()
        like = [(column.dtype, column.shape[1]) for column in columns]
        flat = packed(columns, self.others(leaving))
        width = sum(dtype.itemsize * n for dtype, n in like)
        flat = yield from self.passed(flat, width, arriving, list(map(len, leaving)))
        own = [column.index_select(0, leaving[self.member]) for column in columns]
        got = [own, *unpacked(flat, self.others(arriving), like)]
        x, *of_results, rest = (torch.cat(parts) for parts in zip(*got, strict=True))
        split = torch.split(rest, [part.shape[1] for part in bytes_of], 1)
        weights, ids, at = (
            part.clone(memory_format=torch.contiguous_format).view(one.dtype)
            for part, one in zip(split, narrow, strict=True)
        )
        here = replace(layer, x=x, weights=weights, ids=ids.long(), places=at[:, 0].long())
        return here, of_results, leaving, arriving

    def returned(
        self,
        results: Sequence[Tensor],
        leaving: Sequence[Tensor],
        arriving: Sequence[int],
        tokens: int,
    ) -> Generator[Call, Any, list[Tensor]]:
        """The sums, for this rank's tokens, of what all ranks have computed for them."""
        own = arriving[self.member]
        came = [part[own:] for part in results]
        if len(came) == 1:
            flat = came[0].reshape(-1).view(torch.uint8)
        else:
            numbers = torch.arange(len(came[0]), device=came[0].device)
            flat = packed(came, torch.split(numbers, self.others(arriving)))
        like = [(part.dtype, part.shape[1]) for part in results]
        width = sum(dtype.itemsize * columns for dtype, columns in like)
        counts = list(map(len, leaving))
        flat = yield from self.passed(flat, width, counts, arriving)
        sums = [part.new_zeros((tokens, part.shape[1])) for part in results]
        for total, part in zip(sums, results, strict=True):
            total.index_add_(0, leaving[self.member], part[:own])
        got = unpacked(flat, self.others(counts), like)
        for parts, tokens_there in zip(got, self.others(leaving), strict=True):
            for total, addend in zip(sums, parts, strict=True):
                total.index_add_(0, tokens_there, addend)
        return sums


def _empty_sent(*call: Any) -> tuple[Tensor, ...]:
    layer, rows = _Layer.of(*_split(call)), call[-1]
    columns = layer.up.shape[1] if layer.keep else 0
    out = torch.empty_like(layer.x, dtype=layer.result_type)
    return out, layer.x.new_empty((rows, layer.ids.shape[1], columns))


def _experts_sent(*call: Any) -> Steps:
    """`experts` of this rank's tokens; the first products are those of its experts."""
    layer, group = _Layer.of(*_split(call)), _Group(*call[-6:-1])
    kept = _empty_sent(*call)[1].zero_()
    here, _, leaving, arriving = yield from group.sent(layer, [])
    (out,) = yield from group.returned([here.results(kept)], leaving, arriving, layer.x.shape[0])
    return out, kept


def _experts_backward_sent(grad: Tensor, *call: Any) -> Steps:
    """`experts_backward` of this rank's tokens, and of its experts for the tokens of all ranks."""
    (*operands, kept), settings = _split(call)
    layer, group = _Layer.of(operands, settings), _Group(*call[-6:-1])
    here, (of_results,), leaving, arriving = yield from group.sent(layer, [grad])
    of_x, of_weights, *others = here.gradients(of_results, kept)
    of_x, of_weights = yield from group.returned(
        [of_x, of_weights], leaving, arriving, layer.x.shape[0]
    )
    return of_x, of_weights, *others


# Both forms of each -------------------------------------------------------------------------------


def _gradient(name: str, ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.settings[2]:
        raise RuntimeError("a layer of experts that keeps nothing has no gradients")
    backward = getattr(torch.ops.partitioner, f"{name}_backward")
    of_x, *others = backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (of_x, None, *others, *(None,) * len(ctx.settings))


def _register(name: str, *, biased: bool) -> None:
    operands = _OPERANDS + (_BIASES if biased else "")
    gradients = ", ".join(["Tensor"] * (6 if biased else 4))
    results, forward = "Tensor, Tensor", f"{operands}, {_SETTINGS}"
    backward = f"Tensor grad, {operands}, Tensor kept, {_SETTINGS}"
    forms: tuple[tuple[str, str, str, Any, Any], ...] = (
        ("", forward, results, _empty_results, _experts),
        ("_backward", backward, gradients, _empty_gradients, _experts_backward),
        ("_sent", forward + _SENT, results, _empty_sent, _experts_sent),
        ("_backward_sent", backward + _SENT, gradients, _empty_gradients, _experts_backward_sent),
    )
    for form, arguments, returned, empty, kernel in forms:
        schema = f"{name}{form}({arguments}) -> ({returned})"
        register: Any = sending if form.endswith("_sent") else operator
        register(empty, schema)(kernel)
    save = saving(7 if biased else 5, results=(1,), constants=(1,))
    gradient(name, save)(partial(_gradient, name))


_register("experts", biased=False)
_register("experts_biased", biased=True)
