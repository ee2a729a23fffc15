"""Process groups that the graphs of all ranks name, and PyTorch's meshes of stored values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from partitioner.backends.errors import BackendError
from partitioner.backends.process_group import free_default_arguments
from partitioner.backends.torch.operators.registry import group_name
from partitioner.ir.messages import Link
from partitioner.ir.program import Comm, CommKind, Programs


def check_world(ranks: int) -> int:
    """Return the rank of this process."""
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            f"module() needs {ranks} processes: start them with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if dist.get_world_size() != ranks:
        raise BackendError(
            f"the program is for {ranks} ranks; torch.distributed has {dist.get_world_size()}"
        )
    free_default_arguments()
    return dist.get_rank()


def group_ranks(programs: Programs) -> list[tuple[int, ...]]:
    """The sets of ranks that communicate in any rank's program, in order."""
    found: set[tuple[int, ...]] = set()
    for step in (step for program in programs.ranks for step in program.steps):
        if isinstance(step, Comm):
            found.add(() if step.kind is CommKind.SLICE else step.ranks)
        else:
            found.add(step.meeting)
    return sorted(found - {()})


def check_groups(programs: Programs, made: Programs) -> None:
    """Refuse programs of a whole copy alone whose ranks communicate in other groups than before."""
    if new := {*group_ranks(programs)} - {*group_ranks(made)}:
        raise BackendError(
            f"a call of these sizes communicates among ranks {min(new)}, which others would "
            "have to join: compile the module for it"
        )


#: Names of the groups that were made, by the group of all ranks.
_MADE: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def register_named(groups: Iterable[tuple[int, ...]]) -> None:
    """Make process groups under the names that graphs call them by, alike on every rank.

    Each is made once, by all ranks: those outside of it take part too. They live until
    `destroy_process_group`: nobody else may hold them, since their threads would still run while
    Python shuts down.
    """
    for ranks in groups:
        _register(group_name(ranks), ranks)


def register_links(links: Iterable[Link]) -> None:
    """Make process groups of two ranks for messages, as `register_named` does."""
    for link in links:
        _register(_link_name(link), tuple(sorted(link[2:])))


def resolved_link(link: Link) -> Any:
    """The process group of messages, not to be held."""
    return resolved_group(_link_name(link))


def _link_name(link: Link) -> str:
    return "link_" + "_".join(map(str, link))


def _register(name: str, ranks: tuple[int, ...]) -> None:
    made = _MADE.setdefault(dist.group.WORLD, set())
    if name not in made:
        made.add(name)
        group = new_group(ranks)
        if dist.get_rank() in ranks:
            torch._C._distributed_c10d._register_process_group(GroupName(name), group)


def new_group(
    ranks: Sequence[int], backend: str | None = None, least: timedelta | None = None
) -> Any:
    """A group with the timeout of that of all ranks, at `least` this; see `register_named`."""
    world: Any = dist.group.WORLD
    timeout: timedelta | None = None
    for device_type in world._device_types:
        options = getattr(world._get_backend(device_type), "options", None)
        if options is not None:  # else the backend does not say
            timeout = options._timeout
            break
    if least is not None and timeout is not None:
        timeout = max(timeout, least)
    return dist.new_group(list(ranks), timeout=timeout, backend=backend)


def resolved_group(name: str) -> Any:
    """The process group of a name, not to be held."""
    return torch._C._distributed_c10d._resolve_process_group(GroupName(name))
