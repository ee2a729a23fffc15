"""Gradients of a convolution, one operator each: each is sharded in its own way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

_SETTINGS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups"
)


def _fake(grad_out: Tensor, _: Tensor, size: Sequence[int], *_settings: object) -> Tensor:
    return grad_out.new_empty(list(size))


@operator(
    f"convolution_grad_input(Tensor grad_out, Tensor weight, SymInt[] input_size, {_SETTINGS})"
    " -> Tensor",
    _fake,
)
def convolution_grad_input(
    grad_out: Tensor, weight: Tensor, input_size: Sequence[int], *settings: object
) -> Tensor:
    """Gradient of the data; the kernel reads only the data's shape, so no data is passed."""
    data = grad_out.new_empty(list(input_size))
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_out, data, weight, None, *settings, [True, False, False]
    )[0]
    return gradient


@operator(
    f"convolution_grad_weight(Tensor grad_out, Tensor data, SymInt[] weight_size, {_SETTINGS})"
    " -> Tensor",
    _fake,
)
def convolution_grad_weight(
    grad_out: Tensor, data: Tensor, weight_size: Sequence[int], *settings: object
) -> Tensor:
    """Gradient of the weight; the kernel reads only the weight's shape."""
    weight = grad_out.new_empty(list(weight_size))
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_out, data, weight, None, *settings, [False, True, False]
    )[1]
    return gradient
