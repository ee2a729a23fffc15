"""Normalizations in parts that are cut differently: sums, what follows from them, gradients.

Batch norm in training is three operators, so that a cut batch has the whole batch's statistics:
sums (one all-reduce of two numbers a channel where the batch is cut), statistics, and the
normalization itself. Its gradient is two: sums, and the rest. Sums of the forward are in float64:
a variance is the small difference of two large ones. They are made of means and variances that
PyTorch's own kernels have computed, so nothing is lost before.

PyTorch's kernels for gradients of layer and group norm read statistics as if they were contiguous,
which a part of them need not be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

aten = torch.ops.aten


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which means and deviations of data of an element type are kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _as(dtype: torch.dtype, *values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.to(dtype) for value in values]


def _fake_sums(x: Tensor) -> Tensor:
    return x.new_empty(2, x.shape[1], dtype=torch.float64)


@operator("batch_norm_sums(Tensor x) -> Tensor", _fake_sums)
def batch_norm_sums(x: Tensor) -> Tensor:
    """Sum and sum of squares a channel, [2, C] in float64."""
    sums = x.new_zeros(2, x.shape[1], dtype=torch.float64)
    if x.numel() == 0:
        return sums
    kind = statistics_dtype(x.dtype)
    # Running statistics of the wanted type make the kernel answer in that type.
    scratch = [x.new_zeros(x.shape[1], dtype=kind) for _ in range(2)]
    mean, var = aten.batch_norm_update_stats(x, *scratch, 0.0)
    sums[0] = mean
    torch.addcmul(var.double(), sums[0], sums[0], out=sums[1])
    return sums.mul_(x.numel() // x.shape[1])


def _moments(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance in float64."""
    mean, squares = sums / count
    return mean, torch.addcmul(squares, mean, mean, value=-1).clamp_min_(0)


def _fake_statistics(
    sums: Tensor, _count: int, _eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var, invstd = (sums.new_empty(sums.shape[1], dtype=dtype) for _ in range(3))
    return mean, var, invstd


@operator(
    "batch_norm_statistics(Tensor sums, SymInt count, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_statistics,
)
def batch_norm_statistics(
    sums: Tensor, count: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and inverse deviation; `count` is the elements a channel of the whole."""
    mean, var = _moments(sums, count)
    return mean.to(dtype), var.to(dtype), torch.rsqrt(var + eps).to(dtype)


def _fake_running(
    _sums: Tensor, running_mean: Tensor, running_var: Tensor, _count: int, _momentum: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)


@operator(
    "batch_norm_running(Tensor sums, Tensor running_mean, Tensor running_var, SymInt count,"
    " float momentum) -> (Tensor, Tensor)",
    _fake_running,
)
def batch_norm_running(
    sums: Tensor, running_mean: Tensor, running_var: Tensor, count: int, momentum: float
) -> tuple[Tensor, Tensor]:
    """Next running mean and variance; the variance counts unbiased, as PyTorch's does."""
    mean, var = _moments(sums, count)
    unbiased = var * (count / (count - 1) if count > 1 else math.nan)
    return (
        torch.lerp(running_mean.double(), mean, momentum).to(running_mean.dtype),
        torch.lerp(running_var.double(), unbiased, momentum).to(running_var.dtype),
    )


def _fake_like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@operator(
    "batch_norm_apply(Tensor x, Tensor? mean, Tensor var, Tensor? weight, Tensor? bias, float eps)"
    " -> Tensor",
    _fake_like,
)
def batch_norm_apply(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalise with given statistics; no mean is a mean of 0."""
    kind = statistics_dtype(x.dtype)
    # Half precision with float32 settings is what every device's kernel takes.
    spread, scale, shift = _as(kind, var, weight, bias)
    centre = torch.zeros_like(var, dtype=kind) if mean is None else mean.to(kind)
    found: Tensor = aten._native_batch_norm_legit_no_training(
        x, scale, shift, centre, spread, 0.0, eps
    )[0]
    return found


def _fake_grad_sums(_grad_out: Tensor, _x: Tensor, mean: Tensor, _invstd: Tensor) -> Tensor:
    return mean.new_empty(2, mean.shape[0])


@operator(
    "batch_norm_grad_sums(Tensor grad_out, Tensor x, Tensor mean, Tensor invstd) -> Tensor",
    _fake_grad_sums,
)
def batch_norm_grad_sums(grad_out: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Gradients of bias and weight, [2, C]: sums of the gradient, alone and times the result."""
    if x.numel() == 0:  # the kernel divides by the count
        return mean.new_zeros(2, mean.shape[0])
    # The kernel wants to see a weight, of which these two results do not depend.
    _, scale, shift = aten.native_batch_norm_backward(
        grad_out, x, invstd, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack((shift, scale))


@operator(
    "batch_norm_grad_input(Tensor grad_out, Tensor x, Tensor mean, Tensor invstd, Tensor? weight,"
    " Tensor sums, SymInt count) -> Tensor",
    _fake_like,
)
def batch_norm_grad_input(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: int,
) -> Tensor:
    """Gradient of the data, from the whole batch's `sums` of `batch_norm_grad_sums`."""
    scale = invstd if weight is None else invstd * weight
    shift, slope = sums / count
    # (grad - shift - (x - mean) * invstd * slope) * scale: two normalizations, by the one kernel
    # that reads and writes a tensor once.
    kind = mean.dtype
    found = _affine(x.to(kind), mean, -slope * invstd * scale, -shift * scale)
    found += _affine(grad_out.to(kind), torch.zeros_like(mean), scale, None)
    return found.to(x.dtype)


def _affine(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """``(x - centre) * scale + shift`` by channel."""
    found: Tensor = aten._native_batch_norm_legit_no_training(
        x, scale.to(x.dtype), shift, centre, torch.ones_like(centre), 0.0, 0.0
    )[0]
    return found


def _fake_grad_weight(
    grad_out: Tensor,
    _x: Tensor,
    normalized_shape: Sequence[int],
    _mean: Tensor,
    _rstd: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    size = list(normalized_shape)
    return grad_out.new_empty(size, dtype=dtype), grad_out.new_empty(size, dtype=dtype)


@operator(
    "layer_norm_grad_weight(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean,"
    " Tensor rstd, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_grad_weight,
)
def layer_norm_grad_weight(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, whose element type is `dtype`."""
    scale = grad_out.new_empty(list(normalized_shape), dtype=dtype)  # only its type is asked
    _, first, second = aten.native_layer_norm_backward(
        grad_out,
        x,
        normalized_shape,
        mean.contiguous(),
        rstd.contiguous(),
        scale,
        scale,
        [False, True, True],
    )
    return first, second


@operator(
    "layer_norm_grad_input(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean,"
    " Tensor rstd, Tensor? weight) -> Tensor",
    _fake_like,
)
def layer_norm_grad_input(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """Gradient of the data."""
    found: Tensor = aten.native_layer_norm_backward(
        grad_out,
        x,
        normalized_shape,
        mean.contiguous(),
        rstd.contiguous(),
        weight,
        None,
        [True, False, False],
    )[0]
    return found


def _fake_group_grad_weight(
    grad_out: Tensor,
    x: Tensor,
    _mean: Tensor,
    _rstd: Tensor,
    _group: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    return grad_out.new_empty(channels, dtype=dtype), grad_out.new_empty(channels, dtype=dtype)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Images, channels, and elements a channel of an image."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


@operator(
    "group_norm_grad_weight(Tensor grad_out, Tensor x, Tensor mean, Tensor rstd, SymInt group,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    _fake_group_grad_weight,
)
def group_norm_grad_weight(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, whose element type is `dtype`."""
    scale = grad_out.new_empty(x.shape[1], dtype=dtype)  # only its type is asked
    _, first, second = aten.native_group_norm_backward(
        grad_out.contiguous(),
        x,
        mean.contiguous(),
        rstd.contiguous(),
        scale,
        *_sizes(x),
        group,
        [False, True, True],
    )
    return first, second


@operator(
    "group_norm_grad_input(Tensor grad_out, Tensor x, Tensor mean, Tensor rstd, Tensor? weight,"
    " SymInt group) -> Tensor",
    _fake_like,
)
def group_norm_grad_input(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    group: int,
) -> Tensor:
    """Gradient of the data."""
    found: Tensor = aten.native_group_norm_backward(
        grad_out.contiguous(),
        x,
        mean.contiguous(),
        rstd.contiguous(),
        weight,
        *_sizes(x),
        group,
        [True, False, False],
    )[0]
    return found
