"""Operators that write to a list of tensors, as `torch._foreach_add_` does.

On one device they write to one tensor after the other: what they read of a tensor that comes before
is what they have written there. So it is of parts, where parts are computed with as they are. But
PyTorch brings tensors of unlike cuts into one cut before it writes to any: then the operator is
called for one tensor after the other. So it is of whole tensors: all ranks gather them in one
order, wherever parts lie. Each write is counted, as PyTorch counts those to plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.dtensors.schemas import calls_in_turn, writes_to_a_list
from partitioner.backends.torch.dtensors.wholes import on_wholes


def written_in_turn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call an operator for one tensor of its lists after the other."""
    for one_args, one_kwargs in calls_in_turn(args, kwargs):
        operator(*one_args, **one_kwargs)


def written_on_wholes(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Call an operator, whose lists have one tensor each, on whole tensors."""
    on_wholes(operator, args, kwargs)
    count_writes(args[0])


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count a write to each of the DTensors."""
    increment_version([tensor for tensor in tensors if isinstance(tensor, DTensor)])


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
