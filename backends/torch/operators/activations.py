"""Activations of experts as programs of steps on columns, with their gradients.

A program is a text, as ``"every %0 0 2; clamp_max %1 7.0; sigmoid %2; mul %3 %2"``: steps by name,
each with operands that are numbers or, as ``%n``, results. ``%0`` are the columns of the first
product, and the result of the last step is the activation. All results have equal numbers of
columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor

_aten = torch.ops.aten

#: The steps by name: functions of their operands.
STEPS: Mapping[str, Callable[..., Tensor]] = {
    "part": lambda x, place, count: x.split(x.shape[-1] // count, -1)[place],
    "every": lambda x, start, step: x[..., start::step],  # one of so many columns
    "add": torch.add,
    "sub": operator.sub,  # of a number, too
    "mul": torch.mul,
    "div": torch.div,
    "clamp_max": lambda x, most: x.clamp(max=most),
    "clamp_min": lambda x, least: x.clamp(min=least),
    "pow": torch.pow,
    "neg": torch.neg,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": _aten.silu,
    "gelu": _aten.gelu,
    "gelu-tanh": partial(_aten.gelu, approximate="tanh"),
}


@cache
def activation(text: str) -> Callable[[Tensor], Tensor]:
    """The function of columns that a step's name or a program stands for."""
    if text in STEPS:
        return STEPS[text]
    steps = []
    for line in text.split(";"):
        name, *operands = line.split()
        if name not in STEPS:
            raise ValueError(f"activation {text!r}: there is no step {name!r}")
        steps.append((STEPS[name], tuple(map(_operand, operands))))

    def run(columns: Tensor) -> Tensor:
        results = [columns]
        for step, operands in steps:
            given = [results[int(x[1:])] if isinstance(x, str) else x for x in operands]
            results.append(step(*given))
        return results[-1]

    return run


def with_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of a function of `x`, and the gradient of `x` from that of the result."""
    with torch.inference_mode(False), torch.enable_grad():
        operand = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
        result = function(operand)
    (gradient,) = torch.autograd.grad(result, operand, grad)
    return result.detach(), gradient


def _operand(text: str) -> float | int | str:
    if text.startswith("%"):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)
