"""Whole tensors, and the parts of them that ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.faults import named
from partitioner.backends.torch.state.buffers import extent


def is_sum(tensor: Tensor) -> bool:
    """Test whether ranks have terms of a tensor, which are still to be added up."""
    return isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    )


def whole_spec(mesh: DeviceMesh, tensor: Tensor) -> DTensorSpec:
    """The layout of a plain tensor that all ranks of a mesh have."""
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor with the strides that it has in parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    if whole.stride() == tensor.stride():
        return whole
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=whole.device
    ).copy_(whole)


def outline_of(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes without contents."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def part_of_whole(spec: DTensorSpec, whole: Tensor) -> Tensor:
    """Cut this rank's part, or its term, out of a whole tensor; it may be a view of the tensor.

    Raises:
        BackendError: Terms of a norm are to give a negative number.
    """
    terms = {axis: place for axis, place in enumerate(spec.placements) if place.is_partial()}
    if any(map(_loses_signs, terms.values())) and bool((whole < 0).any()):
        raise BackendError(
            "a norm over a dim that is cut cannot become negative in place, as its parts are "
            "squared to be added up: compute another tensor, as -norm in place of norm.neg_()"
        )
    with torch.no_grad():
        if terms:
            cuts = tuple(Replicate() if x.is_partial() else x for x in spec.placements)
            spec = DTensorSpec(spec.mesh, cuts, spec.tensor_meta)
        part: Tensor = redistribute_local_tensor(whole, whole_spec(spec.mesh, whole), spec)
        for axis, place in terms.items():
            part = _term_of(part, place, spec.mesh.get_local_rank(axis))
    return part


def _loses_signs(place: Placement) -> bool:
    """Test whether terms are raised to a power before they are added up."""
    return isinstance(place, _NormPartial) and place.norm_type != 1


def _term_of(tensor: Tensor, place: Placement, rank: int) -> Tensor:
    """A rank's term of a tensor: it is the tensor on the first rank, and elsewhere changes nothing.

    PyTorch divides a tensor by the number of ranks, which whole numbers do not allow.
    """
    if rank == 0 or any(map(place.is_partial, ("avg", "max", "min"))):
        return tensor
    return torch.full_like(tensor, int(place.is_partial("product")))


def in_parts(tensor: DTensor, whole: Tensor) -> DTensor:
    """A whole tensor cut as another one, which may be a sum to be added up.

    One of other sizes is whole on every rank.
    """
    is_alike = whole.shape == tensor.shape
    placements = tuple(
        p if is_alike and not p.is_partial() else Replicate() for p in tensor.placements
    )
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(tensor.device_mesh, placements, meta)
    if tensor.device_mesh.get_coordinate() is None:
        part = torch.zeros(() if whole.ndim == 0 else (0,), dtype=whole.dtype)
    else:
        part = (
            part_of_whole(spec, whole).clone() if is_alike else whole
        )  # no view, which keeps the whole
    made: DTensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def storage_of(tensor: Tensor) -> int:
    """Where a tensor, or this rank's part of it, lies, even if it has no elements."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    memory: int = local.untyped_storage()._cdata
    return memory


def span_of(tensor: Tensor) -> tuple[int, int, int]:
    """A storage, and its bytes from a tensor's (or this rank's part's) first to behind its last."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    begin = int(local.storage_offset()) * local.element_size()
    return storage_of(local), begin, begin + extent(local)


def check_is_here(mesh: DeviceMesh, reading: str) -> None:
    """Refuse to read a tensor on a rank that has no part of it.

    Args:
        mesh: That of the tensor.
        reading: Words of the error, after "the tensor that" and before "on" and its ranks.
    """
    if mesh.get_coordinate() is None:
        ranks = named(mesh.mesh.flatten().tolist())
        raise BackendError(
            f"rank {dist.get_rank()} has no part of the tensor that {reading} on {ranks}"
        )
