"""Plans of stages whose devices execute identical work (see `search.levels`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.problem.build import planned_on
from partitioner.search.levels.asked_nodes import AskedNodes, on_axes
from partitioner.search.levels.axis_sharder import USUAL
from partitioner.search.levels.mesh_sharder import Sharder
from partitioner.search.levels.meshes import Layout, layouts
from partitioner.search.levels.one_mesh import MeshSearch
from partitioner.search.levels.stages import JOINT_AXES, Staged, StageSearch
from partitioner.search.outcome import Candidate, OutOfTime, SpaceResult
from partitioner.search.request import EXPLICIT, Budget, Request
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import check_even
from partitioner.strategies.spaces import Family, SearchError

#: Times that a search whose plans do not fit by the referee is repeated, within less memory.
_REPEATS = 3
#: Limits of memory that are tried where bytes are to be few.
LIMITS = 8
#: About the seconds until a first plan of several axes is found, whatever the clock says, for each
#: node.
FIRST_S = 3e-3
SOLVER = "decomposition into stages of shardings / device seconds of the nodes"
#: Where bytes are to be few.
BYTES_SOLVER = "decomposition into stages of shardings / a device's share of what is kept"
#: Of meshes that are searched one axis at a time.
AXES_SOLVER = "decomposition into mesh axes / device seconds of the nodes"


@dataclass(frozen=True)
class StagedPlan:
    """The cheapest plan of a search by levels."""

    staged: Staged  #: Its stages.
    meshes: tuple[DeviceMesh, ...]  #: The devices of each stage.
    graph: Graph  #: The graph that the plan is for.
    plan: Plan
    evaluation: Evaluation  #: The plan's evaluation.

    @classmethod
    def some(
        cls, staged: Staged, graph: Graph, asked: Constraints, resharder: Resharder
    ) -> Iterator[StagedPlan]:
        """Plans as the referee prices them, with what is asked of single nodes.

        Raises:
            ConstraintError: A pin leaves a node without a strategy.
        """
        cluster = resharder.cluster
        meshes = staged.groups(cluster)
        planned, plan = planned_on(graph, cluster, *staged.decisions(meshes))
        decides = asked.names_devices or bool(asked.places) or asked.plan is not None
        plans = [plan]
        if decides:
            plans = [AskedNodes(planned, plan, asked, resharder).decided()]
        for follows in ("between", "all") if asked.names_devices else ():
            with suppress(ConstraintError):  # what is free may not be had there
                plans.append(AskedNodes(planned, plan, asked, resharder, follows).decided())
        for one in plans:
            evaluation = evaluate(planned, one, cluster, resharder=resharder)
            yield cls(staged, meshes, planned, one, evaluation)


@dataclass(frozen=True)
class StagesSpace:
    """All plans of stages on equal meshes with even cuts."""

    graph: Graph
    rules: Rules
    cluster: Cluster
    layouts: tuple[Layout, ...]
    request: Request = field(default_factory=Request)
    one_stage: bool = False  #: Whether all devices share every operator, as in training.
    weighs_kinds: bool = False  #: As of `MeshSearch`.

    @classmethod
    def of(cls, graph: Graph, rules: Rules, cluster: Cluster, request: Request) -> StagesSpace:
        """The space that a request names.

        Raises:
            SearchError: The request names none.
            ConstraintError: A pin names no axis of its meshes, or devices share a batch unevenly.
        """
        constraints, kept = request.constraints, request.constraints.kept_meshes
        meshes = layouts(cluster, request.strategy, request.mesh, kept)
        if constraints.bound:
            if request.mesh is None:  # pins name axes of one or two
                meshes = tuple(layout for layout in meshes if len(layout.mesh.axes) <= JOINT_AXES)
            constraints.check_axes(sorted({axis for one in meshes for axis in one.mesh.names}))
            check_even(request.parallel, graph, request.mesh or {})
        _check_devices(graph, cluster, request, meshes)
        if graph.backward:
            meshes = tuple(layout for layout in meshes if layout.mesh.size() == len(cluster))
        # a plan is kept best on a mesh of its own
        meshes = tuple(one for one in meshes if one.mesh in kept) or meshes
        if not meshes and graph.backward:
            raise SearchError(
                "training is planned on one group of all devices, and they must be alike: "
                f"--strategy {request.strategy} gives none"
            )
        if not meshes:
            option = "--mesh" if request.mesh is not None else f"--strategy {request.strategy}"
            raise SearchError(
                f"{option} on devices of several kinds is planned for up to "
                f"{EXPLICIT} devices; --strategy auto gives each kind stages of its own"
            )
        is_one, is_whole = bool(graph.backward), (request.micro_batch_count or 1) == 1
        kinds = is_one and is_whole and not constraints.bound
        return cls(graph, rules, cluster, meshes, request, is_one, kinds)

    def search(self, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The cheapest plan.

        Raises:
            Infeasible: No plan was found that fits.
        """
        best = self.cheapest(budget)
        staged = best.staged
        if self._is_of_bytes:
            best = self._with_less(best, budget)
            staged = replace(best.staged, tight=True)  # what is computed again may hold less
        family = Family(best.plan.kind, best.meshes, best.meshes[:1], symmetric=False)
        sizes = sorted({layout.mesh.size() for layout in staged.searched})
        plans = [self.candidate(best, family, SOLVER)]
        if staged.usual is not None:
            resharder = Resharder(self.cluster)
            (usual,) = StagedPlan.some(staged.usual, self.graph, Constraints(), resharder)
            of_kind = Family(USUAL[0], usual.meshes, (), symmetric=False)
            plans.append(replace(self.candidate(usual, of_kind, SOLVER), bounds_space=False))
        return SpaceResult(
            tuple(plans),
            searched=(
                "one group of all devices, even cuts"
                if self.graph.backward
                else f"stages of {', '.join(map(str, sizes))} devices, even cuts"
            ),
            failed=tuple(
                (Family("stages", (layout.mesh,), (), symmetric=False), OutOfTime(why))
                for layout, why in staged.failed.items()
            ),
            folded=str(staged.folded),
            memory_binds=staged.tight,
        )

    def candidate(self, best: StagedPlan, family: Family, solver: str) -> Candidate:
        """A plan of the space, with its bound."""
        evaluation, cost, least = best.evaluation, self._cost(best), best.staged.bound_s
        if self._is_of_bytes:
            least, solver = self._least_bytes, BYTES_SOLVER
        solution = Solution((), cost, min(least, cost), "feasible", None, solver)
        return Candidate(family, best.graph, best.plan, evaluation, solution)

    @property
    def _is_of_bytes(self) -> bool:
        return self.request.objective == "memory"

    def _cost(self, plan: StagedPlan) -> float:
        return plan.evaluation.cost(self.request.objective)

    @property
    def _least_bytes(self) -> float:
        """Bytes that the fullest device holds at least: its share of what is kept."""
        return kept_bytes(self.graph) / len(self.cluster)

    def _with_less(self, best: StagedPlan, budget: Budget) -> StagedPlan:
        """The plan of fewest bytes that searches within less and less memory find.

        The limit is bisected between what is kept at least and what the best plan takes.
        """

        def rank(plan: StagedPlan) -> tuple[bool, float]:
            return not plan.evaluation.fits, plan.evaluation.cost("memory")

        resharder, most = Resharder(self.cluster), min(d.memory_bytes for d in self.cluster.devices)
        low, high = max(1.0, self._least_bytes), min(most, _fullest_bytes(best))
        for turn in range(LIMITS):
            share = budget.share(LIMITS - turn, LIMITS - turn)
            if budget.work.over or high <= (1 + budget.gap) * low:
                break
            limit = math.floor(math.sqrt(low * high))
            within = replace(self, cluster=self.cluster.with_memory(limit))
            budget.say(f"searching within {units.size(limit)} a device")
            try:
                found = within.cheapest(replace(share, defers_memory=False))
            except Infeasible:
                low = limit
                continue
            _, plan = planned_on(found.graph, self.cluster, found.plan.groups, found.plan.nodes)
            evaluation = evaluate(found.graph, plan, self.cluster, resharder=resharder)
            less = replace(found, plan=plan, evaluation=evaluation)
            best = min(best, less, key=rank)
            low, high = (low, _fullest_bytes(less)) if found.evaluation.fits else (limit, high)
        return best

    def cheapest(self, budget: Budget) -> StagedPlan:
        """The cheapest plan or, if none fits by the referee, the one short of the fewest bytes.

        Raises:
            Infeasible: No plan fits by what the solver counts.
        """
        plans: list[StagedPlan] = []
        within, steps, resharder = self.cluster, budget.work.left, Resharder(self.cluster)
        graph, rules, asked = self.graph, self.rules, on_axes(self.request.constraints)
        waits, count = self.request.objective == "latency", self.request.micro_batch_count or 1
        of_step = (count, self.request.lanes) if self.one_stage else (1, 1)
        if self._is_of_bytes:
            budget = replace(budget, best_s=math.inf)
        for again in range(1 + _REPEATS):
            try:
                sharder = Sharder.of(graph, rules, within, budget, *of_step, asked)
                if self.one_stage:
                    rivals = MeshSearch(sharder, self.layouts, budget, self.weighs_kinds).run()
                else:
                    rivals = StageSearch(sharder, self.layouts, budget, waits=waits).run()
            except Infeasible:
                if not plans:
                    raise
                break
            if count > 1:  # counted anew, what runs once a step would count fully
                rivals = rivals[:1]
            priced, best = self._priced(rivals, resharder)
            if best is not None:
                return replace(best, staged=replace(best.staged, tight=True)) if again else best
            plans += priced
            if budget.work.late:
                break
            budget = replace(budget, work=budget.work.beyond(steps))
            within = _narrowed(within, min(priced, key=_most_short_bytes))
        return min(plans, key=_most_short_bytes)

    def _priced(
        self, rivals: Sequence[Staged], resharder: Resharder
    ) -> tuple[list[StagedPlan], StagedPlan | None]:
        """Plans as the referee prices them, and the best of those that fit.

        Rivals that the search takes for dearer than the best plan are not priced.
        """
        priced: list[StagedPlan] = []
        best: StagedPlan | None = None
        for rival in sorted(rivals, key=attrgetter("seconds")):
            if best is not None and rival.seconds >= self._cost(best) and not self._is_of_bytes:
                break
            for plan in StagedPlan.some(rival, self.graph, self.request.constraints, resharder):
                priced.append(plan)
                if plan.evaluation.fits_exactly:
                    best = min(best or plan, plan, key=self._cost)
        return priced, best


def _check_devices(
    graph: Graph, cluster: Cluster, request: Request, meshes: Sequence[Layout]
) -> None:
    """Refuse pins to devices where each operator is on all devices, or on one."""
    on_all = request.strategy == "intra" or request.mesh is not None
    count = len(cluster) if on_all else 1
    for pin in request.constraints.pins if on_all or request.strategy == "inter" else ():
        if pin.devices and len(pin.devices) != count:
            node = next(node for node in graph.nodes if pin.names(node))
            space = f"{'intra' if on_all else 'inter'} ({meshes[0] if meshes else 'one device'})"
            raise ConstraintError(
                f"{pin.text} leaves no strategy for {node.name!r} ({node.op}) in {space}"
            )


def _most_short_bytes(plan: StagedPlan) -> int:
    return max(plan.evaluation.short_bytes.values())


def _fullest_bytes(plan: StagedPlan) -> int:
    return max(plan.evaluation.needed_bytes.values())


def _narrowed(cluster: Cluster, plan: StagedPlan) -> Cluster:
    """The cluster with so little memory that a search finds no such plan as one that does not fit.

    The referee counts more bytes of a plan than the search does, such as those of an executor. Of
    another plan it is taken to count as many more.
    """
    limit_bytes: dict[DeviceSpec, int] = {}
    for counted_bytes, mesh in zip(plan.staged.counted_bytes, plan.meshes, strict=True):
        spec, short = cluster.devices[mesh.devices[0]], plan.evaluation.short_bytes
        most = max(short.get(device, 0) for device in mesh.devices)
        if most:
            left = max(1, math.floor(counted_bytes - most))
            limit_bytes[spec] = min(left, limit_bytes.get(spec, spec.memory_bytes))
    devices = tuple(
        replace(spec, memory_bytes=limit_bytes.get(spec, spec.memory_bytes))
        for spec in cluster.devices
    )
    return replace(cluster, devices=devices)


def axes_meshes(cluster: Cluster, request: Request) -> tuple[Layout, ...]:
    """The meshes of several axes; none if none has three, or the request needs joint problems.

    Devices must be equal, the objective throughput, and nothing pinned.
    """
    joint = request.objective != "throughput" or request.constraints.bound
    if joint or request.strategy == "inter":
        return ()
    meshes = layouts(cluster, "intra", request.mesh)
    several = tuple(layout for layout in meshes if len(layout.mesh.axes) >= JOINT_AXES)
    return several if any(len(layout.mesh.axes) > JOINT_AXES for layout in several) else ()


def in_time(cluster: Cluster, request: Request) -> tuple[Layout, ...]:
    """The mesh of several axes that a request names, and all that is planned; none if it has none.

    A plan of it is found one axis at a time where the clock ends the making of its joint problem.
    One that keeps a plan has few strategies.
    """
    if request.mesh is None or len(request.mesh) < JOINT_AXES or request.constraints.plan:
        return ()
    return layouts(cluster, "intra", request.mesh)


@dataclass(frozen=True)
class SplitAxesSpace:
    """All plans on one of several meshes of up to 16 devices, each searched one axis at a time.

    Strategies multiply over axes, so that joint problems of three would be too large. Where those
    of simpler meshes leave something to gain, meshes of several axes are searched as those of a
    large cluster are. The only bound over them is the least device seconds of all nodes.
    """

    graph: Graph
    rules: Rules
    cluster: Cluster
    meshes: tuple[Layout, ...]
    #: The request, if a plan is wanted only where the clock ended the making of its joint problem.
    instead: Request | None = None
    #: Makes that problem behind the time limit, for constraints that ask for cuts that it alone
    #: has: halos, uneven parts.
    late: Callable[[Budget], SpaceResult] = lambda _budget: SpaceResult()

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The best plan; none if none is found to fit, or nothing is left to gain or no time."""
        graph, asked, is_instead = self.graph, self.instead or Request(), self.instead is not None
        if is_instead and any(one.plans or one.refused or not one.more for one in others):
            return SpaceResult()
        if not is_instead and (budget.work.late or not may_gain(others)):
            return SpaceResult()
        is_known = budget.best_s < math.inf or any(result.plans for result in others)
        if is_known and budget.work.left_s < FIRST_S * len(graph.nodes):
            budget.work.stop()
            return SpaceResult()
        space = StagesSpace(graph, self.rules, self.cluster, self.meshes, asked, one_stage=True)
        family = Family("intra", (self.meshes[0].mesh,), (), symmetric=False)
        try:
            check_even(asked.parallel, graph, asked.mesh or {})
            best = space.cheapest(budget)
        except ConstraintError as error:
            failed = SpaceResult(failed=((family, error),))
            return failed if is_known else self.late(budget)
        except Infeasible as error:
            return SpaceResult(failed=((family, error),) if is_instead else ())
        if not is_instead and not best.evaluation.fits:
            return SpaceResult()
        family = Family("intra", (best.staged.options[0].layout.mesh,), (), symmetric=False)
        candidate = space.candidate(best, family, AXES_SOLVER)
        return SpaceResult((replace(candidate, bounds_space=False),))


def may_gain(others: Sequence[SpaceResult]) -> bool:
    """Whether to search the meshes of several axes axis by axis.

    They are if no plan is known, if the best plan is on one of them, or if the joint problem of
    one is not solved. Where one axis is best, three are no better.
    """
    plans = [plan for result in others for plan in result.plans]
    if not plans:
        return True
    best = min(plans, key=lambda plan: plan.evaluation.step_s)
    open_spaces = [plan.space for plan in plans if plan.solution.status != "optimal"]
    for result in others:
        open_spaces += [space for space, error in result.failed if isinstance(error, OutOfTime)]
        if result.refused is not None and not result.refused.error.proven:
            open_spaces.append(result.refused.space)
    return any(len(space.groups[0].axes) >= JOINT_AXES for space in (best.space, *open_spaces))
