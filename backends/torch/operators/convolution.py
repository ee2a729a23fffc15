"""Gradients of a convolution, one operator each: each is cut in its own way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

_SETTINGS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups"
)


def _empty_input(
    grad_out: Tensor, _weight: Tensor, input_size: Sequence[int], *_: object
) -> Tensor:
    return grad_out.new_empty(list(input_size))


@operator(
    f"convolution_grad_input(Tensor grad_out, Tensor weight, SymInt[] input_size, {_SETTINGS})"
    " -> Tensor",
    _empty_input,
)
def convolution_grad_input(
    grad_out: Tensor, weight: Tensor, input_size: Sequence[int], *settings: object
) -> Tensor:
    """Gradient of the data. Of the data itself only the shape is asked, so none is passed."""
    shape = grad_out.new_empty(list(input_size))
    mask = [True, False, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        grad_out, shape, weight, None, *settings, mask
    )[0]
    return found


def _empty_weight(
    grad_out: Tensor, _data: Tensor, weight_size: Sequence[int], *_: object
) -> Tensor:
    return grad_out.new_empty(list(weight_size))


@operator(
    f"convolution_grad_weight(Tensor grad_out, Tensor data, SymInt[] weight_size, {_SETTINGS})"
    " -> Tensor",
    _empty_weight,
)
def convolution_grad_weight(
    grad_out: Tensor, data: Tensor, weight_size: Sequence[int], *settings: object
) -> Tensor:
    """Gradient of the weights, likewise without them."""
    shape = grad_out.new_empty(list(weight_size))
    mask = [False, True, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        grad_out, data, shape, None, *settings, mask
    )[1]
    return found
