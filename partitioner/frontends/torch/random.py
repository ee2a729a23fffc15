"""Decomposes random operators into uniform numbers, which alone are drawn from the shared seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _rand_like(x: Tensor, **options: Any) -> Tensor:
    return _rand(x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device)


def _randn(size: Sequence[int], **options: Any) -> Tensor:
    return _normal(size, options.get("dtype") or torch.get_default_dtype(), options.get("device"))


def _randn_like(x: Tensor, **options: Any) -> Tensor:
    return _normal(x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device)


def _bernoulli(x: Tensor, **_: Any) -> Tensor:
    return _bernoulli_p(x, x)


def _bernoulli_p(x: Tensor, p: Tensor | float = 0.5, **_: Any) -> Tensor:
    return (_rand(x.shape, _wide(x.dtype), x.device) < p).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to draw in: numbers of half precision are too coarse to compare."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rand(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    uniform: Tensor = aten.rand.default(list(size), dtype=dtype, device=device, pin_memory=False)
    return uniform


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Box-Muller transform; the logarithm is never of 0."""
    wide = _wide(dtype)
    radius, angle = (_rand(size, wide, device) for _ in range(2))
    length = torch.sqrt(-2.0 * torch.log(1.0 - radius))
    return (length * torch.cos(2.0 * math.pi * angle)).to(dtype)


DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.rand_like.default: _rand_like,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
}
