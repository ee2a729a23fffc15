"""Nodes inside of which the ranks of a group send each other rows: to their owners, and back.

A rule tells which loop is of rows and which of their owners. Each rank has rows, and computes for
those of the whole group what meets the owners that it has. So a result of its rows is the sum over
all owners of the group, a result of its owners is of all rows of the group, and what stays inside
is of all rows and of its own owners alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

from partitioner.api.verify.symbolic.held import Held, choices
from partitioner.api.verify.symbolic.loops import Loops, Parts
from partitioner.api.verify.symbolic.nodes import LocalNode, Match, Rank, WholeModel, unfollowed
from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    are_disjoint,
    count_of,
    likeliest,
    region_text,
)
from partitioner.api.verify.symbolic.shares import merged, together
from partitioner.ir.exchange import Intervals, Region
from partitioner.ir.graph import Node
from partitioner.ir.loops.factors import PENDING, Dispatch, names_of
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.table import LocalView, OpView
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class Sending:
    """A local node inside of which a rank sends rows to others of a group."""

    node: LocalNode
    ranks: tuple[int, ...]  #: Ranks of its group, in order.
    number: int  #: Number of times that the group has met before, on this rank.

    @property
    def reads(self) -> tuple[str, ...]:
        """Local values that it reads."""
        return self.node.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Local values that it makes."""
        return self.node.writes

    def __str__(self) -> str:
        return f"node {self.node.name!r} ({self.node.op})"


def send(
    model: WholeModel, ranks: Sequence[Rank], sides: Mapping[int, Sending]
) -> dict[int, dict[str, list[Held]]]:
    """Give what the results of the local nodes of a group are, by rank and local name.

    Raises:
        RefusedError: They are no node of the model on the parts of all ranks.
    """
    group = next(iter(sides.values())).ranks
    nodes, first = {rank: sides[rank].node for rank in group}, group[0]
    refused = list[RefusedError]()
    for candidates in model.candidates(ranks[first], nodes[first]):
        made: dict[int, dict[str, list[Held]]] = {rank: {} for rank in group}
        found = list[Node]()
        for candidate in candidates:
            matches = [Match(model, ranks[rank], [nodes[rank]], candidate) for rank in group]
            try:
                results = _results(group, matches, candidate)
            except RefusedError as error:
                refused.append(error)
                continue
            found.append(candidate)
            for rank, of in zip(group, results, strict=True):
                for name, held in of.items():
                    made[rank].setdefault(name, []).append(held)
        if found:
            model.found[nodes[first].name, nodes[first].op] = found
            return made
    raise unfollowed(ranks[first], nodes[first], refused)


@contextmanager
def _of_rank(rank: int) -> Iterator[None]:
    """Tell which rank a step is refused on."""
    try:
        yield
    except RefusedError as error:
        error.rank = rank
        raise


def _are_apart(one: _Member, other: _Member) -> bool:
    """Test whether two ranks have no row in common, and no owner."""
    dispatch = one.rule.dispatch
    loops = () if dispatch is None else (dispatch.rows, dispatch.owners)
    return all(are_disjoint(one.parts[loop], other.parts[loop]) for loop in loops)


def _results(group: tuple[int, ...], matches: Sequence[Match], node: Node) -> list[dict[str, Held]]:
    """Give what a node's results are on each rank of a group."""
    rule = rule_of(matches[0].graph, node)
    if isinstance(rule, str) or rule.dispatch is None:
        raise RefusedError(f"the ranks of {node.name!r} send each other no rows", closeness=1)
    refused = list[RefusedError]()
    members = []
    for match in matches:
        with _of_rank(match.rank.rank):
            members.append([*_Member.of(match, rule, rule.dispatch)])
    for chosen in choices(members, _are_apart):
        try:
            return _Exchange(group, node, rule, rule.dispatch, chosen).results()
        except RefusedError as error:
            refused.append(error)
    raise likeliest(refused)


@dataclass(frozen=True)
class _Member:
    """A rank of the group: what it reads, and the parts of loops that this is of."""

    match: Match
    rule: Rule
    reads: Sequence[Held | None]
    own: Loops  #: Over what it has of its own rows and owners.
    parts: Parts

    @classmethod
    def of(cls, match: Match, rule: Rule, dispatch: Dispatch) -> Iterator[_Member]:
        """Give a rank with all parts that its operands may be of.

        Raises:
            RefusedError: They are of none.
        """
        count, refused, is_any = len(rule.operands), list[RefusedError](), False
        stated = [
            None if count + slot in dispatch.inside else match.stated(slot)
            for slot in range(len(rule.results))
        ]
        for reads in match.operands():
            outside = [None if i in dispatch.inside else held for i, held in enumerate(reads)]
            own = Loops(rule, outside, stated, needs_place=True)
            try:
                for parts in own.parts():
                    is_any = True
                    yield cls(match, rule, reads, own, parts)
            except RefusedError as error:
                refused.append(error)
        if not is_any:
            raise likeliest(refused or [RefusedError("its operands are of no iterations")])

    def regions(self, inside: Collection[int], parts: Parts) -> tuple[Region, ...]:
        """Give the parts of its operands; those inside are of these parts, or they are refused."""
        reads = [held if i in inside else None for i, held in enumerate(self.reads)]
        kept = Loops(self.rule, reads, self.own.stated, needs_place=True, known=dict(parts))
        regions = next(kept.operand_regions(of) for of in kept.parts())
        pairs = enumerate(zip(self.own.operand_regions(self.parts), regions, strict=True))
        return tuple(both if i in inside else one for i, (one, both) in pairs)


@dataclass(frozen=True)
class _Exchange:
    """A node of the whole model on the parts of all ranks of a group."""

    group: tuple[int, ...]
    node: Node
    rule: Rule
    dispatch: Dispatch
    members: Sequence[_Member]

    def results(self) -> list[dict[str, Held]]:
        """Give what the local results are on each rank, if each runs what the op table says."""
        self._check_alike()
        held, made = list[tuple[Region, ...]](), list[dict[str, Held]]()
        for member in self.members:
            with _of_rank(member.match.rank.rank):
                parts = {**member.parts, self.dispatch.rows: self._all_rows}
                held.append(member.regions(self.dispatch.inside, parts))
        for member, regions in zip(self.members, held, strict=True):
            with _of_rank(member.match.rank.rank):
                made.append(self._made(member, regions, tuple(held)))
        return made

    @cached_property
    def _all_rows(self) -> Intervals:
        return self._of_all(self.dispatch.rows)

    @cached_property
    def _all_owners(self) -> Intervals:
        return self._of_all(self.dispatch.owners)

    def _of_all(self, loop: str) -> Intervals:
        """The iterations of a loop that all ranks have together; none has those of another."""
        parts = [member.parts[loop] for member in self.members]
        every = merged(sorted(itertools.chain.from_iterable(parts)))
        if count_of(every) < sum(map(count_of, parts)):
            why = f"two ranks of {self.group} have the same iterations of loop {loop!r}"
            raise RefusedError(why, is_wrong=True, closeness=2)
        return every

    def _check_alike(self) -> None:
        """Refuse ranks that differ in more than rows and owners: they are no terms of one sum."""
        first, own = self.members[0], {self.dispatch.rows, self.dispatch.owners}
        for member in self.members:
            for name, part in member.parts.items():
                if name not in own and part != first.parts[name]:
                    texts = region_text((first.parts[name],)), region_text((part,))
                    why = f"ranks that send each other rows have {' and '.join(texts)} of {name!r}"
                    raise RefusedError(why, is_wrong=True, closeness=2)
            pairs = enumerate(zip(first.reads, member.reads, strict=True))
            for one, other in (pair for i, pair in pairs if i not in self.dispatch.inside):
                if one and other and (one.share, one.how) != (other.share, other.how):
                    why = f"ranks that send each other rows have {one} and {other}"
                    raise RefusedError(why, is_wrong=True, closeness=2)

    def _made(
        self, member: _Member, regions: tuple[Region, ...], held: tuple[tuple[Region, ...], ...]
    ) -> dict[str, Held]:
        """Give what the results of a rank are, by local name."""
        match, row, slots = member.match, row_of(self.node), enumerate(self.node.outputs)
        sizes = {name: count_of(part) for name, part in member.parts.items() if name != PENDING}
        outs = tuple(self._result(member, slot).region if name else () for slot, name in slots)
        view = LocalView(sizes, _shapes(regions), _shapes(outs), regions, outs, self.group, held)
        if row.localize is None:
            raise match.other_form()
        local = row.localize(OpView(self.node, match.graph), view)
        names = match.expected(local, member.reads)
        if not names and match.with_any_attributes.expected(local, member.reads):
            why = f"its settings are not those of {self.node.name!r} on the parts of {self.group}"
            raise RefusedError(why, is_wrong=True, closeness=4)
        made = match.made(names, partial(self._result, member))
        if not made:
            raise match.other_form()
        return made

    def _result(self, member: _Member, slot: int) -> Held:
        """Give what a result of a rank is."""
        dispatch, names = self.dispatch, names_of([self.rule.results[slot]])
        is_inside = len(self.rule.operands) + slot in dispatch.inside
        parts, reads = dict(member.parts), member.reads
        if is_inside or dispatch.rows not in names:
            parts[dispatch.rows] = self._all_rows
        if not is_inside and dispatch.owners not in names:
            parts[dispatch.owners], reads = self._all_owners, self._added_up(reads)
        return replace(member.own, reads=reads).result(self.node, slot, parts)

    def _added_up(self, reads: Sequence[Held | None]) -> Sequence[Held | None]:
        """Give operands with the terms that all ranks have of those inside."""
        found = list(reads)
        for index in self.dispatch.inside:
            held = reads[index] if index < len(reads) else None
            if held is None:
                continue
            of_ranks = (one for member in self.members if (one := member.reads[index]))
            share = together((one.share for one in of_ranks), again=False)
            if share is None:
                why = f"the ranks of {self.group} would not have each term of {held} once"
                raise RefusedError(why, is_wrong=True, closeness=2)
            found[index] = replace(held, share=share)
        return found


def _shapes(regions: Iterable[Region]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(count_of, region)) for region in regions)
