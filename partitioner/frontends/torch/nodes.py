"""Calls of PyTorch operators as nodes of the IR, and element types by name.

A node's op is the overload's full name (``"aten::sum.dim_IntList"``). Its inputs are the tensor
arguments in the schema's order: "" for one that is absent or a Python number, each element in
turn for a list of tensors. Every other argument is an attribute of its name, defaults filled in
and None left out; so are the count of a list of tensors and a number given for a tensor. Element
types and memory formats are text ("float32", "channels_last"); device, layout and pinning are
left out: they are the backend's. `partitioner.backends.torch.calls` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from partitioner.frontends.errors import FrontendError
from partitioner.ir.graph import Attr

#: Names of element types in the IR.
DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.float8_e4m3fn: "float8e4m3fn",
    torch.float8_e5m2: "float8e5m2",
    torch.int16: "int16",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.float32: "float32",
    torch.int64: "int64",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
#: Arguments that say where and how a tensor lies; a backend's matter.
_ABOUT_MEMORY = frozenset({"device", "layout", "pin_memory"})


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type.

    Raises:
        FrontendError: The IR has none for it.
    """
    if dtype not in DTYPES:
        raise FrontendError(f"element type {dtype} is not supported")
    return DTYPES[dtype]


def encode_call(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
    name_of: Callable[[Any], str],
) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
    """(op, inputs, attributes) of a call.

    Args:
        op: The overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        is_tensor: Whether an argument stands for a tensor.
        name_of: Value name of such an argument.

    Raises:
        FrontendError: An argument has no form in the IR.
    """
    inputs: list[str] = []
    attrs: dict[str, Attr] = {}
    for index, argument in enumerate(op._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, _default(argument))
        if argument.name in _ABOUT_MEMORY:
            continue
        kind = str(argument.type)
        if _is_tensor_list(kind):
            items = [] if value is None else list(value)
            inputs += [name_of(item) if item is not None else "" for item in items]
            attrs[argument.name] = len(items)
        elif kind in ("Tensor", "Optional[Tensor]"):
            inputs.append(name_of(value) if is_tensor(value) else "")
            if value is not None and not is_tensor(value):
                attrs[argument.name] = _attr(op, argument.name, value)
        elif value is not None:
            attrs[argument.name] = _attr(op, argument.name, value)
    schema = op._schema
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return full, tuple(inputs), attrs


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def _is_tensor_list(kind: str) -> bool:
    return kind.replace("Optional[Tensor]", "Tensor").removeprefix("Optional[") in (
        "List[Tensor]",
        "List[Tensor]]",
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
