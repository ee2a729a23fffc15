"""A way for each of some things, with the least seconds within a limit of bytes, exactly.

    min  sum_v seconds[v, way_v]   s.t.   sum_v bytes[v, way_v] <= limit

The multiple-choice knapsack: what a stage computes again, where its nodes differ. Choices of the
first things are kept as a frontier of (bytes, seconds); things of equal ways are counted, not told
apart. A choice is dropped once the linear relaxation of the rest cannot bring it below the best
that is known, so the frontier stays short: only things close to the critical ratio of seconds lost
to bytes saved are ever in doubt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from partitioner.solver.stages.model import Bools, Floats, Ints

#: (seconds, bytes) of each way of one thing.
Ways = tuple[tuple[float, float], ...]

#: Choices of the frontier that are kept; if there are more, the bound says what was left out.
MOST_CHOICES = 50_000
#: Things whose frontiers are remembered: a search packs the same ones again and again.
REMEMBERED = 2**16
#: Relative error that a sum of seconds may have.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Packed:
    """A choice within the limit, and the bound on all of them."""

    way: tuple[int, ...]  #: Of each thing, an index into its ways.
    seconds: float  #: Of the choice.
    bound_s: float  #: No choice takes less; equal to `seconds` if that is proven least.


@lru_cache(maxsize=REMEMBERED)
def frontier(ways: Ways) -> tuple[int, ...]:
    """The ways that no other beats, the fastest and largest first."""
    kept: list[int] = []
    for index in sorted(range(len(ways)), key=ways.__getitem__):
        if not kept or ways[index][1] < ways[kept[-1]][1]:
            kept.append(index)
    return tuple(kept)


@lru_cache(maxsize=REMEMBERED)
def steps(ways: Ways) -> tuple[tuple[int, int], ...]:
    """The corners of the lower convex hull of the frontier, as steps (from way, to way).

    In ascending order of the seconds that a step loses for each byte that it saves.
    """
    hull: list[int] = []
    for index in frontier(ways):
        while len(hull) > 1:
            (s0, b0), (s1, b1), (s2, b2) = ways[hull[-2]], ways[hull[-1]], ways[index]
            if (s1 - s0) * (b1 - b2) < (s2 - s1) * (b0 - b1):  # the first of both is cheaper a byte
                break
            hull.pop()
        hull.append(index)
    return tuple(itertools.pairwise(hull))


@dataclass(frozen=True, eq=False)
class _Group:
    """Things of equal ways: how their seconds and bytes may add up."""

    things: tuple[int, ...]  #: Indices of the things.
    seconds: Floats  #: Of each choice for all of them, less the fastest's; (choices,).
    saved: Floats  #: Bytes that each choice saves beside the fastest; (choices,).
    ways: tuple[tuple[int, ...], ...]  #: Of each choice, one way a thing.


def relaxed(
    lost: Floats, saved: Floats, before: Floats | Bools, pairs: Ints, need: Floats
) -> tuple[Floats, Floats]:
    """Least seconds that the things of some stretches lose to save so many bytes, by steps.

    Args:
        lost, saved: Seconds that each step loses and bytes that it saves, the cheapest byte first.
        before: Whether each step is of a thing before each position; (positions, steps).
        pairs: Positions at which each stretch starts and stops; (2, stretches).
        need: Bytes that each saves; (stretches,).

    Returns:
        The seconds with the last step in part, the least of all, and with it whole, those of a
        choice; infinite where so many cannot be saved.
    """
    lost_by, saved_by = (
        np.pad(np.cumsum(before * values, axis=1), ((0, 0), (1, 0))) for values in (lost, saved)
    )
    start, stop = pairs
    fits = need <= saved_by[stop, -1] - saved_by[start, -1]
    lower, upper = np.where(fits, 0.0, np.inf), np.where(fits, 0.0, np.inf)
    lack = np.flatnonzero(fits & (need > 0))
    i, j, wanted = start[lack], stop[lack], need[lack]
    low, high = np.zeros(len(lack), dtype=np.int64), np.full(len(lack), len(lost))
    while (low + 1 < high).any():  # the first `low` steps do not save enough, the first `high` do
        middle = (low + high) // 2
        enough = saved_by[j, middle] - saved_by[i, middle] >= wanted
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    if len(lack):
        part = (wanted - (saved_by[j, low] - saved_by[i, low])) / saved[high - 1]
        lower[lack] = lost_by[j, low] - lost_by[i, low] + lost[high - 1] * part
        upper[lack] = lost_by[j, high] - lost_by[i, high]
    return lower, upper


def pack(things: Sequence[Ways], limit_bytes: float) -> Packed | None:
    """The choice of the least seconds within the limit; None if there is none."""
    fastest = [frontier(ways)[0] for ways in things]
    base_s = sum(ways[way][0] for ways, way in zip(things, fastest, strict=True))
    need = sum(ways[way][1] for ways, way in zip(things, fastest, strict=True)) - limit_bytes
    if need <= 0:
        return _packed(things, fastest, None)
    groups = _groups(things)
    if sum(float(group.saved.max()) for group in groups) < need:
        return None
    saved_by, lost_by = _relaxations(things, groups)
    best = _rounded(things, fastest, need)
    best_s = _seconds(things, best) - base_s
    slack = ROUNDING * max(base_s + best_s, 1e-300)
    seconds, saved, dropped_s = np.zeros(1), np.zeros(1), np.inf
    layers: list[tuple[Ints, Ints]] = []
    for index, group in enumerate(groups):
        many = len(group.seconds)
        tried_s = (seconds[:, None] + group.seconds).reshape(-1)
        tried = np.minimum((saved[:, None] + group.saved).reshape(-1), need)
        # with the least seconds that the groups from the next one on lose to save the others
        lack, most = need - tried, saved_by[index + 1]
        lost_s = np.where(lack > most[-1], np.inf, np.interp(lack, most, lost_by[index + 1]))
        bounds = tried_s + lost_s
        keep = np.flatnonzero(bounds < best_s - slack)
        keep = keep[_frontier(tried_s[keep], tried[keep])]
        if len(keep) > MOST_CHOICES:
            order = keep[np.argsort(bounds[keep], kind="stable")]
            dropped_s = min(dropped_s, float(bounds[order[MOST_CHOICES]]))
            keep = np.sort(order[:MOST_CHOICES])
        layers.append((keep // many, keep % many))
        seconds, saved = tried_s[keep], tried[keep]
        if not len(keep):
            break
    if len(seconds):
        best, at = list(fastest), int(seconds.argmin())
        for group, (parent, choice) in zip(reversed(groups), reversed(layers), strict=True):
            for thing, way in zip(group.things, group.ways[choice[at]], strict=True):
                best[thing] = way
            at = int(parent[at])
    return _packed(things, best, base_s + dropped_s)


def _packed(things: Sequence[Ways], chosen: Sequence[int], bound_s: float | None) -> Packed:
    seconds = _seconds(things, chosen)
    return Packed(tuple(chosen), seconds, seconds if bound_s is None else min(seconds, bound_s))


def _seconds(things: Sequence[Ways], chosen: Sequence[int]) -> float:
    return sum(ways[way][0] for ways, way in zip(things, chosen, strict=True))


def _groups(things: Sequence[Ways]) -> list[_Group]:
    """The things with a choice, equal ones together, those that save most first."""
    equal: dict[Ways, list[int]] = {}
    for index, ways in enumerate(things):
        if len(frontier(ways)) > 1:
            equal.setdefault(ways, []).append(index)
    groups = []
    for ways, members in equal.items():
        kept = frontier(ways)
        seconds = np.array([ways[way][0] - ways[kept[0]][0] for way in kept])
        saved = np.array([ways[kept[0]][1] - ways[way][1] for way in kept])
        if len(kept) == 2:
            many = np.arange(len(members) + 1)
            counted = tuple(
                (kept[1],) * r + (kept[0],) * (len(members) - r) for r in range(len(many))
            )
            groups.append(_Group(tuple(members), seconds[1] * many, saved[1] * many, counted))
        else:
            single = tuple((way,) for way in kept)
            groups += [_Group((member,), seconds, saved, single) for member in members]
    return sorted(groups, key=lambda group: -float(group.saved.max()))


def sorted_steps(things: Sequence[Ways]) -> list[tuple[float, float, int, int]]:
    """(seconds lost, bytes saved, thing, way after it) of all steps, the cheapest byte first."""
    taken = [
        (ways[end][0] - ways[start][0], ways[start][1] - ways[end][1], thing, end)
        for thing, ways in enumerate(things)
        for start, end in steps(ways)
    ]
    return sorted(taken, key=lambda step: step[0] / step[1])


def _rounded(things: Sequence[Ways], fastest: Sequence[int], need: float) -> list[int]:
    """The cheapest steps until they save enough, less those that then are not needed."""
    chosen, saved, taken = list(fastest), 0.0, []
    for lost_s, size, thing, way in sorted_steps(things):
        taken.append((lost_s, size, thing, chosen[thing]))
        chosen[thing] = way
        saved += size
        if saved >= need:
            break
    later: set[int] = set()  # only the last step of a thing may be taken back
    for _, size, thing, before in reversed(taken):
        if thing not in later and saved - size >= need:
            saved -= size
            chosen[thing] = before
        else:
            later.add(thing)
    # steps may be left out for rounding only: if they do not save enough, all ways are smallest
    return chosen if saved >= need else [frontier(ways)[-1] for ways in things]


def _relaxations(things: Sequence[Ways], groups: Sequence[_Group]) -> Iterator[Floats]:
    """Bytes saved by the first steps of the groups from each on, and seconds lost by the same.

    [group, step] each: the linear relaxations of all tails of the groups.
    """
    taken = sorted_steps(things)
    at = {v: index for index, group in enumerate(groups) for v in group.things}
    group = np.array([at[thing] for _, _, thing, _ in taken])
    later = group >= np.arange(len(groups) + 1)[:, None]
    for column in (1, 0):
        values = np.array([step[column] for step in taken])
        yield np.pad(np.cumsum(later * values, axis=1), ((0, 0), (1, 0)))


def _frontier(seconds: Floats, saved: Floats) -> Ints:
    """Indices of the choices that no other beats: fewer seconds or more bytes saved."""
    order = np.lexsort((-saved, seconds))
    most = np.maximum.accumulate(saved[order])
    new = np.ones(len(order), dtype=bool)
    new[1:] = saved[order][1:] > most[:-1]
    return np.asarray(order[new])
