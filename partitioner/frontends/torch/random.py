"""Random operators made of uniform numbers, which alone are drawn from the shared seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def rand_like(x: Tensor, **options: Any) -> Tensor:
    """Uniform numbers of a tensor's shape."""
    return _rand(x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device)


def randn(size: Sequence[int], **options: Any) -> Tensor:
    """Normal numbers."""
    return _normal(size, options.get("dtype") or torch.get_default_dtype(), options.get("device"))


def randn_like(x: Tensor, **options: Any) -> Tensor:
    """Normal numbers of a tensor's shape."""
    return _normal(x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device)


def bernoulli(x: Tensor, **_: Any) -> Tensor:
    """1 with the probability that an element gives, else 0."""
    return (_rand(x.shape, _wide(x.dtype), x.device) < x).to(x.dtype)


def bernoulli_p(x: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    """1 with one probability, else 0."""
    return (_rand(x.shape, _wide(x.dtype), x.device) < p).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Numbers of half precision are too coarse to compare."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rand(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    found: Tensor = aten.rand.default(list(size), dtype=dtype, device=device, pin_memory=False)
    return found


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """The transformation of Box and Muller; the logarithm never meets 0."""
    wide = _wide(dtype)
    radius, angle = (_rand(size, wide, device) for _ in range(2))
    length = torch.sqrt(-2.0 * torch.log(1.0 - radius))
    return (length * torch.cos(2.0 * math.pi * angle)).to(dtype)


DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli_p,
    aten.rand_like.default: rand_like,
    aten.randn.default: randn,
    aten.randn_like.default: randn_like,
}
