"""Random numbers that are drawn into a tensor, or of one.

On the CPU they are the next ones of each process. So parts repeat each other, a generator that is
given is not asked, and where parts are of unlike sizes the ranks' generators go apart: what is
whole on all of them would no longer be alike. On accelerators PyTorch draws as for the whole
tensor, and so it is here: each rank draws all and keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.dtensors.parts import in_parts, is_sum, part_of_whole
from partitioner.backends.torch.dtensors.wholes import Handler, by_pytorch, on_wholes

_aten = torch.ops.aten

#: Operators whose results follow from a tensor's sizes and type alone: those that write into it,
#: and those that make another one. And operators that read it.
_WRITING = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float),
    *(_aten.exponential_.default, _aten.log_normal_.default),
    *(_aten.geometric_.default, _aten.cauchy_.default),
)
_MAKING = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)
_READING = (
    *(_aten.bernoulli.default, _aten.native_dropout.default),
    *(_aten.multinomial.default, _aten.rrelu_with_noise.default),
)


def _drawn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor | tuple[DTensor, ...]:
    tensor: DTensor = args[0]
    if not _is_drawn_here(operator, tensor):
        drawn_in_parts: DTensor = by_pytorch(operator, args, kwargs)
        return drawn_in_parts
    if operator in _READING:
        by_whole: DTensor | tuple[DTensor, ...] = on_wholes(operator, args, kwargs)
        return by_whole
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    drawn = operator(whole, *args[1:], **kwargs)
    if operator in _MAKING:
        return in_parts(tensor, drawn)
    tensor._local_tensor.copy_(part_of_whole(tensor._spec, whole))
    return tensor


def _is_drawn_here(operator: torch._ops.OpOverload, tensor: DTensor) -> bool:
    """Test whether a tensor is on the CPU and this rank's part of it follows from its place.

    PyTorch refuses to draw into the terms of a sum.
    """
    is_here = tensor.device_mesh.get_coordinate() is not None
    is_known = operator not in _WRITING or not is_sum(tensor)
    return tensor.device.type == "cpu" and is_here and is_known


HANDLERS: Mapping[Any, Handler] = dict.fromkeys((*_WRITING, *_MAKING, *_READING), _drawn)
