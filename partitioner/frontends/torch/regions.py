"""Where to cut a forward pass so that computing each part again holds few bytes.

What crosses a cut is kept; of the rest, one region at a time is there. So the bytes to make small
are those of all that crosses, and of the region that makes most. As many bytes a region as are
best are tried out, and for each the cuts that the least crosses are found exactly. Where a model
repeats blocks (its layers), each block has one cut, in the same place, where least crosses: blocks
that are alike stay alike, and a plan is searched for one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.ir.repeats import Stretch

#: In how many parts what is saved is thought to be cut, at most that many a region.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Life:
    """A value of the forward pass.

    Attributes:
        first: Position of the node that makes it.
        last: Position of the last one of the forward pass that reads it or a view of it.
        nbytes: Its size.
        saved: Whether the backward pass reads it.
    """

    first: int
    last: int
    nbytes: int
    saved: bool


def regions(lives: Sequence[Life], count: int, repeated: Sequence[Stretch] = ()) -> tuple[int, ...]:
    """The region of each of `count` positions, in order from 0.

    Args:
        lives: The values.
        count: How many positions there are.
        repeated: Where blocks repeat; they are cut alike if that saves anything.

    >>> regions([Life(0, 1, 8, True), Life(1, 2, 1, True), Life(2, 3, 8, True)], 4)
    (0, 0, 1, 1)
    """
    live = _live(lives, count)
    fixed = {cut for stretch in repeated for cut in _alike(lives, live, stretch)}
    ends = _ends(live, fixed, repeated)
    crossing, inside = _tables(lives, ends)
    saved = inside[0, -1]
    inside[_over(ends, fixed)] = np.inf
    best: tuple[float, list[int]] | None = None
    for parts in PARTS:
        found = _cuts(crossing, inside, saved / parts)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    assert best is not None  # one region is always possible
    of: list[int] = []
    for region, index in enumerate(best[1]):
        of += [region] * (ends[index] - len(of))
    return tuple(of)


def _live(lives: Sequence[Life], count: int) -> Table:
    """Bytes that cross from before each position to it or later."""
    change = np.zeros(count + 1)
    for life in lives:
        change[life.first + 1] += life.nbytes
        change[min(count, life.last + 1)] -= life.nbytes
    return np.cumsum(change)


def _alike(lives: Sequence[Life], live: Table, stretch: Stretch) -> range:
    """Positions of the cuts of repeated blocks; none if a block saves no more than crosses."""
    whole = (stretch.stop - stretch.start) // stretch.period * stretch.period
    crossing = live[stretch.start : stretch.start + whole].reshape(-1, stretch.period).sum(axis=0)
    cuts = range(stretch.start + int(np.argmin(crossing)), stretch.stop, stretch.period)
    first, second = cuts[1:3]
    inside = sum(
        life.nbytes for life in lives if life.saved and first <= life.first and life.last < second
    )
    return cuts if inside > live[first] else range(0)


def _ends(live: Table, fixed: Collection[int], repeated: Sequence[Stretch]) -> list[int]:
    """Positions before which a cut may be, the last one included: where few bytes cross."""
    count = len(live) - 1
    low = (p for p in range(1, count) if live[p] <= live[p - 1] and live[p] <= live[p + 1])
    cut = [own for own in repeated if any(own.start <= p < own.stop for p in fixed)]
    free = (p for p in low if not any(own.start <= p < own.stop for own in cut))
    return sorted({0, *fixed, *free, count})


def _over(ends: Sequence[int], fixed: Collection[int]) -> npt.NDArray[np.bool_]:
    """[from, to]: whether a cut that has to be made lies between two ends."""
    passed = np.cumsum([end in fixed for end in ends])
    return passed[None, :] - np.isin(ends, list(fixed))[None, :] > passed[:, None]


def _tables(lives: Sequence[Life], ends: Sequence[int]) -> tuple[Table, Table]:
    """Bytes that leave a region from one end to another, and of what else in it is saved."""
    size = len(ends)
    crossing, inside = np.zeros((size, size)), np.zeros((size, size))
    for life in lives:
        made = int(np.searchsorted(ends, life.first, side="right"))  # it is before ends[made]
        done = int(np.searchsorted(ends, life.last, side="right"))
        crossing[:made, made:done] += life.nbytes
        if life.saved:
            inside[:made, done:] += life.nbytes
    return crossing, inside


def _cuts(crossing: Table, inside: Table, room: float) -> tuple[float, list[int]] | None:
    """The ends of regions of so many bytes at most, and the bytes held; None if there are none."""
    size = len(crossing)
    least, before = np.full(size, np.inf), np.zeros(size, int)
    least[0] = 0.0
    for end in range(1, size):
        cost = np.where(inside[:end, end] <= room, least[:end] + crossing[:end, end], np.inf)
        before[end] = int(np.argmin(cost))
        least[end] = cost[before[end]]
    if not np.isfinite(least[-1]):
        return None
    found = [size - 1]
    while before[found[-1]] > 0:
        found.append(int(before[found[-1]]))
    most = max(inside[a, b] for a, b in zip([0, *found[::-1]], found[::-1], strict=False))
    return float(least[-1] + most), found[::-1]
