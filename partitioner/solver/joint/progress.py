"""The best plan and the best bound so far: every method offers to it, nothing is ever lost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.engines import HIGHS, Engine
from partitioner.solver.joint.milp import Status
from partitioner.solver.outcome import relative_gap
from partitioner.solver.placement.frontier import Fleet, fleet
from partitioner.solver.problem import Problem, SolverError
from partitioner.solver.referee import Objective, Outcome, evaluate_choices

#: Relative difference that rounding may make between two ways of adding up the same plan.
ROUNDING = 1e-9


@dataclass
class Hunt:
    """Progress on one (presolved) problem under one objective.

    Attributes:
        problem: The problem.
        objective: What is minimised.
        gap: Relative gap at which to stop.
        deadline: Monotonic second at which to stop.
        seed: Of all random choices.
        effort: See `solve`.
        engine: Solves the MILPs.
        cutoff: Stop once a bound shows that no plan is below this.
        best: The best plan that fits.
        cost: Its value; infinite if there is none.
        bound: No plan has a lower value; infinite once there is proof that none fits.
        found_by: What found the plan.
        proved_by: What proved the bound.
        closest: The plan seen that is over the limits by the fewest bytes, fitting or not.
    """

    problem: Problem
    objective: Objective
    gap: float
    deadline: float
    seed: int
    cutoff: float = math.inf
    best: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = 0.0
    found_by: str = "none"
    proved_by: str = "none"
    closest: tuple[int, ...] | None = None
    effort: int = 1
    engine: Engine = HIGHS
    _total: float = math.inf
    _excess: float = math.inf

    def offer(self, chosen: Sequence[int], source: str) -> Outcome | None:
        """Keep a plan if it fits and is better; returns what it costs, None if it is forbidden."""
        try:
            outcome = evaluate_choices(self.problem, chosen)
        except SolverError:
            return None
        if outcome.excess_bytes < self._excess:
            self.closest, self._excess = tuple(chosen), outcome.excess_bytes
        if outcome.excess_bytes <= 0:
            self._keep(tuple(chosen), outcome, source)
        return outcome

    def _keep(self, chosen: tuple[int, ...], outcome: Outcome, source: str) -> None:
        value, total = outcome.value(self.objective), sum(outcome.load_s)
        lower = value < self.cost * (1 - ROUNDING)
        same = value <= self.cost * (1 + ROUNDING)
        if lower or (same and total < self._total):
            self.best, self.cost, self._total = chosen, value, total
        if lower:
            self.found_by = source

    def prove(self, bound: float, source: str) -> None:
        """Keep a bound if it is higher."""
        if bound > self.bound:
            self.bound, self.proved_by = bound, source

    @cached_property
    def eliminator(self) -> Eliminator:
        """The problem laid out for elimination."""
        return Eliminator(self.problem)

    @cached_property
    def fleet(self) -> Fleet | None:
        """The devices, if each is a group of its own."""
        return fleet(self.problem)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def done(self) -> bool:
        """Whether the gap asked for is met, or no plan can be below the cutoff."""
        if self.best is None:
            return False
        return self.bound >= self.cutoff or self._met

    @property
    def _met(self) -> bool:
        return relative_gap(self.cost, self.bound) <= self.gap + ROUNDING

    @property
    def status(self) -> Status:
        """The verdict so far."""
        if self.best is not None and self._met:
            return "optimal"
        if self.best is None and math.isinf(self.bound):
            return "infeasible"
        return "time_limit" if not self.left_s else "feasible"
