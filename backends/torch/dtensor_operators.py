"""Operators on DTensors that PyTorch (2.13) computes otherwise than on the whole tensor.

A number that is read of a pending sum (`p.norm().item()`, `float(p.sum())`) is that of the rank's
own part. Here it is the whole tensor's, for which all ranks must read it.

Random numbers that are drawn into a tensor on the CPU are the next ones of each process. So parts
repeat each other, a generator that is given is not asked, and where parts are of unlike sizes the
ranks' generators go apart: what is whole on all of them would no longer be alike. On accelerators
PyTorch draws as for the whole tensor, and so it is here: each rank draws all and keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from partitioner.backends.torch.shards import distributed_as

_aten = torch.ops.aten

#: Operators whose results follow from a tensor's sizes and type alone: those that write into it,
#: and those that make another one.
_WRITING = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_MAKING = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)


@cache
def correct_operators() -> None:
    """From now on, compute these operators on DTensors as on whole tensors."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(_aten._local_scalar_dense.default, _number)
    for operator in (*_WRITING, *_MAKING):
        handlers.setdefault(operator, _drawn)


def _number(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], _: Mapping[str, Any]
) -> bool | complex:
    tensor: DTensor = args[0]
    whole = tensor._local_tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        with torch.no_grad():
            whole = tensor.full_tensor()
    number: bool | complex = operator(whole)
    return number


def _drawn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    tensor: DTensor = args[0]
    if tensor.device.type != "cpu":
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handler = handlers.pop(operator)
        try:
            by_pytorch: DTensor = operator(*args, **kwargs)
        finally:
            handlers[operator] = handler
        return by_pytorch
    whole = operator(torch.empty(tensor.shape, dtype=tensor.dtype), *args[1:], **kwargs)
    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    part = whole
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        part = part.narrow(dim, min(start, whole.shape[dim]), size)
    if operator in _MAKING:
        return distributed_as(tensor, part.contiguous())
    tensor._local_tensor.copy_(part)
    return tensor
