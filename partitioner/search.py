"""The search: every family of plans becomes one problem; the best plan of all wins.

The certificate's bound is the least bound over the families searched, so it covers them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.build import Built, build
from partitioner.constraints import ConstraintError, Constraints
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.reshard import Resharder
from partitioner.cover import cover
from partitioner.families import Family, families
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Certificate, NodePlan, PlacedNode, Plan, place
from partitioner.solver import Infeasible, Objective, Solution, solve
from partitioner.strategies import Rules, strategies

#: Seconds for each search of the second look at what the safe memory formula calls infeasible.
SECOND_LOOK_S = 2.0


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
        time_limit_s: For all families together.
        gap: Relative gap at which a family's search stops.
    """

    objective: Objective = "throughput"
    strategy: str = "auto"
    mesh: Mapping[str, int] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    time_limit_s: float = 30.0
    gap: float = 0.01


@dataclass(frozen=True)
class Found:
    """One family's best plan and its evaluation."""

    family: Family
    plan: Plan
    evaluation: Evaluation
    solution: Solution

    def cost(self, objective: str) -> float:
        """By the referee."""
        return self.evaluation.cost(objective)


@dataclass(frozen=True)
class Outcome:
    """The winner, and what else was seen.

    Attributes:
        plan: The best plan, with its certificate.
        evaluation: Of the best plan.
        found: Best plan of each family that has one.
        failed: Why, for each family without a plan.
    """

    plan: Plan
    evaluation: Evaluation
    found: tuple[Found, ...]
    failed: tuple[tuple[Family, Infeasible | ConstraintError], ...]


def search(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    rules: Rules | None = None,
    progress: Callable[[str], None] = _silent,
) -> Outcome:
    """Find the best plan.

    Raises:
        Infeasible: No family has a plan within the memory limits.
        ConstraintError: The pins leave a node without a strategy in every family.
        SearchError: The request names no search space.
    """
    rules = rules or Rules.of(graph)
    request.constraints.check(graph, len(cluster.devices))
    spaces = families(request.strategy, len(cluster.devices), request.mesh)
    resharder = Resharder(cluster)
    found: list[Found] = []
    failed: list[tuple[Family, Infeasible | ConstraintError]] = []
    deadline = time.monotonic() + request.time_limit_s
    for index, family in enumerate(spaces):
        progress(f"searching {family}")
        left = max(1.0, deadline - time.monotonic()) / (len(spaces) - index)
        try:
            found += _search_family(
                graph,
                cluster,
                request,
                rules,
                family,
                resharder,
                left,
                _cutoff(found, request, cluster),
            )
        except (Infeasible, ConstraintError) as error:
            failed.append((family, error))
    if not found:
        raise _verdict([error for _, error in failed])
    best = _best(found, request.objective, len(cluster.devices))
    plan = _certified(best, found, request)
    return Outcome(plan, best.evaluation, tuple(found), tuple(failed))


def _cutoff(found: Sequence[Found], request: Request, cluster: Cluster) -> float:
    """Cost of the plan to beat."""
    if not found:
        return math.inf
    return _best(found, request.objective, len(cluster)).cost(request.objective)


def _verdict(errors: Sequence[Infeasible | ConstraintError]) -> Infeasible | ConstraintError:
    """The family that came nearest to fitting speaks; pins that cannot be met otherwise."""
    short = [error for error in errors if isinstance(error, Infeasible)]
    return min(short, key=lambda error: error.bytes_short) if short else errors[0]


def _best(found: Sequence[Found], objective: str, devices: int) -> Found:
    """Least cost; for throughput, plans that give every device work go first."""

    def rank(entry: Found) -> tuple[bool, float]:
        idle = objective == "throughput" and entry.evaluation.devices_used < devices
        return idle, entry.cost(objective)

    return min(found, key=rank)


def _certified(best: Found, found: Sequence[Found], request: Request) -> Plan:
    cost = best.cost(request.objective)
    bound = min([cost, *(entry.solution.bound for entry in found)])
    within = cost - bound <= request.gap * cost
    return replace(
        best.plan,
        certificate=Certificate(
            objective=request.objective,
            cost=cost,
            bound=bound,
            status="optimal" if within else _stopped(found),
            strategy=best.family.name,
            solver=best.solution.solver,
            space=", ".join(dict.fromkeys(str(entry.family) for entry in found)),
        ),
    )


def _stopped(found: Sequence[Found]) -> str:
    return "time_limit" if any(f.solution.status == "time_limit" for f in found) else "feasible"


def _search_family(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    rules: Rules,
    family: Family,
    resharder: Resharder,
    time_limit_s: float,
    cutoff: float,
) -> list[Found]:
    """The family's best plan and, if that leaves devices idle, the nearest that does not."""
    built = _problem(graph, cluster, request.constraints, rules, family, resharder)
    try:
        solution = solve(
            built.problem,
            request.objective,
            time_limit_s=time_limit_s,
            gap=request.gap,
            cutoff=cutoff,
        )
    except Infeasible as error:
        return [_exact(graph, cluster, request, family, built, error)]
    plan = _plan(graph, cluster, built, solution)
    found = [Found(family, plan, evaluate(graph, plan, cluster), solution)]
    if request.objective == "throughput" and found[0].evaluation.devices_used < len(cluster):
        chosen = cover(built.problem, solution.chosen)
        if chosen is not None:
            spread = replace(solution, chosen=chosen)
            plan = _plan(graph, cluster, built, spread)
            found.append(Found(family, plan, evaluate(graph, plan, cluster), spread))
    return found


def _exact(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    family: Family,
    built: Built,
    error: Infeasible,
) -> Found:
    """The plan of least peak, if exact liveness in the graph's order lets it fit after all.

    Raises:
        Infeasible: `error`, otherwise.
    """
    free = replace(built.problem, limit_bytes=(math.inf,) * built.problem.devices)
    least = solve(free, "memory", time_limit_s=SECOND_LOOK_S, gap=request.gap)
    plan = _plan(graph, cluster, built, least)
    evaluation = evaluate(graph, plan, cluster)
    if not evaluation.fits_exactly:
        raise error
    bound = solve(free, request.objective, time_limit_s=SECOND_LOOK_S, gap=request.gap).bound
    return Found(family, plan, evaluation, replace(least, bound=bound, status="feasible"))


def _problem(
    graph: Graph,
    cluster: Cluster,
    constraints: Constraints,
    rules: Rules,
    family: Family,
    resharder: Resharder,
) -> Built:
    by_group = [strategies(graph, rules, mesh) for mesh in family.groups]
    groups = list(dict.fromkeys((*family.groups, *family.homes)))
    candidates: dict[str, tuple[PlacedNode, ...]] = {}
    for node in graph.nodes:
        pinned = _planned(graph, constraints.plan, rules, node)
        if pinned is not None:
            candidates[node.name] = (pinned,)
            groups += [pinned.mesh] if pinned.mesh not in groups else []
            continue
        offered = tuple(placed for options in by_group for placed in options[node.name])
        if not offered:
            offered = tuple(place(graph, node, mesh, {}, None) for mesh in family.homes)
        kept = constraints.keep(node, offered)
        if not kept:
            why = constraints.blame(node, offered)
            raise ConstraintError(
                f"{why} leaves no strategy for {node.name!r} ({node.op}) in {family}"
            )
        candidates[node.name] = kept
    free = not constraints.pins and constraints.plan is None and cluster.is_uniform
    same = (tuple(range(len(family.groups))),) if family.symmetric and free else ()
    return build(graph, groups, candidates, cluster, resharder, same)


def _planned(graph: Graph, plan: Plan | None, rules: Rules, node: Node) -> PlacedNode | None:
    decision: NodePlan | None = plan.nodes.get(node.name) if plan is not None else None
    if plan is None or decision is None:
        return None
    mesh: DeviceMesh = plan.groups[decision.group]
    rule = rules.rule(node)
    sizes = {name: factor.size for name, factor in rule.factors.items()} if rule else {}
    layouts = {name: cut.layout(sizes[name], mesh) for name, cut in decision.cuts.items()}
    return place(graph, node, mesh, layouts, rule)


def _plan(graph: Graph, cluster: Cluster, built: Built, solution: Solution) -> Plan:
    decisions = built.node_plans(graph, solution.chosen)
    order = solution.order or range(len(graph.nodes))
    names = [graph.nodes[index].name for index in order]
    used = sorted({decisions[name].group for name in names})
    index = {group: position for position, group in enumerate(used)}
    nodes = {n: NodePlan(index[decisions[n].group], decisions[n].cuts) for n in names}
    groups = tuple(built.groups[group] for group in used)
    return Plan(graph.digest, cluster.to_data(), groups, nodes)
