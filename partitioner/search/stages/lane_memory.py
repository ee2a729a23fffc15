"""The plan of a cut whose stages compute again what they must, by memory as the referee has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from partitioner.cost_model.evaluate import Evaluation
from partitioner.ir.phases import PhaseError
from partitioner.search.outcome import Candidate
from partitioner.search.stages.computed_again import ComputedAgain
from partitioner.search.stages.figures import Sharding, StepEstimate
from partitioner.solver import Objective
from partitioner.solver.work import Work

#: Choices of what stages of a cut compute again, each by the memory of the last one's plan.
CHOICES = 3
#: Choices behind these for a plan that is nearly within memory, in which only lanes that are short
#: choose anew; and the share of a device's memory that such a plan is short of at most.
MENDS, NEARLY = 4, 0.03
#: Share of a device's memory that is left for what the count of a choice may miss.
MARGIN = 0.005


@dataclass(frozen=True)
class LaneMemory:
    """Chooses what the stages of one cut compute again, by plans that the referee counts.

    Attributes:
        again: Chooses the offers within limits.
        ends: Ends of the stages, exclusive.
        estimate: The schedule of the stages.
        memory: Bytes of a device of each lane.
        simulated: Gives the plan of the cut with a sharding, and pays for its evaluation.
        objective: What is to be least of a step.
    """

    again: ComputedAgain
    ends: tuple[int, ...]
    estimate: StepEstimate
    memory: tuple[float, ...]
    simulated: Callable[[Sharding], Candidate]
    objective: Objective = "throughput"
    _seen: set[frozenset[str]] = field(default_factory=set)

    def plan(self, limits: list[float], work: Work) -> Candidate:
        """The best plan.

        Where the referee counts other bytes than those by which offers were chosen, they are chosen
        anew for as much less or more, which the next cut begins with. If the best of these plans is
        nearly within memory, its lanes that are short alone choose anew.

        Args:
            limits: Bytes that the devices of each lane count as having; changed.
            work: Of the search; it ends the choices.

        Raises:
            PhaseError: The stages cannot run with what is computed again first.
        """
        best: Packed | None = None
        for _ in range(CHOICES):
            if best is not None and best.candidate.evaluation.fits_exactly and work.over:
                break
            try:
                one = self._packed(limits)
            except PhaseError:
                if best is None:
                    raise
                break
            if one is None:
                break
            limits[:] = one.corrected
            best = one if best is None else min(best, one, key=self._figure)
        assert best is not None
        last = best
        for _ in range(MENDS):
            if not last.is_nearly_within(self.memory) or work.late:
                break
            try:
                one = self._packed(last.tighter(self.memory))
            except PhaseError:
                break
            if one is None:
                break
            limits[:] = one.corrected
            last, best = one, min(best, one, key=self._figure)
        return best.candidate

    def _figure(self, packed: Packed) -> tuple[int, float]:
        return figure(packed.candidate, self.objective)

    def _packed(self, limits: Sequence[float]) -> Packed | None:
        """The plan by what lanes compute again within limits; None if it was seen."""
        splits = self.estimate.splits
        taken = self.again.packed(self.ends, self.estimate.moments, limits, splits=splits)
        if taken.again in self._seen:
            return None
        self._seen.add(taken.again)
        candidate = self.simulated(self.again.offering.taking(taken.again))
        exact_bytes, size = candidate.evaluation.exact_bytes, self.again.figures.sharding.size
        peaks = [
            max(exact_bytes[device] for device in range(first, first + size))
            for first in range(0, size * len(limits), size)
        ]
        corrected = tuple(
            (1 - MARGIN) * most + counted - peak
            for most, counted, peak in zip(self.memory, taken.bytes, peaks, strict=True)
        )
        over = tuple(peak - most for most, peak in zip(self.memory, peaks, strict=True))
        return Packed(candidate, tuple(limits), corrected, over)


@dataclass(frozen=True)
class Packed:
    """The plan of a cut by what its lanes compute again.

    Attributes:
        candidate: The plan.
        limits: Bytes that the devices of each lane counted as having when this was chosen.
        corrected: The same by what the referee counts: less where it counts more than the choice.
        over: Bytes that the referee counts above the memory of each lane's devices.
    """

    candidate: Candidate
    limits: tuple[float, ...]
    corrected: tuple[float, ...]
    over: tuple[float, ...]

    def is_nearly_within(self, memory: Sequence[float]) -> bool:
        """Whether some lanes are short of their devices' memory, and none by much."""
        shares = [over / most for over, most in zip(self.over, memory, strict=True)]
        return 0 < max(shares) <= NEARLY

    def tighter(self, memory: Sequence[float]) -> tuple[float, ...]:
        """Its limits, less what its lanes are short of."""
        return tuple(
            limit - (over + MARGIN * most) if over > 0 else limit
            for limit, over, most in zip(self.limits, self.over, memory, strict=True)
        )


def figure(candidate: Candidate, objective: Objective) -> tuple[int, float]:
    """Bytes above the limits, then the cost of a step."""
    evaluation = candidate.evaluation
    return sum(evaluation.short_bytes.values()), step_cost(evaluation, objective)


def step_cost(evaluation: Evaluation, objective: Objective) -> float:
    """Cost of a step in micro-batches: bytes for the objective memory, else seconds."""
    return evaluation.cost("memory") if objective == "memory" else evaluation.step_s
