"""Process groups that the graphs of all ranks name, and the meshes that stored values lie on."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.distributed_c10d import GroupName

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.comms import group_name
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import CommKind, Programs

#: Groups by name, as long as they may be called.
_held: dict[str, Any] = {}


def check_world(ranks: int) -> int:
    """This process's rank.

    Raises:
        BackendError: torch.distributed is not up, or has another number of processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            f"module() needs {ranks} processes: start them with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if dist.get_world_size() != ranks:
        raise BackendError(
            f"the program is for {ranks} ranks; torch.distributed has {dist.get_world_size()}"
        )
    return dist.get_rank()


def group_ranks(programs: Programs) -> list[tuple[int, ...]]:
    """Ranks of each communication of any rank, in order."""
    return sorted(
        {
            comm.ranks
            for program in programs.ranks
            for comm in program.comms
            if comm.kind is not CommKind.SLICE
        }
    )


def first_ranks(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def register_groups(programs: Programs) -> None:
    """Make the process groups of all communications, the same on every rank, under their names."""
    register_named(group_ranks(programs))


def register_named(wanted: Iterable[tuple[int, ...]]) -> None:
    """Make process groups under the names that graphs call them by (see `group_name`).

    Args:
        wanted: Ranks of each; the same on every rank, in the same order.
    """
    for ranks in wanted:
        name = group_name(ranks)
        if _known(name) is None:
            group = dist.new_group(list(ranks), timeout=_patience())
            if dist.get_rank() in ranks:
                torch._C._distributed_c10d._register_process_group(GroupName(name), group)
                _held[name] = group


def new_group(ranks: Sequence[int], backend: str | None = None) -> GroupName:
    """Name of a new group that waits as long as the one of all ranks (PyTorch's: 30 minutes)."""
    group = dist.new_group(list(ranks), timeout=_patience(), backend=backend)
    name: GroupName = group.group_name
    _held[name] = group
    return name


@atexit.register
def _drop() -> None:
    """End the threads of groups while the interpreter is whole.

    Gloo's free the tensors of the last communication, maybe after the rank went on; one that does
    so while Python is being torn down ends the process by SIGABRT (seen with PyTorch 2.13).
    """
    _held.clear()


def _patience() -> timedelta | None:
    """What `init_process_group` was told; None if the backend does not say."""
    world: Any = dist.group.WORLD
    for kind in world._device_types:
        options = getattr(world._get_backend(kind), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    return None


def _known(name: str) -> Any:
    """The group that an earlier program registered, if it is still of this world."""
    try:
        return torch._C._distributed_c10d._resolve_process_group(GroupName(name))
    except (RuntimeError, ValueError):
        return None


def torch_meshes(
    meshes: Iterable[DeviceMesh], device: torch.device
) -> Mapping[DeviceMesh, TorchMesh]:
    """PyTorch's meshes of ours, made in one order on every rank."""
    found = {}
    for mesh in sorted(set(meshes), key=lambda m: (m.devices, m.axes)):
        shape = tuple(size for _, size in mesh.axes) or (1,)
        ranks = torch.tensor(mesh.devices).reshape(shape)
        found[mesh] = TorchMesh(device.type, ranks, mesh_dim_names=mesh.names or ("one",))
    return found
