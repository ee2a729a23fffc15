"""The search: every family of plans becomes one problem; the best plan of all wins.

The certificate's bound is the least bound over the families searched, so it covers them all. A plan
that was found one axis at a time (`partitioner.search.split_axes`) is covered if it is the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.columns import DevicePrices
from partitioner.cost_model.compute import node_seconds
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.reshard import Resharder
from partitioner.ir.checks import is_number, is_whole
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.offers import alternatives
from partitioner.ir.plan import OBJECTIVES, Certificate, PlacedNode, Plan, place
from partitioner.no_gc import no_collection
from partitioner.problem.build import Built, build
from partitioner.problem.decode import certified, decided, kept_decision
from partitioner.problem.idle_devices import cover
from partitioner.problem.memory_kinds import Holdings
from partitioner.search.exact_memory import SECOND_LOOK_S, Found, Refused, second_look
from partitioner.search.levels import Staged, layouts, search_levels, search_whole
from partitioner.search.limits import EXPLICIT, EXPLICIT_NODES, MOST_EXPLICIT
from partitioner.search.split_axes import axes_meshes, by_levels, may_gain, search_axes
from partitioner.solver import Infeasible, Objective, Solution, solve
from partitioner.solver.joint.engines import HIGHS, Engine, find
from partitioner.solver.outcome import Status
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.spaces import (
    Family,
    SearchError,
    check_mesh,
    check_space,
    check_strategy,
    families,
)
from partitioner.strategies.speeds import device_speeds

#: The least time that a family is searched for.
LEAST_S = 0.2


def _silent(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Request:
    """What is asked of the search.

    Attributes:
        objective: "throughput", "latency" or "memory".
        strategy: "auto", "intra" or "inter".
        mesh: Axis sizes for intra plans; None searches them.
        constraints: Pins.
        time_limit_s: For all families together, in seconds; above 0 and finite.
        gap: Relative gap at which a family's search stops; at least 0 and below 1.
        solver: Name of the MILP solver, see `partitioner.solver.joint.engines`.
        seed: Of all random choices; at least 0.

    Raises:
        SearchError: A value is none of these.
        EngineError: There is no such solver on this machine.
    """

    objective: Objective = "throughput"
    strategy: str = "auto"
    mesh: Mapping[str, int] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    time_limit_s: float = 30.0
    gap: float = 0.01
    solver: str = HIGHS.name
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SearchError(f"objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        check_strategy(self.strategy)
        check_mesh(self.mesh)
        if not (is_number(self.time_limit_s) and 0 < self.time_limit_s < math.inf):
            raise SearchError(
                f"time_limit_s is {self.time_limit_s!r}, not a number of seconds above 0"
            )
        if not (is_number(self.gap) and 0 <= self.gap < 1):
            raise SearchError(f"gap is {self.gap!r}, not a number of at least 0 and below 1")
        if not is_whole(self.seed) or self.seed < 0:
            raise SearchError(f"seed is {self.seed!r}, not a whole number of at least 0")
        find(self.solver)

    @cached_property
    def engine(self) -> Engine:
        """The MILP solver."""
        return find(self.solver)


class OutOfTime(PartitionerError):  # noqa: N818 - a verdict
    """A family was not searched: the time limit was over."""


class Short(Exception):  # noqa: N818 - carries a verdict
    """A family was refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused.error))
        self.refused = refused


@dataclass(frozen=True)
class Outcome:
    """The winner, and what else was seen.

    Attributes:
        graph: What the plan is for: the graph that was searched, less what it leaves out.
        plan: The best plan, with its certificate.
        evaluation: Of the best plan.
        found: Best plan of each family that has one.
        failed: Why, for each family without a plan.
        tight: By levels: whether memory forbids a plan that costs less by more than the gap.
    """

    graph: Graph
    plan: Plan
    evaluation: Evaluation
    found: tuple[Found, ...]
    failed: tuple[tuple[Family, PartitionerError], ...]
    tight: bool = False


@no_collection()
def search(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    rules: Rules | None = None,
    progress: Callable[[str], None] = _silent,
    *,
    yields: bool = False,
    best_s: float = math.inf,
) -> Outcome:
    """Find the best plan.

    Args:
        graph: The graph.
        cluster: The devices.
        request: What is asked for.
        rules: Rules of the graph's nodes.
        progress: Called with a line of text before each family.
        yields: By levels: whether to stop where memory forbids a cheaper plan (`Outcome.tight`).
        best_s: By levels: cost of a plan of another graph, which is to be beaten.

    Raises:
        Infeasible: No family has a plan within the memory limits.
        ConstraintError: The pins leave a node without a strategy in every family.
        SearchError: The request names no search space.
    """
    check_space(request.strategy, len(cluster), request.mesh)
    request.constraints.check(graph, len(cluster))
    known = rules or Rules.of(graph)
    large = is_large(graph, len(cluster))
    if large and not _explicit_only(request):
        whole = partial(search_whole, yields=yields, best_s=best_s)
        find = whole if graph.backward else search_levels
        return _by_levels(graph, known, cluster, request, progress, find)
    if len(cluster) > MOST_EXPLICIT:
        raise SearchError(
            f"{_explicit_only(request)} on {len(cluster)} devices: this is planned for up to "
            f"{MOST_EXPLICIT} devices"
        )
    spaces = families(request.strategy, len(cluster), request.mesh)
    meshes = axes_meshes(cluster, request)
    axes = {axis for family in spaces for group in family.groups for axis in group.names}
    request.constraints.check_axes(sorted(axes))
    job = _Search(graph, cluster, request, known, Resharder(cluster))
    deadline = time.monotonic() + request.time_limit_s
    found, refused, failed = job.joint(spaces, deadline, bool(meshes), progress)
    if not found and not refused:
        pins = [error for _, error in failed if isinstance(error, ConstraintError)]
        raise max(pins, key=lambda error: error.position)
    more: tuple[Found, ...] = ()
    late = [family for family, error in failed if isinstance(error, OutOfTime)]
    late += [entry.family for entry in refused if not entry.error.proven]
    if meshes and may_gain(found, late):
        known_s = _cutoff(found, request, cluster)
        more = search_axes(graph, known, cluster, meshes, request, deadline, known_s, progress)
    if not found and not more:
        progress("looking again at what does not fit")
        left = max(SECOND_LOOK_S, deadline - time.monotonic())
        looked = len(refused) == len(spaces) and not meshes
        found = [
            second_look(
                refused,
                request.objective,
                request.gap,
                left,
                job.found,
                job.held,
                complete=looked,
                seed=request.seed,
                engine=request.engine,
            )
        ]
    best = _best([*found, *more], request.objective, len(cluster))
    without = [family for family, _ in failed]
    tried = [f for f in spaces if f not in without]
    if any(best is entry for entry in more):
        plan = certified(best, [*found, best], request, [*tried, best.family])
    else:
        plan = certified(best, found, request, tried)
    lost = tuple((entry.family, entry.error) for entry in refused)
    return Outcome(best.graph, plan, best.evaluation, (*found, *more), (*lost, *failed))


def is_large(graph: Graph, devices: int) -> bool:
    """Whether so many devices are planned by levels if they can be."""
    many = devices > EXPLICIT or len(graph.nodes) * devices > EXPLICIT_NODES
    return many and devices > 1


def _explicit_only(request: Request) -> str:
    """What of a request asks for a column for every device; "" if nothing does."""
    if request.objective != "throughput":
        return f"objective {request.objective}"
    return "constraints" if request.constraints.bound else ""


def _by_levels(
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    request: Request,
    progress: Callable[[str], None],
    find: Callable[..., tuple[Staged, ...]],
) -> Outcome:
    """Stages whose devices do alike; see `partitioner.search.levels`."""
    space = layouts(cluster, request.strategy, request.mesh)
    if graph.backward:
        space = tuple(layout for layout in space if layout.mesh.size() == len(cluster))
    if not space and graph.backward:
        raise SearchError(
            "training is planned on one group of all devices, and they must be alike: "
            f"--strategy {request.strategy} gives none"
        )
    if not space:
        asked = "--mesh" if request.mesh is not None else f"--strategy {request.strategy}"
        raise SearchError(
            f"{asked} on devices of several kinds is planned for up to "
            f"{EXPLICIT} devices; --strategy auto gives each kind stages of its own"
        )
    deadline = time.monotonic() + request.time_limit_s
    staged, meshes, left, plan, figures = by_levels(
        find, graph, rules, cluster, space, request, deadline, progress
    )
    cost = figures.step_s
    bound = min(staged.bound_s, cost)
    met = cost - bound <= request.gap * cost
    sizes = sorted({layout.mesh.size() for layout in staged.searched})
    status: Status = "optimal" if met else "feasible" if staged.in_time else "time_limit"
    certificate = Certificate(
        objective=request.objective,
        cost=cost,
        bound=bound,
        status=status,
        strategy=plan.kind,
        solver="stages over shardings / device seconds of the nodes",
        space=f"stages of {', '.join(map(str, sizes))} devices, even cuts",
        seed=request.seed,
        folded=str(staged.folded),
    )
    plan = replace(plan, certificate=certificate)
    solution = Solution((), cost, bound, status, None, certificate.solver)
    name = {"single": "single", "inter": "inter", "intra": "intra"}.get(plan.kind, "hybrid")
    family = Family(name, meshes, meshes[:1], symmetric=False)
    failed = tuple(
        (Family("stages", (layout.mesh,), (), symmetric=False), OutOfTime(why))
        for layout, why in staged.failed.items()
    )
    found = (Found(family, left, plan, figures, solution),)
    return Outcome(left, plan, figures, found, failed, staged.tight)


def first_problem(
    graph: Graph, cluster: Cluster, request: Request, rules: Rules | None = None
) -> tuple[Family, Built]:
    """The first search space of a request, as the solver's problem.

    Raises:
        ConstraintError: The pins leave a node without a strategy.
        SearchError: The request names no search space.
    """
    family, *_ = families(request.strategy, len(cluster), request.mesh)
    request.constraints.check(graph, len(cluster))
    request.constraints.check_axes(sorted({axis for mesh in family.groups for axis in mesh.names}))
    job = _Search(graph, cluster, request, rules or Rules.of(graph), Resharder(cluster))
    return family, job.built(family)


def _cutoff(found: Sequence[Found], request: Request, cluster: Cluster) -> float:
    """Cost of the plan to beat."""
    if not found:
        return math.inf
    return _best(found, request.objective, len(cluster)).cost(request.objective)


def _best(found: Sequence[Found], objective: str, devices: int) -> Found:
    """Least cost; for throughput, plans that give every device work go first."""

    def rank(entry: Found) -> tuple[bool, float]:
        idle = objective == "throughput" and entry.evaluation.devices_used < devices
        return idle, entry.cost(objective)

    return min(found, key=rank)


@dataclass(frozen=True)
class _Search:
    """What all families of one search share."""

    graph: Graph
    cluster: Cluster
    request: Request
    rules: Rules
    resharder: Resharder

    @cached_property
    def speeds(self) -> Mapping[int, float] | None:
        """Of every device on this graph; None if they are equal."""
        return device_speeds(self.graph, self.rules, self.cluster)

    def joint(
        self,
        spaces: Sequence[Family],
        deadline: float,
        more: bool,
        progress: Callable[[str], None],
    ) -> tuple[list[Found], list[Refused], list[tuple[Family, ConstraintError | OutOfTime]]]:
        """The best plan of each family, as one problem each; `more`: leave time for as much again.

        Returns:
            Plans, families in which none fits, families that were not searched.
        """
        found: list[Found] = []
        refused: list[Refused] = []
        failed: list[tuple[Family, ConstraintError | OutOfTime]] = []
        for index, family in enumerate(spaces):
            left = deadline - time.monotonic()
            if left <= 0 and (found or refused):
                failed.append(
                    (family, OutOfTime(f"not searched within {self.request.time_limit_s:g} s"))
                )
                continue
            progress(f"searching {family}")
            left = max(LEAST_S, left) / (len(spaces) + more - index)
            try:
                found += self.family(family, left, _cutoff(found, self.request, self.cluster))
            except ConstraintError as error:
                failed.append((family, error))
            except Short as error:
                refused.append(error.refused)
        return found, refused, failed

    def family(self, family: Family, time_limit_s: float, cutoff: float) -> list[Found]:
        """The family's best plan and, if that leaves devices idle, the nearest that does not.

        Empty if the work alone shows that no plan of the family is below the cutoff.

        Raises:
            ConstraintError: The pins leave a node without a strategy.
            Short: No plan fits by the safe memory formula.
        """
        candidates = self._candidates(family)
        if self.request.objective == "throughput" and self._least_load(candidates) >= cutoff:
            return []
        built = self._build(family, candidates)
        gap = self.request.gap
        try:
            solution = solve(
                built.problem,
                self.request.objective,
                time_limit_s=time_limit_s,
                gap=gap,
                seed=self.request.seed,
                engine=self.request.engine,
                cutoff=cutoff,
                reason_s=0.0,
            )
        except Infeasible as error:
            raise Short(Refused(family, built, error)) from None
        found = [self.found(family, built, solution)]
        idle = found[0].evaluation.devices_used < len(self.cluster)
        if self.request.objective == "throughput" and idle:
            chosen = cover(built.problem, solution.chosen)
            if chosen is not None:
                found.append(self.found(family, built, replace(solution, chosen=chosen)))
        return found

    def found(self, family: Family, built: Built, solution: Solution) -> Found:
        """A solution as a plan, with its evaluation."""
        graph, plan = decided(self.graph, self.cluster, built, solution)
        rules = self.rules.by_node if graph is self.graph else None
        return Found(family, graph, plan, evaluate(graph, plan, self.cluster, rules), solution)

    def held(self, plan: Plan, device: int) -> str:
        """What a device holds where it is fullest, in words."""
        return Holdings.of(self.graph, plan, self.cluster).text(device)

    def _least_load(self, candidates: Mapping[str, Sequence[PlacedNode]]) -> float:
        """No plan's busiest device has less: the least device-seconds of each node, shared."""
        least = (
            min(sum(node_seconds(self.graph, p, self.cluster).values()) for p in options)
            for options in candidates.values()
        )
        return sum(least) / len(self.cluster)

    def _candidates(self, family: Family) -> dict[str, tuple[PlacedNode, ...]]:
        """What may be done with each node: strategies that honour the constraints, on all groups.

        Of a node that takes either operand, one for each; an optional one may also be left out.

        Raises:
            ConstraintError: A node is left without any.
        """
        constraints = self.request.constraints
        by_group = [strategies(self.graph, self.rules, mesh, self.speeds) for mesh in family.groups]
        found: dict[str, tuple[PlacedNode, ...]] = {}
        for position, node in enumerate(self.graph.nodes):
            pinned = kept_decision(self.graph, constraints.plan, self.rules, node)
            if pinned is not None:
                found[node.name] = (pinned,)
                continue
            offered = tuple(placed for options in by_group for placed in options[node.name])
            if not offered:
                offered = tuple(place(self.graph, node, mesh, {}, None) for mesh in family.homes)
            kept = constraints.keep(node, offered)
            found[node.name] = tuple(alternatives(self.graph, node, kept)) if kept else ()
            if not kept:
                why = constraints.blame(node, offered)
                raise ConstraintError(
                    f"{why} leaves no strategy for {node.name!r} ({node.op}) in {family}",
                    position,
                )
        return found

    def built(self, family: Family) -> Built:
        """The family's problem.

        Raises:
            ConstraintError: The pins leave a node without a strategy.
        """
        return self._build(family, self._candidates(family))

    def _build(self, family: Family, candidates: Mapping[str, tuple[PlacedNode, ...]]) -> Built:
        meshes = (placed.mesh for options in candidates.values() for placed in options)
        groups = tuple(dict.fromkeys((*family.groups, *family.homes, *meshes)))
        constraints = self.request.constraints
        free = not constraints.bound and self.cluster.is_uniform
        same = (tuple(range(len(family.groups))),) if family.symmetric and free else ()
        prices = DevicePrices(self.graph, self.cluster, self.resharder)
        return build(self.graph, groups, candidates, prices, same)
