"""A layer of experts on a shard of them: tokens are sorted by expert, and each expert runs once.

``out[t] = sum over k of weights[t, k] * down[e] @ act(up[e] @ x[t])`` with ``e = ids[t, k]``.
Tokens are (tokens, channels), ids and weights (tokens, chosen), `up` (experts, width or twice the
width, channels), `down` (experts, channels, width). A gated layer has the gate's rows before the
others: ``act(gate) * other``. No token is dropped, whatever the number that an expert gets.

A device's shard consists of pieces of experts, each of a start and a length among all of them;
tokens of other experts add nothing, so that the sum over the devices is the whole result.

The first products of all choices, (tokens, chosen, columns), are a second result for the gradients,
with zeros for experts elsewhere. Rows that are missing there are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import gradient, operator
from partitioner.backends.torch.operators.vocabulary import check_ids, local_places

_aten = torch.ops.aten

_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down"
_SETTINGS = "str activation, bool gated, bool keep, int size, int[] starts, int[] lengths"

#: The activation and its gradient (from the result's gradient and the operand) by name.
ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (_aten.gelu, _aten.gelu_backward),
    "gelu-tanh": (
        partial(_aten.gelu, approximate="tanh"),
        partial(_aten.gelu_backward, approximate="tanh"),
    ),
    "relu": (_aten.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "silu": (_aten.silu, _aten.silu_backward),
}


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

    def routed(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """By expert of the shard that any token chose: its place, its tokens, their choices.

        Choices are places among the elements of `ids`.
        """
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
        act = ACTIVATIONS[self.activation][0]
        if not self.gated:
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
            kept[missing] = rows[missing] @ self.up[place].T
        return kept

    def inner_gradient(self, grad: Tensor, before: Tensor) -> Tensor:
        """The gradient of the first product from that of the activation."""
        act, slope = ACTIVATIONS[self.activation]
        if not self.gated:
            return slope(grad, before)
        gate, other = before.chunk(2, -1)
        return torch.cat([slope(grad * other, gate), grad * act(gate)], -1)


def _empty_results(
    x: Tensor, ids: Tensor, _: Tensor, up: Tensor, down: Tensor, *settings: Any
) -> tuple[Tensor, Tensor]:
    columns = up.shape[1] if settings[2] else 0
    return x.new_empty((x.shape[0], down.shape[1])), x.new_empty((*ids.shape, columns))


@operator(f"experts({_OPERANDS}, {_SETTINGS}) -> (Tensor, Tensor)", _empty_results)
def experts(*call: Any) -> tuple[Tensor, Tensor]:
    """((tokens, channels), first products of each choice: without columns unless they are kept)."""
    layer = _Layer(*call)
    out, kept = (result.zero_() for result in _empty_results(*call))
    weights, rows = layer.weights.reshape(-1), kept.view(layer.ids.numel(), kept.shape[2])
    for place, tokens, choices in layer.routed():
        before = layer.x.index_select(0, tokens) @ layer.up[place].T
        if layer.keep:
            rows.index_copy_(0, choices, before)
        result = layer.inner(before) @ layer.down[place].T
        out.index_add_(0, tokens, result.mul_(weights[choices].unsqueeze(-1)))
    return out, kept


def _empty_gradients(_grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    x, _, *others = call[:5]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, *others))


@operator(
    f"experts_backward(Tensor grad, {_OPERANDS}, Tensor kept, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_gradients,
)
def experts_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Gradients of tokens, weights, `up` and `down`."""
    *operands, kept = call[:6]
    layer = _Layer(*operands, *call[6:])
    results = tuple(tensor.zero_() for tensor in _empty_gradients(grad, *operands))
    of_x, of_weights, of_up, of_down = results
    weights, products = layer.weights.reshape(-1), kept.reshape(layer.ids.numel(), kept.shape[2])
    for place, tokens, choices in layer.routed():
        rows, of_rows = layer.x.index_select(0, tokens), grad.index_select(0, tokens)
        before = layer.first_products(place, rows, products.index_select(0, choices))
        inner = layer.inner(before)
        of_inner = of_rows @ layer.down[place]
        of_weights.view(-1)[choices] = (of_inner * inner).sum(-1)
        factors = weights[choices].unsqueeze(-1)
        torch.mm(of_rows.mul_(factors).T, inner, out=of_down[place])
        of_before = layer.inner_gradient(of_inner.mul_(factors), before)
        torch.mm(of_before.T, rows, out=of_up[place])
        of_x.index_add_(0, tokens, of_before @ layer.up[place])
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = inputs[5:]
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.settings[2]:
        raise RuntimeError("a layer of experts that keeps nothing has no gradients")
    of_x, *others = torch.ops.partitioner.experts_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (of_x, None, *others, *(None,) * len(ctx.settings))


gradient("experts", _gradient, _save)
