"""The least number of devices, in fractions, whose sets cover all nodes: a growing linear program.

    minimise  theta + sum_v box_v * s_v
    such that (1) sum of x over the sets that hold v, + s_v >= 1          for every node v,
              (2) sum of x over the sets of class c <= number_c * theta   for every class c,

x, s, theta >= 0. `Covering` writes (1), (2), theta and s; `Covering.add` adds the x of one set. The
duals of (1), at most box_v each, are the values of the nodes. HiGHS keeps its basis as sets are
added, which makes a round cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from partitioner.solver.milp.highs import new_highs
from partitioner.solver.placement.sweep import Floats

#: HiGHS's code of the primal simplex method: the basis stays feasible when sets are added.
PRIMAL = 4


class Covering:
    """The program over the sets so far, for some devices of each class."""

    def __init__(self, numbers: Sequence[int], box: Floats) -> None:
        self.known: set[tuple[int, frozenset[int]]] = set()
        self.seconds: list[float] = []  # of each set
        self.nodes, self.limit = len(box), math.inf
        self.solver = new_highs()
        for option, value in (("threads", 1), ("presolve", "off"), ("simplex_strategy", PRIMAL)):
            self.solver.setOptionValue(option, value)
        no_columns = (0, np.array([], dtype=np.int32), np.array([]))
        for _ in box:
            self.solver.addRow(1.0, math.inf, *no_columns)
        for _ in numbers:
            self.solver.addRow(-math.inf, 0.0, *no_columns)
        class_rows = range(self.nodes, self.nodes + len(numbers))
        self._column(1.0, class_rows, [-float(n) for n in numbers])
        for node, cost in enumerate(box):
            self._column(float(cost), [node], [1.0])

    def add(self, of_class: int, inside: frozenset[int], seconds: float) -> bool:
        """Let a device of a class hold a set of nodes; whether it is new."""
        if (of_class, inside) in self.known:
            return False
        self.known.add((of_class, inside))
        self.seconds.append(seconds)
        rows = [*sorted(inside), self.nodes + of_class]
        self._column(0.0, rows, [1.0] * len(rows), self._most(seconds))
        return True

    def solve(self, limit: float) -> tuple[float, Floats]:
        """The least value with sets that take at most `limit` seconds, and the nodes' duals."""
        if limit != self.limit:
            self.limit = limit
            for index, seconds in enumerate(self.seconds, start=1 + self.nodes):
                self.solver.changeColBounds(index, 0.0, self._most(seconds))
        self.solver.run()
        duals = np.array(self.solver.getSolution().row_dual[: self.nodes])
        return float(self.solver.getInfo().objective_function_value), np.maximum(0.0, duals)

    def _most(self, seconds: float) -> float:
        return math.inf if seconds <= self.limit else 0.0

    def _column(
        self, cost: float, rows: Sequence[int], values: Sequence[float], upper: float = math.inf
    ) -> None:
        indices = np.array(rows, dtype=np.int32)
        self.solver.addCol(cost, 0.0, upper, len(indices), indices, np.array(values))
