"""Operators that write to a list of tensors, as `torch._foreach_add_` does.

On one device they write to one tensor after the other: what they read of a tensor that comes before
is what they have written there. So it is of parts, where parts are computed with as they are. But
PyTorch brings tensors of unlike cuts into one cut before it writes to any: then the operator is
called for one tensor after the other. So it is of whole tensors where memory that is written to is
read for another one, but not where tensors are apart in one memory, as gradients are that arrive
together. Each write is counted, as PyTorch counts those to plain tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.buffers import extent
from partitioner.backends.torch.dtensors.parts import storage_of
from partitioner.backends.torch.dtensors.wholes import on_wholes


def written_in_turn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call an operator for one tensor of its lists after the other."""
    for index in range(len(args[0])):
        one_args, one_kwargs = _call_of(index, args, kwargs)
        operator(*one_args, **one_kwargs)


def written_as_wholes(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call an operator on whole tensors, as if it wrote to one after the other."""
    if reads_what_another_writes(args, kwargs):
        written_in_turn(operator, args, kwargs)
    else:
        on_wholes(operator, args, kwargs)
        count_writes(args[0])


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count a write to each of the DTensors."""
    increment_version([tensor for tensor in tensors if isinstance(tensor, DTensor)])


def _call_of(
    index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one tensor of the list: of each list, and each row of numbers, its own."""

    def own(argument: Any) -> Any:
        is_row = isinstance(argument, Tensor) and argument.ndim == 1
        is_list = isinstance(argument, list | tuple) or is_row
        return argument[index : index + 1] if is_list else argument

    return tuple(map(own, args)), {name: own(argument) for name, argument in kwargs.items()}


def reads_what_another_writes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether memory that is written to is read, or written to, for another tensor of the list."""
    if len(args[0]) < 2:
        return False
    written = sorted((*_memory_of(tensor), index) for index, tensor in enumerate(args[0]))
    if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(written)):
        return True
    begins = [memory[:2] for memory in written]
    for index, tensor in _read_tensors((*args[1:], *kwargs.values())):
        storage, begin, end = _memory_of(tensor)
        first = max(bisect_right(begins, (storage, begin)) - 1, 0)
        near = written[first : bisect_left(begins, (storage, end))]
        if any(x[0] == storage and x[2] > begin and x[3] != index for x in near):
            return True
    return False


def _read_tensors(arguments: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
    """The tensors of a call, with the place of the one that each is read for; -1 for all."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield -1, argument
        elif isinstance(argument, list | tuple):
            yield from ((i, x) for i, x in enumerate(argument) if isinstance(x, Tensor))


def _memory_of(tensor: Tensor) -> tuple[int, int, int]:
    """A storage, and its bytes from a tensor's (or this rank's part's) first to behind its last.

    A part without elements has all of the storage: it lies there where other ranks' parts do, and
    all ranks must call operators in one order.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not local.numel():
        return storage_of(local), 0, max(local.untyped_storage().nbytes(), 1)
    begin = int(local.storage_offset()) * local.element_size()
    return storage_of(local), begin, begin + extent(local)


def _operators() -> Iterator[torch._ops.OpOverload]:
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not name.endswith("_") or not schema.arguments:
            continue
        first = schema.arguments[0]
        if not isinstance(first.type, torch.ListType):
            continue
        is_of_tensors = isinstance(first.type.getElementType(), torch.TensorType)
        if is_of_tensors and first.alias_info is not None and first.alias_info.is_write:
            operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            yield operator


#: PyTorch's operators whose first argument is a list of tensors that they write to.
WRITING = frozenset(_operators())
