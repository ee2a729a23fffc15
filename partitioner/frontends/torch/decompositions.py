"""PyTorch operators in parts that can be cut: the table that captures of a model are given.

PyTorch computes some gradients together that are cut differently: of a convolution, the data's
gradient is summed over output channels and the weights' over the batch. Here each becomes an
operator of our own (`partitioner.backends.torch.operators`) that computes one. Batch norm in
training becomes sums, which a cut batch leaves pending, and what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch import random as torch_random

aten = torch.ops.aten
own = torch.ops.partitioner

Wanted = Sequence[bool]  #: Which results are asked for.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def convolution_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *settings: Any,
) -> Gradients:
    """Three operators: of data, of weights, of the bias."""
    del bias_sizes
    *shape, wanted = settings
    places = [0, *range(2, grad_out.dim())]
    return (
        own.convolution_grad_input(grad_out, weight, x.shape, *shape) if wanted[0] else None,
        own.convolution_grad_weight(grad_out, x, weight.shape, *shape) if wanted[1] else None,
        aten.sum.dim_IntList(grad_out, places) if wanted[2] else None,
    )


def native_layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Two operators: of data, and of weight and bias."""
    shape, kind = normalized_shape, _kind_of(x, weight, bias)
    data = own.layer_norm_grad_input(grad_out, x, shape, mean, rstd, weight) if wanted[0] else None
    if not (wanted[1] or wanted[2]):
        return data, None, None
    found = own.layer_norm_grad_weight(grad_out, x, shape, mean, rstd, kind)
    return data, *_asked(found, wanted[1:])


def native_group_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *settings: Any,
) -> Gradients:
    """Two operators: of data, and of weight and bias."""
    _, _, _, group, wanted = settings
    data = own.group_norm_grad_input(grad_out, x, mean, rstd, weight, group) if wanted[0] else None
    if not (wanted[1] or wanted[2]):
        return data, None, None
    found = own.group_norm_grad_weight(grad_out, x, mean, rstd, group, _kind_of(x, weight))
    return data, *_asked(found, wanted[1:])


def _kind_of(x: Tensor, *settings: Tensor | None) -> torch.dtype:
    """Element type of the settings' gradients."""
    return next((setting.dtype for setting in settings if setting is not None), x.dtype)


def _asked(found: Sequence[Tensor], wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
    first, second = (result if asked else None for result, asked in zip(found, wanted, strict=True))
    return first, second


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
    """Batch norm with running statistics, which are results here."""
    if not training:
        none = x.new_empty(0)
        out = own.batch_norm_apply(x, running_mean, running_var, weight, bias, eps)
        return out, none, none, running_mean, running_var
    sums, results = _batch_norm(x, weight, bias, eps)
    running = own.batch_norm_running(sums, running_mean, running_var, _count(x), momentum)
    return *results, *running


def native_batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm that keeps no running statistics: it always takes the batch's."""
    del training, momentum
    return _batch_norm(x, weight, bias, eps)[1]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    sums = own.batch_norm_sums(x)
    mean, var, invstd = own.batch_norm_statistics(sums, _count(x), eps, kind)
    out = own.batch_norm_apply(x, mean, var, weight, bias, eps)
    return sums, (out, mean, invstd)


def _count(x: Tensor) -> int:
    """Elements a channel."""
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
    wanted: Wanted,
) -> Gradients:
    """Sums, which are the gradients of bias and weight, and the data's gradient."""
    if train:
        sums = own.batch_norm_grad_sums(grad_out, x, save_mean, save_invstd)
        data = own.batch_norm_grad_input(
            grad_out, x, save_mean, save_invstd, weight, sums, _count(x)
        )
        return (data if wanted[0] else None), *_rows(sums, x, weight, wanted)
    data = own.batch_norm_apply(grad_out, None, running_var, weight, None, eps)
    if not (wanted[1] or wanted[2]):
        return data, None, None
    assert running_var is not None
    invstd = aten.rsqrt(aten.add.Tensor(running_var, eps))
    sums = own.batch_norm_grad_sums(grad_out, x, running_mean, invstd)
    return (data if wanted[0] else None), *_rows(sums, x, weight, wanted)


def _rows(
    sums: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias, of the weight's element type."""
    kind = _kind_of(x, weight)
    rows = [aten.select.int(sums, 0, row) for row in (1, 0)]
    if kind is not sums.dtype:
        rows = [aten._to_copy(row, dtype=kind) for row in rows]
    return _asked(rows, wanted[1:])


#: What to pass to a capture (and to join with other tables): overload -> what it is made of.
DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten._native_batch_norm_legit_functional.default: native_batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: native_batch_norm_no_stats,
    aten.native_group_norm_backward.default: native_group_norm_backward,
    aten.native_layer_norm_backward.default: native_layer_norm_backward,
    # these two only mark their operand: what sends its memory would not know of it
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    **torch_random.DECOMPOSITIONS,
}
