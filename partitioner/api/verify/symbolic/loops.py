"""The parts of a node's loops that operands are of, and the parts of results that follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from partitioner.api.verify.symbolic.held import Held
from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    agreed,
    any_of,
    count_of,
    dim_part,
    factor_parts,
    is_anywhere,
    plain,
    region_text,
    whole,
)
from partitioner.api.verify.symbolic.shares import ALL, NOTHING, Share, joint, times
from partitioner.ir.exchange import Intervals, Region
from partitioner.ir.graph import Node
from partitioner.ir.layout import LayoutError
from partitioner.ir.loops.factors import PENDING, DimExpr, FactorKind, names_of, single
from partitioner.ir.loops.windows import Parts as ByPosition
from partitioner.ir.loops.windows import Window
from partitioner.ir.rule import Rule

#: Most places of parts that are tried.
_MOST_PLACES = 256
Parts = Mapping[str, Intervals]  #: The part of every loop.
_Slid = tuple[str, Window, Intervals]  #: A loop of windows, its window over a dim, the dim's part.


@dataclass(frozen=True)
class Loops:
    """The loops of a node of the whole model, over parts of its operands."""

    rule: Rule
    reads: Sequence[Held | None]  #: What is read as each operand.
    #: The shape that a rank's program states for each result; None where it states none. It is only
    #: where the search for parts begins: what is found is held against the local node.
    stated: Sequence[tuple[int, ...] | None]
    needs_place: bool  #: Whether the local node depends on where parts lie.
    #: Parts of several intervals that the rank has of other values: where a part may lie, too.
    cuts: Iterable[Intervals] = ()
    known: dict[str, Intervals] = field(default_factory=dict)

    def parts(self) -> Iterator[Parts]:
        """The parts of all loops; several where a part may lie in several places.

        Raises:
            RefusedError: The operands are of no iterations that the rule allows.
        """
        slid = list(self._note_operands())
        self._note_results({name for name, _, _ in slid})
        unknown = dict.fromkeys(name for name, _, _ in slid if name not in self.known)
        choices = [self._places(name, slid) for name in unknown]
        if math.prod(map(len, choices)) > _MOST_PLACES:
            raise RefusedError("its windows may lie in too many places", closeness=2)
        for chosen in itertools.product(*choices):
            parts = {**self.known, **dict(zip(unknown, chosen, strict=True))}
            self._check_windows(slid, parts)
            all_parts = {n: parts.get(n, whole(f.size)) for n, f in self.rule.factors.items()}
            yield from self._settled(all_parts)

    def _note_operands(self) -> Iterator[_Slid]:
        """Note the parts of loops that operands tell; windows over their dims are handed on."""
        rule = self.rule
        for index, (dims, held) in enumerate(zip(rule.operands, self.reads, strict=False)):
            if held is None:
                continue
            if held.share != ALL and index not in rule.linear | rule.addends:
                raise RefusedError(
                    f"it reads {held}, and is not linear in it", is_wrong=True, closeness=2
                )
            if dims is None:
                check_whole(held, rule.operand_shapes[index])
                continue
            for expr, part in zip(dims, held.region, strict=True):
                window = rule.window(index, expr)
                if window is None:
                    self._note(expr, part, held)
                elif isinstance(window, Window):
                    yield single(expr), window, part
                else:
                    self._note(expr, part, held, window)

    def _note(
        self, expr: DimExpr, part: Intervals, held: Held, by_position: ByPosition | None = None
    ) -> None:
        try:
            if by_position is None:
                of_factors = factor_parts(expr, part, self.rule.factors)
            else:
                of_factors = {single(expr): _position(by_position, part)}
        except RefusedError as error:
            raise RefusedError(f"it reads {held}: {error}", closeness=2) from None
        for name, of_factor in of_factors.items():
            factor, before = self.rule.factors[name], self.known.get(name)
            both = agreed(before, of_factor)
            if both is None and before is not None:
                raise RefusedError(
                    f"it reads {held}, which is of iterations {region_text((of_factor,))} of loop "
                    f"{name!r}, beside {region_text((before,))}",
                    is_wrong=True,
                    closeness=2,
                )
            self.known[name] = both or ()
            if factor.kind is FactorKind.WHOLE and both != whole(factor.size):
                raise RefusedError(
                    f"it reads {held}, and needs all of loop {name!r}", is_wrong=True, closeness=2
                )

    def _note_results(self, slid: set[str]) -> None:
        """Note loops that no operand has: their iterations are alike, so any of them are meant."""
        by_position = {n for (_, n), of in self.rule.windows.items() if isinstance(of, ByPosition)}
        for shape, dims in zip(self.stated, self.rule.results, strict=True):
            for size, expr in zip(shape or (), dims or (), strict=False):
                names = [name for term in expr for name in term]
                missing = [n for n in names if n not in self.known and n not in slid | by_position]
                if len(missing) == 1:
                    self._note_missing(missing[0], expr, size)

    def _note_missing(self, name: str, expr: DimExpr, size: int) -> None:
        """Note the one loop of a result's dim that is not known, by the size of the local dim."""
        of, terms = self.rule.factors[name], [term for term in expr if name not in term]
        (own,) = (term for term in expr if name in term)
        counts = {n: count_of(self.known[n]) for term in expr for n in term if n in self.known}
        beside = sum(math.prod(counts[n] for n in term) for term in terms)
        inner = max(math.prod(counts[n] for n in own if n != name), 1)
        count = min(max(size - beside, 0) // inner, of.size)
        if of.kind is not FactorKind.WHOLE:
            self.known[name] = any_of(count, of.size)

    def _places(self, name: str, slid: Iterable[_Slid]) -> list[Intervals]:
        """The positions of a loop of windows that read just the part that there is."""
        size = self.rule.factors[name].size
        window, part = next((window, part) for of, window, part in slid if of == name)
        counts = [
            shape[dim]
            for shape, dims in zip(self.stated, self.rule.results, strict=True)
            for dim, expr in enumerate(dims or ())
            if shape is not None and single(expr) == name
        ]
        if len(part) != 1 or not counts or counts[0] == size:
            return [whole(size)]
        count, first, last = counts[0], 0, size - counts[0]
        if not is_anywhere(part):
            around = (part[0][0] * window.divisor + window.before) // window.stride
            near = -(-(window.divisor + window.extent) // window.stride) + 1
            first = 0 if part[0][0] == 0 else max(0, around - near)
            last = min(around + near, last)
        tried = [((at, count),) for at in range(first, min(last, first + _MOST_PLACES) + 1)]
        return [at for at in tried if _may_read(window, at, size, part)]

    def slid_in_part(self) -> set[str]:
        """The loops whose windows slide over a part of a dim, if all of them do, too."""
        return {
            single(expr)
            for index, (dims, held) in enumerate(zip(self.rule.operands, self.reads, strict=False))
            for expr, part in zip(dims or (), () if held is None else held.region, strict=False)
            if isinstance(window := self.rule.window(index, expr), Window)
            and part != whole(window.size)
        }

    def _check_windows(self, slid: Iterable[_Slid], parts: Parts) -> None:
        for name, window, part in slid:
            if not _may_read(window, parts[name], self.rule.factors[name].size, part):
                raise RefusedError(
                    f"its windows over {name} read another part than {region_text((part,))}",
                    is_wrong=True,
                    closeness=2,
                )

    def _settled(self, parts: dict[str, Intervals]) -> Iterator[Parts]:
        """Put parts that may be anywhere to all places, if these tell in the node or a result."""
        loose = [name for name, part in parts.items() if is_anywhere(part)]
        if not loose or not (self.needs_place or self.rule.windows or self._are_mixed(loose)):
            yield parts
            return
        choices = []
        for name in loose:
            count, size = count_of(parts[name]), self.rule.factors[name].size
            last = size - count
            starts = range(last + 1) if last < _MOST_PLACES else (*range(0, last, count), last)
            apart = (part for part in self.cuts if count_of(part) == count)
            within = (part for part in apart if max(map(sum, part)) <= size)
            choices.append([*(((start, count),) for start in starts), *within])
        for chosen in itertools.islice(itertools.product(*choices), _MOST_PLACES):
            yield {**parts, **dict(zip(loose, chosen, strict=True))}

    def _are_mixed(self, loose: Iterable[str]) -> bool:
        """Test whether such a loop is in a dim of a result with others, which may tell its place.

        Equal rows of unlike elements are alike by rows alone.
        """
        factors = self.rule.factors
        terms = [(term, expr) for dims in self.rule.results for expr in dims or () for term in expr]
        return any(
            name in term and (len(expr) > 1 or any(factors[n].size > 1 for n in term if n != name))
            for name in loose
            for term, expr in terms
        )

    def operand_regions(self, parts: Parts) -> tuple[Region, ...]:
        """The parts of the operands; those that may be anywhere are where the loops' parts are."""
        regions: list[Region] = []
        for index, held in enumerate(self.reads):
            dims = self.rule.operands[index] if index < len(self.rule.operands) else None
            if held is None or dims is None:
                regions.append(() if held is None else held.region)
                continue
            pairs = zip(dims, held.region, strict=True)
            regions.append(
                tuple(
                    self._place(index, expr, parts, count_of(part)) if is_anywhere(part) else part
                    for expr, part in pairs
                )
            )
        return tuple(regions)

    def _place(self, index: int, expr: DimExpr, parts: Parts, count: int = -1) -> Intervals:
        """The part of a dim of an operand, of so many elements, or of a result behind them."""
        window, name = self.rule.window(index, expr), single(expr)
        if isinstance(window, Window):
            read = _reads(window, parts[name], self.rule.factors[name].size)
            return next((one for one in read if count_of(one) == count), ())
        if window is not None:
            return _by_position(window, parts[name])
        return dim_part(expr, parts, self.rule.factors)

    def result_region(self, slot: int, parts: Parts) -> Region:
        """The part of a result."""
        dims, shape = self.rule.results[slot], self.rule.result_shapes[slot]
        index = len(self.rule.operands) + slot
        try:
            return tuple(
                whole(size) if not any(expr) else self._place(index, expr, parts)
                for expr, size in zip(dims or [((),)] * len(shape), shape, strict=True)
            )
        except RefusedError as error:
            raise RefusedError(f"its result: {error}", closeness=2) from None

    def result(self, node: Node, slot: int, parts: Parts) -> Held:
        """Give what a result of a node is."""
        region = self.result_region(slot, parts)
        return Held(node.outputs[slot], region, *self._share(node.name, slot, parts))

    def _share(self, node: str, slot: int, parts: Parts) -> tuple[Share, str]:
        """The terms that a result has of a reduction, and which reduction is pending."""
        rule = self.rule
        names = {n for expr in rule.results[slot] or () for term in expr for n in term} | {PENDING}
        cut = {
            name: parts[name]
            for name, factor in rule.factors.items()
            if factor.reduce and name not in names and parts[name] != whole(factor.size)
        }
        if any(is_anywhere(part) and rule.factors[n].reduce != "sum" for n, part in cut.items()):
            raise RefusedError("it reduces a part that may be anywhere", closeness=2)
        present = {i: held for i, held in enumerate(self.reads) if held is not None}
        added = [
            i for i in sorted(rule.addends) if i in present and not self._has_terms(i, names, parts)
        ]
        added = added if cut or any(present[i].share != ALL for i in added) else []
        linear = [i for i in sorted(rule.linear) if i in present and i not in added]
        hows = {rule.factors[name].reduce for name in cut}
        for index in (*linear, *added):
            held = present[index]
            hows |= {"sum"} if held.share != ALL or index in added else set()
            hows |= {held.how} if held.share not in (ALL, NOTHING) else set()
        if len(hows) > 1:
            raise RefusedError(f"it mixes {' and '.join(sorted(hows))}", is_wrong=True, closeness=2)
        loops = {name: ((node, name, rule.factors[name].size), part) for name, part in cut.items()}
        share = joint(node, [present[i].share for i in linear]) if linear else ALL
        share = times(share, loops.values())
        if added:
            own = (names_of([rule.operands[i]]) for i in added)
            shares = [
                times(present[i].share, [loops[name] for name in of if name in loops])
                for i, of in zip(added, own, strict=True)
            ]
            share = joint(f"{node} +", [share, *shares])
        return share, "" if share == ALL else next(iter(hows))

    def _has_terms(self, addend: int, names: Collection[str], parts: Parts) -> bool:
        """Test whether a result is of the part of a loop of which its addend may have terms alone.

        An addend is a sum over the summed loops that it lacks. What is of some iterations of such a
        loop depends on no terms of others.
        """
        factors, own = self.rule.factors, names_of([self.rule.operands[addend]])
        return any(
            factors[name].reduce and name not in own and parts[name] != whole(factors[name].size)
            for name in names
            if name in parts
        )


def check_whole(held: Held, shape: Sequence[int]) -> None:
    """Refuse what is not all of a value of this shape."""
    if held.share != ALL or held.region != tuple(map(whole, shape)):
        raise RefusedError(f"it reads {held}, and needs all of it", is_wrong=True, closeness=2)


@lru_cache(maxsize=256)
def _positions(window: ByPosition) -> tuple[Intervals, ...]:
    """The part of each position."""
    ends = [*itertools.accumulate(map(sum, window.segments), initial=0)]
    return tuple(
        plain(
            (end + sum(cuts[:position]), cuts[position])
            for end, cuts in zip(ends, window.segments, strict=False)
        )
        for position in range(len(window.segments[0]))
    )


def _position(window: ByPosition, part: Intervals) -> Intervals:
    """The position that a part is of, or all of them; RefusedError if it is of none."""
    parts = _positions(window)
    if part == whole(window.size):
        return whole(len(parts))
    if part not in parts:
        raise RefusedError("that is the part of no position", is_wrong=True)
    return ((parts.index(part), 1),)


def _by_position(window: ByPosition, positions: Intervals) -> Intervals:
    """The part of a position, or of all of them."""
    parts = _positions(window)
    if positions == whole(len(parts)):
        return whole(window.size)
    if len(positions) != 1 or positions[0][1] != 1:
        raise RefusedError("several positions have no part together", closeness=2)
    return parts[positions[0][0]]


def _may_read(window: Window, positions: Intervals, count: int, part: Intervals) -> bool:
    """Test whether positions of a window, of which there are so many, are of a part of a dim."""
    return any(agreed(one, part) is not None for one in _reads(window, positions, count))


def _reads(window: Window, positions: Intervals, count: int) -> tuple[Intervals, ...]:
    """The parts of a dim that positions of a window may be given, each of one interval.

    It is what they read; all positions may be given all of the dim, too.
    """
    found = [whole(window.size)] if positions == whole(count) else []
    if len(positions) == 1 and not is_anywhere(positions):
        with suppress(LayoutError):
            found.append((window.read(*positions[0]),))
    return tuple(dict.fromkeys(found))
