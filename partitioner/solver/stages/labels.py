"""Exact search for a cut that fits: tails of stages, position by position from the last.

A *label* is one tail: its sum of degrees and its devices of each pool. Of two tails from one
position, one that takes no more of anything makes the other useless. Labels that no head can
complete within the devices, by the bounds of `paths`, are dropped.
"""

from __future__ import annotations

import math

import numpy as np

from partitioner.solver.stages.entries import Entries, Space
from partitioner.solver.stages.model import Ints
from partitioner.solver.stages.paths import Bounds, Lengths, Picks, bound, picks_of

#: Labels of a position that a search keeps, spread over all; None for all, the only one that
#: proves that nothing fits. Far from the least load there are thousands, of which nearly any
#: leads to a cut that fits.
WIDTHS = (4, 32, None)
#: Combinations of values up to which the lowest of a grid is looked up.
GRID = 2**22


def fit(space: Space, entries: Entries) -> tuple[Picks | None, Bounds]:
    """A cut out of settled entries that fits the devices, the memory and the degrees.

    Returns:
        The cut, None if there is none; and bounds on all cuts out of the entries.
    """
    bounds = bound(space, entries)
    if bounds.picks is not None or not bounds.fits:
        return bounds.picks, bounds
    entries = bounds.within(space, entries)
    for width in WIDTHS:
        picks, exact = search(space, entries, bounds.lengths, width)
        if picks is not None or exact:
            return picks, bounds
    raise AssertionError("the last search leaves no label out")


def search(
    space: Space, entries: Entries, lengths: tuple[Lengths, ...], width: int | None
) -> tuple[Picks | None, bool]:
    """`fit` by labels, once the bounds have not decided.

    At most `width` labels of a position are kept; None for all.

    Returns:
        A cut that fits, if one was found, and whether no label was left out.
    """
    exact, groups = True, space.groups
    size = space.positions + 1
    many, begin = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    first = np.searchsorted(space.start[entries.cell], np.arange(size))
    columns = 1 + len(space.pools)
    taken = np.zeros((1, columns), dtype=np.int64)
    entry, after = np.array([-1]), np.array([-1])
    many[-1] = 1
    for i in range(space.positions - 1, -1, -1):
        starting = np.arange(first[i], first[i + 1])
        stop = space.stop[entries.cell[starting]]
        pairs = np.repeat(starting, many[stop])
        tails = _ranges(begin[stop], many[stop])
        tried, group = taken[tails], entries.group[pairs]
        if space.coupled:
            tried[:, 0] += groups.degree[group]
        tried[np.arange(len(pairs)), 1 + groups.pool[group]] += groups.devices[group]
        allowed = tried[:, 0] <= entries.room[pairs]
        allowed &= (tried[:, 1:] <= space.pools).all(axis=1)
        for of in lengths:
            allowed &= of.head[i] + tried[:, 1:] @ of.weights <= of.limit
        keep = np.flatnonzero(allowed)
        keep = keep[frontier(tried[keep])]
        if width is not None and len(keep) > width:
            exact, keep = False, keep[np.linspace(0, len(keep) - 1, width).astype(np.int64)]
        begin[i], many[i] = len(taken), len(keep)
        taken = np.concatenate([taken, tried[keep]])
        entry = np.concatenate([entry, pairs[keep]])
        after = np.concatenate([after, tails[keep]])
    if not many[0]:
        return None, exact
    label, path = int(begin[0]), []
    while entry[label] >= 0:
        path.append(int(entry[label]))
        label = int(after[label])
    return picks_of(space, entries, path), exact


def _ranges(begin: Ints, many: Ints) -> Ints:
    """The ranges begin[e] .. begin[e] + many[e] - 1, one after another."""
    ends = np.cumsum(many)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(begin - (ends - many), many))


def frontier(taken: Ints) -> Ints:
    """Indices of the rows of which no other is as low in every column; one of equal rows."""
    columns = [column for column in taken.T if len(column) and (column != column[0]).any()]
    if not columns:
        return np.arange(min(len(taken), 1))
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns[:-1]]
    if math.prod(int(rank.max()) + 1 for rank in ranks) > GRID:
        return _by_elimination(taken, np.lexsort(taken.T[::-1]))
    return _by_grid(ranks, columns[-1])


def _by_grid(ranks: list[Ints], last: Ints) -> Ints:
    """Find for each combination of ranks the row of the lowest `last`, where that is a new low."""
    shape = tuple(int(rank.max()) + 1 for rank in ranks)
    cell = np.ravel_multi_index(ranks, shape) if ranks else np.zeros(len(last), dtype=np.int64)
    order = np.lexsort((last, cell))
    first = np.ones(len(order), dtype=bool)
    first[1:] = cell[order][1:] != cell[order][:-1]
    rows = order[first]
    lowest = np.full(math.prod(shape), np.iinfo(np.int64).max)
    lowest[cell[rows]] = last[rows]
    lowest = lowest.reshape(shape)
    for axis in range(len(shape)):
        np.minimum.accumulate(lowest, axis=axis, out=lowest)
    kept = last[rows] == lowest.reshape(-1)[cell[rows]]
    for axis, rank in enumerate(ranks):
        before = lowest.take(np.maximum(np.arange(shape[axis]) - 1, 0), axis=axis)
        kept &= (rank[rows] == 0) | (last[rows] < before.reshape(-1)[cell[rows]])
    return np.asarray(rows[kept])


def _by_elimination(taken: Ints, order: Ints) -> Ints:
    """The frontier with one pass over the rows for each that is kept; needs no memory."""
    kept = []
    while len(order):
        kept.append(int(order[0]))
        order = order[(taken[order] < taken[order[0]]).any(axis=1)]
    return np.array(kept)
