"""Process groups of torch.distributed, made up front in one order, and timing across ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

#: How long a rank waits for another one inside a communication.
TIMEOUT = timedelta(minutes=30)

Group = Any  #: `dist.ProcessGroup`; torch exports no type for "not a member".
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class Groups:
    """The groups of a run.

    Attributes:
        control: All ranks, on gloo: for small Python objects.
        up: All ranks: point-to-point data to higher ranks for a later round.
        down: The same to lower ranks. Two groups, because on NCCL a send waits in one queue with
            receives from the same rank, and two ranks that both send first would wait for ever.
        of: Groups of the ranks that take part in a communication, by those ranks.
    """

    control: Group
    up: Group
    down: Group
    of: Mapping[tuple[int, ...], Group]

    def mail(self, source: int, target: int) -> Group:
        """The group for data of a later round."""
        return self.up if source < target else self.down


def make_groups(rank_sets: Iterable[tuple[int, ...]], device: torch.device) -> Groups:
    """Make the groups that any rank needs, in the same order everywhere, and connect them.

    Args:
        rank_sets: Of this rank's communications.
        device: Where data lies; gloo carries the CPU's, NCCL the GPUs'.
    """
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(set(rank_sets)), group=control)
    union: list[tuple[int, ...]] = sorted({ranks for sets in gathered for ranks in sets})
    backend = "nccl" if device.type == "cuda" else "gloo"
    up, down = (dist.new_group(backend=backend, timeout=TIMEOUT) for _ in range(2))
    groups = {
        ranks: dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT) for ranks in union
    }
    member = dist.get_rank()
    for group in (up, down, *(group for ranks, group in groups.items() if member in ranks)):
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # connect before data flows
    return Groups(control, up, down, groups)


def timed(
    serve: Callable[[int], _ResultT], requests: int, group: Group = None
) -> tuple[_ResultT, float]:
    """Serve one request to warm up, then all of them; their results and the slowest rank's seconds.

    Args:
        serve: Runs this number of requests.
        requests: At least 1.
        group: All ranks, on gloo; None for the default group.
    """
    serve(1)
    dist.barrier(group=group)
    start = time.perf_counter()
    results = serve(requests)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return results, seconds.item()
