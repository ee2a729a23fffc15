"""The `.data` of DTensors, by which weights are read, written to and swapped.

PyTorch counts no write to `p.data`, and gives a DTensor whose `data` is set the sizes of the new
one, but not its part. Here a write to `p.data` counts as one to `p`: so its rows show it, and a
backward pass that needs what was there is refused. And a tensor has the part of what it is set to,
in the same memory, as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.copies import SHARED, Copy
from partitioner.backends.torch.dtensors.wholes import MESHES

#: That of all tensors.
_DATA: Any = torch.Tensor.data


def correct_data() -> None:
    """Make the `data` of DTensors on the meshes of ranks' modules as told above, from now on."""
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]


def _data(tensor: DTensor) -> Tensor:
    if tensor.device_mesh not in MESHES:
        data: Tensor = _DATA.__get__(tensor)
        return data
    with torch.inference_mode(tensor.is_inference()):  # else PyTorch makes no view of it
        return tensor.detach()


def _set_data(tensor: DTensor, data: Tensor) -> None:
    if tensor.device_mesh not in MESHES:
        _DATA.__set__(tensor, data)
        return
    if not (isinstance(data, DTensor) and _is_cut_as(tensor, data)):
        raise BackendError(
            "the .data of a tensor that is cut over ranks was set to a tensor that is not cut so: "
            "write it in place under torch.no_grad(), as by p.copy_(w)"
        )
    if data is not tensor:
        replace_data(tensor, data)
        setattr(data._local_tensor.untyped_storage(), SHARED, True)
        if not tensor.is_inference():
            increment_version([tensor])


def _is_cut_as(tensor: DTensor, data: DTensor) -> bool:
    """Test whether both tensors have parts of their own, of one cut."""
    return (
        not isinstance(tensor, Copy)
        and not isinstance(data, Copy)
        and data.device_mesh == tensor.device_mesh
        and data.placements == tensor.placements
    )


def replace_data(tensor: DTensor, data: DTensor) -> None:
    """Give a DTensor the sizes, the cut and the part of another one."""
    _DATA.__set__(tensor, data)
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
