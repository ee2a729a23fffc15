"""Stages of several sizes: which devices run each node, where stages need not be equally large.

Each size of a device group has a sharding of its own. A stage of a size takes the seconds that its
nodes and messages take in that sharding; the cut and the sizes are chosen together, for the least
largest load of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from partitioner.search.stages.figures import ONCE, Ints, StageFigures
from partitioner.search.stages.stage_lives import Floats
from partitioner.solver.stages.least_cuts import State, least_cuts

#: Most stages of a cut.
MOST_STAGES = 8


@dataclass(frozen=True)
class UnevenCut:
    """Stages of several sizes."""

    ends: tuple[int, ...]  #: Ends of the stages, exclusive, as numbers of nodes that are cut.
    sizes: tuple[int, ...]  #: Devices of each stage.
    load_s: float  #: Of the busiest stage, for one micro-batch.

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each node that is cut, in order: neighbours share a stage."""
        groups, start, first = [], 0, 0
        for end, size in zip(self.ends, self.sizes, strict=True):
            groups += [tuple(range(first, first + size))] * (end - start)
            start, first = end, first + size
        return tuple(groups)


def uneven_cuts(figures: Mapping[int, StageFigures], devices: int) -> Iterator[UnevenCut]:
    """For each number of stages the cut of least largest load over all devices, if sizes differ.

    Args:
        figures: Those of the sharding of each size of a stage; of one graph.
        devices: Number of devices.
    """
    at = figures[min(figures)].positions
    sizes = tuple(figures)
    loads = [_loads(of_size, at) for of_size in figures.values()]
    most = min(MOST_STAGES, devices)
    steps: dict[State, list[tuple[State, int]]] = {(0, 0): []}
    for stages in range(1, most + 1):
        for used in range(1, devices + 1):
            steps[stages, used] = [
                ((stages - 1, used - size), index) for index, size in enumerate(sizes)
            ]
    cuts = least_cuts(loads, steps)
    for stages in range(1, most + 1):
        load_s = float(cuts.load_s[stages, devices][-1])
        taken = cuts.stages((stages, devices)) if np.isfinite(load_s) else ()
        of_stages = tuple(sizes[load] for *_, load in taken)
        if len(set(of_stages)) > 1:
            yield UnevenCut(tuple(int(at[stop]) for _, stop, _ in taken), of_stages, load_s)


def _loads(figures: StageFigures, at: Ints) -> Floats:
    """Seconds of a stage from each position to each, infinite if it has no node."""
    sums, sent = figures.load_sums[:ONCE].sum(0)[at], 2 * figures.messages[1][at]
    sent[0] = sent[-1] = 0.0
    loads = sums[None, :] - sums[:, None] + sent[:, None] + sent[None, :]
    loads[np.tril_indices(len(at))] = np.inf
    return np.asarray(loads)
