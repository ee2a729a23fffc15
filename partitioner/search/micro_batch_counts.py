"""Numbers of micro-batches: the best plan of some, and the fewest that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.graph import Graph
from partitioner.search.limits import EXPLICIT
from partitioner.search.outcome import Outcome
from partitioner.search.pipelines import find_pipeline, over_counts
from partitioner.search.request import Budget, Request
from partitioner.solver import Infeasible
from partitioner.strategies.constraints import ConstraintError

#: Gives the graphs of a micro-batch for a number of them, the second to be planned if no plan of
#: the first fits; raises `Infeasible` if there are no such micro-batches.
Graphs = Callable[[int], Iterable[Graph]]


def usual_counts(batch: int, devices: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth a try: about one, two and four for each device, and one.

    One is the fastest where a step takes as long as its launches and messages: of a small model,
    which is not for many devices.
    """
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    wanted = (devices, 2 * devices, 4 * devices, *((1,) if devices <= EXPLICIT else ()))
    nearest = (min(divisors, key=lambda n: (abs(n - count), n)) for count in wanted)
    return tuple(sorted(set(nearest)))


@dataclass
class CountSearch:
    """Plans of a step by the number of its micro-batches.

    Attributes:
        graphs: The graphs of a micro-batch.
        cluster: The devices.
        request: The request; called before `Request.over`.
        budget: The budget of all numbers.
        sizes: Numbers of devices of a stage to try; None for those of the request.
        outcomes: The best plan of each number that has one.
        refused: The refusal of each other number.
        impossible: Why a number has no plan whatever the memory is, as where ranks outnumber rows.
    """

    graphs: Graphs
    cluster: Cluster
    request: Request
    budget: Budget
    sizes: tuple[int, ...] | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    refused: dict[int, Infeasible] = field(default_factory=dict)
    impossible: dict[int, ConstraintError] = field(default_factory=dict)

    def all(self, counts: Sequence[int]) -> Outcome:
        """The best plan of these numbers.

        Raises:
            Infeasible: None of them has one; the refusal that is short of the fewest bytes.
        """
        for index, count in enumerate(counts):
            self._plan(count, len(counts) - index)
        if not self.outcomes and not self.refused:
            raise next(iter(self.impossible.values()))
        if not self.outcomes:
            raise min(self.refused.values(), key=lambda error: error.bytes_short)
        return self.best

    def fewest(self, counts: Sequence[int]) -> Outcome | None:
        """The best plan of the least number that fits, or of a larger one that is faster.

        With more micro-batches less is held at once. So none fits if the first does not, nor the
        last that leaves each device two samples; else numbers that do not fit are skipped in
        growing steps, and the least one that does is bisected. A larger one is faster where it
        computes less again or communicates less.

        Args:
            counts: Numbers to choose from, ascending, to one sample in each micro-batch.
        """
        if not counts or self._none_fits(counts):
            return None
        low, high, end, step = -1, 0, len(counts), 1
        while high < end and not self._plan(counts[high]):
            if counts[high] in self.impossible:  # nor are larger ones: their parts are smaller
                end = high
            else:
                low, step = high, 2 * step
            high = min(low + step, end - 1) if low < end - 1 else end
        if high == end:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._plan(counts[middle]):
                high = middle
            else:
                low = middle
        best_s = self.outcomes[counts[high]].evaluation.step_s
        for count in counts[high + 1 :]:
            if not self._plan(count) or self.outcomes[count].evaluation.step_s >= best_s:
                break
            best_s = self.outcomes[count].evaluation.step_s
        return self.best

    def _none_fits(self, counts: Sequence[int]) -> bool:
        """Whether memory refuses the first and the last that leaves each device two samples."""
        samples = max(counts[0], counts[-1] // (2 * len(self.cluster)))
        most = max(count for count in counts if count <= samples)
        if self._plan(counts[0]) or self._plan(most) or most in self.impossible:
            return False
        return self.refused[most].bytes_short > 0

    @property
    def best(self) -> Outcome:
        """The fastest plan, with a certificate over all numbers that were tried."""
        count = min(self.outcomes, key=lambda n: self.outcomes[n].evaluation.step_s)
        return over_counts(self.outcomes, count, self.request.gap)

    def _plan(self, count: int, parts: int = 2) -> bool:
        """Plan a number of micro-batches with a part of the budget; whether a plan fits."""
        if count not in {**self.outcomes, **self.refused, **self.impossible}:
            self.budget.say(f"planning {count} micro-batch{'es' if count > 1 else ''}")
            share, graphs = self.budget.share(parts), iter(self.graphs(count))
            while count not in self.outcomes:
                try:
                    graph = next(graphs)
                    if graph.optional:
                        self.budget.say("allowing values to be computed again")
                    self.outcomes[count] = find_pipeline(
                        graph, self.cluster, self.request, share, count, self.sizes
                    )
                except StopIteration:
                    break
                except Infeasible as error:
                    self.refused[count] = error
                except ConstraintError as error:
                    self.impossible[count] = error
        return count in self.outcomes
