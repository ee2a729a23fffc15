"""Stages over devices in their order, each the cheapest path within the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.search.blocks.paths import PathSearch
from partitioner.search.blocks.runs import Option, Runs
from partitioner.solver import Objective


@dataclass(frozen=True)
class Chain:
    """Stages from the first node to a position."""

    longest_s: float = 0.0
    sum_s: float = 0.0
    stages: tuple[tuple[int, int], ...] = ()
    options: tuple[Option, ...] = ()

    def rank(self, objective: Objective) -> tuple[float, ...]:
        """The seconds by which chains are compared, those of the objective first."""
        both = self.longest_s, self.sum_s
        return both[::-1] if objective == "latency" else both


def staged(
    cluster: Cluster, searches: Mapping[DeviceSpec, PathSearch], margin: float, objective: Objective
) -> Chain | None:
    """The best stages over the devices in their order, some of which may be left out."""
    any_search = next(iter(searches.values()))
    count = len(any_search.graph.nodes)
    starts = any_search.starts
    best: dict[int, Chain] = {0: Chain()}
    for device, spec in enumerate(cluster.devices):
        search, after = searches[spec], dict(best)
        for begin in starts:
            if begin not in best:
                continue
            for stop, path in search.paths_from(begin, margin).items():
                chain = best[begin]
                seconds = path.seconds + _arriving_s(any_search.runs, cluster, begin, chain, device)
                longer = Chain(
                    max(chain.longest_s, seconds),
                    chain.sum_s + seconds,
                    (*chain.stages, (begin, device)),
                    (*chain.options, *path.runs),
                )
                known = after.get(stop)
                if known is None or longer.rank(objective) < known.rank(objective):
                    after[stop] = longer
        best = after
    return best.get(count)


def _arriving_s(runs: Runs, cluster: Cluster, begin: int, chain: Chain, device: int) -> float:
    """Seconds of sending a stage what lives where it begins."""
    if not chain.stages:
        return 0.0
    level = cluster.level((chain.stages[-1][1], device))
    return level.message_s + level.transfer_s(runs.around(begin, begin)[1])
