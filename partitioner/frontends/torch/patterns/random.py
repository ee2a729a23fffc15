"""Decomposes random operators into uniform numbers, which alone are drawn from the shared seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

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


_DRAWS: Mapping[torch._ops.OpOverload, Draw] = {
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
DECOMPOSITIONS = {operator: _without_generator(draw) for operator, draw in _DRAWS.items()}
