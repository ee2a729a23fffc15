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

from partitioner.backends.torch.dtensors.parts import memory_of
from partitioner.backends.torch.dtensors.schemas import calls_in_turn, writes_to_a_list
from partitioner.backends.torch.dtensors.wholes import on_wholes


def written_in_turn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call an operator for one tensor of its lists after the other."""
    for one_args, one_kwargs in calls_in_turn(args, kwargs):
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


def reads_what_another_writes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether memory that is written to is read, or written to, for another tensor of the list."""
    if len(args[0]) < 2:
        return False
    written = sorted((*memory_of(tensor), index) for index, tensor in enumerate(args[0]))
    if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(written)):
        return True
    begins = [memory[:2] for memory in written]
    for index, tensor in _read_tensors((*args[1:], *kwargs.values())):
        storage, begin, end = memory_of(tensor)
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


def _operators() -> Iterator[torch._ops.OpOverload]:
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not name.endswith("_"):
            continue
        if writes_to_a_list(schema):
            operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            yield operator


#: PyTorch's operators whose first argument is a list of tensors that they write to.
WRITING = frozenset(_operators())
