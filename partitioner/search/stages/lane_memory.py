"""The plan of a cut whose stages compute again what they must, by memory as the referee has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partitioner.cost_model.evaluate import Evaluation
from partitioner.ir.phases import PhaseError
from partitioner.search.outcome import Candidate
from partitioner.search.stages.computed_again import ComputedAgain
from partitioner.search.stages.figures import Sharding, StepEstimate
from partitioner.solver import Objective
from partitioner.solver.work import Work

#: Most choices of what stages of a cut compute again, each by the memory of the last one's plan.
#: What passes hold that compute some of it again is known of their plan alone.
CHOICES = 5


@dataclass(frozen=True)
class LaneMemory:
    """Chooses what the stages of one cut compute again, by plans that the referee counts."""

    again: ComputedAgain  #: Chooses the offers within limits.
    ends: tuple[int, ...]  #: Ends of the stages, exclusive.
    estimate: StepEstimate  #: The schedule of the stages.
    memory: tuple[float, ...]  #: Bytes of a device of each lane.
    #: Gives the plan of the cut with a sharding, and pays for its evaluation.
    simulated: Callable[[Sharding], Candidate]
    objective: Objective = "throughput"  #: What is to be least of a step.

    def plan(self, limits: list[float], work: Work) -> Candidate:
        """The best plan.

        Where the referee counts other bytes than those by which offers were chosen, they are chosen
        anew for as much less or more, which the next cut begins with: until a plan fits, and once
        more if the first one does.

        Args:
            limits: Bytes that the devices of each lane count as having; changed.
            work: Of the search; it ends the choices.

        Raises:
            PhaseError: The stages cannot run with what is computed again first.
        """
        splits, runs = self.estimate.splits, self.estimate.runs
        plans: list[Candidate] = []
        seen: set[frozenset[str]] = set()
        for _ in range(CHOICES):
            fits = any(plan.evaluation.fits_exactly for plan in plans)
            if plans and ((len(plans) > 1 and fits) or (work.over if fits else work.late)):
                break
            taken = self.again.packed(self.ends, runs, limits, splits=splits)
            if taken.again in seen:
                break
            seen.add(taken.again)
            try:
                plans.append(self.simulated(self.again.offering.taking(taken.again)))
            except PhaseError:
                if not plans:
                    raise
                break
            peaks = self._peaks(plans[-1])
            limits[:] = [
                most + counted - peak
                for most, counted, peak in zip(self.memory, taken.bytes, peaks, strict=True)
            ]
        return min(plans, key=lambda plan: figure(plan, self.objective))

    def _peaks(self, plan: Candidate) -> list[int]:
        """Bytes of the fullest device of each lane."""
        exact_bytes, size = plan.evaluation.exact_bytes, self.again.figures.sharding.size
        return [
            max(exact_bytes[device] for device in range(first, first + size))
            for first in range(0, size * len(self.memory), size)
        ]


def figure(candidate: Candidate, objective: Objective) -> tuple[int, float]:
    """Bytes above the limits, then the cost of a step."""
    evaluation = candidate.evaluation
    return sum(evaluation.short_bytes.values()), step_cost(evaluation, objective)


def step_cost(evaluation: Evaluation, objective: Objective) -> float:
    """Cost of a step in micro-batches: bytes for the objective memory, else seconds."""
    return evaluation.cost("memory") if objective == "memory" else evaluation.step_s
