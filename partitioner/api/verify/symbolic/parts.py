"""Parts of values: what a rank holds of a dim, and of the loops that dims are made of.

A part of a dim is a list of intervals in the rank's own order, or any elements of a dim along which
all elements are equal (`any_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from partitioner.ir.exchange import Intervals, Region, intersect
from partitioner.ir.layout import Interval
from partitioner.ir.loops.factors import DimExpr, Factor, Term

#: Start of an interval that may be anywhere.
_ANYWHERE = -1
#: Most intervals of a part.
MOST_INTERVALS = 65_536


class RefusedError(Exception):
    """A step that is wrong, or that the interpreter cannot follow: one clause."""

    rank: int | None = None  #: The rank whose step it is, of a step of several; None if of all.

    def __init__(self, why: str, *, is_wrong: bool = False, closeness: int = 0) -> None:
        super().__init__(why)
        self.is_wrong = is_wrong  #: Whether what the rank holds contradicts the model.
        self.closeness = closeness  #: How far the step was followed, to tell the likeliest cause.


def likeliest(refused: Sequence[RefusedError]) -> RefusedError:
    """The reason that was met furthest, of those against each choice; wrong if all of them are."""
    reason = max(refused, key=lambda error: error.closeness)
    reason.is_wrong = all(error.is_wrong for error in refused)
    return reason


def region_text(region: Region) -> str:
    """Text of a region: ``"[0..4, 2..3+6..8]"``."""
    dims = (
        "+".join(f"any {n}" if at == _ANYWHERE else f"{at}..{at + n}" for at, n in part) or "none"
        for part in region
    )
    return f"[{', '.join(dims)}]"


def any_of(count: int, size: int) -> Intervals:
    """A part of so many elements of a dim of equal elements; all of it has one form."""
    return whole(size) if count == size else ((_ANYWHERE, count),) if count else ()


def is_anywhere(part: Intervals) -> bool:
    """Test whether a part may be anywhere."""
    return bool(part) and part[0][0] == _ANYWHERE


def whole(size: int) -> Intervals:
    """All of a dim."""
    return ((0, size),) if size else ()


def all_of(shape: Iterable[int]) -> Region:
    """All of a value."""
    return tuple(map(whole, shape))


def count_of(part: Intervals) -> int:
    """Elements of a part."""
    return sum(length for _, length in part)


def plain(intervals: Iterable[Interval]) -> Intervals:
    """Intervals in their order; none is empty, and those that follow each other are one."""
    found: list[Interval] = []
    for start, length in intervals:
        if not length:
            continue
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    if len(found) > MOST_INTERVALS:
        raise RefusedError(f"a part has more than {MOST_INTERVALS} intervals")
    if any(sum(a) > b[0] for a, b in pairwise(sorted(found))):
        raise RefusedError("a part has an element twice", is_wrong=True, closeness=2)
    return tuple(found)


def region_of(region: Region | None, shape: Sequence[int]) -> Region:
    """A region in the form of this module."""
    return all_of(shape) if region is None else tuple(map(plain, region))


def taken(part: Intervals, wanted: Intervals) -> Intervals:
    """The elements of a part at these places of it, packed."""
    if is_anywhere(part):
        count = count_of(wanted)
        return ((_ANYWHERE, count),) if count else ()
    found: list[Interval] = []
    for start, length in wanted:
        at = 0
        for begin, size in part:
            low, high = max(start, at), min(start + length, at + size)
            if low < high:
                found.append((begin + low - at, high - low))
            at += size
    return plain(found)


def agreed(one: Intervals | None, other: Intervals) -> Intervals | None:
    """The part that both may be; None if they differ."""
    if one is None or one == other:
        return other
    if count_of(one) != count_of(other):
        return None
    if is_anywhere(one):
        return other
    return one if is_anywhere(other) else None


def same_region(one: Region, other: Region) -> Region | None:
    """The region that both may be; None if they differ."""
    if len(one) != len(other):
        return None
    parts = [agreed(a, b) for a, b in zip(one, other, strict=True)]
    known = tuple(part for part in parts if part is not None)
    return known if len(known) == len(parts) else None


def factor_parts(
    expr: DimExpr, part: Intervals, factors: Mapping[str, Factor]
) -> dict[str, Intervals]:
    """The parts of the loops of which a dim's part is made; RefusedError if it is of none."""
    found: dict[str, Intervals] = {}
    at, pieces = 0, list[Interval]()
    for term in expr:
        size = math.prod(factors[name].size for name in term)
        if len(expr) == 1:
            own = part
        elif is_anywhere(part):
            raise RefusedError("a part that may be anywhere is of several pieces")
        else:
            own = plain(
                (max(start, at) - at, min(start + n, at + size) - max(start, at))
                for start, n in part
                if max(start, at) < min(start + n, at + size)
            )
        pieces.extend((at + start, length) for start, length in own)
        for name, of_factor in _term_parts(term, own, factors).items():
            both = agreed(found.get(name), of_factor)
            if both is None:
                raise RefusedError(f"loop {name} would have two parts")
            found[name] = both
        at += size
    if len(expr) > 1 and plain(pieces) != part:
        raise RefusedError("its pieces are in another order", closeness=2)
    return found


def _term_parts(term: Term, part: Intervals, factors: Mapping[str, Factor]) -> dict[str, Intervals]:
    if len(term) < 2:
        return dict.fromkeys(term, part)
    head, *rest = term
    minor = math.prod(factors[name].size for name in rest)
    all_of_rest = {name: whole(factors[name].size) for name in rest}
    if is_anywhere(part):
        count, left = divmod(count_of(part), minor)
        if left:
            raise RefusedError("a part that may be anywhere is of no whole rows", closeness=2)
        return {head: any_of(count, factors[head].size), **all_of_rest}
    if all(start % minor == 0 and length % minor == 0 for start, length in part):
        rows = plain((start // minor, length // minor) for start, length in part)
        return {head: rows, **all_of_rest}
    by_row: dict[int, list[Interval]] = {}
    for row, interval in _in_rows(part, minor):
        by_row.setdefault(row, []).append(interval)
    patterns = {plain(row) for row in by_row.values()}
    found = {head: plain((row, 1) for row in by_row)}
    if len(patterns) == 1:
        found |= _term_parts(tuple(rest), patterns.pop(), factors)
    if len(found) < len(term) or _term_part(term, found, factors) != part:
        raise RefusedError(f"its part is not of the loops {' '.join(term)}", closeness=2)
    return found


def _in_rows(part: Intervals, size: int) -> Iterator[tuple[int, Interval]]:
    """The pieces of a part in rows of so many elements, with their rows."""
    if count_of(part) // size > MOST_INTERVALS:
        raise RefusedError(f"a part has more than {MOST_INTERVALS} intervals", closeness=2)
    for start, length in part:
        end = start + length
        while start < end:
            row, at = divmod(start, size)
            yield row, (at, min(end - start, size - at))
            start += size - at


def dim_part(
    expr: DimExpr, parts: Mapping[str, Intervals], factors: Mapping[str, Factor]
) -> Intervals:
    """The part of a dim that follows from parts of its loops."""
    if len(expr) == 1:
        return _term_part(expr[0], parts, factors)
    found: list[Interval] = []
    at = 0
    for term in expr:
        size = math.prod(factors[name].size for name in term)
        part = _term_part(term, parts, factors)
        if is_anywhere(part):
            raise RefusedError("a part that may be anywhere is joined to others")
        found.extend((at + start, length) for start, length in part)
        at += size
    return plain(found)


def _term_part(
    term: Term, parts: Mapping[str, Intervals], factors: Mapping[str, Factor]
) -> Intervals:
    part, size = whole(1), 1
    for name in reversed(term):
        outer = parts[name]
        if part == whole(size):
            part = (
                any_of(count_of(outer) * size, factors[name].size * size)
                if is_anywhere(outer)
                else plain((start * size, length * size) for start, length in outer)
            )
        elif is_anywhere(outer) or is_anywhere(part):
            raise RefusedError("a part that may be anywhere is of several loops")
        else:
            if count_of(outer) * len(part) > MOST_INTERVALS:
                raise RefusedError(f"a part has more than {MOST_INTERVALS} intervals")
            part = plain(
                (row * size + start, length)
                for first, rows in outer
                for row in range(first, first + rows)
                for start, length in part
            )
        size *= factors[name].size
    return part


def joined(pieces: Iterable[tuple[Intervals, Intervals]], size: int, whole_size: int) -> Intervals:
    """The part of a dim that `size` elements are, pieces of which were written to places of them.

    Raises:
        RefusedError: Two pieces disagree about an element, or one is written by none.
    """
    places = sorted(set(_placed(pieces)))
    if any(begin == _ANYWHERE for _, _, begin in places):
        if any(begin != _ANYWHERE for _, _, begin in places):
            raise RefusedError("a part that may be anywhere is joined to others", closeness=2)
        return any_of(size, whole_size)
    found: list[Interval] = []
    end = 0
    for start, length, begin in places:
        shared = end - start
        if shared < 0:
            break
        if shared and begin + shared != sum(found[-1]):
            raise RefusedError("two pieces are written to one place", is_wrong=True)
        if length > shared:
            found.append((begin + shared, length - shared))
            end = start + length
    if end != size:
        raise RefusedError("an element is written by none", is_wrong=True)
    return plain(found)


def _placed(pieces: Iterable[tuple[Intervals, Intervals]]) -> Iterator[tuple[int, int, int]]:
    """Start and length of each interval that is written, and its start in the whole."""
    for part, written in dict.fromkeys(pieces):
        if count_of(part) != count_of(written):
            raise RefusedError("a piece has another size than its place", is_wrong=True)
        at = 0
        for start, length in written:
            done = start
            for begin, run in taken(part, ((at, length),)):
                yield done, run, begin
                done += run
            at += length


def are_disjoint(one: Intervals, other: Intervals) -> bool:
    """Test whether parts have no element in common."""
    return not intersect(tuple(sorted(one)), tuple(sorted(other)))


def covers(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Test whether regions tile a value: every element is in exactly one."""
    full = [region for region in regions if all(map(count_of, region))]
    if sum(math.prod(map(count_of, region)) for region in full) != math.prod(shape):
        return False
    unlike = [dim for dim in range(len(shape)) if len({region[dim] for region in full}) > 1]
    if len(unlike) == 1:  # pieces of one dim
        (dim,) = unlike
        ends = sorted(interval for region in full for interval in region[dim])
        return all(sum(one) <= other[0] for one, other in pairwise(ends))
    return not any(
        not any(are_disjoint(a, b) for a, b in zip(one, other, strict=True))
        for index, one in enumerate(full)
        for other in full[:index]
    )
