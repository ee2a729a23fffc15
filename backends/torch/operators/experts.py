"""A layer of experts on a shard of them: tokens are sorted by expert, and each expert runs once.

``out[t] = sum over k of weights[t, k] * down[e] @ act(up[e] @ x[t])`` with ``e = ids[t, k]``. Tokens
are (tokens, channels), ids and weights (tokens, chosen), `up` (experts, width or twice the width,
channels), `down` (experts, channels, width). A gated layer has the gate's rows before the others:
``act(gate) * other``. No token is dropped, whatever the number of tokens that an expert gets.

A device's shard consists of pieces of experts, each of a start and a length among all of them;
tokens of other experts add nothing, so that the sum over the devices is the whole result.
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
_SETTINGS = "str activation, bool gated, int size, int[] starts, int[] lengths"

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
        for place, choices in enumerate(order.split(counts)):
            if choices.numel():
                yield place, choices.div(self.ids.shape[1], rounding_mode="floor"), choices

    def inner(self, before: Tensor) -> Tensor:
        """The activation of the first product."""
        act = ACTIVATIONS[self.activation][0]
        if not self.gated:
            return act(before)
        gate, other = before.chunk(2, -1)
        return act(gate).mul_(other)

    def inner_gradient(self, grad: Tensor, before: Tensor) -> Tensor:
        """The gradient of the first product from that of the activation."""
        act, slope = ACTIVATIONS[self.activation]
        if not self.gated:
            return slope(grad, before)
        gate, other = before.chunk(2, -1)
        return torch.cat([slope(grad * other, gate), grad * act(gate)], -1)


@operator(
    f"experts({_OPERANDS}, {_SETTINGS}) -> Tensor",
    lambda x, _ids, _weights, _up, down, *_: x.new_empty((x.shape[0], down.shape[1])),
)
def experts(*call: Any) -> Tensor:
    """(tokens, channels)."""
    layer = _Layer(*call)
    out = layer.x.new_zeros((layer.x.shape[0], layer.down.shape[1]))
    weights = layer.weights.reshape(-1)
    for place, tokens, choices in layer.routed():
        before = layer.x.index_select(0, tokens) @ layer.up[place].T
        result = layer.inner(before) @ layer.down[place].T
        out.index_add_(0, tokens, result.mul_(weights[choices].unsqueeze(-1)))
    return out


def _empty_gradients(_grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    x, _, *others = call[:5]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, *others))


@operator(
    f"experts_backward(Tensor grad, {_OPERANDS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_gradients,
)
def experts_backward(grad: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """Gradients of tokens, weights, `up` and `down`; the first product is computed again."""
    layer = _Layer(*call)
    results = tuple(
        tensor.new_zeros(tensor.shape)
        for tensor in (layer.x, layer.weights, layer.up, layer.down)
    )
    of_x, of_weights, of_up, of_down = results
    weights = layer.weights.reshape(-1)
    for place, tokens, choices in layer.routed():
        rows, of_rows = layer.x.index_select(0, tokens), grad.index_select(0, tokens)
        before = rows @ layer.up[place].T
        inner = layer.inner(before)
        of_inner = of_rows @ layer.down[place]
        of_weights.view(-1)[choices] = (of_inner * inner).sum(-1)
        factors = weights[choices].unsqueeze(-1)
        torch.mm(of_rows.mul_(factors).T, inner, out=of_down[place])
        of_before = layer.inner_gradient(of_inner.mul_(factors), before)
        torch.mm(of_before.T, rows, out=of_up[place])
        of_x.index_add_(0, tokens, of_before @ layer.up[place])
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x, *others = torch.ops.partitioner.experts_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (of_x, None, *others, *(None,) * len(ctx.settings))


gradient("experts", _gradient, _save)
