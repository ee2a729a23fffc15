"""Every possible stage as flat arrays of entries, and those that matter below one load.

Once a stage's load is known to count no longer, only the devices that it takes, its degree and
its *room* matter: the largest sum of degrees, from it to the last stage, at which its memory
(and the limit on all degrees) still holds. Of stages of the same interval, pool and degree, one
that takes more devices must have more room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from partitioner.solver.stages.model import Bools, Floats, Ints, StageOption, StageProblem


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
