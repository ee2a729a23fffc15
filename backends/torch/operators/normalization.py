"""Normalizations in parts that are sharded differently: statistics, results, gradients.

Batch norm in training is three operators, so that a sharded batch has the statistics of the whole
one: sums (one all-reduce of two numbers a channel where the batch is sharded), statistics, and the
normalization itself. Its gradient is two: sums, and the gradient of the data. Forward sums are in
float64: a variance is the small difference of two large ones. They are derived from means and
variances of PyTorch's own kernels, so nothing is lost before.

PyTorch's kernels for gradients read statistics as if they were contiguous, and those of group norm
every operand, which a shard of them need not be. PyTorch decomposes `rms_norm` when a step is
traced on a CPU, and its fused gradient exists on accelerators only: here it is plain tensor
operations, the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import gradient, operator

aten = torch.ops.aten
#: Elements, of a tensor and of the whole batch, that CUDA's kernel of the gradient counts in 32
#: bits.
_MOST_COUNTED = 2**31
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


# Batch norm --------------------------------------------------------------------------------------


@operator(lambda x: x.new_empty(2, x.shape[1], dtype=torch.float64))
def batch_norm_sums(x: Tensor) -> Tensor:
    """Sum and sum of squares a channel, [2, C] in float64."""
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[1], dtype=torch.float64)
    # Running statistics of the wanted type make the kernel answer in that type.
    scratch = [x.new_empty(x.shape[1], dtype=_statistics_dtype(x)) for _ in range(2)]
    sums = torch.stack(aten.batch_norm_update_stats(x, *scratch, 0.0)).double()
    sums[1].addcmul_(sums[0], sums[0])
    return sums.mul_(x.numel() // x.shape[1])


def _moments(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance in float64."""
    mean, squares = sums / count
    return mean, torch.addcmul(squares, mean, mean, value=-1).clamp_min_(0)


def _deviation(var: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.rsqrt(var + eps, out=var.new_empty(var.shape, dtype=dtype))


@operator(
    lambda sums, _count, _eps, dtype: tuple(
        sums.new_empty(sums.shape[1], dtype=dtype) for _ in range(3)
    )
)
def batch_norm_statistics(
    sums: Tensor, count: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and inverse deviation; `count` is the whole batch's elements a channel."""
    mean, var = _moments(sums, count)
    return mean.to(dtype), var.to(dtype), _deviation(var, eps, dtype)


@operator(
    lambda _mean, _var, mean, var, *_settings: (torch.empty_like(mean), torch.empty_like(var))
)
def batch_norm_running(
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: int,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """Next running mean and variance; the variance is unbiased, as PyTorch's is."""
    share = momentum * (count / (count - 1) if count > 1 else math.nan)
    next_mean = torch.lerp(running_mean.to(mean.dtype), mean, momentum)
    next_var = torch.add(running_var.to(var.dtype) * (1 - momentum), var, alpha=share)
    return next_mean.to(running_mean.dtype), next_var.to(running_var.dtype)


@operator()
def batch_norm_apply(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """The data normalized with these statistics; no mean is a mean of 0."""
    dtype = _statistics_dtype(x)
    # Half precision with float32 settings is what every device's kernel takes.
    spread = var.to(dtype)
    scale, shift = (None if value is None else value.to(dtype) for value in (weight, bias))
    centre = torch.zeros_like(var, dtype=dtype) if mean is None else mean.to(dtype)
    normalized: Tensor = aten._native_batch_norm_legit_no_training(
        x, scale, shift, centre, spread, 0.0, eps
    )[0]
    return normalized


@operator(lambda _grad_out, _x, mean, _invstd: mean.new_empty(2, mean.shape[0]))
def batch_norm_grad_sums(grad_out: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Gradients of bias and weight, [2, C]: sums of the gradient, alone and times the result."""
    if x.numel() == 0:  # the kernel divides by the count
        return mean.new_zeros(2, mean.shape[0])
    # The kernel wants a weight, on which these two results do not depend.
    grad_out, x = _with_usual_strides(grad_out), _with_usual_strides(x)
    mean, invstd = mean.contiguous(), invstd.contiguous()
    _, scale, shift = aten.native_batch_norm_backward(
        grad_out, x, invstd, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack((shift, scale))


def _with_usual_strides(x: Tensor) -> Tensor:
    """The tensor, with the strides that its memory format gives to dims of one element.

    These may be any: a sample that was taken alone has others. PyTorch's kernel (2.13) of batch
    norm's gradient takes the order in memory of one operand from them, and reads the other wrong.
    """
    if 1 not in x.shape:
        return x
    for memory_format in (torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())):
        if x.is_contiguous(memory_format=memory_format):
            like = torch.empty(x.shape, device="meta").contiguous(memory_format=memory_format)
            return x.as_strided(x.shape, like.stride())
    return x.contiguous()


@operator()
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
    if x.is_cuda and x.numel() and max(x.numel(), count) < _MOST_COUNTED:
        scale = None if weight is None else weight.to(mean.dtype)
        counted = torch.full((1,), count, dtype=torch.int32, device=x.device)
        result: Tensor = aten.batch_norm_backward_elemt(
            grad_out, x, mean, invstd, scale, sums[0], sums[1] / invstd, counted
        )
        return result
    scale = invstd if weight is None else invstd * weight
    # (grad - shift - (x - mean) * invstd * slope) * scale: a normalization, by the one kernel that
    # reads and writes a tensor once, to which the gradient's share is added where it lies.
    shift, slope = sums * (scale / -count)
    dtype = mean.dtype
    total = _affine(x.to(dtype), mean, slope * invstd, shift)
    return _add_scaled(total, grad_out.to(dtype), scale).to(x.dtype)


def _add_scaled(total: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """``total + x * scale`` by channel, in the memory of `total`."""
    return total.addcmul_(x, scale.view(-1, *[1] * (x.dim() - 2)))


def _affine(x: Tensor, centre: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """``(x - centre) * scale + shift`` by channel."""
    result: Tensor = aten._native_batch_norm_legit_no_training(
        x, scale.to(x.dtype), shift, centre, torch.ones_like(centre), 0.0, 0.0
    )[0]
    return result


# Layer and group norm ----------------------------------------------------------------------------


def _empty_weights(
    grad_out: Tensor, size: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return grad_out.new_empty(list(size), dtype=dtype), grad_out.new_empty(list(size), dtype=dtype)


#: Operands of both gradients of a layer norm.
_LAYER = "Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd"


def layer_norm_backward(
    operands: Sequence[Any], weight: Tensor | None, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """PyTorch's gradients of data, weight and bias, as far as they are `wanted`."""
    grad_out, x, normalized_shape, mean, rstd = operands
    statistics = mean.contiguous(), rstd.contiguous()
    gradients: tuple[Tensor, ...] = aten.native_layer_norm_backward(
        grad_out, x, normalized_shape, *statistics, weight, bias, wanted
    )
    return gradients


@operator(
    lambda grad_out, _x, shape, _mean, _rstd, dtype: _empty_weights(grad_out, shape, dtype),
    f"layer_norm_grad_weight({_LAYER}, ScalarType dtype) -> (Tensor, Tensor)",
)
def layer_norm_grad_weight(*call: Any) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, whose element type is `dtype`."""
    *operands, dtype = call
    scale = operands[0].new_empty(list(operands[2]), dtype=dtype)  # only its type is read
    _, weight, bias = layer_norm_backward(operands, scale, scale, [False, True, True])
    return weight, bias


@operator(schema=f"layer_norm_grad_input({_LAYER}, Tensor? weight) -> Tensor")
def layer_norm_grad_input(*call: Any) -> Tensor:
    """Gradient of the data."""
    *operands, weight = call
    return layer_norm_backward(operands, weight, None, [True, False, False])[0]


def layer_norm_gradients(*call: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute what `layer_norm_grad_input` and `layer_norm_grad_weight` return, in one call."""
    *operands, weight = call
    data, of_weight, of_bias = layer_norm_backward(operands, weight, weight, [True, True, True])
    return data, (of_weight, of_bias)


def _group_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor | None,
    group: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    operands = (one.contiguous() for one in (grad_out, x, mean, rstd))
    images, channels, *plane = x.shape
    gradients: tuple[Tensor, ...] = aten.native_group_norm_backward(
        *operands, scale, images, channels, math.prod(plane), group, wanted
    )
    return gradients


@operator(
    lambda grad_out, x, _mean, _rstd, _group, dtype: _empty_weights(grad_out, [x.shape[1]], dtype)
)
def group_norm_grad_weight(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, whose element type is `dtype`."""
    scale = grad_out.new_empty(x.shape[1], dtype=dtype)  # only its type is read
    wanted = [False, True, True]
    _, weight, bias = _group_norm_backward(grad_out, x, mean, rstd, scale, group, wanted)
    return weight, bias


@operator()
def group_norm_grad_input(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, group: int
) -> Tensor:
    """Gradient of the data."""
    scale = None if weight is None else weight.contiguous()
    return _group_norm_backward(grad_out, x, mean, rstd, scale, group, [True, False, False])[0]


def _planes(x: Tensor, count: int) -> Tensor:
    """The data as one image of `count` channels: [1, count, elements]."""
    return x.reshape(1, count, -1)


def _each(statistics: Tensor, channels: int) -> Tensor:
    """Numbers of a group, [N, G], for each channel of each image: [N * C]."""
    return statistics.repeat_interleave(channels // statistics.shape[1], 1).flatten()


def _strided_as(x: Tensor, result: Tensor) -> Tensor:
    """The result with the sizes and strides of `torch.empty_like(x)`."""
    strides = torch.empty_like(x, device="meta").stride()  # no memory is taken for them
    whole = result.reshape(x.shape)
    return whole if strides == whole.stride() else torch.empty_like(x).copy_(whole)


@operator(lambda x, group: x.new_empty(2, x.shape[0], group, dtype=torch.float64))
def group_norm_sums(x: Tensor, group: int) -> Tensor:
    """Sum and sum of squares a group of each image, [2, N, G] in float64."""
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[0], group, dtype=torch.float64)
    sums: Tensor = batch_norm_sums(_planes(x, x.shape[0] * group))
    return sums.view(2, x.shape[0], group)


@operator(
    lambda sums, _count, _eps, dtype: tuple(
        sums.new_empty(sums.shape[1:], dtype=dtype) for _ in range(2)
    )
)
def group_norm_statistics(
    sums: Tensor, count: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation, [N, G]; `count` is the elements of a whole group of an image."""
    mean, var = _moments(sums, count)
    return mean.to(dtype), _deviation(var, eps, dtype)


@operator()
def group_norm_apply(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The data normalized with these statistics, [N, G]."""
    images, channels = x.shape[:2]
    scale = _each(rstd, channels)
    if weight is not None:
        scale = scale * weight.to(scale.dtype).repeat(images)
    shift = None if bias is None else bias.to(scale.dtype).repeat(images)
    planes = _planes(x, images * channels)
    return _strided_as(x, _affine(planes, _each(mean, channels), scale, shift))


@operator(lambda grad_out, _x, mean, _rstd: mean.new_empty(2, *grad_out.shape[:2]))
def group_norm_grad_sums(grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Sums of a channel of each image, [2, N, C]: of the gradient, alone and times the result."""
    images, channels = x.shape[:2]
    count = images * channels
    centre, spread = (_each(numbers, channels) for numbers in (mean, rstd))
    sums: Tensor = batch_norm_grad_sums(_planes(grad_out, count), _planes(x, count), centre, spread)
    return sums.view(2, images, channels)


@operator()
def group_norm_grad_planes(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: int,
) -> Tensor:
    """Gradient of the data from sums of whole planes; an image's group has `count` elements."""
    images, channels = x.shape[:2]
    groups = mean.shape[1]
    scaled = sums if weight is None else sums * weight.to(sums.dtype)
    shift, slope = scaled.view(2, images, groups, -1).sum(3) / count
    centre, spread = _each(mean, channels), _each(rstd, channels)
    own = spread if weight is None else spread * weight.to(spread.dtype).repeat(images)
    planes = images * channels
    tilt, height = _each(-slope * rstd * rstd, channels), _each(-shift * rstd, channels)
    total = _affine(_planes(x, planes), centre, tilt, height)
    return _strided_as(grad_out, _add_scaled(total, _planes(grad_out, planes), own))


# RMS norm ----------------------------------------------------------------------------------------


def _dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _fake_rms_norm(x: Tensor, normalized_shape: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    count = len(normalized_shape)
    kept = [*x.shape[: x.dim() - count], *[1] * count]
    return torch.empty_like(x), x.new_empty(kept, dtype=_statistics_dtype(x))


@operator(_fake_rms_norm)
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The data normalized, and the inverse root of the mean square."""
    wide = x.to(_statistics_dtype(x))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = wide.square().mean(_dims(normalized_shape), keepdim=True).add_(least).rsqrt_()
    unit = wide * rstd
    return (unit if weight is None else unit.mul_(weight)).to(x.dtype), rstd


@operator()
def rms_norm_grad_input(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """Gradient of the data."""
    scaled = grad_out.to(rstd.dtype)
    if weight is not None:
        scaled = scaled * weight
    unit = x * rstd
    shared = (scaled * unit).mean(_dims(normalized_shape), keepdim=True)
    return torch.addcmul(scaled, unit, shared, value=-1).mul_(rstd).to(x.dtype)


@operator(lambda grad_out, _x, shape, _rstd, dtype: grad_out.new_empty(list(shape), dtype=dtype))
def rms_norm_grad_weight(
    grad_out: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient of the weight, whose element type is `dtype`."""
    rows = (x * rstd).mul_(grad_out).reshape(-1, *normalized_shape)
    return rows.sum(0).to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.normalized_shape, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the second result


@gradient("rms_norm", _save)
def _gradient(ctx: Any, grad_out: Tensor, _: object) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    operators, shape = torch.ops.partitioner, ctx.normalized_shape
    data = scale = None
    if ctx.needs_input_grad[0]:
        data = operators.rms_norm_grad_input(grad_out, x, shape, rstd, weight)
    if ctx.needs_input_grad[2]:
        scale = operators.rms_norm_grad_weight(grad_out, x, shape, rstd, weight.dtype)
    return data, None, scale, None
