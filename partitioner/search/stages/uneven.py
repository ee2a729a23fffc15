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

#: Most stages of a cut.
MOST_STAGES = 8


@dataclass(frozen=True)
class UnevenCut:
    """Stages of several sizes.

    Attributes:
        ends: Ends of the stages, exclusive, as numbers of nodes that are cut.
        sizes: Devices of each stage.
        load_s: Of the busiest stage, for one micro-batch.
    """

    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    load_s: float

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
    loads = {size: _loads(of_size, at) for size, of_size in figures.items()}
    count = len(at) - 1
    most = np.full((devices + 1, count + 1), np.inf)
    most[0, 0] = 0.0
    choices: list[tuple[Ints, Ints]] = []  # by number of stages: size and start of the last one
    for _ in range(min(MOST_STAGES, devices)):
        following = np.full_like(most, np.inf)
        sizes, starts = (np.zeros(most.shape, np.int64) for _ in range(2))
        for used in range(1, devices + 1):
            for size, load in loads.items():
                if size > used:
                    continue
                worst = np.maximum(most[used - size][:, None], load)
                least, start = worst.min(axis=0), worst.argmin(axis=0)
                better = least < following[used]
                following[used][better] = least[better]
                sizes[used][better], starts[used][better] = size, start[better]
        most = following
        choices.append((sizes, starts))
        if np.isfinite(most[devices, count]):
            cut = _cut(choices, at, devices, float(most[devices, count]))
            if len(set(cut.sizes)) > 1:
                yield cut


def _loads(figures: StageFigures, at: Ints) -> Floats:
    """Seconds of a stage from each position to each, infinite if it has no node."""
    sums, sent = figures.load_sums[:ONCE].sum(0)[at], 2 * figures.messages[1][at]
    sent[0] = sent[-1] = 0.0
    loads = sums[None, :] - sums[:, None] + sent[:, None] + sent[None, :]
    loads[np.tril_indices(len(at))] = np.inf
    return np.asarray(loads)


def _cut(choices: list[tuple[Ints, Ints]], at: Ints, devices: int, load_s: float) -> UnevenCut:
    """The cut that ends with all devices at the last position."""
    used, stop, ends, taken = devices, len(at) - 1, [], []
    for sizes, starts in reversed(choices):
        ends.append(int(at[stop]))
        taken.append(int(sizes[used, stop]))
        used, stop = used - taken[-1], int(starts[used, stop])
    return UnevenCut(tuple(reversed(ends)), tuple(reversed(taken)), load_s)
