"""A mixed-integer linear program (MILP) as data, and the result of solving it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from partitioner.solver.outcome import Status


@dataclass(frozen=True)
class Row:
    """Sum of value x column, compared with `side`: `sense` is -1 for <=, 0 for =, 1 for >=."""

    columns: tuple[int, ...]
    values: tuple[float, ...]
    sense: Literal[-1, 0, 1]
    side: float
    name: str = ""  #: In files; "" for its number.


@dataclass(frozen=True)
class Milp:
    """Minimise cost @ x with lower <= x <= upper, integral where `integer` says so, and rows.

    Costs, bounds and sides are in units of order 1: mixed scales spoil a solver's tolerances.
    """

    cost: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    integer: tuple[bool, ...]
    rows: tuple[Row, ...]
    names: tuple[str, ...] = ()  #: Of the columns in files, "" for a number; () for none.

    def relaxed(self) -> Milp:
        """The LP relaxation: no column is integral."""
        return replace(self, integer=(False,) * len(self.integer))


@dataclass(frozen=True)
class MilpResult:
    """The best point that a solver found, and its bound."""

    values: tuple[float, ...]  #: One value a column; empty if no feasible point was found.
    cost: float  #: Objective of the values; infinite if there are none.
    bound: float  #: No feasible point costs less.
    #: `optimal` is proven within the gap asked for; `feasible` was stopped otherwise than by time;
    #: `time_limit` may have values or not.
    status: Status
    branches: int = 0  #: Nodes of branch and bound that were solved, where the solver says so.


class TooLargeError(Exception):
    """A program has more entries than there is room for."""


@dataclass
class MilpBuilder:
    """Collects columns and rows; `build` freezes them."""

    room: float = math.inf  #: Entries of all rows at most.
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def column(
        self, name: str = "", *, cost: float = 0.0, upper: float = math.inf, integer: bool = False
    ) -> int:
        """Add a column that is at least 0; return its index."""
        self.names.append(name)
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        terms: Iterable[tuple[int, float]],
        sense: Literal[-1, 0, 1],
        side: float,
        name: str = "",
    ) -> None:
        """Add a row; terms of one column are summed; zeros, and a true row without terms, go."""
        total: dict[int, float] = {}
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        if not all(total.values()):
            total = {column: value for column, value in total.items() if value}
        true_if_empty = {-1: side >= 0, 0: side == 0, 1: side <= 0}[sense]
        if total or not true_if_empty:
            self.rows.append(Row(tuple(total), tuple(total.values()), sense, side, name))
            self.room -= len(total)
            if self.room < 0:
                raise TooLargeError

    def build(self) -> Milp:
        """The program so far."""
        return Milp(
            tuple(self.cost),
            (0.0,) * len(self.cost),
            tuple(self.upper),
            tuple(self.integer),
            tuple(self.rows),
            tuple(self.names),
        )
