"""Encodes calls of PyTorch operators as nodes of the IR.

A node's op is the overload's full name (``"aten::sum.dim_IntList"``). Its inputs are the tensor
arguments in the schema's order: "" for one that is absent or a Python number, each element in
turn for a list of tensors. Every other argument is an attribute of its name, with defaults filled
in and without None; a list of tensors has its length as attribute, a number in the place of a
tensor its value. Element types and memory formats are text ("float32", "channels_last"). Device,
layout and pinning are left out: the backend chooses them. `partitioner.backends.torch.graphs.calls`
decodes nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.ir.graph import Attr

#: Arguments about a tensor's memory.
_MEMORY = frozenset({"device", "layout", "pin_memory"})


def encode_call(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
    name_of: Callable[[Any], str],
) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
    """The op, inputs and attributes of the node that encodes a call.

    `is_tensor` tells whether an argument stands for a tensor, and `name_of` gives its value then.

    Raises:
        FrontendError: An argument has no form in the IR.
    """
    inputs: list[str] = []
    attrs: dict[str, Attr] = {}
    full, arguments = _schema(op)
    for index, (name, declared, default) in enumerate(arguments):
        if name in _MEMORY:
            continue
        value = args[index] if index < len(args) else kwargs.get(name, default)
        if declared in ("List[Tensor]", "Optional[List[Tensor]]"):
            items = [] if value is None else list(value)
            inputs += [name_of(item) if item is not None else "" for item in items]
            attrs[name] = len(items)
            continue
        if declared == "Tensor":
            inputs.append(name_of(value) if is_tensor(value) else "")
        if value is not None and not (declared == "Tensor" and is_tensor(value)):
            attrs[name] = _attr(op, name, value)
    return full, tuple(inputs), attrs


@cache
def _schema(op: torch._ops.OpOverload) -> tuple[str, tuple[tuple[str, str, Any], ...]]:
    """The full name of an operator, and the name, type and default of each of its arguments."""
    schema = op._schema
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return full, tuple(
        (
            argument.name,
            str(argument.type).replace("Optional[Tensor]", "Tensor"),
            argument.default_value if argument.has_default_value() else None,
        )
        for argument in schema.arguments
    )


def _attr(op: object, name: str, value: Any) -> Attr:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float) for v in value):
        return tuple(value)
    raise FrontendError(f"{op}: argument {name} = {value!r} is not supported")
