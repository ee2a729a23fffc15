"""Whole tensors and numbers that are written into a tensor in parts.

A whole tensor that is copied into one in parts gives each rank its part, and so does a matrix that
PyTorch makes in its memory (`torch.nn.init.eye_`). One that ranks have as terms gets other terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.dtensors.parts import in_parts, is_sum, part_of_whole
from partitioner.backends.torch.dtensors.plain import note_plain
from partitioner.backends.torch.dtensors.wholes import Handler, by_pytorch, on_wholes

_aten = torch.ops.aten


def _copied(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Copy a plain tensor, which is whole, into this rank's part."""
    tensor, source = args[:2]
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor):
        copied: Tensor = by_pytorch(operator, args, kwargs)
        return copied
    note_plain(tensor.device_mesh, operator, args, kwargs)
    whole = source.expand(tensor.shape)
    if tensor.device_mesh.get_coordinate() is not None:
        tensor._local_tensor.copy_(part_of_whole(tensor._spec, whole), *args[2:], **kwargs)
    return tensor


def _filled(_: torch._ops.OpOverload, args: tuple[Any, ...], __: Mapping[str, Any]) -> DTensor:
    """Fill a tensor with a number."""
    tensor, number = args
    number = number.full_tensor() if isinstance(number, DTensor) else number
    if not is_sum(tensor):
        tensor._local_tensor.fill_(number)
    else:
        tensor.copy_(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).fill_(number)
        )
    filled: DTensor = tensor
    return filled


def _made_empty(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """Make a whole tensor, also like the terms of a sum: what is written to it is no term."""
    tensor: DTensor = args[0]
    if not is_sum(tensor):
        made: DTensor = by_pytorch(operator, args, kwargs)
        return made
    whole = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return in_parts(tensor, operator(whole, *args[1:], **kwargs))


def _made_in(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """Make a matrix in the memory of a tensor: of the whole, this rank's part."""
    tensor: DTensor = kwargs["out"]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor.copy_(operator(*args, **{**kwargs, "out": whole}))
    return tensor


HANDLERS: Mapping[Any, Handler] = {
    _aten.copy_.default: _copied,
    _aten.empty_like.default: _made_empty,
    _aten.fill_.Tensor: _filled,
    _aten.fill_.Scalar: _filled,
    _aten.eye.m_out: _made_in,
    _aten.index_put_.default: on_wholes,  # values at places of the whole (`p[mask] = 0.`),
}
