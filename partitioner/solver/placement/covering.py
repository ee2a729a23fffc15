"""The least number of devices, in fractions, whose sets cover all nodes: a growing linear program.

    minimise  theta + sum_v box_v * s_v
    such that sum of x over the sets that hold v, + s_v >= 1                for every node v,
              sum of x over the sets of class c <= number_c * theta         for every class c,

x, s, theta >= 0. The duals of the nodes, at most box_v each, are what nodes are worth. HiGHS
keeps its basis as sets are added, which is what makes a round cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: HiGHS's code of the primal simplex method: the basis stays feasible when sets are added.
PRIMAL = 4


@dataclass(frozen=True)
class Column:
    """A set of nodes on a device of a class, with the seconds that it takes."""

    kind: int
    inside: frozenset[int]
    seconds: float


class Covering:
    """The program over the sets so far.

    Args:
        numbers: Devices of each class.
        box: The most that each node may be worth.
    """

    def __init__(self, numbers: Sequence[int], box: Floats) -> None:
        import highspy

        self.columns: list[Column] = []
        self.known: set[tuple[int, frozenset[int]]] = set()
        self.count, self.limit = len(box), math.inf
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("presolve", "off"),
            ("simplex_strategy", PRIMAL),
        ):
            self.solver.setOptionValue(option, value)
        for _ in box:
            self._row(1.0, math.inf)
        for _ in numbers:
            self._row(-math.inf, 0.0)
        self._column(
            1.0, range(self.count, self.count + len(numbers)), [-float(n) for n in numbers]
        )
        for node, cost in enumerate(box):
            self._column(float(cost), [node], [1.0])
        self.first = 1 + self.count

    def add(self, column: Column) -> bool:
        """Let a set be used; whether it is new."""
        key = column.kind, column.inside
        if key in self.known:
            return False
        self.known.add(key)
        self.columns.append(column)
        rows = [*sorted(column.inside), self.count + column.kind]
        self._column(0.0, rows, [1.0] * len(rows), self._most(column))
        return True

    def solve(self, limit: float) -> tuple[float, Floats]:
        """The least value with sets that take at most `limit` seconds, and the nodes' duals."""
        if limit != self.limit:
            self.limit = limit
            for index, column in enumerate(self.columns, start=self.first):
                self.solver.changeColBounds(index, 0.0, self._most(column))
        self.solver.run()
        duals = np.array(self.solver.getSolution().row_dual[: self.count])
        return float(self.solver.getInfo().objective_function_value), np.maximum(0.0, duals)

    def _most(self, column: Column) -> float:
        return math.inf if column.seconds <= self.limit else 0.0

    def _row(self, lower: float, upper: float) -> None:
        self.solver.addRow(lower, upper, 0, np.array([], dtype=np.int32), np.array([]))

    def _column(
        self, cost: float, rows: Sequence[int], values: Sequence[float], upper: float = math.inf
    ) -> None:
        indices = np.array(rows, dtype=np.int32)
        self.solver.addCol(cost, 0.0, upper, len(indices), indices, np.array(values))
