"""Messages between the phases of a step: when they have left, in the order of the ranks.

A rank gets ready to receive when it begins the run before the one that reads the message. It may
wait for one of its own to leave only where the other rank gets ready without waiting for it, in
whatever order messages travel. So each run has a depth, one more than those of the runs that it
waits for, and a rank waits before a run that is deeper than the one in which the other gets ready.
Ranks that communicate in a run wait for each other there, so it is as deep on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import networkx as nx

from partitioner.ir.phases import RunOrder

#: The way of a message: the phases that send and read it, its source and its target.
Link = tuple[int, int, int, int]
#: Ranks that communicate within a phase.
Group = tuple[int, tuple[int, ...]]


def ends_of_messages(
    order: RunOrder, links: Iterable[Link], rank: int, groups: Iterable[Group] = ()
) -> Mapping[tuple[Link, int], int]:
    """Find the place in a rank's order before which each message that it sends has left.

    The next run goes on beside the message. By link and micro-batch; one place more than there are
    runs for messages that leave at the end.
    """
    links, groups = list(links), list(groups)
    ranks = {rank}.union(*(link[2:] for link in links), *(of for _, of in groups))
    runs = {one: order.runs(one) for one in ranks}
    places = {one: {run: place for place, run in enumerate(of)} for one, of in runs.items()}
    depths = _depths(runs, places, links, _beside(groups))
    ends = {}
    for link in links:
        phase, target_phase, source, target = link
        for (made, micro_batch), place in places[source].items() if source == rank else ():
            read = places[target].get((target_phase, micro_batch))
            if made != phase or read is None:
                continue
            ready = depths[target][read - 1] if read else -1
            later = range(place + 2, len(runs[rank]))
            free = (one for one in later if depths[rank][one] > ready)
            ends[link, micro_batch] = next(free, len(runs[rank]))
    return ends


def endless_run(
    runs: Mapping[int, tuple[tuple[int, int], ...]], links: Iterable[Link], groups: Iterable[Group]
) -> tuple[int, tuple[int, int]] | None:
    """Find the first run of a rank that waits for itself, by way of others; None if none does.

    `runs` are those of all ranks, in order.
    """
    places = {one: {run: place for place, run in enumerate(of)} for one, of in runs.items()}
    for rank, depths in _depths(runs, places, links, _beside(groups)).items():
        if float("inf") in depths:
            return rank, runs[rank][depths.index(float("inf"))]
    return None


def _beside(groups: Iterable[Group]) -> Mapping[tuple[int, int], frozenset[int]]:
    """Find the ranks that each rank waits for within each phase, itself among them."""
    joined = nx.Graph()
    for phase, ranks in groups:
        nx.add_path(joined, [(rank, phase) for rank in ranks])
    return {
        one: frozenset(rank for rank, _ in of)
        for of in nx.connected_components(joined)
        for one in of
    }


def _depths(
    runs: Mapping[int, tuple[tuple[int, int], ...]],
    places: Mapping[int, Mapping[tuple[int, int], int]],
    links: Iterable[Link],
    beside: Mapping[tuple[int, int], frozenset[int]],
) -> Mapping[int, list[float]]:
    """Depths of the runs of each rank; infinite where a run waits for itself."""
    senders: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for phase, target_phase, source, target in links:
        senders[target, target_phase].append((source, phase))
    depths: dict[int, list[float]] = {rank: [] for rank in runs}
    grows = True
    while grows:
        grows = False
        for rank, of in runs.items():
            own = depths[rank]
            for target_phase, micro_batch in of[len(own) :]:
                together = beside.get((rank, target_phase), {rank})
                waits = [
                    (source, places[source][phase, micro_batch])
                    for one in together
                    for source, phase in senders[one, target_phase]
                    if (phase, micro_batch) in places[source]
                ]
                here = ((one, places[one].get((target_phase, micro_batch), 0)) for one in together)
                waits += [(one, place - 1) for one, place in here if place]
                if any(place >= len(depths[source]) for source, place in waits):
                    break
                before = (depths[source][place] for source, place in waits)
                own.append(1 + max(before, default=0))
                grows = True
    for rank, of in runs.items():
        depths[rank] += [float("inf")] * (len(of) - len(depths[rank]))
    return depths
