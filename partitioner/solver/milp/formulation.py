"""The tight formulation as a MILP.

Variables (all in scaled units: seconds / `Formulation.unit`, bytes / the largest limit), with their
names in files (`--dump-problem FILE.lp`):

    s[v,p]    s_v_p         node v takes choice p                          binary
    e[uv,P,Q] pair_uv_P_Q   edge uv goes from class P to class Q           continuous, >= 0
    z[i]      item_i        item i is paid and held                        continuous, 0 to 1
    T         load          load of the busiest device                     continuous
    M         bytes         bytes (over the limit) of the fullest device   continuous

Minimise T + eps x total load (objective "throughput"), or M ("memory", "excess"), subject to the
families of constraints, each a method of `_Program` that yields its rows:

    (1) choose      sum_p s[v,p] = 1
    (2) leave, meet sum_Q e[uv,P,Q] = sum_{p in P} s[u,p],
                    sum_P e[uv,P,Q] = sum_{q in Q} s[v,q]
    (3) pay         z[i] >= sum of e over i's pairs on one edge, or of s over i's choices
    (4) carry       load of device d <= T, one row a distinct device
    (5) hold        bytes held on d at t <= limit[d] (+ M), at maximal cliques
    (6) open        the n-th heaviest node uses one of the first n interchangeable
                    groups, and a group is opened only after the one before it

A forbidden pair has no e. An item that one edge or hold alone can trigger needs no z: it is
priced on e or s. An edge with one class at an end needs no e: s of the other end says all.
With one distinct device there is no T: the sum itself is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from partitioner.solver.milp.program import Milp, MilpBuilder, TooLargeError
from partitioner.solver.problem import (
    Edge,
    Pair,
    Problem,
    Site,
    clique_positions,
    item_sites,
    rank_nodes,
    symmetric_groups,
)
from partitioner.solver.work import Work

Goal = Literal["throughput", "memory", "excess"]
Terms = list[tuple[int, float]]  #: A sum of column x value.
Sense = Literal[-1, 0, 1]
#: Name, left side, sense and right side.
Constraint = tuple[str, Terms, Sense, float]
MOST: Sense = -1  #: <=
EQUAL: Sense = 0
LEAST: Sense = 1  #: >=

#: Entries of the rows at most. HiGHS looks at no clock while it lays out a program: of 17 million
#: entries (a training graph of 468 nodes within memory) it comes back after two minutes.
MOST_ENTRIES = 500_000
#: Weight of the total load in the objective, per device: breaks ties, moves T by at most this.
TIE_WEIGHT = 1e-5
#: Symmetry rows (6) are written for so many of the heaviest nodes.
SYMMETRY_NODES = 24


@dataclass(frozen=True)
class Formulation:
    """A MILP, and how plans and bounds are read from its results."""

    milp: Milp
    select: tuple[tuple[int, ...], ...]  #: Column of s[v,p].
    unit: float  #: Seconds or bytes in one unit of the objective.
    slack: float  #: The goal's value is at least the MILP's bound / (1 + slack).

    @property
    def min_max(self) -> bool:
        """Tell whether a maximum over devices is minimised, not one sum."""
        return self.slack > 0

    def decode(self, values: Sequence[float]) -> tuple[int, ...]:
        """The plan in a solution."""
        return tuple(
            max(range(len(row)), key=lambda p: (values[row[p]], -p)) for row in self.select
        )

    def start(self, chosen: Sequence[int]) -> dict[int, float]:
        """A plan as values of the binaries."""
        return {
            column: float(p == choice)
            for row, choice in zip(self.select, chosen, strict=True)
            for p, column in enumerate(row)
        }

    def bound(self, bound: float) -> float:
        """The MILP's bound as one on the goal, in seconds or bytes."""
        return max(0.0, bound * self.unit / (1 + self.slack))


#: Rows that are written before the clock is asked again.
ROWS_AT_ONCE = 64


def formulate(
    problem: Problem, goal: Goal, known: float | None = None, work: Work | None = None
) -> Formulation | None:
    """Write the MILP of a (presolved) problem; None if it had more than `MOST_ENTRIES`.

    Args:
        problem: Every node has a choice.
        goal: "throughput" within the limits, least peak ("memory", limits left aside), or least
            bytes over the limits ("excess").
        known: A value of the goal that a known plan reaches: loads are written in units of it. It
            bounds no column: with such a bound HiGHS 1.15.1 proves too much (a test shows it).
        work: Its clock ends the writing, too: then there is none either.
    """
    try:
        build = MilpBuilder(MOST_ENTRIES)
        x = _Program.of(build, problem, goal, known)
        families = (x.choose(), x.leave_and_meet(), x.pay(), x.carry(), x.hold(), x.open())
        for place, (name, terms, sense, side) in enumerate(itertools.chain(*families)):
            if work is not None and place % ROWS_AT_ONCE == 0 and work.late:
                return None
            build.row(terms, sense, side, name)
        for column, value in x.objective():
            build.cost[column] += value
        slack = TIE_WEIGHT * problem.devices if x.load is not None else 0.0
        return Formulation(build.build(), tuple(map(tuple, x.s)), x.unit, slack)
    except TooLargeError:
        return None


class _Edge(NamedTuple):
    """An edge uv: the sums of s of its ends by class, and the terms that are 1 for each pair."""

    outs: Mapping[int, Terms]  #: sum_{p in P} s[u,p] of each P.
    ins: Mapping[int, Terms]  #: sum_{q in Q} s[v,q] of each Q.
    e: Mapping[Pair, Terms]


@dataclass(frozen=True)
class _Program:
    """The variables of a problem's program, and the families of constraints over them."""

    problem: Problem
    goal: Goal
    unit: float  #: Seconds or bytes in one unit of the objective.
    bytes_unit: float
    s: Sequence[Sequence[int]]  #: Column of s[v,p].
    edges: Sequence[_Edge]
    sites: Sequence[Sequence[Terms]]  #: For each item the terms of each of its sites.
    z: Sequence[Terms]  #: For each item the terms that are 1 where it is paid and held.
    loaded: Sequence[int]  #: The devices that differ in loads.
    load: int | None  #: T.
    bytes: int | None  #: M.

    @classmethod
    def of(cls, build: MilpBuilder, problem: Problem, goal: Goal, known: float | None) -> _Program:
        """Make the variables."""
        s = [
            [build.column(f"s_{v}_{p}", upper=1.0, integer=True) for p in range(len(choices))]
            for v, choices in enumerate(problem.nodes)
        ]
        edges = [_edge(build, k, edge, s) for k, edge in enumerate(problem.edges)]

        def terms(site: Site) -> Terms:
            """The terms that are 1 where a site triggers its item."""
            if site.edge is not None:
                e = edges[site.edge].e
                return [term for pair in site.pairs for term in e.get(pair, [])]
            assert site.hold is not None
            row = s[problem.holds[site.hold].node]
            return [(row[choice], 1.0) for choice in site.choices]

        sites = [list(map(terms, at)) for at in item_sites(problem)]
        z = [
            [(build.column(f"item_{i}", upper=1.0), 1.0)] if len(at) > 1 else at[0] if at else []
            for i, at in enumerate(sites)
        ]

        # one device of those of equal loads
        def key(device: int) -> tuple[float, ...]:
            loads = (choice.load_s[device] for choices in problem.nodes for choice in choices)
            items = (item.load_s[device] for item in problem.items)
            return (*loads, *items)

        loaded = _distinct(problem, key)
        seconds = goal == "throughput"
        # seconds of order of a step: the nodes' least loads on one device
        least = sum(min(max(choice.load_s) for choice in choices) for choices in problem.nodes)
        dearest = max((max(item.load_s) for item in problem.items), default=0.0)
        # bytes of order of a device: the largest finite limit, or the largest item
        limits = [limit for limit in problem.limit_bytes if math.isfinite(limit) and limit > 0]
        largest = max((max(item.bytes) for item in problem.items), default=0.0)
        bytes_unit = max(limits, default=0.0) or largest or 1.0
        return cls(
            problem,
            goal,
            (known or least or dearest or 1.0) if seconds else bytes_unit,
            bytes_unit,
            s,
            edges,
            sites,
            z,
            loaded,
            load=build.column("load") if seconds and len(loaded) > 1 else None,
            bytes=None if seconds else build.column("bytes"),
        )

    def objective(self) -> Terms:
        """T + eps x total load, or the one distinct device's load, or M."""
        if self.bytes is not None:
            return [(self.bytes, 1.0)]
        if self.load is None:
            return _times(1 / self.unit, self.seconds(self.loaded[0]))
        terms = [(self.load, 1.0)]
        for device in range(self.problem.devices):
            terms += _times(TIE_WEIGHT / self.unit, self.seconds(device))
        return terms

    def choose(self) -> Iterator[Constraint]:
        """(1) sum_p s[v,p] = 1."""
        for v, row in enumerate(self.s):
            yield f"choose_{v}", [(column, 1.0) for column in row], EQUAL, 1.0

    def leave_and_meet(self) -> Iterator[Constraint]:
        """(2) sum_Q e[uv,P,Q] = sum_{p in P} s[u,p], sum_P e[uv,P,Q] = sum_{q in Q} s[v,q]."""
        for k, (edge, (outs, ins, e)) in enumerate(
            zip(self.problem.edges, self.edges, strict=True)
        ):
            if len(outs) == 1 or len(ins) == 1:  # no pair is a variable
                for o, i in sorted(edge.forbidden & e.keys()):
                    yield f"forbid_{k}_{o}_{i}", e[o, i], EQUAL, 0.0
                continue
            for o, members in outs.items():
                left = [term for i in ins for term in e.get((o, i), [])]
                yield f"leave_{k}_{o}", [*left, *_times(-1.0, members)], EQUAL, 0.0
            for i, members in ins.items():
                met = [term for o in outs for term in e.get((o, i), [])]
                yield f"meet_{k}_{i}", [*met, *_times(-1.0, members)], EQUAL, 0.0

    def pay(self) -> Iterator[Constraint]:
        """(3) z[i] >= sum of the e or s of each site of an item with several."""
        for i, (z, sites) in enumerate(zip(self.z, self.sites, strict=True)):
            for j, terms in enumerate(sites if len(sites) > 1 else ()):
                yield f"pay_{i}_{j}", [*z, *_times(-1.0, terms)], LEAST, 0.0

    def carry(self) -> Iterator[Constraint]:
        """(4) load of device d <= T."""
        if self.load is None:
            return
        for d in self.loaded:
            terms = [(column, value / self.unit) for column, value in self.seconds(d)]
            yield f"carry_{d}", [*terms, (self.load, -1.0)], MOST, 0.0

    def hold(self) -> Iterator[Constraint]:
        """(5) bytes held on d at t <= limit[d] (+ M), where they can be more."""
        problem = self.problem
        over = [] if self.bytes is None else [(self.bytes, -1.0)]

        # one device of those of equal limits and bytes
        def key(device: int) -> tuple[float, ...]:
            return (problem.limit_bytes[device], *(item.bytes[device] for item in problem.items))

        for d in _distinct(problem, key):
            limit = 0.0 if self.goal == "memory" else problem.limit_bytes[d]
            if not math.isfinite(limit):
                continue
            held = [
                (item, _times(item.bytes[d], z))
                for item, z in zip(problem.items, self.z, strict=True)
                if item.bytes[d] and z
            ]
            for t in clique_positions((item.first, item.last) for item, _ in held).tolist():
                live = [term for item, z in held if item.first <= t <= item.last for term in z]
                if over or self._most(live) > limit:
                    terms = [(column, size / self.bytes_unit) for column, size in live]
                    yield f"hold_{d}_{t}", [*terms, *over], MOST, limit / self.bytes_unit

    def open(self) -> Iterator[Constraint]:
        """(6) s[v] on a group <= sum of s of the heavier nodes on the group before it."""
        ranked = rank_nodes(self.problem)[:SYMMETRY_NODES]
        for groups in symmetric_groups(self.problem):
            for place, v in enumerate(ranked):
                for before, group in itertools.pairwise(groups):
                    opened = [term for u in ranked[:place] for term in self._on(u, before)]
                    terms = [*self._on(v, group), *_times(-1.0, opened)]
                    yield f"open_{v}_{group}", terms, MOST, 0.0

    def seconds(self, device: int) -> Terms:
        """Load of a device."""
        terms = [
            (column, choice.load_s[device])
            for choices, row in zip(self.problem.nodes, self.s, strict=True)
            for choice, column in zip(choices, row, strict=True)
        ]
        for item, z in zip(self.problem.items, self.z, strict=True):
            if item.load_s[device]:
                terms += _times(item.load_s[device], z)
        return terms

    def _on(self, node: int, group: int) -> Terms:
        choices = zip(self.problem.nodes[node], self.s[node], strict=True)
        return [(column, 1.0) for choice, column in choices if choice.group == group]

    def _most(self, live: Terms) -> float:
        """Bound the bytes of all plans: the fullest choice of each node and pair of each edge."""
        total: dict[int, float] = {}
        for column, size in live:
            total[column] = total.get(column, 0.0) + size
        fullest: dict[int, float] = {}
        for column, size in total.items():
            owner = self._owners.get(column, -1 - column)
            fullest[owner] = max(fullest.get(owner, 0.0), size)
        return sum(fullest.values())

    @cached_property
    def _owners(self) -> Mapping[int, int]:
        """The number of the node or edge that each column is a choice or a pair of."""
        owners: dict[int, int] = {}
        for number, edge in enumerate(self.edges, len(self.s)):
            pairs = (column for terms in edge.e.values() for column, _ in terms)
            owners.update(dict.fromkeys(pairs, number))
        for node, row in enumerate(self.s):
            owners.update(dict.fromkeys(row, node))
        return owners


def _edge(build: MilpBuilder, k: int, edge: Edge, s: Sequence[Sequence[int]]) -> _Edge:
    outs = _members(edge.out_class, s[edge.u])
    ins = _members(edge.in_class, s[edge.v])
    pairs = itertools.product(outs, ins)
    if len(ins) == 1:
        return _Edge(outs, ins, {(o, i): outs[o] for o, i in pairs})
    if len(outs) == 1:
        return _Edge(outs, ins, {(o, i): ins[i] for o, i in pairs})
    e: dict[Pair, Terms] = {
        (o, i): [(build.column(f"pair_{k}_{o}_{i}"), 1.0)]
        for o, i in pairs
        if (o, i) not in edge.forbidden
    }
    return _Edge(outs, ins, e)


def _members(classes: Sequence[int], row: Sequence[int]) -> dict[int, Terms]:
    members: dict[int, Terms] = {}
    for name, column in zip(classes, row, strict=True):
        members.setdefault(name, []).append((column, 1.0))
    return dict(sorted(members.items()))


def _times(factor: float, terms: Terms) -> Terms:
    return [(column, value * factor) for column, value in terms]


def _distinct(problem: Problem, key: Callable[[int], tuple[float, ...]]) -> list[int]:
    """The first device of each key, ascending."""
    first: dict[tuple[float, ...], int] = {}
    for device in range(problem.devices):
        first.setdefault(key(device), device)
    return sorted(first.values())
