"""The tight formulation as a MILP.

Variables (all in scaled units: seconds / `Formulation.unit`, bytes / the largest limit), with their
names in files (`--dump-problem FILE.lp`):

    s[v,p]    s_v_p         node v takes choice p                          binary
    e[uv,P,Q] pair_uv_P_Q   edge uv goes from class P to class Q           continuous, >= 0
    z[i]      item_i        item i is paid and held                        continuous, 0 to 1
    T         load          load of the busiest device                     continuous
    M         bytes         bytes (over the limit) of the fullest device   continuous

Minimise T + eps x total load (objective "throughput"), or M ("memory", "excess"), subject to

    (1) choose      sum_p s[v,p] = 1                                               `_choose`
    (2) leave, meet sum_Q e[uv,P,Q] = sum_{p in P} s[u,p],
                    sum_P e[uv,P,Q] = sum_{q in Q} s[v,q]                          `_edge`
    (3) pay         z[i] >= sum of e over i's pairs on one edge, or of s over i's
                    choices                                                        `_item`
    (4) carry       load of device d <= T, one row a distinct device               `_loads`
    (5) hold        bytes held on d at t <= limit[d] (+ M), at maximal cliques     `_memory`
    (6) open        the n-th heaviest node uses one of the first n interchangeable
                    groups, and a group is opened only after the one before it     `_symmetry`

A forbidden pair has no e. An item that one edge or hold alone can trigger needs no z: it is
priced on e or s. An edge with one class at an end needs no e: s of the other end says all.
With one distinct device there is no T: the sum itself is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partitioner.solver.milp.program import Milp, MilpBuilder, TooLargeError
from partitioner.solver.problem import Edge, Pair, Problem
from partitioner.solver.sites import Site, clique_positions, item_sites
from partitioner.solver.symmetry import rank_nodes, symmetric_groups

Goal = Literal["throughput", "memory", "excess"]
Terms = list[tuple[int, float]]

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


def formulate(
    problem: Problem,
    goal: Goal,
    known: float | None = None,
    caps: Mapping[int, float] | None = None,
) -> Formulation | None:
    """Write the MILP of a (presolved) problem; None if it had more than `MOST_ENTRIES`.

    Args:
        problem: Every node has a choice.
        goal: "throughput" within the limits, least peak ("memory", limits left aside), or least
            bytes over the limits ("excess").
        known: A value of the goal that a known plan reaches: loads are written in units of it. It
            bounds no column: with such a bound HiGHS 1.15.1 proves too much (a test shows it).
        caps: Seconds that these devices must stay within instead of counting for the maximum.
    """
    try:
        return _formulated(problem, goal, known, caps or {})
    except TooLargeError:
        return None


def _formulated(
    problem: Problem, goal: Goal, known: float | None, caps: Mapping[int, float]
) -> Formulation:
    build = MilpBuilder(MOST_ENTRIES)
    select = _choose(build, problem)
    pairs = [_edge(build, number, edge, select) for number, edge in enumerate(problem.edges)]
    on = [
        _item(build, number, [_site(problem, site, select, pairs) for site in sites])
        for number, sites in enumerate(item_sites(problem))
    ]
    columns = _Columns(problem, select, pairs, on)
    unit = bytes_unit = _reference_bytes(problem)
    slack = 0.0
    if goal == "throughput":
        unit = known or _reference_s(problem)
        slack = _loads(build, columns, unit, caps)
    _memory(build, columns, goal, bytes_unit)
    _symmetry(build, problem, select)
    return Formulation(build.build(), tuple(map(tuple, select)), unit, slack)


@dataclass(frozen=True)
class _Columns:
    """The columns of (1) to (3) by the choice, pair or item that they stand for."""

    problem: Problem
    select: list[list[int]]  #: s[v,p].
    pairs: list[dict[Pair, Terms]]  #: For each edge the terms that are 1 where a pair is taken.
    on: list[Terms]  #: For each item the terms that are 1 where it is paid and held.

    def load(self, device: int) -> Terms:
        """Seconds of a device."""
        terms = [
            (column, choice.load_s[device])
            for choices, row in zip(self.problem.nodes, self.select, strict=True)
            for choice, column in zip(choices, row, strict=True)
        ]
        for item, on in zip(self.problem.items, self.on, strict=True):
            if item.load_s[device]:
                terms += [(column, value * item.load_s[device]) for column, value in on]
        return terms


def _choose(build: MilpBuilder, problem: Problem) -> list[list[int]]:
    """(1) one choice a node."""
    select = []
    for v, choices in enumerate(problem.nodes):
        row = [build.column(f"s_{v}_{p}", upper=1.0, integer=True) for p in range(len(choices))]
        build.row(((column, 1.0) for column in row), 0, 1.0, f"choose_{v}")
        select.append(row)
    return select


def _edge(
    build: MilpBuilder, number: int, edge: Edge, select: Sequence[Sequence[int]]
) -> dict[Pair, Terms]:
    """(2) marginals of one edge, over classes; the terms of each pair."""
    outs = _members(edge.out_class, select[edge.u])
    ins = _members(edge.in_class, select[edge.v])
    if len(outs) == 1 or len(ins) == 1:
        terms = {(o, i): outs[o] if len(ins) == 1 else ins[i] for o in outs for i in ins}
        for pair in sorted(edge.forbidden & terms.keys()):
            build.row(terms[pair], 0, 0.0, f"forbid_{number}_{pair[0]}_{pair[1]}")
        return terms
    terms = {
        (o, i): [(build.column(f"pair_{number}_{o}_{i}"), 1.0)]
        for o in outs
        for i in ins
        if (o, i) not in edge.forbidden
    }
    for o, members in outs.items():
        left = _minus([terms.get((o, i), []) for i in ins], members)
        build.row(left, 0, 0.0, f"leave_{number}_{o}")
    for i, members in ins.items():
        met = _minus([terms.get((o, i), []) for o in outs], members)
        build.row(met, 0, 0.0, f"meet_{number}_{i}")
    return terms


def _site(
    problem: Problem,
    site: Site,
    select: Sequence[Sequence[int]],
    pairs: Sequence[Mapping[Pair, Terms]],
) -> Terms:
    """The terms that are 1 where a site triggers its item."""
    if site.edge is not None:
        terms = pairs[site.edge]
        return [term for pair in site.pairs for term in terms.get(pair, [])]
    assert site.hold is not None
    row = select[problem.holds[site.hold].node]
    return [(row[choice], 1.0) for choice in site.choices]


def _item(build: MilpBuilder, number: int, sites: Sequence[Terms]) -> Terms:
    """(3) an item with several sites gets a variable, any other is its site."""
    if len(sites) < 2:
        return sites[0] if sites else []
    column = build.column(f"item_{number}", upper=1.0)
    for site, terms in enumerate(sites):
        build.row([(column, 1.0), *_minus([], terms)], 1, 0.0, f"pay_{number}_{site}")
    return [(column, 1.0)]


def _loads(build: MilpBuilder, columns: _Columns, unit: float, caps: Mapping[int, float]) -> float:
    """(4) load rows and the objective; returns how far the tie-break can move it."""
    problem = columns.problem

    def key(device: int) -> tuple[float, ...]:
        loads = (choice.load_s[device] for choices in problem.nodes for choice in choices)
        items = (item.load_s[device] for item in problem.items)
        return (caps.get(device, math.inf), *loads, *items)

    def price(device: int, factor: float) -> None:
        for column, value in columns.load(device):
            build.cost[column] += value * factor

    devices = _distinct(problem, key)
    if len(devices) == 1 and not caps:
        price(devices[0], 1 / unit)
        return 0.0
    top = build.column("load", cost=1.0)
    for device in devices:
        terms = [(column, value / unit) for column, value in columns.load(device)]
        if device in caps:
            build.row(terms, -1, caps[device] / unit, f"carry_{device}")
        else:
            build.row([*terms, (top, -1.0)], -1, 0.0, f"carry_{device}")
    for device in range(problem.devices):
        price(device, TIE_WEIGHT / unit)
    return TIE_WEIGHT * problem.devices


def _memory(build: MilpBuilder, columns: _Columns, goal: Goal, unit: float) -> None:
    """(5) bytes held, at the maximal cliques of the live intervals."""
    problem, on = columns.problem, columns.on
    top = None if goal == "throughput" else build.column("bytes", cost=1.0)

    def key(device: int) -> tuple[float, ...]:
        return (problem.limit_bytes[device], *(item.bytes[device] for item in problem.items))

    for device in _distinct(problem, key):
        limit = 0.0 if goal == "memory" else problem.limit_bytes[device]
        if not math.isfinite(limit):
            continue
        held = [
            (item, [(column, value * item.bytes[device]) for column, value in terms])
            for item, terms in zip(problem.items, on, strict=True)
            if item.bytes[device] and terms
        ]
        for position in clique_positions((item.first, item.last) for item, _ in held):
            live = [terms for item, terms in held if item.first <= position <= item.last]
            if top is None and _most_bytes(columns, live) <= limit:
                continue
            terms = [(column, size / unit) for item_terms in live for column, size in item_terms]
            if top is not None:
                terms.append((top, -1.0))
            build.row(terms, -1, limit / unit, f"hold_{device}_{position}")


def _most_bytes(columns: _Columns, live: Iterable[Terms]) -> float:
    """Bound the bytes of all plans: the fullest choice of each node and pair of each edge."""
    total: dict[int, float] = {}
    for column, size in (term for terms in live for term in terms):
        total[column] = total.get(column, 0.0) + size
    most = 0.0
    for row in columns.select:
        most += max(total.pop(column, 0.0) for column in row)
    for by_pair in columns.pairs:
        sizes = [total.pop(column, 0.0) for terms in by_pair.values() for column, _ in terms]
        most += max(sizes, default=0.0)
    return most + sum(total.values())


def _symmetry(build: MilpBuilder, problem: Problem, select: Sequence[Sequence[int]]) -> None:
    """(6) interchangeable groups are opened in order, by the heaviest nodes first."""

    def in_group(node: int, group: int) -> Terms:
        choices = zip(problem.nodes[node], select[node], strict=True)
        return [(column, 1.0) for choice, column in choices if choice.group == group]

    ranked = rank_nodes(problem)[:SYMMETRY_NODES]
    for groups in symmetric_groups(problem):
        for place, node in enumerate(ranked):
            for before, group in itertools.pairwise(groups):
                opened = [term for n in ranked[:place] for term in in_group(n, before)]
                terms = [*in_group(node, group), *_minus([], opened)]
                build.row(terms, -1, 0.0, f"open_{node}_{group}")


def _members(classes: Sequence[int], row: Sequence[int]) -> dict[int, Terms]:
    members: dict[int, Terms] = {}
    for name, column in zip(classes, row, strict=True):
        members.setdefault(name, []).append((column, 1.0))
    return dict(sorted(members.items()))


def _minus(plus: Iterable[Terms], minus: Terms) -> Terms:
    terms = [term for group in plus for term in group]
    return terms + [(column, -value) for column, value in minus]


def _distinct(problem: Problem, key: Callable[[int], tuple[float, ...]]) -> list[int]:
    """The first device of each key, ascending."""
    first: dict[tuple[float, ...], int] = {}
    for device in range(problem.devices):
        first.setdefault(key(device), device)
    return sorted(first.values())


def _reference_s(problem: Problem) -> float:
    """Seconds of order of a step: the nodes' least loads on one device."""
    least = sum(min(max(choice.load_s) for choice in choices) for choices in problem.nodes)
    return least or max((max(item.load_s) for item in problem.items), default=0.0) or 1.0


def _reference_bytes(problem: Problem) -> float:
    """Bytes of order of a device: the largest finite limit, or the largest item."""
    limits = [limit for limit in problem.limit_bytes if math.isfinite(limit) and limit > 0]
    return (
        max(limits, default=0.0) or max((max(i.bytes) for i in problem.items), default=0.0) or 1.0
    )
