"""Measures the communications between processes, and adds them to profiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from partitioner.api.profiling.measure import Timing
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import (
    Profile,
    beside,
    check_writable,
    in_groups,
    over,
    write_entries,
)
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.foundations import units
from partitioner.search.request import Say

if TYPE_CHECKING:
    from partitioner.api.profiling.gloo import LinkGroup, Place, Wanted


def groups_of(cluster: Cluster) -> tuple[LinkGroup, ...]:
    """The groups of a cluster's ranks whose communications are measured."""
    from partitioner.api.profiling.gloo import link_groups

    return link_groups([(level.name, level.size) for level in cluster.levels])


def unknown_links(profiles: Iterable[Profile], groups: Sequence[LinkGroup]) -> tuple[Wanted, ...]:
    """The communications of groups that no profile has from this backend."""
    from partitioner.api.profiling import gloo

    known = {
        (kind, ranks, entry.nbytes, profile.level)
        for profile in profiles
        for (kind, ranks), entries in profile.links.items()
        for entry in entries
        if entry.backend == gloo.NAME
    }
    return tuple(
        (kind, group, nbytes)
        for kind, group, nbytes in gloo.wanted_of(groups)
        if (in_groups(kind, group.each), len(group.ranks), nbytes, group.level) not in known
    )


def measure_here(known: Profile, wanted: Sequence[Wanted], end_s: float, say: Say) -> int:
    """Measure communications between processes of this machine until `end_s`; their number.

    Each counts twice, with its seconds beside compute.
    """
    from partitioner.api.profiling import gloo

    ranks = max(len(group.ranks) for _, group, _ in wanted)
    say(f"measuring communications between {ranks} processes")
    return _write(known, gloo.measure_links(wanted, end_s))


def measure_together(cluster: Cluster, end_s: float, say: Say) -> tuple[int, int]:
    """Measure those of all groups between the processes that torchrun started, until `end_s`.

    Every process calls it; rank 0 adds the measurements of each level to the level's profile, and
    knows from these what is new.

    Returns:
        The number of what was measured, and of what is still unknown.

    Raises:
        CostError: There are more or fewer processes than devices, or a level names no profile.
        BackendError: A process has not started.
    """
    import torch.distributed as dist

    from partitioner.api.profiling import gloo

    profiles = {}
    for level in cluster.levels:
        if level.profile is None:
            raise CostError(
                f"cluster {cluster.name!r}: level {level.name!r} names no profile, which its "
                "communications would be added to"
            )
        profiles[level.profile.level] = level.profile
    with _started(len(cluster)):
        rank = dist.get_rank()
        if rank == 0:
            for profile in profiles.values():
                check_writable(profile.file)
            say(f"measuring communications between {len(cluster)} processes of torchrun")
        new = [unknown_links(profiles.values(), groups_of(cluster))]
        dist.broadcast_object_list(new)
        (wanted,) = new
        measured = gloo.measure_links_together(wanted, end_s) if wanted else {}
    for name, profile in profiles.items():
        of_level = {place: seconds for place, seconds in measured.items() if place[1].level == name}
        if rank == 0:
            _write(profile, of_level)
    return len(measured), 2 * len(wanted) - len(measured)


@contextmanager
def _started(ranks: int) -> Iterator[None]:
    """torch.distributed over gloo between so many processes; it may be up already."""
    import torch.distributed as dist

    from partitioner.backends.process_group import TIMEOUT, Start

    is_up = dist.is_initialized()
    if not is_up:
        start = Start.of_environment()
        dist.init_process_group(
            "gloo", store=start.store, rank=start.rank, world_size=start.ranks, timeout=TIMEOUT
        )
    try:
        if dist.get_world_size() != ranks:
            raise CostError(
                f"the cluster has {ranks} devices, torchrun started {dist.get_world_size()} "
                "processes"
            )
        yield
        dist.barrier()
    finally:
        if not is_up:
            dist.destroy_process_group()


def _write(known: Profile, measured: Mapping[Place, Sequence[float]]) -> int:
    """Add seconds of turns to a profile; their number."""
    from partitioner.api.profiling import gloo

    entries = []
    for (kind, group, nbytes, is_beside), seconds in measured.items():
        grouped = in_groups(kind, group.each)
        entries.append(
            LinkEntry(
                over(beside(grouped) if is_beside else grouped, group.level),
                len(group.ranks),
                nbytes,
                *Timing.of(seconds),
                gloo.NAME,
                units.now(),
            )
        )
    write_entries(known.file, known.device, known.threads, entries)
    return len(entries)
