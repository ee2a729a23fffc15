"""Decomposes PyTorch operators into parts that can be cut; captures take the table.

PyTorch computes some gradients together that are cut differently: of a convolution, the data's
gradient is summed over output channels and the weights' over the batch. Here operators of our own
(`partitioner.backends.torch.operators`) compute each alone. Batch norm in training becomes sums,
which are partial over a cut batch, and what is computed from them; group norm of images likewise.
Random operators become uniform numbers, which alone are drawn from the shared seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.strides import (
    as_strided,
    as_strided_scatter,
    memory_order,
)

aten = torch.ops.aten
own = torch.ops.partitioner

Mask = Sequence[bool]  #: Tells which gradients are wanted: of data, weight and bias.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def convolution_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *settings: Any,
) -> Gradients:
    """An operator for each of data, weight and bias."""
    del bias_sizes
    *shape, mask = settings
    all_but_channels = [0, *range(2, grad_out.dim())]
    return (
        own.convolution_grad_input(grad_out, weight, x.shape, *shape) if mask[0] else None,
        own.convolution_grad_weight(grad_out, x, weight.shape, *shape) if mask[1] else None,
        aten.sum.dim_IntList(grad_out, all_but_channels) if mask[2] else None,
    )


def native_layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Mask,
) -> Gradients:
    """An operator for data, and one for weight and bias."""
    shape, dtype = normalized_shape, _weight_dtype(x, weight, bias)
    data = own.layer_norm_grad_input(grad_out, x, shape, mean, rstd, weight) if mask[0] else None
    if not (mask[1] or mask[2]):
        return data, None, None
    pair = own.layer_norm_grad_weight(grad_out, x, shape, mean, rstd, dtype)
    return data, *_masked(pair, mask)


def _is_image(x: Tensor, weight: Tensor | None) -> bool:
    """Test whether groups have space to cut, in types in which PyTorch keeps their statistics."""
    wide = x.dtype in (torch.float32, torch.float64)
    alike = weight is None or weight.dtype is x.dtype
    return wide and alike and x.dim() > 2 and math.prod(x.shape[2:]) > 1 and x.numel() > 0


def native_group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any) -> Any:
    """Sums, which are partial over cut space, statistics, and what is computed from them."""
    _, _, _, groups, eps = settings
    if not _is_image(x, weight):
        return NotImplemented
    sums = own.group_norm_sums(x, groups)
    mean, rstd = own.group_norm_statistics(sums, math.prod(x.shape[1:]) // groups, eps, x.dtype)
    return own.group_norm_apply(x, mean, rstd, weight, bias), mean, rstd


def native_group_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *settings: Any,
) -> Gradients:
    """An operator for data, and one for weight and bias; of images, sums are apart."""
    _, _, _, groups, mask = settings
    if _is_image(x, weight):
        sums = own.group_norm_grad_sums(grad_out, x, mean, rstd)
        count = math.prod(x.shape[1:]) // groups
        data = own.group_norm_grad_planes(grad_out, x, mean, rstd, weight, sums, count)
        # an image's row each: first of the result's products, then of the gradient
        rows = [aten.sum.dim_IntList(aten.select.int(sums, 0, row), [0]) for row in (1, 0)]
        return (data if mask[0] else None), *_masked(rows, mask)
    data = own.group_norm_grad_input(grad_out, x, mean, rstd, weight, groups) if mask[0] else None
    if not (mask[1] or mask[2]):
        return data, None, None
    dtype = _weight_dtype(x, weight)
    pair = own.group_norm_grad_weight(grad_out, x, mean, rstd, groups, dtype)
    return data, *_masked(pair, mask)


def _weight_dtype(x: Tensor, *weights: Tensor | None) -> torch.dtype:
    return next((weight.dtype for weight in weights if weight is not None), x.dtype)


def _masked(pair: Sequence[Tensor], mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = pair
    return weight if mask[1] else None, bias if mask[2] else None


def native_batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm whose next running statistics are results."""
    if not training:
        empty = x.new_empty(0)
        out = own.batch_norm_apply(x, running_mean, running_var, weight, bias, eps)
        return out, empty, empty, running_mean, running_var
    var, results = _batch_norm(x, weight, bias, eps)
    _, mean, _ = results
    running = own.batch_norm_running(mean, var, running_mean, running_var, _count(x), momentum)
    return *results, *running


def native_batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm without running statistics: it always takes the batch's."""
    del training, momentum
    return _batch_norm(x, weight, bias, eps)[1]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The variance of the batch, and (output, mean, inverse standard deviation)."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    sums = own.batch_norm_sums(x)
    mean, var, invstd = own.batch_norm_statistics(sums, _count(x), eps, dtype)
    out = own.batch_norm_apply(x, mean, var, weight, bias, eps)
    return var, (out, mean, invstd)


def _count(x: Tensor) -> int:
    return math.prod(x.shape) // x.shape[1]


def native_batch_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Mask,
) -> Gradients:
    """Sums, which are the gradients of bias and weight, and the data's gradient."""
    if train:
        sums = own.batch_norm_grad_sums(grad_out, x, save_mean, save_invstd)
        data = own.batch_norm_grad_input(
            grad_out, x, save_mean, save_invstd, weight, sums, _count(x)
        )
    else:
        data = own.batch_norm_apply(grad_out, None, running_var, weight, None, eps)
        if not (mask[1] or mask[2]):
            return data, None, None
        assert running_var is not None
        invstd = aten.rsqrt(aten.add.Tensor(running_var, eps))
        sums = own.batch_norm_grad_sums(grad_out, x, running_mean, invstd)
    dtype = _weight_dtype(x, weight)
    pair = [aten.select.int(sums, 0, row) for row in (1, 0)]
    if dtype is not sums.dtype:
        pair = [aten._to_copy(row, dtype=dtype) for row in pair]
    return (data if mask[0] else None), *_masked(pair, mask)


def copied(old: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The source in the type, shape and memory order of what it is copied over."""
    del non_blocking
    same = source.dtype == old.dtype
    new: Tensor = aten.alias(source) if same else aten._to_copy(source, dtype=old.dtype)
    if new.shape != old.shape:
        new = aten.expand(new, old.shape)
    order = memory_order(old)
    if order == memory_order(new) and new.shape == source.shape:
        return new
    turned = aten.clone(aten.permute(new, order), memory_format=torch.contiguous_format)
    back: Tensor = aten.permute(turned, sorted(range(len(order)), key=order.__getitem__))
    return back


Draw = Callable[..., Tensor]


def _rand(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    uniform: Tensor = aten.rand.default(list(size), dtype=dtype, device=device, pin_memory=False)
    return uniform


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Box-Muller transform; the logarithm is never of 0."""
    wide = _wide(dtype)
    radius, angle = (_rand(size, wide, device) for _ in range(2))
    length = torch.sqrt(-2.0 * torch.log(1.0 - radius))
    return (length * torch.cos(2.0 * math.pi * angle)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to draw in: numbers of half precision are too coarse to compare."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rand_of(x: Tensor) -> Tensor:
    return _rand(x.shape, _wide(x.dtype), x.device)


def _like(draw: Draw) -> Draw:
    """Draw as many numbers as an operand has elements."""
    return lambda x, **options: draw(
        x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device
    )


def _randn(size: Sequence[int], **options: Any) -> Tensor:
    return _normal(size, options.get("dtype") or torch.get_default_dtype(), options.get("device"))


def _bernoulli(x: Tensor, p: Tensor | float = 0.5) -> Tensor:
    return (_rand_of(x) < p).to(x.dtype)


def _exponential(x: Tensor, rate: float = 1.0) -> Tensor:
    """Invert the distribution; no number is 0, as users divide by them and take logarithms."""
    drawn = -torch.log1p(-_rand_of(x))
    return (drawn.clamp(min=torch.finfo(drawn.dtype).eps / 2) / rate).to(x.dtype)


def _normal_around(mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    """Draw a number for each pair of elements; one of the operands is a tensor."""
    tensors = [one for one in (mean, std) if isinstance(one, Tensor)]
    shapes = (one.shape for one in tensors)
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return _normal(shape, tensors[0].dtype, tensors[0].device) * std + mean


def _integers(low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    """Draw whole numbers below `high`, as doubles, which tell 2^53 numbers apart."""
    drawn = _rand(size, torch.float64, options.get("device")) * (high - low)
    return (drawn.floor() + low).to(options.get("dtype") or torch.int64)


def _integers_like(x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    return _like(lambda *of: _integers(low, high, of[0], dtype=of[1], device=of[2]))(x, **options)


def _multinomial(x: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Let the weights race: the first by exponential times is drawn first."""
    if replacement and count > 1:
        return NotImplemented  # type: ignore[no-any-return]
    raced = x / _exponential(x)
    return raced.argmax(-1, keepdim=True) if count == 1 else raced.topk(count, -1).indices


def _without_generator(draw: Draw) -> Draw:
    """Leave calls with a generator of their own as they are."""

    def drawn(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        return draw(*args, **options) if generator is None else NotImplemented

    return drawn


#: Draws of random operators from uniform numbers.
DRAWS: Mapping[torch._ops.OpOverload, Draw] = {
    aten.bernoulli.default: lambda x: _bernoulli(x, x),
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.exponential.default: _exponential,
    aten.multinomial.default: _multinomial,
    aten.normal.float_float: lambda mean, std, size, **options: (
        _randn(size, **options) * std + mean
    ),
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.normal_functional.default: lambda x, mean=0.0, std=1.0: (
        _normal(x.shape, x.dtype, x.device) * std + mean
    ),
    aten.rand_like.default: _like(_rand),
    aten.randint.default: lambda high, size, **options: _integers(0, high, size, **options),
    aten.randint.low: _integers,
    aten.randint_like.default: lambda x, high, **options: _integers_like(x, 0, high, **options),
    aten.randint_like.low_dtype: _integers_like,
    aten.randn.default: _randn,
    aten.randn_like.default: _like(_normal),
    aten.uniform.default: lambda x, low=0.0, high=1.0: (low + (high - low) * _rand_of(x)).to(
        x.dtype
    ),
}

#: Functions that compute operators from others, by overload.
DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.convolution_backward.default: convolution_backward,
    aten.copy.default: copied,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten._native_batch_norm_legit_functional.default: native_batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: native_batch_norm_no_stats,
    aten.native_group_norm.default: native_group_norm,
    aten.native_group_norm_backward.default: native_group_norm_backward,
    aten.native_layer_norm_backward.default: native_layer_norm_backward,
    # these two only mark their operand, which is lost where its memory is sent
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    **{operator: _without_generator(draw) for operator, draw in DRAWS.items()},
}
