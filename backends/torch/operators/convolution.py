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
_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]  # missing in PyTorch's stubs
#: PyTorch's numbers for kernels of oneDNN: that of transposed ones, behind, has no name in Python.
_OF_ONEDNN = range(_BACKENDS.Mkldnn.value, _BACKENDS.MkldnnEmpty.value)


def _fake(grad_out: Tensor, _: Tensor, size: Sequence[int], *_settings: object) -> Tensor:
    return grad_out.new_empty(list(size))


@operator(
    f"convolution_grad_input(Tensor grad_out, Tensor weight, SymInt[] input_size, {_SETTINGS})"
    " -> Tensor",
    _fake,
)
def convolution_grad_input(
    grad_out: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Gradient of the data.

    It is the transposed convolution (of a transposed one a convolution). Where oneDNN has it, that
    is what is called: PyTorch's gradient wants memory of the data's size, to read nothing of it.
    """
    space = len(input_size) - 2  # a setting of one number is that of all dims
    stride, padding, dilation = (
        numbers if len(numbers) == space else list(numbers) * space
        for numbers in (stride, padding, dilation)
    )
    windows = stride, padding, dilation
    swept, places = (grad_out.shape, input_size) if transposed else (input_size, grad_out.shape)
    rest = _rest(swept[2:], places[2:], weight.shape[2:], *windows)
    if all(0 <= more < step for more, step in zip(rest, stride, strict=True)):
        settings = *windows, not transposed, [0] * space if transposed else rest, groups
        backend = torch._C._select_conv_backend(grad_out, weight, None, *settings)
        if backend.value in _OF_ONEDNN:
            spread: Tensor = torch.ops.aten.convolution(grad_out, weight, None, *settings)
            return spread.contiguous()
    data = grad_out.new_empty(list(input_size))
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_out,
        data,
        weight,
        None,
        *windows,
        transposed,
        output_padding,
        groups,
        [True, False, False],
    )[0]
    return gradient


def _rest(
    sizes: Sequence[int],
    places: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Elements of each dim behind the last of so many places of a window."""
    dims = zip(sizes, places, kernel, stride, padding, dilation, strict=True)
    return [
        size + 2 * pad - (count - 1) * step - apart * (length - 1) - 1
        for size, count, length, step, pad, apart in dims
    ]


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
