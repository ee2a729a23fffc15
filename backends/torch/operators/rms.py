"""Root-mean-square norm as one operator, and its gradients.

PyTorch takes `rms_norm` apart when a step is traced on a CPU; its fused gradient exists on
accelerators only. These are plain tensor operations, the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.normalization import statistics_dtype
from partitioner.backends.torch.operators.registry import gradient, operator


def _dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _fake(x: Tensor, normalized_shape: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    count = len(normalized_shape)
    kept = [*x.shape[: x.dim() - count], *[1] * count]
    return torch.empty_like(x), x.new_empty(kept, dtype=statistics_dtype(x.dtype))


@operator(
    "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    _fake,
)
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Result, and the inverse root of the mean square."""
    wide = x.to(statistics_dtype(x.dtype))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = wide.square().mean(_dims(normalized_shape), keepdim=True).add_(least).rsqrt_()
    found = wide * rstd
    return (found if weight is None else found.mul_(weight)).to(x.dtype), rstd


def _fake_like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@operator(
    "rms_norm_grad_input(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd,"
    " Tensor? weight) -> Tensor",
    _fake_like,
)
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


def _fake_weight(
    grad_out: Tensor,
    _x: Tensor,
    normalized_shape: Sequence[int],
    _rstd: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return grad_out.new_empty(list(normalized_shape), dtype=dtype)


@operator(
    "rms_norm_grad_weight(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd,"
    " ScalarType dtype) -> Tensor",
    _fake_weight,
)
def rms_norm_grad_weight(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the weight, whose element type is `dtype`."""
    rows = (x * rstd).mul_(grad_out).reshape(-1, *normalized_shape)
    return rows.sum(0).to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.normalized_shape, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the second result


def _gradient(ctx: Any, grad_out: Tensor, _: object) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    own, shape = torch.ops.partitioner, ctx.normalized_shape
    data = scale = None
    if ctx.needs_input_grad[0]:
        data = own.rms_norm_grad_input(grad_out, x, shape, rstd, weight)
    if ctx.needs_input_grad[2]:
        scale = own.rms_norm_grad_weight(grad_out, x, shape, rstd, weight.dtype)
    return data, None, scale, None


gradient("rms_norm", _gradient, _save)
