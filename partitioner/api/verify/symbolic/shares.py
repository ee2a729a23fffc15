"""Shares of a pending reduction: the terms of it that a rank has, and what ranks have together.

The terms of a reduction are the iterations of the loops that were cut. A matrix product whose
inner loop of 8 is cut has 8 terms; a rank that computed 0 to 3 has the share ``{k: 0 to 3}``.
Terms of a bias are apart from those of the product that it is added to: a `Joint` share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from partitioner.api.verify.symbolic.parts import any_of, count_of, is_anywhere
from partitioner.ir.exchange import Intervals, intersect

Loop = tuple[str, str, int]  #: Node, factor, and number of its iterations.


@dataclass(frozen=True)
class Box:
    """The product of parts of loops; loops that are not named have all iterations."""

    parts: tuple[tuple[Loop, Intervals], ...] = ()  #: Ascending by loop; none is all of its loop.


@dataclass(frozen=True)
class Joint:
    """A share of each of several summands; without any, a share of nothing."""

    node: str = ""  #: Node that adds them, and which of its additions it is.
    shares: tuple[Share, ...] = ()


Share: TypeAlias = Box | Joint
ALL = Box()  #: The reduction is complete.
NOTHING = Joint()  #: No term: zeros of a sum.


def joint(node: str, shares: Sequence[Share]) -> Share:
    """The share that a sum of summands has; equal shares of all of them are that share."""
    first = shares[0]
    return first if all(share == first for share in shares) else Joint(node, tuple(shares))


def times(share: Share, loops: Iterable[tuple[Loop, Intervals]]) -> Share:
    """The part of a share that has these iterations of further loops only."""
    cut = tuple(loops)
    if not cut or share == NOTHING:
        return share
    if any(not intervals for _, intervals in cut):
        return NOTHING
    if isinstance(share, Joint):
        return Joint(share.node, tuple(times(one, cut) for one in share.shares))
    return Box(tuple(sorted((*share.parts, *cut))))


def together(shares: Iterable[Share], *, again: bool) -> Share | None:
    """The share that several ranks have together; None if no term would count once.

    With `again`, terms may count several times, as those of a maximum.
    """
    apart: list[Share] = []
    for share in shares:
        whole, index = share, 0
        while index < len(apart):
            both = _both(apart[index], whole, again=again)
            if both is None:
                index += 1
            else:
                del apart[index]
                whole, index = both, 0
        apart.append(whole)
    return apart[0] if len(apart) == 1 else None


def _both(one: Share, other: Share, *, again: bool) -> Share | None:
    if NOTHING in (one, other):
        return other if one == NOTHING else one
    if isinstance(one, Box) and isinstance(other, Box):
        return _united(one, other, again=again)
    for node in dict.fromkeys(share.node for share in (one, other) if isinstance(share, Joint)):
        count = max(len(s.shares) for s in (one, other) if isinstance(s, Joint) and s.node == node)
        sides = (
            share.shares if isinstance(share, Joint) and share.node == node else (share,) * count
            for share in (one, other)
        )
        pairs = [_both(a, b, again=again) for a, b in zip(*sides, strict=True)]
        sums = [share for share in pairs if share is not None]
        if len(sums) == count:
            return joint(node, sums)
    return None


def _united(one: Box, other: Box, *, again: bool) -> Box | None:
    """Two boxes that differ in one loop, as one.

    Parts of a loop that may be anywhere are of equal terms: they are counted.
    """
    mine, theirs = dict(one.parts), dict(other.parts)
    differ = [loop for loop in {**mine, **theirs} if mine.get(loop) != theirs.get(loop)]
    if not differ and again:
        return one
    if not differ:
        differ = [loop for loop, part in mine.items() if is_anywhere(part)][:1]
    if not differ:
        return None
    if len(differ) > 1:
        return None
    (loop,) = differ
    whole = ((0, loop[2]),)
    a, b = mine.pop(loop, whole), theirs.get(loop, whole)
    if is_anywhere(a) or is_anywhere(b):
        count = count_of(a) + count_of(b)
        if again or count > loop[2]:
            return None
        union = any_of(count, loop[2])
    elif intersect(a, b) and not again:
        return None
    else:
        union = merged(sorted((*a, *b)))
    kept = tuple(mine.items()) if union == whole else (*mine.items(), (loop, union))
    return Box(tuple(sorted(kept)))


def merged(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Intervals, ascending and none of them empty, of which neighbours and overlaps are one."""
    found: list[tuple[int, int]] = []
    for start, length in intervals:
        if not length:
            continue
        if found and start <= sum(found[-1]):
            low = found[-1][0]
            found[-1] = (low, max(sum(found[-1]), start + length) - low)
        else:
            found.append((start, length))
    return tuple(found)
