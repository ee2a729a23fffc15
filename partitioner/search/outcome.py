"""Results of a search: candidate plans, refusals, and the winner with its certificate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.executors import executor_of
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh, numbers
from partitioner.ir.plan import Certificate, Plan
from partitioner.problem.build import Built
from partitioner.problem.memory_kinds import Holdings
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import LONGER, Infeasible, Solution, returns, short_of_memory
from partitioner.solver.progress import ROUNDING
from partitioner.solver.referee import Objective
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.spaces import Family

#: The number of an interchangeable group among the kinds of its level.
Kind = tuple["int | Kind", ...]


class OutOfTime(PartitionerError):  # noqa: N818 - a verdict
    """A space was not searched because the time limit was over."""


class NoCheaper(PartitionerError):  # noqa: N818 - a verdict
    """No plan was found that costs less than a known one.

    Attributes:
        bound: No plan of what was searched costs less.
    """

    def __init__(self, text: str, bound: float) -> None:
        super().__init__(text)
        self.bound = bound


def stopped_refusal(refusal: Infeasible, work: Work) -> Infeasible:
    """A refusal that says so if the clock has stopped the search, unless it is proven."""
    if refusal.proven or not (work.stopped or work.late):
        return refusal
    return Infeasible(f"{refusal}{LONGER}", **vars(refusal))


def in_executor(evaluation: Evaluation) -> tuple[int, int] | None:
    """The device whose executor exceeds its memory most, and by how many bytes; None if none do."""
    over = {
        device: peak.bytes - evaluation.limit_bytes[device]
        for device, peak in evaluation.executor_peak.items()
    }
    device = max(over, key=over.__getitem__, default=0)
    return (device, over[device]) if over.get(device, 0) > 0 else None


def of_results(
    graph: Graph, plan: Plan, cluster: Cluster, evaluation: Evaluation, device: int
) -> str:
    """Say how many bytes of a device bring results to every rank, as a clause; "" for none."""
    if not graph.delivered:
        return ""
    alone = evaluate(graph, plan, cluster, delivers=False)
    more = evaluation.needed_bytes[device] - alone.needed_bytes[device]
    if more <= 0:
        return ""
    largest = max(sorted(graph.delivered), key=lambda value: graph.types[value].nbytes)
    return (
        f"; {more} bytes of these bring the module's results to every rank, whole ({largest!r} has "
        f"{graph.types[largest].nbytes}): it fits sooner where the module returns less, or as an "
        "ONNX model, whose ranks keep their parts"
    )


@dataclass(frozen=True)
class Candidate:
    """The best plan of one space."""

    space: Family
    #: The graph of the plan: the one searched, less the optional nodes that it leaves out.
    graph: Graph
    plan: Plan  #: The plan, without a certificate.
    evaluation: Evaluation  #: The referee's evaluation.
    solution: Solution  #: The solution, with the bound on all plans of the space.
    #: Whether that bound covers the space; else it covers this plan alone.
    bounds_space: bool = True
    notes: tuple[str, ...] = ()  #: As of `Outcome`, of this plan.

    def cost(self, objective: str) -> float:
        """The cost by the referee."""
        return self.evaluation.cost(objective)

    @property
    def returns(self) -> int:
        """The number of times that the plan returns to devices that it left."""
        devices = [frozenset(mesh.devices) for mesh in self.plan.groups]
        return returns(devices[node.group] for node in self.plan.nodes.values())

    @property
    def is_copied(self) -> bool:
        """Tell whether several devices compute all nodes whole."""
        nodes, groups = self.plan.nodes.values(), self.plan.groups
        return all(not node.cuts and groups[node.group].size() > 1 for node in nodes)

    def numbered(self, request: Request, cluster: Cluster) -> Candidate:
        """The candidate with interchangeable devices numbered in the order of their first use.

        It stays as it is if the referee prices the renumbered plan higher, or it does not fit.
        """
        plan = in_order_of_use(self.plan, cluster, request.constraints)
        if plan is self.plan:
            return self
        evaluation = evaluate(self.graph, plan, cluster)
        cost, most = evaluation.cost(request.objective), self.cost(request.objective)
        fits = evaluation.fits_exactly >= self.evaluation.fits_exactly
        if not fits or cost > most * (1 + ROUNDING):
            return self
        return replace(self, plan=plan, evaluation=evaluation)


@dataclass(frozen=True)
class Refused:
    """A space without a known plan that fits by the safe memory formula."""

    space: Family
    goal: Objective  #: Of its problem.
    built: Built
    error: Infeasible


@dataclass(frozen=True)
class SpaceResult:
    """The outcome of searching one space."""

    #: Its best plan and, where that leaves devices idle, the best that does not; empty where no
    #: plan of the space is as good as a known one.
    plans: tuple[Candidate, ...] = ()
    #: In words, the space that the plans' bound covers; "" if it was not searched.
    searched: str = ""
    bound: float = math.inf  #: No plan of the space costs less; for a space without plans.
    refused: Refused | None = None  #: The space as the solver refused it, for a second look.
    #: Reasons why spaces, or parts of this one, have no plan or were not searched.
    failed: tuple[tuple[Family, PartitionerError], ...] = ()
    folded: str = ""  #: In words, the repeated blocks that were planned once.
    #: Whether memory forbids a plan that costs less by more than the gap.
    memory_binds: bool = False
    #: Goes on with the search, from these plans on; None if nothing is left to try.
    more: Callable[[Budget], SpaceResult] | None = None
    took_s: float = 0.0  #: Seconds of the search, or of its last part.

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The plans that fit by the referee, who counts more than the solver does."""
        return tuple(plan for plan in self.plans if plan.evaluation.fits_exactly)

    @property
    def least(self) -> float:
        """No plan of the space costs less."""
        return min((plan.solution.bound for plan in self.plans), default=self.bound)


@dataclass(frozen=True)
class Outcome:
    """The best plan of all spaces, and the outcome of each."""

    graph: Graph  #: The graph of the plan: the one searched, less what the plan leaves out.
    plan: Plan  #: The best plan, with its certificate.
    evaluation: Evaluation  #: Its evaluation.
    candidates: tuple[Candidate, ...]  #: The best plan of each space that has one.
    #: The reason for each space without a plan.
    failed: tuple[tuple[Family, PartitionerError], ...]
    #: Spaces, in words, none of whose plans costs less than a bound, which no better plan has.
    ruled_out: tuple[tuple[str, float], ...] = ()
    #: Whether memory forbids a plan that costs less by more than the gap; known by levels only.
    memory_binds: bool = False
    #: The graph that was searched, with its offers; None if it is that of the plan.
    of: Graph | None = None
    #: The graph of the whole batch, which one device would run; None if there is none.
    whole: Graph | None = None
    #: The graph and number of micro-batches in which one device would run a batch that it does not
    #: hold at once; None if it does, or none are known.
    alone: tuple[Graph, int] | None = None
    #: What the plan does otherwise than one of the whole batch at once, a sentence each.
    notes: tuple[str, ...] = ()
    #: The request with its constraints on the graph; None for that of the user.
    request: Request | None = None
    #: Goes on with the search where its budget ended it; None if nothing is left to try.
    more: Callable[[Budget], Outcome] | None = None

    def noted(self, *notes: str) -> Outcome:
        """The outcome with more notes, in front of its own and of those of its candidates."""
        plans = tuple(replace(one, notes=(*notes, *one.notes)) for one in self.candidates)
        return replace(self, notes=(*notes, *self.notes), candidates=plans)

    @property
    def certificate(self) -> Certificate:
        """The certificate of the plan."""
        assert self.plan.certificate is not None
        return self.plan.certificate

    def certified(self, **changes: Any) -> Outcome:
        """The outcome with some fields of the certificate changed."""
        certificate = replace(self.certificate, **changes)
        return replace(self, plan=replace(self.plan, certificate=certificate))

    def stopped(self) -> Outcome:
        """The outcome with a certificate that says that the clock stopped the search."""
        return self.certified(status="time_limit")


def winner(
    results: Sequence[SpaceResult], request: Request, cluster: Cluster, *, stopped: bool
) -> Outcome:
    """The best plan of all spaces, with a certificate over those that its bound covers.

    Its interchangeable devices are numbered in the order of their first use. At least one result
    has a plan; `stopped` says that the clock has cut something off.
    """
    results = [
        replace(result, plans=tuple(plan.numbered(request, cluster) for plan in result.plans))
        for result in results
    ]
    candidates = [plan for result in results for plan in result.plans]
    best = best_of(candidates, request.objective, len(cluster))
    covered = [plan for plan in candidates if plan.bounds_space or plan is best]
    spaces = [result.searched for result in results if result.searched]
    if not best.bounds_space:
        spaces.append(str(best.space))
    cost = best.cost(request.objective)
    bounds = (result.bound for result in results)
    bound = min([cost, *bounds, *(candidate.solution.bound for candidate in covered)])
    ended = "optimal" if cost - bound <= request.gap * cost else "feasible"
    certificate = Certificate(
        objective=request.objective,
        cost=cost,
        bound=bound,
        status="time_limit" if stopped else ended,
        strategy=best.plan.kind,
        solver=best.solution.solver,
        space=", ".join(dict.fromkeys(spaces)),
        seed=request.seed,
        folded=next(r.folded for r in results if any(plan is best for plan in r.plans)),
    )
    refused = [(r.refused.space, r.refused.error) for r in results if r.refused is not None]
    failed = [failure for result in results for failure in result.failed]
    return Outcome(
        best.graph,
        replace(best.plan, certificate=certificate),
        best.evaluation,
        tuple(candidates),
        (*refused, *failed),
        tuple(
            (result.searched, result.bound)
            for result in results
            if result.searched and not result.plans and not result.failed and not result.refused
        ),
        any(result.memory_binds for result in results),
    )


def too_large(best: Candidate, cluster: Cluster) -> Infeasible:
    """The refusal of the best plan that was found, which does not fit by the referee."""
    evaluation, plan = best.evaluation, best.plan
    over = max(evaluation.short_bytes, key=evaluation.short_bytes.__getitem__)
    peak, inside = evaluation.needed_peak(over), ""
    in_kernels = evaluation.needed_bytes[over] > evaluation.held_bytes[over]
    if (stages := _stages_on(plan, over, peak.at)) and plan.kind == "pipeline":
        inside = f" of stage{'s' if len(stages) > 1 else ''} {numbers(stages)}"
    if in_kernels:
        inside += f" in {executor_of(best.graph).holder}"
    holdings = Holdings.of(best.graph, plan, cluster)
    parts = holdings.text(over, exact=True, headroom=not in_kernels)
    held = f"without them it holds {parts}" if in_kernels else f"there it holds {parts}"
    results = of_results(best.graph, plan, cluster, evaluation, over)
    return short_of_memory(
        evaluation.needed_bytes[over],
        evaluation.limit_bytes[over],
        over,
        peak.at,
        inside=inside,
        more=f"; {held}{results}; this is {best.space}",
    )


def _stages_on(plan: Plan, device: int, task: str) -> tuple[int, ...]:
    """The stage of a node or, where the task is none, the stages on a device, ascending."""
    if task in plan.nodes:
        return (plan.stages[plan.nodes[task].group],)
    groups = zip(plan.groups, plan.stages, strict=True)
    return tuple(sorted({stage for mesh, stage in groups if device in mesh.devices}))


def best_of(candidates: Sequence[Candidate], objective: str, devices: int) -> Candidate:
    """The plan of least cost.

    Of plans of equal cost one in which every device computes the whole model goes last: it is one
    device's plan on many. For throughput those go first that give every device work, then those
    with fewer returns to devices, then that whose fullest device holds fewer bytes, then the one
    that holds fewer in all.
    """

    def rank(candidate: Candidate) -> tuple[float, bool, bool, int, int, int]:
        idle = objective == "throughput" and candidate.evaluation.devices_used < devices
        held = candidate.evaluation.held_bytes.values()
        cost = float(f"{candidate.cost(objective):.9g}")
        is_copied = candidate.is_copied
        return cost, is_copied, idle, candidate.returns, max(held), sum(held)

    return min(candidates, key=rank)


def in_order_of_use(plan: Plan, cluster: Cluster, constraints: Constraints) -> Plan:
    """The plan with interchangeable devices numbered in the order of their first use.

    Devices that pins name keep their numbers, and so do all of a plan that is kept.
    """
    if constraints.plan is not None:
        return plan
    pinned = {device for pin in constraints.pins for device in pin.devices}
    order = tuple(dict.fromkeys(node.group for node in plan.nodes.values()))
    used = (device for group in order for device in plan.groups[group].devices)
    first_use = tuple(dict.fromkeys(used))
    numbers = numbers_by_use(cluster, first_use, pinned)
    if all(numbers[device] == device for device in first_use):
        return plan
    return _renumbered(plan, order, numbers)


def _renumbered(plan: Plan, order: Sequence[int], numbers: Mapping[int, int]) -> Plan:
    """The plan on other devices, its groups in this order and then those that no node is on."""
    order = (*order, *(group for group in range(len(plan.groups)) if group not in order))
    place = {old: new for new, old in enumerate(order)}
    meshes = (plan.groups[old] for old in order)
    return replace(
        plan,
        groups=tuple(DeviceMesh(m.axes, tuple(numbers[d] for d in m.devices)) for m in meshes),
        stages=tuple(plan.stages[old] for old in order),
        nodes={name: replace(node, group=place[node.group]) for name, node in plan.nodes.items()},
    )


def numbers_by_use(
    cluster: Cluster, first_use: Sequence[int], fixed: Collection[int] = ()
) -> dict[int, int]:
    """New numbers of all devices: the interchangeable ones ascend in the order of their first use.

    Those that are `fixed` keep theirs.
    """
    rank = {device: position for position, device in enumerate(first_use)}
    blocks = _Blocks(cluster, rank, frozenset(fixed))
    return dict(blocks.matched(len(cluster.levels), 0, 0))


@dataclass(frozen=True)
class _Blocks:
    """The groups of each level of a cluster; those of level 0 are single devices."""

    cluster: Cluster
    rank: Mapping[int, int]
    fixed: frozenset[int]

    def size(self, level: int) -> int:
        """Devices of one group."""
        return self.cluster.levels[level - 1].size if level else 1

    def kind(self, level: int, start: int) -> Kind:
        """Equal for interchangeable groups."""
        if not level:
            specification = self.cluster.first_of_spec[self.cluster.devices[start]]
            return specification, start if start in self.fixed else -1
        return tuple(sorted(self.kind(level - 1, inner) for inner in self._inner(level, start)))

    def _inner(self, level: int, start: int) -> range:
        return range(start, start + self.size(level), self.size(level - 1))

    def _use(self, level: int, start: int) -> int:
        """Position of the group's first use; after all others if it is not used."""
        devices = range(start, start + self.size(level))
        return min(self.rank.get(device, len(self.rank)) for device in devices)

    def matched(self, level: int, old: int, new: int) -> list[tuple[int, int]]:
        """Old and new number of each device of a group that takes the place of an equal one."""
        if not level:
            return [(old, new)]
        places: dict[Kind, list[int]] = {}
        for inner in reversed(self._inner(level, new)):
            places.setdefault(self.kind(level - 1, inner), []).append(inner)
        by_use = sorted(self._inner(level, old), key=lambda inner: self._use(level - 1, inner))
        pairs = ((inner, places[self.kind(level - 1, inner)].pop()) for inner in by_use)
        matches = (self.matched(level - 1, inner, place) for inner, place in pairs)
        return list(itertools.chain.from_iterable(matches))
