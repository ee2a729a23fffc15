"""Numbers that are read of a tensor.

PyTorch reads a number of a pending sum (`p.norm().item()`, `float(p.sum())`) of the rank's own
part. Here it is the whole tensor's, for which all ranks that have parts of it must read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.dtensors.parts import check_is_here
from partitioner.backends.torch.dtensors.wholes import Handler

_aten = torch.ops.aten


def _number(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], _: Mapping[str, Any]
) -> bool | complex:
    tensor: DTensor = args[0]
    check_is_here(tensor.device_mesh, "a number is read of: read it")
    whole = tensor._local_tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        with torch.no_grad():
            whole = tensor.full_tensor()
    number: bool | complex = operator(whole)
    return number


HANDLERS: Mapping[Any, Handler] = {_aten._local_scalar_dense.default: _number}
