"""Whole copies of a model on equal groups of devices, which take the requests of a stream in turn.

The usual search plans one group, and all groups run that plan: its copies are an axis of each mesh,
over which nothing is cut and nothing exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import COPIES, Copies, DeviceMesh
from partitioner.ir.ops import is_stored
from partitioner.ir.plan import Certificate, Plan
from partitioner.search.outcome import Candidate, NoCheaper, Outcome
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.one_device import shortage
from partitioner.solver import Infeasible
from partitioner.strategies.spaces import Family, SearchError

#: Finds the best plan of a group of devices.
Find = Callable[[Cluster, Request, Budget], Outcome]


@dataclass(frozen=True)
class CopiesSearch:
    """The search of whole copies: on the smallest groups of devices that hold the model."""

    graph: Graph
    cluster: Cluster
    request: Request
    find: Find

    def best(self, budget: Budget) -> Outcome:
        """The best copies.

        Raises:
            Infeasible: No two groups of devices hold a copy each.
            NoCheaper: None was found that costs less than the known plan of the budget.
            SearchError: The model keeps values from one request to the next, or is trained.
            PlanError: The plan that is kept is not of the graph.
        """
        kept = next((node for node in self.graph.nodes if is_stored(node)), None)
        if self.graph.backward or kept is not None:
            what = "training keeps weights" if kept is None else f"{kept.name!r} is kept"
            raise SearchError(
                f"whole copies serve requests that know nothing of each other, and {what} from one "
                "to the next: leave strategy 'copies' out"
            )
        if (plan := self.request.constraints.plan) is not None:
            return self._kept(plan)
        refusal = Infeasible("one group of devices alone holds one", proven=False)
        *smaller, largest = self._sizes()
        for size in (*smaller, largest):
            try:
                outcome = self._of_size(size, budget, is_last=size == largest)
            except Infeasible as error:
                refusal = error
            else:
                if outcome is not None:
                    return outcome
        raise refusal.saying(
            f"no two whole copies fit, each on devices of its own: {refusal}; --strategy auto "
            "weighs partitions"
        )

    def _kept(self, plan: Plan) -> Outcome:
        """The outcome of a plan that is kept, once it is known to be of the graph."""
        self.request.constraints.check(self.graph, len(self.cluster))
        plan = replace(plan, certificate=None)
        evaluation = evaluate(self.graph, plan, self.cluster)
        cost = evaluation.step_s
        certificate = Certificate(
            "throughput", cost, cost, "optimal", plan.kind, "none", "the plan that is kept"
        )
        return Outcome(self.graph, replace(plan, certificate=certificate), evaluation, (), ())

    def _sizes(self) -> Iterator[int]:
        """Devices of a group, ascending: the most for each number of copies, along the links."""
        devices, inner = len(self.cluster), self.cluster.levels[:-1]
        for size in sorted({devices // copies for copies in range(2, devices + 1)}):
            if all(not level.size % size or not size % level.size for level in inner):
                yield size

    def _of_size(self, size: int, budget: Budget, *, is_last: bool) -> Outcome | None:
        """The best copies on groups of so many devices; None if no two groups hold one.

        What cannot fit is not searched, but for a refusal of the last size that says so.

        Raises:
            Infeasible: None of the groups does.
            NoCheaper: As `best`.
        """
        starts = range(0, len(self.cluster) - size + 1, size)
        kinds = {start: self.cluster.devices[start : start + size] for start in starts}
        found: dict[tuple[DeviceSpec, ...], Outcome] = {}
        refusal, least, count = Infeasible(""), math.inf, len({*kinds.values()})
        for kind, start in {kinds[start]: start for start in reversed(starts)}.items():
            group = self.cluster.first(size, start)
            if not is_last and shortage(self.graph, group)[1]:
                continue
            share = replace(budget.share(count), best_s=budget.best_s * len(starts))
            try:
                found[kind] = self.find(group, replace(self.request, strategy="auto"), share)
            except NoCheaper as error:
                least = min(least, error.bound / len(starts))
            except Infeasible as error:
                refusal = error
        bounds = {start: _bound(found[kind]) for start, kind in kinds.items() if kind in found}
        copied = [self._copied(outcome, size, bounds) for outcome in found.values()]
        outcomes = [outcome for outcome in copied if outcome is not None]
        if outcomes:
            return min(outcomes, key=lambda outcome: outcome.evaluation.step_s)
        if least < math.inf:
            raise NoCheaper("no copies were found to cost less", least)
        if str(refusal):
            raise refusal
        return None

    def _copied(self, outcome: Outcome, size: int, bounds: Mapping[int, float]) -> Outcome | None:
        """The plan of a group on each group that holds it; None if fewer than two do.

        `bounds` are those of the groups' own plans, by their first devices.
        """
        starts = list(bounds)
        evaluation = self._evaluated(outcome, starts)[1]
        short = {device // size * size for device in evaluation.short_bytes}
        starts = [start for start in starts if start not in short]
        if len(starts) < 2:
            return None
        plan, evaluation = self._evaluated(outcome, starts)
        of_group = outcome.plan.certificate
        assert of_group is not None
        cost = evaluation.step_s
        seconds = tuple(bounds[start] for start in starts)
        bound = min(cost, Copies((), seconds).step_s)
        is_open = cost - bound > self.request.gap * cost
        ended = "time_limit" if of_group.status == "time_limit" else "feasible"
        each = ", one on each device" if size == 1 else f" on {size} devices each: {of_group.space}"
        certificate = replace(
            of_group,
            cost=cost,
            bound=bound,
            status=ended if is_open else "optimal",
            strategy=plan.kind,
            space=f"{len(starts)} whole copies{each}",
        )
        return replace(
            outcome,
            plan=replace(plan, certificate=certificate),
            evaluation=evaluation,
            candidates=tuple(self._candidates(outcome, starts, bound)),
            request=self.request,
            more=None,
        )

    def _candidates(
        self, outcome: Outcome, starts: Sequence[int], bound: float
    ) -> Iterator[Candidate]:
        """Copies of the best plan of each space of a group, as far as they fit."""
        for one in outcome.candidates:
            plan, evaluation = self._evaluated(one, starts)
            if evaluation.fits_exactly:
                family = Family(plan.kind, plan.groups, plan.groups, symmetric=False)
                cost = evaluation.step_s
                solution = replace(one.solution, cost=cost, bound=min(bound, cost))
                yield Candidate(family, one.graph, plan, evaluation, solution, notes=one.notes)

    def _evaluated(self, of: Outcome | Candidate, starts: Sequence[int]) -> tuple[Plan, Evaluation]:
        """Copies of the plan of a group on groups that begin at these devices, and their cost."""
        groups = (
            DeviceMesh(
                ((COPIES, len(starts)), *mesh.axes),
                tuple(start + device for start in starts for device in mesh.devices),
            )
            for mesh in of.plan.groups
        )
        data = self.cluster.to_data()
        plan = replace(of.plan, groups=tuple(groups), cluster=data, certificate=None)
        return plan, evaluate(of.graph, plan, self.cluster)


def _bound(outcome: Outcome) -> float:
    certificate = outcome.plan.certificate
    assert certificate is not None
    return certificate.bound
