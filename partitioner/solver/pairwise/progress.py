"""The best choice and the best bound so far, and the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from partitioner.solver.outcome import Bounds, Status, relative_gap
from partitioner.solver.pairwise.model import Model
from partitioner.solver.pairwise.problem import Ints, Pairwise, evaluate
from partitioner.solver.work import now_s

#: Bounds are sums of floats: this is taken off before they are rounded up to a whole number.
RELATIVE, ABSOLUTE = 1e-9, 1e-6


@dataclass(frozen=True)
class PairwiseSolution:
    """A choice of strategies and its certificate."""

    chosen: tuple[int, ...]  #: One strategy index a node; empty if none was found.
    cost: int | None  #: Its exact cost; None if none was found.
    bound: float  #: No feasible choice costs less; infinite if none is feasible.
    #: `optimal` within the gap, `feasible` (stopped by the round limit), `time_limit` (with a
    #: choice or without), or `infeasible`.
    status: Status
    reason: str  #: Why nothing is feasible; empty otherwise.
    solver: str  #: Methods that found the choice / proved the bound.
    seconds: float  #: Time spent, without that of compiling the solver.
    #: (seconds, cost, bound) at every improvement; the cost is infinite before the first choice.
    trace: tuple[tuple[float, float, float], ...]

    @property
    def gap(self) -> float:
        """The relative gap between cost and bound; infinite without a cost."""
        return math.inf if self.cost is None else relative_gap(self.cost, self.bound)


@dataclass
class Progress:
    """The best choice and bound of a search so far; see `PairwiseSolution`."""

    problem: Pairwise
    gap: float
    started: float  #: Second of `now_s` at the start, as `deadline` is of the end.
    deadline: float
    chosen: tuple[int, ...] = ()
    cost: float = math.inf  #: Of the best feasible choice; infinite if there is none.
    bound: float = 0.0
    reason: str = ""
    found_by: str = "none"  #: Method that found the choice.
    proved_by: str = "none"  #: Method that proved the bound.
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    _bounds: Bounds = field(default_factory=Bounds)

    def offer(self, model: Model, chosen: Ints, source: str) -> None:
        """Keep a choice of a model's strategies if it is feasible and better, by the referee."""
        self.take(model.original(chosen), source)

    def take(self, chosen: tuple[int, ...], source: str) -> None:
        """Keep a choice of the problem's strategies if it is feasible and better."""
        outcome = evaluate(self.problem, chosen)
        if not outcome.fault and outcome.cost < self.cost:
            self.chosen, self.cost, self.found_by = chosen, outcome.cost, source
            if self.bound > self.cost:
                self.bound, self.proved_by = self._bounds.without_those_above(self.cost)
            self._note()

    def prove(self, bound: float, source: str) -> None:
        """Keep a bound if it is higher; costs are whole, so it is rounded up."""
        if math.isfinite(bound):
            bound = math.ceil(bound - RELATIVE * abs(bound) - ABSOLUTE)
        bound = min(bound, self.cost)
        self._bounds.add(bound, source)
        if bound > self.bound:
            self.bound, self.proved_by = bound, source
            self._note()

    def refute(self, reason: str, source: str) -> None:
        """Note that nothing is feasible."""
        self.reason, self.bound, self.proved_by = reason, math.inf, source

    def close(self, source: str) -> None:
        """Note that nothing is better than the best choice; without one, that none is feasible."""
        if math.isfinite(self.cost):
            self.prove(self.cost, source)
        else:
            self.refute("no allowed choice keeps within the limit", source)

    def _note(self) -> None:
        self.trace.append((now_s() - self.started, self.cost, self.bound))

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - now_s())

    @property
    def met(self) -> bool:
        """Tell whether the gap is reached, or nothing is feasible.

        A gap as small as the share that `prove` takes off for rounding can never be proven: above
        costs of 5e8 that is whole units. So smaller gaps count as that share.
        """
        gap = max(self.gap, 2 * RELATIVE)
        return bool(self.reason) or self.cost - self.bound <= gap * self.cost < math.inf

    @property
    def over(self) -> bool:
        """Tell whether to stop."""
        return self.met or not self.left_s

    def solution(self) -> PairwiseSolution:
        """The best choice and its certificate."""
        known = bool(self.chosen) or (not self.problem.nodes and math.isfinite(self.cost))
        status: Status = "feasible" if known and self.left_s else "time_limit"
        if self.met:
            status = "infeasible" if self.reason else "optimal"
        return PairwiseSolution(
            self.chosen,
            int(self.cost) if known else None,
            self.bound,
            status,
            self.reason,
            f"{self.found_by} / {self.proved_by}",
            now_s() - self.started,
            tuple(self.trace),
        )
