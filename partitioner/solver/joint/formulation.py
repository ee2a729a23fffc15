"""The tight formulation as a MILP.

Variables (all in scaled units: seconds / `second_s`, bytes / `unit_bytes`):

    s[v,p]    node v takes choice p                          binary
    e[uv,P,Q] edge uv goes from class P to class Q           continuous, >= 0
    z[i]      item i is paid and held                        continuous, 0 to 1
    T         load of the busiest device                     continuous
    M         bytes (over the limit) of the fullest device   continuous

Minimise T + eps x total load (objective "throughput"), or M ("memory", "excess"), subject to

    (1) sum_p s[v,p] = 1                                                        `_choose`
    (2) sum_Q e[uv,P,Q] = sum_{p in P} s[u,p],  sum_P e[uv,P,Q] = sum_{q in Q} s[v,q]  `_edge`
    (3) z[i] >= sum of e over i's pairs on one edge, or of s over i's choices   `_item`
    (4) load of device d <= T, one row a distinct device                        `_loads`
    (5) bytes held on d at t <= limit[d] (+ M), at maximal cliques only         `_memory`
    (6) the n-th heaviest node uses one of the first n interchangeable groups, and a group is
        opened only after the one before it                                     `_symmetry`

A forbidden pair has no e. An item that one edge or hold alone can trigger needs no z: it is
priced on e or s. An edge with one class at an end needs no e: s of the other end says all.
With one distinct device there is no T: the sum itself is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from partitioner.solver.joint.milp import Milp, MilpBuilder
from partitioner.solver.joint.sites import Site, clique_positions, item_sites
from partitioner.solver.problem import Pair, Problem
from partitioner.solver.symmetry import rank_nodes, symmetric_groups

Goal = Literal["throughput", "memory", "excess"]
Terms = list[tuple[int, float]]

#: Weight of the total load in the objective, per device: breaks ties, moves T by at most this.
TIE_WEIGHT = 1e-5
#: Symmetry rows (6) are written for so many of the heaviest nodes.
SYMMETRY_NODES = 24


@dataclass(frozen=True)
class Formulation:
    """A MILP with what is needed to read its answers.

    Attributes:
        milp: The program.
        select: Column of s[v,p].
        unit: What one unit of the objective is, in seconds or bytes.
        slack: The goal's value is at least the MILP's bound / (1 + slack).
        spread: Whether a maximum over devices is minimised, not one sum.
    """

    milp: Milp
    select: tuple[tuple[int, ...], ...]
    unit: float
    slack: float
    spread: bool

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
    cutoff: float | None = None,
    caps: Mapping[int, float] | None = None,
) -> Formulation:
    """Write the MILP of a (presolved) problem.

    Args:
        problem: The problem; every node has a choice.
        goal: "throughput" within the limits, least peak ("memory", limits left aside), or least
            bytes over the limits ("excess").
        cutoff: A value of the goal that a known plan reaches.
        caps: Seconds that these devices must stay within instead of counting for the maximum.
    """
    writer = _Writer(problem, goal)
    writer.choose()
    for index in range(len(problem.edges)):
        writer.edge(index)
    for index, sites in enumerate(item_sites(problem)):
        writer.item(index, sites)
    slack = 0.0
    if goal == "throughput":
        unit = cutoff or _reference_s(problem)
        slack = writer.loads(unit, cutoff, caps or {})
    else:
        unit = _reference_bytes(problem)
    writer.memory(unit if goal != "throughput" else _reference_bytes(problem))
    writer.symmetry()
    return Formulation(writer.out.build(), tuple(map(tuple, writer.select)), unit, slack, slack > 0)


@dataclass
class _Writer:
    problem: Problem
    goal: Goal
    out: MilpBuilder = field(default_factory=MilpBuilder)
    select: list[list[int]] = field(default_factory=list)
    pairs: list[dict[Pair, Terms]] = field(default_factory=list)
    on: list[Terms] = field(default_factory=list)

    def choose(self) -> None:
        """(1) one choice a node."""
        for node, choices in enumerate(self.problem.nodes):
            row = [
                self.out.column(f"s[{node},{p}]", upper=1.0, integer=True)
                for p in range(len(choices))
            ]
            self.select.append(row)
            self.out.row(((column, 1.0) for column in row), 0, 1.0)

    def edge(self, index: int) -> None:
        """(2) marginals of one edge, over classes."""
        edge = self.problem.edges[index]
        outs = _members(edge.out_class, self.select[edge.u])
        ins = _members(edge.in_class, self.select[edge.v])
        if len(outs) == 1 or len(ins) == 1:
            terms = {(o, i): outs[o] if len(ins) == 1 else ins[i] for o in outs for i in ins}
            for pair in sorted(edge.forbidden & terms.keys()):
                self.out.row(terms[pair], 0, 0.0)
        else:
            terms = {
                (o, i): [(self.out.column(f"e[{index},{o},{i}]"), 1.0)]
                for o in outs
                for i in ins
                if (o, i) not in edge.forbidden
            }
            for o, own in outs.items():
                self.out.row(_minus([terms.get((o, i), []) for i in ins], own), 0, 0.0)
            for i, own in ins.items():
                self.out.row(_minus([terms.get((o, i), []) for o in outs], own), 0, 0.0)
        self.pairs.append(terms)

    def item(self, index: int, sites: tuple[Site, ...]) -> None:
        """(3) an item with several sites gets a variable, any other is its site."""
        terms = [self._site(site) for site in sites]
        if len(terms) > 1:
            column = self.out.column(f"z[{index}]", upper=1.0)
            for site in terms:
                self.out.row([(column, 1.0), *_minus([], site)], 1, 0.0)
            terms = [[(column, 1.0)]]
        self.on.append(terms[0] if terms else [])

    def _site(self, site: Site) -> Terms:
        if site.edge is not None:
            pairs = self.pairs[site.edge]
            return [term for pair in site.pairs for term in pairs.get(pair, [])]
        assert site.hold is not None
        row = self.select[self.problem.holds[site.hold].node]
        return [(row[choice], 1.0) for choice in site.choices]

    def loads(self, unit: float, cutoff: float | None, caps: Mapping[int, float]) -> float:
        """(4) load rows and the objective; returns how far the tie-break can move it."""
        devices = _distinct(self.problem, lambda d: (caps.get(d, math.inf), *self._load_key(d)))
        if len(devices) == 1 and not caps:
            self._price(self._load_terms(devices[0]), 1 / unit)
            return 0.0
        top = self.out.column(
            "T", cost=1.0, upper=cutoff / unit * (1 + 1e-6) if cutoff else math.inf
        )
        for device in devices:
            terms = [(column, value / unit) for column, value in self._load_terms(device)]
            if device in caps:
                self.out.row(terms, -1, caps[device] / unit)
            else:
                self.out.row([*terms, (top, -1.0)], -1, 0.0)
        for device in range(self.problem.devices):
            self._price(self._load_terms(device), TIE_WEIGHT / unit)
        return TIE_WEIGHT * self.problem.devices

    def _price(self, terms: Terms, factor: float) -> None:
        for column, value in terms:
            self.out.cost[column] += value * factor

    def _load_key(self, device: int) -> tuple[float, ...]:
        loads = (choice.load_s[device] for choices in self.problem.nodes for choice in choices)
        return (*loads, *(item.load_s[device] for item in self.problem.items))

    def _load_terms(self, device: int) -> Terms:
        terms = [
            (column, choice.load_s[device])
            for choices, row in zip(self.problem.nodes, self.select, strict=True)
            for choice, column in zip(choices, row, strict=True)
        ]
        for item, on in zip(self.problem.items, self.on, strict=True):
            if item.load_s[device]:
                terms += [(column, value * item.load_s[device]) for column, value in on]
        return terms

    def memory(self, unit: float) -> None:
        """(5) bytes held, at the maximal cliques of the live intervals."""
        top = None
        if self.goal != "throughput":
            top = self.out.column("M", cost=1.0)
        for device in _distinct(self.problem, self._bytes_key):
            limit = self.problem.limit_bytes[device]
            if self.goal == "memory":
                limit = 0.0
            if not math.isfinite(limit):
                continue
            live = [
                i for i, item in enumerate(self.problem.items) if item.bytes[device] and self.on[i]
            ]
            for position in clique_positions([_span(self.problem, i) for i in live]):
                held = [i for i in live if _alive(self.problem, i, position)]
                self._memory_row(device, held, limit, unit, top)

    def _memory_row(
        self, device: int, held: Sequence[int], limit: float, unit: float, top: int | None
    ) -> None:
        if top is None and self._most_bytes(device, held) <= limit:
            return
        terms = [
            (column, value * self.problem.items[i].bytes[device] / unit)
            for i in held
            for column, value in self.on[i]
        ]
        self.out.row(terms if top is None else [*terms, (top, -1.0)], -1, limit / unit)

    def _most_bytes(self, device: int, held: Sequence[int]) -> float:
        """No plan holds more than this: the fullest choice of each node and pair of each edge."""
        total: dict[int, float] = {}
        for i in held:
            for column, value in self.on[i]:
                total[column] = total.get(column, 0.0) + value * self.problem.items[i].bytes[device]
        most = 0.0
        for row in self.select:
            most += max(total.pop(column, 0.0) for column in row)
        for terms in self.pairs:
            own = [total.pop(c, 0.0) for pair in terms.values() for c, _ in pair]
            most += max(own, default=0.0)
        return most + sum(total.values())

    def _bytes_key(self, device: int) -> tuple[float, ...]:
        return (self.problem.limit_bytes[device], *(i.bytes[device] for i in self.problem.items))

    def symmetry(self) -> None:
        """(6) groups that are alike are opened in order, by the heaviest nodes first."""
        ranked = rank_nodes(self.problem)[:SYMMETRY_NODES]
        for groups in symmetric_groups(self.problem):
            for place, node in enumerate(ranked):
                for index, group in enumerate(groups[1:], start=1):
                    own = self._in_group(node, group)
                    opened = [
                        t for n in ranked[:place] for t in self._in_group(n, groups[index - 1])
                    ]
                    self.out.row([*own, *_minus([], opened)], -1, 0.0)

    def _in_group(self, node: int, group: int) -> Terms:
        choices = self.problem.nodes[node]
        return [
            (column, 1.0)
            for choice, column in zip(choices, self.select[node], strict=True)
            if choice.group == group
        ]


def _members(classes: Sequence[int], row: Sequence[int]) -> dict[int, Terms]:
    members: dict[int, Terms] = {}
    for name, column in zip(classes, row, strict=True):
        members.setdefault(name, []).append((column, 1.0))
    return dict(sorted(members.items()))


def _minus(plus: Iterable[Terms], minus: Terms) -> Terms:
    terms = [term for group in plus for term in group]
    return terms + [(column, -value) for column, value in minus]


def _distinct(problem: Problem, key: Callable[[int], tuple[float, ...]]) -> list[int]:
    """The first device of each kind."""
    kinds: dict[tuple[float, ...], int] = {}
    for device in range(problem.devices):
        kinds.setdefault(key(device), device)
    return sorted(kinds.values())


def _span(problem: Problem, index: int) -> tuple[int, int]:
    return problem.items[index].first, problem.items[index].last


def _alive(problem: Problem, index: int, position: int) -> bool:
    return problem.items[index].first <= position <= problem.items[index].last


def _reference_s(problem: Problem) -> float:
    """Seconds of order of a step: the nodes' least loads on one device."""
    least = sum(min(max(choice.load_s) for choice in choices) for choices in problem.nodes)
    return least or max((max(item.load_s) for item in problem.items), default=0.0) or 1.0


def _reference_bytes(problem: Problem) -> float:
    """Bytes of order of a device: the largest finite limit, or the bytes of all items' spread."""
    limits = [limit for limit in problem.limit_bytes if math.isfinite(limit) and limit > 0]
    return (
        max(limits, default=0.0) or max((max(i.bytes) for i in problem.items), default=0.0) or 1.0
    )
