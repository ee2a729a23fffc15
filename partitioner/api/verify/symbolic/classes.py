"""Ranks that run the same steps, followed once: their parts differ in where they begin.

All that tells the facts of such ranks apart are starts of intervals, which are `Starts` here: what
is computed of them is computed for every rank. Two are equal if they are on every rank; where an
order is decided for some ranks only, the ranks cannot be followed together (`ApartError`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add, floordiv, ge, gt, le, lt, mod, mul, sub
from typing import Any, cast

from partitioner.api.verify.symbolic.held import Facts, Held
from partitioner.api.verify.symbolic.nodes import MOST_NODES, LocalNode, Rank, WholeModel, follow
from partitioner.api.verify.symbolic.program import Program
from partitioner.api.verify.symbolic.shares import Box, Share
from partitioner.ir.exchange import Intervals


class ApartError(Exception):
    """Ranks that cannot be followed together."""


@dataclass(frozen=True, eq=False)
class Starts:
    """The start of an interval on each rank of a class; they are not all equal."""

    of: tuple[int, ...]

    def __hash__(self) -> int:
        return hash(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Starts) and self.of == other.of

    def __add__(self, other: Any) -> Any:
        return self._with(add, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(lambda mine, theirs: theirs - mine, other)

    def __mul__(self, other: Any) -> Any:
        return self._with(mul, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._with(floordiv, other)

    def __mod__(self, other: Any) -> Any:
        return self._with(mod, other)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __neg__(self) -> Any:
        return 0 - self

    def __lt__(self, other: Any) -> bool:
        return self._decided(lt, other)

    def __le__(self, other: Any) -> bool:
        return self._decided(le, other)

    def __gt__(self, other: Any) -> bool:
        return self._decided(gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._decided(ge, other)

    def __bool__(self) -> bool:
        return self._decided(lambda mine, _: mine != 0, 0)

    def _pairs(self, other: Any) -> list[tuple[int, int]]:
        others = other.of if isinstance(other, Starts) else (other,) * len(self.of)
        return [*zip(self.of, others, strict=True)]

    def _with(self, operator: Callable[[int, int], int], other: Any) -> Any:
        return start_of([operator(a, b) for a, b in self._pairs(other)])

    def _decided(self, operator: Callable[[int, int], bool], other: Any) -> bool:
        answers = {operator(a, b) for a, b in self._pairs(other)}
        if len(answers) > 1:
            raise ApartError
        return answers.pop()


def start_of(starts: Sequence[int]) -> int:
    """The start of an interval that begins so on each rank; a plain number if all are equal."""
    if len(set(starts)) == 1:
        return starts[0]
    return cast("int", Starts(tuple(starts)))  # which has the operators of a number


def packed(of_ranks: Sequence[Facts]) -> Facts:
    """Facts of all ranks of a class as one; an ApartError if more than starts differs."""
    first = of_ranks[0]
    if all(facts is first for facts in of_ranks):
        return first
    if {len(facts) for facts in of_ranks} != {len(first)}:
        raise ApartError
    return tuple(_packed(helds) for helds in zip(*of_ranks, strict=True))


def _packed(helds: Sequence[Held]) -> Held:
    first = helds[0]
    forms = {(held.value, held.how, len(held.region)) for held in helds}
    if len(forms) > 1:
        raise ApartError
    region = tuple(map(_intervals, zip(*(held.region for held in helds), strict=True)))
    return Held(first.value, region, _share([held.share for held in helds]), first.how)


def _intervals(of_ranks: Sequence[Intervals]) -> Intervals:
    lengths = {tuple(length for _, length in one) for one in of_ranks}
    if len(lengths) > 1:
        raise ApartError
    starts = zip(*(tuple(start for start, _ in one) for one in of_ranks), strict=True)
    return tuple(zip(map(start_of, starts), lengths.pop(), strict=True))


def _share(shares: Sequence[Share]) -> Share:
    first = shares[0]
    if all(share == first for share in shares):
        return first
    if isinstance(first, Box):
        boxes = [share.parts for share in shares if isinstance(share, Box)]
        loops = {tuple(loop for loop, _ in parts) for parts in boxes}
        if len(boxes) < len(shares) or len(loops) > 1:
            raise ApartError
        parts = zip(*(tuple(part for _, part in box) for box in boxes), strict=True)
        return Box(tuple(zip(loops.pop(), map(_intervals, parts), strict=True)))
    joints = [share for share in shares if not isinstance(share, Box)]
    forms = {(share.node, len(share.shares)) for share in joints}
    if len(joints) < len(shares) or len(forms) > 1:
        raise ApartError
    summands = zip(*(share.shares for share in joints), strict=True)
    return replace(first, shares=tuple(map(_share, summands)))


def of_rank(facts: Facts, place: int) -> Facts:
    """The facts of one rank of a class."""

    def intervals(part: Intervals) -> Intervals:
        return tuple(
            (start.of[place] if isinstance(start, Starts) else start, length)
            for start, length in cast("Sequence[tuple[Any, int]]", part)
        )

    def share(of: Share) -> Share:
        if isinstance(of, Box):
            return Box(tuple((loop, intervals(part)) for loop, part in of.parts))
        return replace(of, shares=tuple(map(share, of.shares)))

    return tuple(
        Held(held.value, tuple(map(intervals, held.region)), share(held.share), held.how)
        for held in facts
    )


def follow_together(
    model: WholeModel, ranks: Sequence[Rank], programs: Sequence[Program], at: int
) -> int:
    """Follow the local nodes of a class from a place on; returns the place behind them.

    Raises:
        ApartError, RefusedError, TypeError: The ranks are to be followed one by one.
    """
    program, end = programs[0], programs[0].ends[at]
    steps = (one.steps[at:end] for one in programs)
    nodes = [[step for step in of if isinstance(step, LocalNode)] for of in steps]
    stretch = _Stretch.of(model, ranks, nodes)
    place = 0
    while place < end - at:
        place += stretch.follow(place)
    for name in stretch.made:
        if program.last_reads.get(name, -1) >= end:
            for index, rank in enumerate(ranks):
                rank.note(name, of_rank(stretch.joint.facts[name], index))
    for rank in ranks:
        rank.is_ambiguous |= stretch.joint.is_ambiguous
    return end


@dataclass(frozen=True)
class _Stretch:
    """Local nodes of the ranks of a class; most are the same objects on all of them."""

    model: WholeModel
    ranks: Sequence[Rank]
    nodes: Sequence[Sequence[LocalNode]]  #: Those of each rank.
    joint: Rank  #: What all of them know.

    @classmethod
    def of(
        cls, model: WholeModel, ranks: Sequence[Rank], nodes: Sequence[Sequence[LocalNode]]
    ) -> _Stretch:
        """The stretch before its first node; an ApartError if its values have other types."""
        first, own = ranks[0], nodes[0]
        if any(len(of) != len(own) for of in nodes):
            raise ApartError
        made = {name for node in own for name in node.writes}
        names = [*dict.fromkeys(n for node in own for n in node.reads if n not in made)]
        if any(rank.types.get(n) != first.types.get(n) for rank in ranks for n in (*names, *made)):
            raise ApartError
        same = {name for name in names if len({_token(rank, name) for rank in ranks}) == 1}
        joint = Rank(
            first.rank,
            first.types,
            lambda name: first.contents(name) if name in same else None,
            equal_facts=first.equal_facts,
        )
        joint.others = first.others
        for name in names:
            joint.note(name, packed([rank.facts.get(name, ()) for rank in ranks]))
        return cls(model, ranks, nodes, joint)

    @property
    def made(self) -> Sequence[str]:
        return [name for node in self.nodes[0] for name in node.writes]

    def follow(self, place: int) -> int:
        """Follow the node at a place, with those that belong to it; their number."""
        own = self.nodes[0]
        if self._is_shared(place):
            count = follow(self.model, self.joint, own[place : place + MOST_NODES])
            if not all(map(self._is_shared, range(place + 1, place + count))):
                raise ApartError  # they begin alike only
            return count
        counts = {self._follow_alone(index, place) for index in range(len(self.ranks))}
        if len(counts) > 1:
            raise ApartError
        (count,) = counts
        for node in own[place : place + count]:
            for name in node.writes:
                self.joint.note(name, packed([rank.facts.get(name, ()) for rank in self.ranks]))
        return count

    def _is_shared(self, place: int) -> bool:
        """Test whether all ranks have the same node at a place."""
        return all(nodes[place] is self.nodes[0][place] for nodes in self.nodes)

    def _follow_alone(self, index: int, place: int) -> int:
        """Follow a node of one rank, which others have with other attributes."""
        rank, nodes = self.ranks[index], self.nodes[index][place : place + MOST_NODES]
        for name in nodes[0].reads:
            if name in self.joint.facts:
                rank.note(name, of_rank(self.joint.facts[name], index))
        return follow(self.model, rank, nodes)


def _token(rank: Rank, name: str) -> object:
    return None if rank.tokens is None else rank.tokens.get(name)
