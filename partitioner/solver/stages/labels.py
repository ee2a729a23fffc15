"""Whether any cut fits, exactly: tails by what they take, position by position from the last.

A *label* is one tail: its sum of degrees and its devices of each pool. Of two tails from one
position, one that takes no more of anything makes the other useless. Labels that no head can
complete within the devices, by the bounds of `paths`, are dropped.
"""

from __future__ import annotations

import numpy as np

from partitioner.solver.stages.paths import (
    Lengths,
    Picks,
    follow_tails,
    least_tails,
    picks_of,
    try_weights,
    with_room,
    within,
)
from partitioner.solver.stages.runs import Bools, Ints, Runs, Space


def fit(space: Space, runs: Runs) -> Picks | None:
    """A cut out of the entries that fits the devices, the memory and the degrees; None if none.

    Args:
        space: Of the entries.
        runs: Settled entries, sorted by interval.
    """
    if space.coupled:
        tails, pick = least_tails(space, runs)
        if tails[0] < 0:
            return None
        picks = picks_of(space, runs, follow_tails(space, runs, pick))
        if picks is not None:
            return picks
        runs = with_room(space, runs, tails)
    picks, lengths = try_weights(space, runs)
    if picks is not None or not lengths:
        return picks
    return search(space, runs.where(within(space, runs, lengths)), lengths)


def search(space: Space, runs: Runs, lengths: tuple[Lengths, ...]) -> Picks | None:
    """`fit` by labels, once the bounds have not decided."""
    size = space.positions + 1
    many, begin = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    first = np.searchsorted(space.start[runs.cell], np.arange(size))
    columns = 1 + len(space.pools)
    taken = np.zeros((1, columns), dtype=np.int64)
    entry, after = np.array([-1]), np.array([-1])
    many[-1] = 1
    for i in range(space.positions - 1, -1, -1):
        own = np.arange(first[i], first[i + 1])
        stop = space.stop[runs.cell[own]]
        pairs = np.repeat(own, many[stop])
        tails = _ranges(begin[stop], many[stop])
        tried = _extended(space, runs, pairs, taken[tails])
        keep = np.flatnonzero(_allowed(space, runs, pairs, tried, lengths, i))
        keep = keep[frontier(tried[keep])]
        begin[i], many[i] = len(taken), len(keep)
        taken = np.concatenate([taken, tried[keep]])
        entry = np.concatenate([entry, pairs[keep]])
        after = np.concatenate([after, tails[keep]])
    if not many[0]:
        return None
    label, entries = int(begin[0]), []
    while entry[label] >= 0:
        entries.append(int(entry[label]))
        label = int(after[label])
    return picks_of(space, runs, entries)


def _ranges(begin: Ints, many: Ints) -> Ints:
    """The ranges begin[e] .. begin[e] + many[e] - 1, one after another."""
    ends = np.cumsum(many)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(begin - (ends - many), many))


def _extended(space: Space, runs: Runs, pairs: Ints, taken: Ints) -> Ints:
    groups, group = space.groups, runs.group[pairs]
    tried = taken.copy()
    if space.coupled:
        tried[:, 0] += groups.degree[group]
    tried[np.arange(len(pairs)), 1 + groups.pool[group]] += groups.devices[group]
    return tried


def _allowed(
    space: Space, runs: Runs, pairs: Ints, tried: Ints, lengths: tuple[Lengths, ...], i: int
) -> Bools:
    fits = (tried[:, 1:] <= space.pools).all(axis=1)
    fits &= tried[:, 0] <= runs.room[pairs]
    for of in lengths:
        fits &= of.head[i] + tried[:, 1:] @ of.weights <= of.limit
    return np.asarray(fits)


def frontier(taken: Ints) -> Ints:
    """Indices of the rows of which no other is as low in every column; one of equal rows."""
    columns = np.flatnonzero((taken != taken[:1]).any(axis=0))
    order = np.lexsort(taken.T[::-1])
    if len(columns) <= 1:
        return order[:1]
    if len(columns) == 2:
        last = taken[order, columns[1]]
        lower = np.ones(len(order), dtype=bool)
        lower[1:] = last[1:] < np.minimum.accumulate(last)[:-1]
        return order[lower]
    kept = []
    while len(order):
        kept.append(int(order[0]))
        order = order[(taken[order] < taken[order[0]]).any(axis=1)]
    return np.array(kept)
