"""A bound for placement on devices by the configuration LP and column generation.

Of all sets of nodes that fit a device within T (`capacity`) choose fractions x >= 0 such that

    sum of x over the sets that hold node v >= 1 for every node v,
    sum of x over the sets of a class of devices that are alike <= their number.

Every plan of no more than T is such a choice, so T is a lower bound if there is none. Gilmore and
Gomory (1961) bound cutting stock in this way; it has no symmetry of devices, and sees that sets
must be disjoint and indivisible, which the relaxed MILP does not. By LP duality there is none if
values y >= 0 of the nodes exist with

    sum_v y_v  >  sum over classes c of number_c * max { y(S) : S fits c within T },

which is checked with the bound of the MILP that prices, so that no tolerance of the LP matters.
The values come from the LP over the sets found so far, averaged with the best values yet
(Wentges, 1997). T is sought by bisection between the best bound and the best plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from partitioner.solver.capacity import Devices, devices, knapsack, price, work
from partitioner.solver.hunt import Hunt
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices

Floats = npt.NDArray[np.float64]

#: Values of T that are tried, rounds of pricing of each.
STEPS = 6
ROUNDS = 60
#: Larger problems are left alone: one pricing takes seconds.
MOST_NODES = 150
#: T counts as refuted from this relative excess of value on.
MARGIN = 1e-6
#: Rounds without a new set after which T is given up.
MOST_STALE = 5
#: The best values' share in the average.
SMOOTH = 0.5


def configure(hunt: Hunt) -> None:
    """Raise the bound of the throughput objective."""
    found = devices(hunt.problem)
    if found is None or hunt.best is None or len(hunt.problem.nodes) > MOST_NODES:
        return
    search = _Columns(hunt, found)
    low, high = hunt.bound, hunt.cost
    for step in range(STEPS):
        if hunt.done or not hunt.left_s:
            return
        limit = high * (1 - hunt.gap) if not step else (low + high) / 2
        if limit <= low:
            return
        if search.refutes(limit):
            hunt.prove(limit, "configuration LP")
            low = limit
        else:
            high = limit


@dataclass(frozen=True)
class _Column:
    """A set of nodes on a device of a class, with the seconds that it takes."""

    kind: int
    inside: frozenset[int]
    seconds: float


@dataclass
class _Columns:
    hunt: Hunt
    found: Devices
    columns: dict[tuple[int, frozenset[int]], _Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, classes = self.hunt.problem, self.found.classes
        self.number = [len(own) for own in classes]
        self.knapsacks: list[Problem] = [knapsack(problem, self.found, own[0]) for own in classes]
        works = [np.array(work(problem, self.found, own[0])) for own in classes]
        self.first = np.min([own / (own.sum() or 1.0) for own in works], axis=0)
        assert self.hunt.best is not None
        loads = evaluate_choices(problem, self.hunt.best).load_s
        for kind, own in enumerate(classes):
            for group in own:
                picks = zip(self.hunt.best, self.found.choice[group], strict=True)
                inside = frozenset(node for node, (now, pick) in enumerate(picks) if now == pick)
                self._add(_Column(kind, inside, loads[self.found.device[group]]))

    def refutes(self, limit: float) -> bool:
        """Whether no plan has all loads within the limit, as far as found in time."""
        values = best = self._scaled(self.first)
        most, stale = -math.inf, 0
        for _ in range(ROUNDS):
            room, new = self._round(values, limit)
            stale = 0 if new else stale + 1
            if room > MARGIN:
                return True
            if room > most:
                best, most = values, room
            prices = self._master(limit)
            if not self.hunt.left_s or prices is None or stale == MOST_STALE:
                return False
            values = self._scaled(SMOOTH * best + (1 - SMOOTH) * prices)
        return False

    def _scaled(self, values: Floats) -> Floats:
        scaled: Floats = values / (values.max() or 1.0)
        return scaled

    def _round(self, values: Floats, limit: float) -> tuple[float, bool]:
        """Price every class: the excess of value, and whether there is a new set."""
        room = whole = math.fsum(values)
        new = False
        for kind, sack in enumerate(self.knapsacks):
            priced = price(sack, values.tolist(), limit, self.hunt.left_s, self.hunt.engine)
            room -= self.number[kind] * priced.bound
            if priced.inside is not None:
                new |= self._add(_Column(kind, priced.inside, priced.seconds))
        return (room / whole if whole else 0.0), new

    def _add(self, column: _Column) -> bool:
        key = column.kind, column.inside
        if key in self.columns:
            return False
        self.columns[key] = column
        return True

    def _master(self, limit: float) -> Floats | None:
        """Values of the nodes from the sets so far; None if these cover all nodes."""
        fitting = [c for c in self.columns.values() if c.seconds <= limit]
        nodes = len(self.hunt.problem.nodes)
        cover = np.zeros((nodes, len(fitting)))
        use = np.zeros((len(self.number), len(fitting)))
        for index, column in enumerate(fitting):
            cover[sorted(column.inside), index] = 1.0
            use[column.kind, index] = 1.0
        none = np.zeros((len(self.number), nodes))
        rows = np.block([[-cover, -np.eye(nodes)], [use, none]])
        sides = np.array([*([-1.0] * nodes), *self.number])
        cost = np.array([*([0.0] * len(fitting)), *([1.0] * nodes)])
        found = linprog(cost, A_ub=rows, b_ub=sides, method="highs")
        if found.status != 0 or found.fun <= MARGIN:
            return None
        duals: Floats = np.maximum(0.0, -found.ineqlin.marginals[:nodes])
        return duals
