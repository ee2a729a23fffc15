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
from partitioner.ir.ops import is_stored, writes_stored
from partitioner.ir.plan import Certificate, Plan
from partitioner.search.outcome import Candidate, Outcome
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.one_device import shortage
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.strategies.spaces import Family, SearchError


@dataclass(frozen=True)
class CopiesSearch:
    """The search of whole copies: on the smallest groups of devices that hold the model."""

    graph: Graph
    cluster: Cluster
    request: Request
    find: Callable[[Cluster, Request, Budget], Outcome]  #: Finds the best plan of a group.

    def best(self, budget: Budget) -> Outcome:
        """The best copies.

        Raises:
            Infeasible: No two groups of devices hold a copy each.
            SearchError: The model keeps values from one request to the next, or is trained.
            PlanError: The plan that is kept is not of the graph.
        """
        nodes = self.graph.nodes
        kept = next((node for node in nodes if is_stored(node) or writes_stored(node)), None)
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
        for device, short in evaluation.short_bytes.items():
            text = (
                f"the plan that is kept does not fit: device {device} is short of {short:,} bytes"
            )
            raise Infeasible(text, device=device, bytes_short=short)
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
        """
        starts = range(0, len(self.cluster) - size + 1, size)
        kinds = {start: self.cluster.devices[start : start + size] for start in starts}
        first = {kinds[start]: start for start in reversed(starts)}
        found: dict[tuple[DeviceSpec, ...], Outcome] = {}
        refusals: list[Infeasible] = []
        for kind, start in first.items():
            group = self.cluster.first(size, start)
            if is_last or not shortage(self.graph, group)[1]:
                share = replace(budget.share(len(first)), best_s=math.inf)
                try:
                    found[kind] = self.find(group, replace(self.request, strategy="auto"), share)
                except Infeasible as error:
                    refusals.append(error)
        held = {start: found[kind] for start, kind in kinds.items() if kind in found}
        copied = (self._copied(outcome, size, held) for outcome in found.values())
        outcomes = [outcome for outcome in copied if outcome is not None]
        if refusals and not outcomes:
            raise refusals[0]
        return min(outcomes, key=lambda outcome: outcome.evaluation.step_s, default=None)

    def _copied(self, outcome: Outcome, size: int, held: Mapping[int, Outcome]) -> Outcome | None:
        """The plan of a group on each group that holds it; None if fewer than two do.

        `held` are the outcomes of all groups that hold a copy, by their first devices.
        """
        of_group, starts = outcome.certificate, list(held)
        short = self._evaluated(outcome.plan, outcome.graph, starts)[1].short_bytes
        starts = [start for start in starts if short.keys().isdisjoint(range(start, start + size))]
        if len(starts) < 2:
            return None
        plan, evaluation = self._evaluated(outcome.plan, outcome.graph, starts)
        bounds = tuple(held[start].certificate.bound for start in starts)
        cost, least = evaluation.step_s, Copies((), bounds).step_s
        ended = "time_limit" if of_group.status == "time_limit" else "feasible"
        each = ", one on each device" if size == 1 else f" on {size} devices each: {of_group.space}"
        certificate = replace(
            of_group,
            cost=cost,
            bound=min(cost, least),
            status=ended if cost - least > self.request.gap * cost else "optimal",
            strategy=plan.kind,
            space=f"{len(starts)} whole copies{each}",
        )
        family = Family(plan.kind, plan.groups, plan.groups, symmetric=False)
        solution = Solution((), cost, certificate.bound, "feasible", None, of_group.solver)
        return replace(
            outcome,
            plan=replace(plan, certificate=certificate),
            evaluation=evaluation,
            candidates=(Candidate(family, outcome.graph, plan, evaluation, solution),),
            request=self.request,
            more=None,
        )

    def _evaluated(
        self, plan: Plan, graph: Graph, starts: Sequence[int]
    ) -> tuple[Plan, Evaluation]:
        """Copies of the plan of a group on groups that begin at these devices, and their cost."""
        groups = (
            DeviceMesh(
                ((COPIES, len(starts)), *mesh.axes),
                tuple(start + device for start in starts for device in mesh.devices),
            )
            for mesh in plan.groups
        )
        data = self.cluster.to_data()
        plan = replace(plan, groups=tuple(groups), cluster=data, certificate=None)
        return plan, evaluate(graph, plan, self.cluster)
