"""Operators that write to a list of tensors, as `torch._foreach_add_` does.

On one device they write to one tensor after the other: what they read of a tensor that comes before
is what they have written there. PyTorch brings tensors of unlike cuts into one cut before it
writes. So where a tensor that is written to is read for another one, the operator is called for one
tensor after the other. Each write is counted, as PyTorch counts those to plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from partitioner.backends.torch.dtensors.parts import storage_of
from partitioner.backends.torch.dtensors.wholes import Handler, by_pytorch


def _written_in_turn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    calls = [_call_of(index, args, kwargs) for index in range(len(args[0]))]
    if _reads_what_another_writes(calls):
        for one_args, one_kwargs in calls:
            operator(*one_args, **one_kwargs)
    else:
        by_pytorch(operator, args, kwargs)
        increment_version(args[0])


def _call_of(
    index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one tensor of the list: of each list, and each row of numbers, its own."""

    def own(argument: Any) -> Any:
        is_row = isinstance(argument, Tensor) and argument.ndim == 1
        is_list = isinstance(argument, list | tuple) or is_row
        return argument[index : index + 1] if is_list else argument

    return tuple(map(own, args)), {name: own(argument) for name, argument in kwargs.items()}


def _reads_what_another_writes(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> bool:
    """Whether a call for one tensor reads the memory of a tensor that another call writes to."""
    writers = {storage_of(args[0][0]): index for index, (args, _) in enumerate(calls)}
    return any(
        writers.get(storage_of(tensor), index) != index
        for index, call in enumerate(calls)
        for tensor in pytree.tree_leaves(call)
        if isinstance(tensor, Tensor)
    )


def _operators() -> Iterator[torch._ops.OpOverload]:
    """PyTorch's operators whose first argument is a list of tensors that they write to."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not name.endswith("_") or not schema.arguments:
            continue
        first = schema.arguments[0]
        if not isinstance(first.type, torch.ListType):
            continue
        is_of_tensors = isinstance(first.type.getElementType(), torch.TensorType)
        if is_of_tensors and first.alias_info is not None and first.alias_info.is_write:
            yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")


HANDLERS: Mapping[Any, Handler] = dict.fromkeys(_operators(), _written_in_turn)
