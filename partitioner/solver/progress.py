"""The best plan and the best bound so far: all methods offer to it, and nothing is ever lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.outcome import Bounds, Status, relative_gap, returns
from partitioner.solver.problem import Problem, SolverError
from partitioner.solver.referee import Objective, Outcome, evaluate_choices
from partitioner.solver.work import Work

#: Relative difference that rounding may make between two ways of adding up the same plan.
ROUNDING = 1e-9
#: A plan that is below a bound by more than this relative difference, more than the tolerances of
#: MILP solvers, refutes it.
REFUTED = 1e-5
#: A load is lower than another from this relative difference on.
LOAD_EPSILON = 1e-7


@dataclass
class Progress:
    """The search for the best plan of one (presolved) problem: its limits and its results."""

    problem: Problem
    objective: Objective
    gap: float  #: Relative gap at which to stop.
    work: Work  #: Steps that may be done, and the second at which the clock stops the search.
    seed: int  #: Of all random choices.
    cutoff: float = math.inf  #: Stop once a bound shows that no plan is below this.
    effort: int = 1  #: See `solve`.
    engine: Engine = HIGHS  #: Solves the MILPs.
    best: tuple[int, ...] | None = None  #: The best plan that fits.
    cost: float = math.inf  #: Its value; infinite if there is none.
    bound: float = 0.0  #: No plan has a lower value; infinite once it is proven that none fits.
    found_by: str = "none"  #: The method that found the plan.
    proved_by: str = "none"  #: The method that proved the bound.
    closest: tuple[int, ...] | None = None  #: The plan that is over the limits by the fewest bytes.
    _bounds: Bounds = field(default_factory=Bounds)
    #: Of the best plan: the load of all devices, its returns, the highest peak, all peaks.
    _rank: tuple[float, ...] = (math.inf,) * 4
    _excess: float = math.inf

    def offer(self, chosen: Sequence[int], source: str) -> Outcome | None:
        """Keep a plan if it fits and is better; return its cost, None if it is forbidden.

        Of plans of equal cost that of less load in all is better, then the one that returns to
        fewer groups that it left, then the one whose fullest device holds fewer bytes, then the one
        that holds fewer in all.
        """
        try:
            outcome = evaluate_choices(self.problem, chosen)
        except SolverError:
            return None
        if outcome.excess_bytes < self._excess:
            self.closest, self._excess = tuple(chosen), outcome.excess_bytes
        if outcome.excess_bytes > 0:
            return outcome
        value = outcome.value(self.objective)
        peaks = outcome.peak_bytes
        groups = (frozenset((n[c].group,)) for n, c in zip(self.problem.nodes, chosen, strict=True))
        rank = sum(outcome.load_s), returns(groups), max(peaks), sum(peaks)
        lower = value < self.cost * (1 - ROUNDING)
        same = value <= self.cost * (1 + ROUNDING)
        if lower or (same and _is_lower(rank, self._rank)):
            self.best, self.cost, self._rank = tuple(chosen), value, rank
        if lower:
            self.found_by = source
            self._drop_refuted()
        return outcome

    def prove(self, bound: float, source: str) -> None:
        """Keep a bound if it is higher, and no known plan refutes it."""
        self._bounds.add(bound, source)
        if bound > self.bound:
            self.bound, self.proved_by = bound, source
        self._drop_refuted()

    def _drop_refuted(self) -> None:
        most = self.cost * (1 + REFUTED)
        if self.bound > most:
            self.bound, self.proved_by = self._bounds.without_those_above(most)

    @property
    def done(self) -> bool:
        """Tell whether the gap asked for is met, or no plan can be below the cutoff."""
        return self.best is not None and (self.bound >= self.cutoff or self._met)

    @property
    def over(self) -> bool:
        """Tell whether to stop: done, or out of steps or time."""
        return self.done or self.work.over

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
        return "time_limit" if self.work.stopped else "feasible"


def _is_lower(
    new: Sequence[float], old: Sequence[float], rounding: float = ROUNDING, absolute: float = 0.0
) -> bool:
    """Test whether figures are lexicographically less by more than rounding."""
    for a, b in zip(new, old, strict=True):
        if not math.isclose(a, b, rel_tol=rounding, abs_tol=absolute):
            return a < b
    return False


def lower_loads(new: Sequence[float], old: Sequence[float]) -> bool:
    """Test whether loads, largest first, are lexicographically less by more than rounding."""
    most = LOAD_EPSILON * max(old)
    return _is_lower(sorted(new, reverse=True), sorted(old, reverse=True), 0.0, most)


def device_most_over(problem: Problem, outcome: Outcome) -> int:
    """The device whose peak is furthest above its limit."""
    over = [peak - top for peak, top in zip(outcome.peak_bytes, problem.limit_bytes, strict=True)]
    return over.index(max(over))
