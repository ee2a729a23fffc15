"""Activations of experts as programs of steps on columns, with their gradients.

A program is a text, as ``"every %0 0 2; clamp_max %1 7.0; sigmoid %2; mul %3 %2"``: steps by name,
each with operands that are numbers or, as ``%n``, results. ``%0`` are the columns of the first
product, and the result of the last step is the activation. All results have equal numbers of
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

Operand = Tensor | float | int


@dataclass(frozen=True)
class Step:
    """A step of a program."""

    compute: Callable[..., Tensor]  #: Gives the result of the operands.
    #: Gives, of the result's gradient, the result and the operands, the gradient of each operand;
    #: those of numbers are not looked at.
    slopes: Callable[..., Sequence[Any]]


def _part(x: Tensor, place: int, count: int) -> Tensor:
    width = x.shape[-1] // count
    return x.narrow(-1, place * width, width)


def _every(x: Tensor, start: int, step: int) -> Tensor:
    """Each of so many columns, from the one at `start` on."""
    return x[..., start::step]


def _put(view: Callable[..., Tensor], grad: Tensor, _: Tensor, x: Tensor, *more: int) -> Any:
    """The gradient of columns of which some are read."""
    whole = torch.zeros_like(x)
    view(whole, *more).copy_(grad)
    return (whole,)


def _one(slope: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Sequence[Tensor]]:
    return lambda grad, result, x: (slope(grad, result, x),)


_tanh_gelu: Callable[[Tensor], Tensor] = partial(_aten.gelu, approximate="tanh")

#: The steps by name.
STEPS: Mapping[str, Step] = {
    "part": Step(_part, partial(_put, _part)),
    "every": Step(_every, partial(_put, _every)),
    "add": Step(torch.add, lambda grad, _, _x, _y: (grad, grad)),
    "sub": Step(lambda x, y: x - y, lambda grad, _, _x, _y: (grad, -grad)),
    "mul": Step(torch.mul, lambda grad, _, x, y: (grad * y, grad * x)),
    "div": Step(torch.div, lambda grad, result, _x, y: (grad / y, -grad * result / y)),
    "clamp_max": Step(
        lambda x, most: x.clamp(max=most), lambda grad, _, x, most: (grad * (x <= most), None)
    ),
    "clamp_min": Step(
        lambda x, least: x.clamp(min=least), lambda grad, _, x, least: (grad * (x >= least), None)
    ),
    "pow": Step(torch.pow, lambda grad, _, x, n: (grad * n * x ** (n - 1), None)),
    "neg": Step(torch.neg, _one(lambda grad, _, _x: -grad)),
    "exp": Step(torch.exp, _one(lambda grad, result, _x: grad * result)),
    "sigmoid": Step(torch.sigmoid, _one(lambda grad, y, _x: _aten.sigmoid_backward(grad, y))),
    "tanh": Step(torch.tanh, _one(lambda grad, y, _x: _aten.tanh_backward(grad, y))),
    "relu": Step(torch.relu, _one(lambda grad, _, x: _aten.threshold_backward(grad, x, 0))),
    "silu": Step(_aten.silu, _one(lambda grad, _, x: _aten.silu_backward(grad, x))),
    "gelu": Step(_aten.gelu, _one(lambda grad, _, x: _aten.gelu_backward(grad, x))),
    "gelu-tanh": Step(
        _tanh_gelu,
        _one(lambda grad, _, x: _aten.gelu_backward(grad, x, approximate="tanh")),
    ),
}


@dataclass(frozen=True)
class Program:
    """A program that was read."""

    #: Each step and its operands: numbers, or places of results as texts.
    steps: tuple[tuple[Step, tuple[float | int | str, ...]], ...]

    @classmethod
    @cache
    def of(cls, text: str) -> Program:
        """The program of a text."""
        steps = []
        for line in text.split(";"):
            name, *operands = line.split()
            if name not in STEPS:
                raise ValueError(f"activation {text!r}: there is no step {name!r}")
            steps.append((STEPS[name], tuple(map(_operand, operands))))
        return cls(tuple(steps))

    def results(self, columns: Tensor) -> list[Tensor]:
        """The columns, and the result of each step."""
        results = [columns]
        for step, operands in self.steps:
            results.append(step.compute(*_given(operands, results)))
        return results

    def gradient(self, grad: Tensor, columns: Tensor) -> Tensor:
        """The gradient of the columns from that of the last result."""
        results = self.results(columns)
        grads: dict[int, Tensor] = {len(self.steps): grad}
        for place, (step, operands) in reversed([*enumerate(self.steps, 1)]):
            if place not in grads:
                continue
            slopes = step.slopes(grads.pop(place), results[place], *_given(operands, results))
            for operand, slope in zip(operands, slopes, strict=False):
                if isinstance(operand, str):
                    source = int(operand[1:])
                    grads[source] = grads[source] + slope if source in grads else slope
        return grads.get(0, torch.zeros_like(columns))


def _operand(text: str) -> float | int | str:
    if text.startswith("%"):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _given(operands: Sequence[float | int | str], results: Sequence[Tensor]) -> list[Operand]:
    return [results[int(x[1:])] if isinstance(x, str) else x for x in operands]
