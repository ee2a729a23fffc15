"""Recognises activations: named ones, and programs (`backends.torch.operators.activations`)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partitioner.frontends.torch.patterns.rewrite import (
    Arguments,
    args_of,
    arguments_of,
    calls,
    is_shaped,
    is_tensor,
    through,
    value,
)

_aten = torch.ops.aten

#: Steps of programs by operator: of one operand, and of two.
_UNARY = {
    _aten.exp.default: "exp",
    _aten.neg.default: "neg",
    _aten.sigmoid.default: "sigmoid",
    _aten.tanh.default: "tanh",
}
_BINARY = {
    _aten.add.Tensor: "add",
    _aten.div.Tensor: "div",
    _aten.mul.Tensor: "mul",
    _aten.sub.Tensor: "sub",
}
_ACTIVATIONS = {_aten.relu.default: "relu", _aten.silu.default: "silu"}


def named_activation(node: fx.Node) -> tuple[fx.Node, str, bool] | None:
    """(what it is applied to, its name, whether it is gated)."""
    if not calls(node, _aten.mul.Tensor):
        name = _named(node)
        return (through(args_of(node)[0]), name, False) if name else None
    one, two = map(through, args_of(node)[:2])
    for act, other in ((one, two), (two, one)):
        if not (name := _named(act)):
            continue
        halves = through(args_of(act)[0]), other
        if not all(calls(half, operator.getitem) for half in halves):
            continue
        (chunk, first), (same, second) = (args_of(half) for half in halves)
        if chunk is same and (first, second) == (0, 1) and _halves(chunk):
            return through(args_of(chunk)[0]), name, True
    return None


def activation_program(
    node: Any, is_begin: Callable[[fx.Node], bool]
) -> tuple[fx.Node, str, bool] | None:
    """As `named_activation`, of steps on columns from `is_begin` on: the name is a program."""
    if not isinstance(node, fx.Node) or not is_tensor(node) or value(node).dim() != 2:
        return None
    steps: list[str] = []
    places: dict[fx.Node, str] = {}
    begin = _written(node, steps, places, tuple(value(node).shape), is_begin)
    if begin is None or not steps:
        return None
    width, columns = value(node).shape[1], value(begin).shape[1]
    if columns not in (width, 2 * width):
        return None
    return begin, "; ".join(steps), columns == 2 * width


def _written(
    node: fx.Node,
    steps: list[str],
    places: dict[fx.Node, str],
    shape: tuple[int, ...],
    is_begin: Callable[[fx.Node], bool],
) -> fx.Node | None:
    """Write the steps that give a node; return the one node they begin with, or None."""
    if node in places:
        return next(iter(places))
    if is_begin(node):
        if places:
            return None  # another one
        places[node] = "%0"
        return node
    step = _step(node)
    if step is None or not is_shaped(node, *shape):
        return None
    operands, begin = [], None
    for operand in step[1]:
        if not isinstance(operand, fx.Node):
            operands.append(repr(operand))
            continue
        operand = through(operand)
        begin = _written(operand, steps, places, shape, is_begin)
        if begin is None:
            return None
        operands.append(places[operand])
    if begin is None:
        return None
    if step[0] == "clamp":
        places[node] = _clamped(operands, steps)
        return begin
    steps.append(" ".join((step[0], *operands)))
    places[node] = f"%{len(steps)}"
    return begin


def _clamped(operands: list[str], steps: list[str]) -> str:
    """Write the steps of a clamp by one bound or both; returns the last one's place."""
    source, *bounds = operands
    for name, bound in zip(("clamp_min", "clamp_max"), bounds, strict=True):
        if bound != repr(None):
            steps.append(f"{name} {source} {bound}")
            source = f"%{len(steps)}"
    return source


def _step(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    if calls(node, operator.getitem):
        chunk, place = args_of(node)
        if not isinstance(chunk, fx.Node) or not _halves(chunk):
            return None
        return "part", (args_of(chunk)[0], place, 2)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    given = arguments_of(node)
    if node.target is _aten.slice.Tensor:
        return _sliced(given)
    if _named(node):
        return _named(node), (given["self"],)
    if node.target in _BINARY:
        both = given["self"], given["other"]
        return (_BINARY[node.target], both) if given.get("alpha", 1) == 1 else None
    if node.target in (_aten.clamp.default, _aten.clamp_.default):
        return "clamp", (given["self"], given["min"], given["max"])
    if node.target is _aten.pow.Tensor_Scalar:
        return "pow", (given["self"], given["exponent"])
    if node.target is _aten.square.default:
        return "pow", (given["self"], 2)
    return (_UNARY[node.target], (given["self"],)) if node.target in _UNARY else None


def _sliced(given: Arguments) -> tuple[str, tuple[Any, ...]] | None:
    x, start, end, step = given["self"], given["start"] or 0, given["end"], given["step"]
    rank, columns = value(x).dim(), value(x).shape[-1]
    end = columns if end is None else min(end, columns)
    if given["dim"] % rank != rank - 1 or start < 0 or columns % 2:
        return None
    if step == 2 and start in (0, 1) and end == columns:
        return "every", (x, start, 2)
    is_half = step == 1 and end - start == columns // 2 and start in (0, columns // 2)
    return ("part", (x, int(start > 0), 2)) if is_half else None


def _named(node: Any) -> str:
    if calls(node, _aten.gelu.default):
        return {"none": "gelu", "tanh": "gelu-tanh"}[arguments_of(node)["approximate"]]
    target: Any = node.target if isinstance(node, fx.Node) else None
    return _ACTIVATIONS.get(target, "")


def _halves(node: fx.Node) -> bool:
    """Tell whether it cuts the last dim in two equal parts."""
    if not calls(node, _aten.chunk.default, _aten.split.Tensor):
        return False
    parts, dim = list(arguments_of(node).values())[1:3]
    columns = value(args_of(node)[0]).shape[-1]
    half = 2 if calls(node, _aten.chunk.default) else columns // 2
    return columns % 2 == 0 and dim % 2 == 1 and parts == half
