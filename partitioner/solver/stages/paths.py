"""Shortest paths over the intervals: what every cut must take, and cuts that often fit.

With the coupling of memory left out, the devices that a cut takes, weighted by pool, are the
length of a path from position 0 to the last. A shortest path bounds every cut from below for any
weights; weights for which no path is within the weighted devices there are prove that nothing
fits. Before that, the least sum of degrees of every tail is found, which is exact: a smaller sum
never hurts the stages before. So stages that have no room even for the least tail are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.solver.stages.model import Bools, Floats, Ints
from partitioner.solver.stages.runs import Runs, Space

Picks = tuple[tuple[int, int, int], ...]  #: (interval, group, sum of degrees from here) a stage.

#: Sums of devices are below this.
DEVICES = 2**40
#: Relative error that a sum of weighted devices may have.
ROUNDING = 1e-9
#: Trials of weights; a few find nearly the best of two.
TRIALS = 8


@dataclass(frozen=True, eq=False)
class Lengths:
    """Shortest paths under one weight a pool.

    Attributes:
        weights: Of a device of each pool; (pools,).
        limit: Weighted devices that there are, a little more for rounding.
        tail: Shortest from each position to the last; (n + 1,).
        head: Shortest from position 0 to each; (n + 1,).
    """

    weights: Floats
    limit: float
    tail: Floats
    head: Floats


def least_tails(space: Space, runs: Runs) -> tuple[Ints, Ints]:
    """Least sum of degrees from each position on, and the entry that starts it; -1 if none.

    Among equal sums the one of the fewest devices. Entries are sorted by interval.
    """
    key = np.full(space.positions + 1, -1)
    pick = np.full(space.positions + 1, -1)
    key[-1] = 0
    first = np.searchsorted(space.start[runs.cell], np.arange(space.positions + 1))
    stop, degree = space.stop[runs.cell], space.groups.degree[runs.group]
    step = degree * DEVICES + space.groups.devices[runs.group]
    slack = runs.room - degree
    for i in range(space.positions - 1, -1, -1):
        own = slice(first[i], first[i + 1])
        tail = key[stop[own]]
        fits = np.flatnonzero((tail >= 0) & (tail // DEVICES <= slack[own]))
        if len(fits):
            total = tail[fits] + step[own][fits]
            best = int(total.argmin())
            key[i], pick[i] = total[best], first[i] + fits[best]
    return np.where(key < 0, -1, key // DEVICES), pick


def _has_room(space: Space, runs: Runs, tails: Ints) -> Bools:
    """Which entries have room for the least tail after them."""
    tail = tails[space.stop[runs.cell]]
    return np.asarray((tail >= 0) & (tail + space.groups.degree[runs.group] <= runs.room))


@dataclass(frozen=True, eq=False)
class Matrices:
    """Fewest devices of each pool on each interval, and the entry; (pools, n + 1, n + 1)."""

    devices: Floats
    entry: Ints

    @staticmethod
    def of(space: Space, runs: Runs) -> Matrices:
        """From entries sorted by interval, then group: the first of a pool takes the fewest."""
        pool = space.groups.pool[runs.group]
        first = np.ones(len(runs), dtype=bool)
        first[1:] = (runs.cell[1:] != runs.cell[:-1]) | (pool[1:] != pool[:-1])
        entry = np.flatnonzero(first)
        at = pool[entry], space.start[runs.cell[entry]], space.stop[runs.cell[entry]]
        shape = (len(space.pools), space.positions + 1, space.positions + 1)
        devices, entries = np.full(shape, np.inf), np.full(shape, -1)
        devices[at] = space.groups.devices[runs.group[entry]]
        entries[at] = entry
        return Matrices(devices, entries)


def least_of(space: Space, runs: Runs, values: Floats) -> Floats:
    """[i, j]: the least of one value an entry over the entries of positions i to j - 1."""
    side = space.positions + 1
    least = np.full(side * side, np.inf)
    np.minimum.at(least, space.start[runs.cell] * side + space.stop[runs.cell], values)
    return least.reshape(side, side)


def tail_lengths(cost: Floats) -> tuple[Floats, Ints]:
    """Length of the shortest path from each position to the last, and its next position."""
    size = len(cost)
    length, follow = np.full(size, np.inf), np.full(size, -1)
    length[-1] = 0.0
    for i in range(size - 2, -1, -1):
        total = cost[i, i + 1 :] + length[i + 1 :]
        best = int(total.argmin())
        length[i], follow[i] = total[best], i + 1 + best
    return length, follow


def head_lengths(cost: Floats) -> Floats:
    """Length of the shortest path from position 0 to each."""
    length = np.full(len(cost), np.inf)
    length[0] = 0.0
    for i in range(len(cost) - 1):
        np.minimum(length[i + 1 :], length[i] + cost[i, i + 1 :], out=length[i + 1 :])
    return length


def picks_of(space: Space, runs: Runs, entries: list[int]) -> Picks | None:
    """A path as stages, if there is room for all and the devices suffice; None otherwise."""
    degree, devices = space.groups.degree[runs.group], space.groups.devices[runs.group]
    total, found = 0, []
    for entry in reversed(entries):
        total += int(degree[entry])
        if space.coupled and total > runs.room[entry]:
            return None
        found.append((int(runs.cell[entry]), int(runs.group[entry]), total))
    used = np.bincount(
        space.groups.pool[runs.group[entries]], devices[entries], minlength=len(space.pools)
    )
    return None if (used > space.pools).any() else tuple(reversed(found))


def follow_tails(space: Space, runs: Runs, pick: Ints) -> list[int]:
    """The entries of the cut of the least sum of degrees."""
    position, entries = 0, []
    while position < space.positions:
        entries.append(int(pick[position]))
        position = int(space.stop[runs.cell[entries[-1]]])
    return entries


@dataclass(frozen=True, eq=False)
class Bounds:
    """What any cut out of some entries takes at least, and a cut if one was met on the way.

    Attributes:
        fits: False if it is proven that no cut fits.
        picks: A cut that fits, if one was met.
        tails: Least sum of degrees from each position; (n + 1,).
        lengths: Under each of the weights that were tried.
    """

    fits: bool
    picks: Picks | None
    tails: Ints
    lengths: tuple[Lengths, ...]

    def within(self, space: Space, runs: Runs) -> Runs:
        """The entries that may be in a cut that is within all limits."""
        start, stop = space.start[runs.cell], space.stop[runs.cell]
        devices, pool = space.groups.devices[runs.group], space.groups.pool[runs.group]
        mask = _has_room(space, runs, self.tails)
        for of in self.lengths:
            mask &= of.head[start] + of.weights[pool] * devices + of.tail[stop] <= of.limit
        return runs.where(mask)


def bound(space: Space, runs: Runs) -> Bounds:
    """Bounds on the cuts out of settled entries, sorted by interval."""
    picks, tails = None, np.zeros(space.positions + 1, dtype=np.int64)
    if space.coupled:
        tails, pick = least_tails(space, runs)
        if tails[0] < 0:
            return Bounds(False, None, tails, ())
        picks = picks_of(space, runs, follow_tails(space, runs, pick))
        runs = runs.where(_has_room(space, runs, tails))
    matrices = Matrices.of(space, runs)
    weights = 1.0 / np.maximum(space.pools, 1)
    found: list[Lengths] = []
    for trial in range(1 if len(space.pools) == 1 else TRIALS):
        weighted = matrices.devices * weights[:, None, None]
        cost = weighted.min(axis=0)
        tail, follow = tail_lengths(cost)
        limit = float(weights @ space.pools) * (1 + ROUNDING)
        found.append(Lengths(weights, limit, tail, head_lengths(cost)))
        if tail[0] > limit:
            return Bounds(False, None, tails, ())
        entries = _entries_along(matrices, weighted.argmin(axis=0), follow)
        picks = picks or picks_of(space, runs, entries)
        if picks is not None:
            break
        weights = _reweighted(space, runs, entries, weights, trial)
    return Bounds(True, picks, tails, tuple(found))


def _entries_along(matrices: Matrices, pool: Ints, follow: Ints) -> list[int]:
    position, entries = 0, []
    while position < len(follow) - 1:
        after = int(follow[position])
        entries.append(int(matrices.entry[pool[position, after], position, after]))
        position = after
    return entries


def _reweighted(
    space: Space, runs: Runs, entries: list[int], weights: Floats, trial: int
) -> Floats:
    """Dearer devices of the pools of which the path takes too many, in ever smaller steps."""
    group = runs.group[entries]
    used = np.bincount(
        space.groups.pool[group], space.groups.devices[group], minlength=len(space.pools)
    )
    over = np.clip(used / np.maximum(space.pools, 1), 0.25, 4.0)
    changed: Floats = weights * over ** (1.0 / (1 + trial))
    return changed
