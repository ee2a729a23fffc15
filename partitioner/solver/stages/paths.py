"""A cut that fits, exactly: shortest paths over the intervals, then labels of tails.

With the coupling of memory left out, the devices that a cut takes, weighted by pool, are the
length of a path from position 0 to the last. A shortest path bounds every cut from below for any
weights; weights for which no path is within the weighted devices prove that nothing fits. Before
that, the least sum of degrees of every tail is found, which is exact: a smaller sum never hurts the
stages before. So stages that have no room even for the least tail are dropped.

What these bounds do not decide, labels do, position by position from the last. A *label* is one
tail: its sum of degrees and its devices of each pool. Of two tails from one position, one that
takes no more of anything makes the other useless. Labels that no head can complete within the
devices, by the bounds, are dropped.

All possible stages are flat arrays of *entries*. Once a stage's load is known to count no longer,
only the devices that it takes, its degree and its *room* matter: the largest sum of degrees, from
it to the last stage, at which its memory (and the limit on all degrees) still holds. Of stages of
the same interval, pool and degree, one that takes more devices must have more room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from partitioner.solver.stages.model import (
    Bools,
    Floats,
    Ints,
    Stage,
    StageOption,
    StageProblem,
    flights,
)


@dataclass(frozen=True, eq=False)
class Groups:
    """Options that differ in load and memory only, merged; sorted by pool, devices, degree."""

    pool: Ints  #: Of each group.
    devices: Ints  #: Devices that a stage of each group takes.
    degree: Ints  #: Of each group.
    of: tuple[int, ...]  #: Group of each option.
    #: Lists of groups, by devices, within which more devices must mean more room.
    classes: tuple[Ints, ...]


@dataclass(frozen=True, eq=False)
class Entries:
    """Possible stages: entry e is interval `cell[e]` on group `group[e]`."""

    cell: Ints  #: Index of the interval, in `Space.start` and `Space.stop`.
    group: Ints  #: Index of the group.
    room: Ints  #: Largest sum of degrees from this stage to the last.
    load_s: Floats  #: Its load.

    def where(self, mask: Bools) -> Entries:
        """The entries of a mask."""
        return Entries(self.cell[mask], self.group[mask], self.room[mask], self.load_s[mask])

    def __len__(self) -> int:
        return len(self.cell)


@dataclass(frozen=True, eq=False)
class Space:
    """The parts of a problem that all loads share."""

    positions: int  #: Number of positions.
    pools: Ints  #: Devices of each pool.
    groups: Groups  #: The groups of options.
    start: Ints  #: Of each interval; intervals are sorted by start, then stop.
    stop: Ints  #: Of each interval.
    coupled: bool  #: Whether some stage's room is below every possible sum of degrees.


def lay_out(problem: StageProblem) -> tuple[Space, Entries]:
    """All stages that fit their memory alone, way by way, as entries."""
    side = problem.positions + 1
    upper = np.flatnonzero(np.triu(np.ones((side, side), dtype=bool), 1))
    # bound the sum of degrees of all cuts
    by_device = [0.0] * len(problem.pools)
    for option in problem.options:
        by_device[option.pool] = max(by_device[option.pool], option.degree / option.devices)
    by_pool = (
        math.floor(pool.devices * degrees + 1e-6)
        for pool, degrees in zip(problem.pools, by_device, strict=True)
    )
    by_stage = problem.positions * max(option.degree for option in problem.options)
    most = min(sum(by_pool), by_stage)
    keys = [(o.pool, o.devices, o.degree) for o in problem.options]
    order = sorted(set(keys))
    of = tuple(order.index(key) for key in keys)
    # by devices, less those that are useless beside earlier ones: where an option of the same pool
    # and degree, on as few devices, is as fast and has room for everything, as in most intervals
    largest = most if problem.most_degrees is None else min(most, problem.most_degrees)
    fastest: dict[tuple[int, int], Floats] = {}
    parts = []
    for index in sorted(range(len(of)), key=of.__getitem__):
        option = problem.options[index]
        if option.devices > problem.pools[option.pool].devices:
            continue
        least = fastest.setdefault((option.pool, option.degree), np.full(len(upper), np.inf))
        part = _entries(problem, option, of[index], upper, most, least)
        roomy = part.room == largest
        np.minimum.at(least, part.cell[roomy], part.load_s[roomy])
        parts.append(part)
    entries = join(parts)
    coupled = bool((entries.room < most).any())
    classes: dict[tuple[int, int], list[int]] = {}
    for group, key in enumerate(order):
        classes.setdefault((key[0], key[2] if coupled else 0), []).append(group)
    pool, devices, degree = (np.array(column) for column in zip(*order, strict=True))
    groups = Groups(pool, devices, degree, of, tuple(map(np.array, classes.values())))
    pools = np.array([pool.devices for pool in problem.pools])
    start, stop = np.divmod(upper, side)
    return Space(problem.positions, pools, groups, start, stop, coupled), entries


def join(parts: Sequence[Entries]) -> Entries:
    """The entries of all parts."""
    none = np.zeros(0, dtype=np.int64)
    parts = parts or [Entries(none, none, none, np.zeros(0))]
    columns = ([getattr(part, field.name) for part in parts] for field in fields(Entries))
    return Entries(*map(np.concatenate, columns))


def _entries(
    problem: StageProblem, option: StageOption, group: int, upper: Ints, most: int, below: Floats
) -> Entries:
    """The entries of an option with loads below some, (intervals,)."""
    ways = len(option.load_s)
    loads = option.load_s.reshape(ways, -1)[:, upper]
    way, cell = np.nonzero(loads < below)
    at = upper[cell]
    many = most_in_flight(
        problem.pools[option.pool].limit_bytes,
        option.resident_bytes.reshape(ways, -1)[way, at],
        option.flying_bytes.reshape(ways, -1)[way, at],
        most,
    )
    if problem.in_flight:
        room = np.minimum(many * option.degree, most)
    else:
        room = np.where(many >= 1, most, 0)
    if problem.most_degrees is not None:
        room = np.minimum(room, problem.most_degrees)
    fits = room >= option.degree
    room = room[fits].astype(np.int64)
    return Entries(cell[fits], np.full(len(room), group), room, loads[way[fits], cell[fits]])


def most_in_flight(limit_bytes: float, resident: Floats, flying: Floats, most: int) -> Floats:
    """Micro-batches in flight at which `resident + flying * many <= limit`, `most` at most.

    Exact in the arithmetic of that very comparison; below 1 where not even one fits.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        many = np.floor((limit_bytes - resident) / flying)
        many = np.where(flying > 0, many, np.where(resident <= limit_bytes, most, 0))
        many = np.clip(np.nan_to_num(many, nan=0.0), 0, most)
        many = many - (resident + flying * many > limit_bytes)
        more = (many < most) & (resident + flying * (many + 1) <= limit_bytes)
        return np.asarray(many + more)


def settle(space: Space, entries: Entries) -> Entries:
    """The entries less those that others make useless if no load counts, sorted by interval.

    The loads of the result are 0.
    """
    many = len(space.groups.pool)
    cells = np.flatnonzero(np.bincount(entries.cell, minlength=len(space.start)))
    row = np.zeros(len(space.start), dtype=np.int64)
    row[cells] = np.arange(len(cells))
    table = np.zeros((len(cells), many), dtype=np.int64)
    np.maximum.at(table.reshape(-1), row[entries.cell] * many + entries.group, entries.room)
    for groups in space.groups.classes:
        rooms = table[:, groups]
        fewer = np.zeros_like(rooms)
        np.maximum.accumulate(rooms[:, :-1], axis=1, out=fewer[:, 1:])
        table[:, groups] = np.where(rooms > fewer, rooms, 0)
    at, group = np.nonzero(table)
    return Entries(cells[at], group, table[at, group], np.zeros(len(at)))


Picks = tuple[tuple[int, int, int], ...]  #: (interval, group, sum of degrees from here) a stage.

#: Sums of devices are below this.
DEVICES = 2**40
#: Relative error that a sum of weighted devices may have.
ROUNDING = 1e-9
#: Trials of weights; a few find nearly the best of two.
TRIALS = 8


@dataclass(frozen=True, eq=False)
class Lengths:
    """Shortest paths under one weight a pool."""

    weights: Floats  #: Of a device of each pool; (pools,).
    limit: float  #: Weighted devices that there are, a little more for rounding.
    tail: Floats  #: Shortest from each position to the last; (n + 1,).
    head: Floats  #: Shortest from position 0 to each; (n + 1,).


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds on all cuts out of some entries, and a cut if one was met on the way."""

    fits: bool  #: False if it is proven that no cut fits.
    picks: Picks | None  #: A cut that fits, if one was met.
    tails: Ints  #: Least sum of degrees from each position; (n + 1,).
    lengths: tuple[Lengths, ...]  #: Under each of the weights that were tried.

    def within(self, space: Space, entries: Entries) -> Entries:
        """The entries that may be in a cut that is within all limits."""
        start, stop = space.start[entries.cell], space.stop[entries.cell]
        devices, pool = space.groups.devices[entries.group], space.groups.pool[entries.group]
        mask = _has_room(space, entries, self.tails)
        for of in self.lengths:
            mask &= of.head[start] + of.weights[pool] * devices + of.tail[stop] <= of.limit
        return entries.where(mask)


def bound(space: Space, entries: Entries) -> Bounds:
    """Bounds on the cuts out of settled entries, sorted by interval."""
    picks, tails = None, np.zeros(space.positions + 1, dtype=np.int64)
    if space.coupled:
        tails, pick = least_tails(space, entries)
        if tails[0] < 0:
            return Bounds(False, None, tails, ())
        path, position = [], 0
        while position < space.positions:
            path.append(int(pick[position]))
            position = int(space.stop[entries.cell[path[-1]]])
        picks = picks_of(space, entries, path)
        entries = entries.where(_has_room(space, entries, tails))
    # fewest devices of each pool on each interval, and the entry; (pools, n + 1, n + 1)
    pool_of = space.groups.pool[entries.group]
    first = np.ones(len(entries), dtype=bool)  # of a pool: entries are sorted by interval and group
    first[1:] = (entries.cell[1:] != entries.cell[:-1]) | (pool_of[1:] != pool_of[:-1])
    least = np.flatnonzero(first)
    at = pool_of[least], space.start[entries.cell[least]], space.stop[entries.cell[least]]
    shape = (len(space.pools), space.positions + 1, space.positions + 1)
    devices, entry = np.full(shape, np.inf), np.full(shape, -1)
    devices[at], entry[at] = space.groups.devices[entries.group[least]], least
    weights = 1.0 / np.maximum(space.pools, 1)
    lengths: list[Lengths] = []
    for trial in range(1 if len(space.pools) == 1 else TRIALS):
        weighted = devices * weights[:, None, None]
        cost = weighted.min(axis=0)
        tail, follow = tail_lengths(cost)
        limit = float(weights @ space.pools) * (1 + ROUNDING)
        lengths.append(Lengths(weights, limit, tail, head_lengths(cost)))
        if tail[0] > limit:
            return Bounds(False, None, tails, ())
        pool = weighted.argmin(axis=0)
        path, position = [], 0
        while position < space.positions:
            start, position = position, int(follow[position])
            path.append(int(entry[pool[start, position], start, position]))
        picks = picks or picks_of(space, entries, path)
        if picks is not None:
            break
        # dearer devices of the pools of which the path takes too many, in ever smaller steps
        over = np.clip(_used(space, entries, path) / np.maximum(space.pools, 1), 0.25, 4.0)
        weights = weights * over ** (1.0 / (1 + trial))
    return Bounds(True, picks, tails, tuple(lengths))


def least_tails(space: Space, entries: Entries) -> tuple[Ints, Ints]:
    """Least sum of degrees from each position on, and the entry that starts it; -1 if none.

    Among equal sums the one of the fewest devices. Entries are sorted by interval.
    """
    key = np.full(space.positions + 1, -1)
    pick = np.full(space.positions + 1, -1)
    key[-1] = 0
    first = np.searchsorted(space.start[entries.cell], np.arange(space.positions + 1))
    stop, degree = space.stop[entries.cell], space.groups.degree[entries.group]
    step = degree * DEVICES + space.groups.devices[entries.group]
    slack = entries.room - degree
    for i in range(space.positions - 1, -1, -1):
        starting = slice(first[i], first[i + 1])
        tail = key[stop[starting]]
        fits = np.flatnonzero((tail >= 0) & (tail // DEVICES <= slack[starting]))
        if len(fits):
            total = tail[fits] + step[starting][fits]
            best = int(total.argmin())
            key[i], pick[i] = total[best], first[i] + fits[best]
    return np.where(key < 0, -1, key // DEVICES), pick


def _has_room(space: Space, entries: Entries, tails: Ints) -> Bools:
    """Test whether each entry has room for the least tail after it."""
    tail = tails[space.stop[entries.cell]]
    return np.asarray((tail >= 0) & (tail + space.groups.degree[entries.group] <= entries.room))


def least_of(space: Space, entries: Entries, values: Floats) -> Floats:
    """[i, j]: the least of one value an entry over the entries of positions i to j - 1."""
    side = space.positions + 1
    least = np.full(side * side, np.inf)
    np.minimum.at(least, space.start[entries.cell] * side + space.stop[entries.cell], values)
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
    return tail_lengths(cost[::-1, ::-1].T)[0][::-1]


def _used(space: Space, entries: Entries, path: Sequence[int]) -> Floats:
    group = entries.group[path]
    devices = space.groups.devices[group]
    used = np.bincount(space.groups.pool[group], devices, minlength=len(space.pools))
    return used.astype(np.float64)


def picks_of(space: Space, entries: Entries, path: Sequence[int]) -> Picks | None:
    """A path as stages, if there is room for all and the devices suffice; None otherwise."""
    total, picks = 0, []
    for entry in reversed(path):
        group = int(entries.group[entry])
        total += int(space.groups.degree[group])
        if space.coupled and total > entries.room[entry]:
            return None
        picks.append((int(entries.cell[entry]), group, total))
    return None if (_used(space, entries, path) > space.pools).any() else tuple(reversed(picks))


def stages_of(problem: StageProblem, space: Space, picks: Picks) -> tuple[Stage, ...]:
    """The stages of a path, each on the option of its group and in the way of the least load."""
    degrees = [int(space.groups.degree[group]) for _, group, _ in picks]
    flying = flights(degrees, in_flight=problem.in_flight)
    stages = []
    for (cell, group, _), many in zip(picks, flying, strict=True):
        i, j = int(space.start[cell]), int(space.stop[cell])
        best, least = Stage(i, j, -1, -1), np.inf
        for index, option in enumerate(problem.options):
            if space.groups.of[index] != group:
                continue
            held = option.resident_bytes[:, i, j] + option.flying_bytes[:, i, j] * many
            fits = held <= problem.pools[option.pool].limit_bytes
            loads = np.where(fits, option.load_s[:, i, j], np.inf)
            way = int(loads.argmin())
            if loads[way] < least:
                least, best = float(loads[way]), Stage(i, j, index, way)
        stages.append(best)
    return tuple(stages)


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
        # the ranges begin[e] .. begin[e] + many[e] - 1, one after another
        ends = np.cumsum(many[stop])
        total = int(ends[-1]) if len(ends) else 0
        tails = np.asarray(
            np.arange(total) + np.repeat(begin[stop] - (ends - many[stop]), many[stop])
        )
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


def frontier(taken: Ints) -> Ints:
    """Indices of the rows of which no other is as low in every column; one of equal rows."""
    columns = [column for column in taken.T if len(column) and (column != column[0]).any()]
    if not columns:
        return np.arange(min(len(taken), 1))
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns[:-1]]
    if math.prod(int(rank.max()) + 1 for rank in ranks) > GRID:
        # the frontier with one pass over the rows for each that is kept; needs no memory
        order = np.lexsort(taken.T[::-1])
        kept = []
        while len(order):
            kept.append(int(order[0]))
            order = order[(taken[order] < taken[order[0]]).any(axis=1)]
        return np.array(kept)
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
