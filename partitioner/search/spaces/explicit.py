"""Spaces of plans as joint problems, in which every device has a column of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.prices.reshard import Resharder, most_joined
from partitioner.cost_model.profiles.forms import chain
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.offers import alternatives
from partitioner.ir.plan import PlacedNode, Plan, place
from partitioner.ir.rule import Rule
from partitioner.problem.build import Built, build, decided, kept_decision
from partitioner.problem.memory_kinds import Holdings
from partitioner.rewrites.staging import layers
from partitioner.search.outcome import Candidate, OutOfTime, Refused, SpaceResult
from partitioner.search.request import SOME_PLAN_S, Budget, Request
from partitioner.solver.joint.local_search import State, tables
from partitioner.solver.joint.solve import LEAST_GAP, solve
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.problem import Problem
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import Rules, device_shares, strategies
from partitioner.strategies.spaces import Family, families

#: Steps of building and presolving a problem, for each choice and each item.
CHOICE_STEPS, ITEM_STEPS = 150, 15
#: Most windows whose halos are fused in a chain, on a mesh of one axis and of several: the first
#: that gives a joint problem no more than so many pairs of strategies of a producer and a reader.
#: Strategies multiply over axes, and would crowd out the search of large models.
FUSED, FUSED_OVER_AXES, MOST_WITH_FUSED = (4, 2, 1), (1,), 40_000
#: A space is searched on if that gained so many times the gap asked for.
LEAST_GAIN = 0.1
#: Times that a search whose plan does not fit by the referee is repeated, within less memory, and
#: the steps that these searches have at least.
REPEATS, REPEAT_STEPS = 3, 1e6
#: Nodes that are tried for each idle device, those with the least load first.
MAX_TRIES = 200
#: Relative difference of two costs that is rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class JointSearch:
    """The graph, devices and request that all joint problems of a search share."""

    graph: Graph
    cluster: Cluster
    request: Request
    rules: Rules
    prices: DeviceColumns

    @cached_property
    def shares(self) -> tuple[Mapping[int, float], ...]:
        """Shares of this graph that the devices may have, beside balanced ones."""
        return device_shares(self.graph, self.rules, self.cluster)

    @property
    def tries_kinds(self) -> bool:
        """Tell whether the usual kinds of parallelism are searched beside all plans."""
        request = self.request
        free = request.parallel is None and request.mesh is None and not request.constraints.bound
        return free and request.strategy != "inter" and len(self.cluster) > 1

    def goal(self, family: Family) -> Objective:
        """The objective of the joint problem.

        Training steps on several groups run in sequence, so their latency is what they cost.
        """
        several = len(family.groups) > 1 and bool(self.graph.backward)
        objective = self.request.objective
        return "latency" if several and objective == "throughput" else objective

    def candidate(self, family: Family, built: Built, solution: Solution) -> Candidate:
        """A solution as a plan, with its evaluation.

        With measured costs, what one kernel can compute is on one device.
        """
        if any(spec.profile is not None for spec in self.cluster.devices):
            solution = self._settled(built, solution)
        graph, plan = self._decided(built, solution)
        if places := self.request.constraints.places:
            names = side_by_side(graph, places)
            plan = replace(plan, nodes={name: plan.nodes[name] for name in names})
        return Candidate(family, graph, plan, evaluate(graph, plan, self.cluster), solution)

    def _decided(self, built: Built, solution: Solution) -> tuple[Graph, Plan]:
        """The plan of a solution, in the blocks of the plan that is kept, and its graph."""
        graph, plan = decided(self.graph, self.cluster, built, solution)
        kept = self.request.constraints.plan
        return graph, plan if kept is None else replace(plan, blocks=kept.blocks)

    def _settled(self, built: Built, solution: Solution) -> Solution:
        objective = self.request.objective
        used: list[int] = []  # devices, first those of the solution

        def cost(chosen: Sequence[int]) -> float:
            graph, plan = self._decided(built, replace(solution, chosen=tuple(chosen)))
            evaluation = evaluate(graph, plan, self.cluster)
            used.append(evaluation.devices_used)
            is_idle = objective == "throughput" and used[-1] < used[0]
            return evaluation.cost(objective) if evaluation.fits and not is_idle else math.inf

        return replace(solution, chosen=beside_producers(self.graph, built, solution.chosen, cost))

    def holdings(self, candidate: Candidate, device: int) -> str:
        """In words, the bytes by kind that a device holds at its peak."""
        return Holdings.of(candidate.graph, candidate.plan, self.cluster).text(device)

    def least_cost(self, goal: Objective, options: Mapping[str, Sequence[PlacedNode]]) -> float:
        """A bound on the cost of all plans, by the work alone; 0 for memory.

        The busiest device's load is at least each node's least device-seconds, shared evenly. The
        latency is at least that, and at least the longest path of the nodes' least seconds.
        """
        if goal == "memory":
            return 0.0
        device_s = 0.0
        done: dict[str, float] = {}
        for node in self.graph.nodes:
            seconds = [self.prices.node_seconds(placed) for placed in options[node.name]]
            device_s += min(sum(of_device.values()) for of_device in seconds)
            least_s = min(max(of_device.values(), default=0.0) for of_device in seconds)
            end = max((done.get(value, 0.0) for value in node.reads), default=0.0) + least_s
            done.update(dict.fromkeys(node.writes, end))
        path_s = max(done.values(), default=0.0) if goal == "latency" else 0.0
        return max(device_s / len(self.cluster), path_s)

    def options(
        self, family: Family, check: Callable[[], None] = lambda: None
    ) -> dict[str, tuple[PlacedNode, ...]]:
        """The strategies of each node that honour the constraints, on all groups.

        A node that takes either of two operands has one strategy for each; an optional node may
        also be left out. Cuts in parts that overlap are among them, as far as their number allows.
        `check` is called at each node, and may raise.

        Raises:
            ConstraintError: A node is left without any.
        """
        plain = self._options(family, 0, check)
        if not any(isinstance(r, Rule) and r.windows for r in self.rules.by_node.values()):
            return plain
        several = any(len(mesh.axes) > 1 for mesh in family.groups)
        for fused in FUSED_OVER_AXES if several else FUSED:
            if self._pairs(plain) > MOST_WITH_FUSED:
                break
            options = self._options(family, fused, check)
            if self._pairs(options) <= MOST_WITH_FUSED:
                return options
        return plain

    def _pairs(self, options: Mapping[str, Sequence[PlacedNode]]) -> int:
        """Pairs of strategies over all edges, by which a joint problem grows."""
        ends = ((self.graph.producers.get(v), n) for n in self.graph.nodes for v in n.reads)
        return sum(len(options[a.name]) * len(options[b.name]) for a, b in ends if a is not None)

    def _options(
        self, family: Family, fused: int, check: Callable[[], None]
    ) -> dict[str, tuple[PlacedNode, ...]]:
        """The options with halos of up to so many windows fused.

        Strategies are derived where a node is left to choose alone.
        """
        constraints = self.request.constraints
        parts = _parts(family, constraints)

        @cache
        def derived(mesh: DeviceMesh) -> Mapping[str, tuple[PlacedNode, ...]]:
            shares = self.shares
            return strategies(self.graph, self.rules, mesh, shares, fused=fused, check=check)

        options: dict[str, tuple[PlacedNode, ...]] = {}
        for position, node in enumerate(self.graph.nodes):
            check()
            pinned = kept_decision(self.graph, constraints.plan, self.rules, node)
            if pinned is not None:
                options[node.name] = (pinned,)
                continue
            meshes = parts.get(node.name) or family.groups
            offered = tuple(placed for mesh in meshes for placed in derived(mesh)[node.name])
            if not offered:
                of_part = tuple(DeviceMesh.single(m.devices[0]) for m in parts.get(node.name, ()))
                homes = of_part or family.homes
                offered = tuple(place(self.graph, node, mesh, {}, None) for mesh in homes)
            kept = constraints.keep(node, offered, f"in {family}", position)
            options[node.name] = tuple(alternatives(self.graph, node, kept))
        return options

    def problem(
        self,
        family: Family,
        options: Mapping[str, tuple[PlacedNode, ...]],
        check: Callable[[], None] = lambda: None,
    ) -> Built:
        """The joint problem of a space; `check` is called now and then, and may raise."""
        meshes = (placed.mesh for some in options.values() for placed in some)
        groups = tuple(dict.fromkeys((*family.groups, *family.homes, *meshes)))
        pinned = self.request.constraints.bound
        symmetric = family.symmetric and not pinned and self.cluster.is_uniform
        interchangeable = (tuple(range(len(family.groups))),) if symmetric else ()
        several = len(family.groups) > 1 and bool(self.graph.backward)
        parts = layers(self.graph) if several else ()
        return build(self.graph, groups, options, self.prices, interchangeable, check, parts)


@dataclass(frozen=True)
class JointSpace:
    """All plans on the device groups of a family, as one joint problem."""

    shared: JointSearch  #: The search.
    family: Family
    #: Whether the problem is made behind the time limit, too, where no other space is known: the
    #: refusal is told by it.
    needed: bool = True
    #: The share of the cost of a known plan that another must promise to gain; None for the gap.
    least_gain: float | None = None

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The best plan and, if that leaves devices idle, the nearest that does not.

        No plan if the work alone shows that none of the space costs less than `budget.best_s` by
        more than the least gain.
        """
        known = not self.needed or any(result.plans or result.refused for result in others)
        limit_s, least = self.shared.request.time_limit_s, 0.0

        def check() -> None:
            if known and budget.work.late:
                raise OutOfTime(f"not searched within {limit_s:g} s")

        try:
            check()
            goal = self.shared.request.objective
            known_s = budget.best_s
            best = "" if known_s >= SOME_PLAN_S else f", best {units.cost(goal, known_s)}"
            budget.say(f"searching {self.family}{best}")
            options = self.shared.options(self.family, check)
            budget.work.spend(CHOICE_STEPS * sum(map(len, options.values())))
            least = self.shared.least_cost(self.shared.goal(self.family), options)
            least_gain = budget.gap if self.least_gain is None else self.least_gain
            if least >= (1 - least_gain) * budget.best_s:
                return SpaceResult(searched=str(self.family), bound=least)
            built = self.shared.problem(self.family, options, check)
            check()
        except ConstraintError as error:
            return SpaceResult(failed=((self.family, error),))
        except OutOfTime as error:
            again = partial(self.search, others=others)
            return SpaceResult(bound=least, failed=((self.family, error),), more=again)
        # where no plan fits, kinds of parallelism go before the integer program of all of a mesh
        effort = 0 if self.shared.tries_kinds and len(self.family.groups) == 1 else 1
        return self._solved(built, budget, least, effort)

    def _solved(
        self, built: Built, budget: Budget, least: float, effort: int, known: Solution | None = None
    ) -> SpaceResult:
        """The best plan of the problem, in search of which `known` was found before.

        No plan costs less than `least`.
        """
        goal = self.shared.goal(self.family)
        budget.work.spend(ITEM_STEPS * len(built.problem.items))
        steps = max(budget.work.left, REPEAT_STEPS)
        try:
            solution = self._solution(built.problem, budget, effort, known)
        except Infeasible as error:
            refused = Refused(self.family, goal, built, error)
            if error.proven:
                return SpaceResult(searched=str(self.family), refused=refused)
            again = partial(self._solved, built, least=least, effort=1)
            more = again if budget.work.over or not effort else None
            return SpaceResult((), str(self.family), least, refused, more=more)
        first = self.shared.candidate(self.family, built, solution)
        plan = self._that_fits(built, first, replace(budget, work=budget.work.beyond(steps)))
        plans, objective = [plan], self.shared.request.objective
        if goal == "throughput" and plan.evaluation.devices_used < len(self.shared.cluster):
            chosen = cover(built.problem, plan.solution.chosen)
            if chosen is not None:
                busy = replace(plan.solution, chosen=chosen)
                plans.append(self.shared.candidate(self.family, built, busy))
        more = None
        waits = goal == "latency" and len(self.family.groups) > 1  # no other method knows of it
        # the solver has nothing cheaper, though the referee may count more
        is_least = plan is first and solution.cost - solution.bound <= ROUNDING * solution.cost
        if not (waits or is_least) and (
            known is None or gain(known, solution) > LEAST_GAIN * max(budget.gap, LEAST_GAP)
        ):
            more = partial(self._solved, built, least=least, effort=2, known=solution)
        binds = first.cost(objective) < (1 - budget.gap) * plan.cost(objective)
        return SpaceResult(tuple(plans), str(self.family), memory_binds=binds, more=more)

    def _solution(
        self, problem: Problem, budget: Budget, effort: int = 1, known: Solution | None = None
    ) -> Solution:
        return solve(
            problem,
            self.shared.goal(self.family),
            budget.work,
            gap=budget.gap,
            seed=budget.seed,
            engine=budget.engine,
            cutoff=budget.best_s,
            reason_s=0.0,
            effort=effort,
            known=known,
        )

    def _that_fits(self, built: Built, plan: Candidate, budget: Budget) -> Candidate:
        """The plan or, if it does not fit by the referee, the next one found that does.

        The search is repeated within so much less memory as the executor takes beside what the
        solver counts. If no plan fits, that which is short of the fewest bytes.
        """
        nearest, problem = plan, built.problem
        for _ in range(REPEATS):
            if plan.evaluation.fits_exactly or budget.work.over:
                break
            problem = _narrowed(problem, plan, self.shared.prices.devices)
            try:
                solution = self._solution(problem, budget)
            except Infeasible:
                break
            solution = replace(solution, bound=nearest.solution.bound)
            plan = self.shared.candidate(self.family, built, solution)
            nearest = min(
                nearest, plan, key=lambda one: max(one.evaluation.short_bytes.values(), default=0)
            )
        return nearest


def _narrowed(problem: Problem, plan: Candidate, devices: Sequence[int]) -> Problem:
    """The problem with so little memory that a search finds no such plan as one that does not fit.

    The referee counts more bytes of a plan than the solver. Of another plan, and on other devices
    of as much memory, it is taken to count as many more.
    """
    counted = evaluate_choices(problem, plan.solution.chosen).peak_bytes
    within = {limit: limit for limit in problem.limit_bytes}  # by the limit before
    for column, device in enumerate(devices):
        short = plan.evaluation.short_bytes.get(device)
        if short is not None:
            limit = problem.limit_bytes[column]
            within[limit] = min(within[limit], counted[column] - short)
    return replace(problem, limit_bytes=tuple(within[limit] for limit in problem.limit_bytes))


@dataclass(frozen=True)
class KindSpace:
    """The plans of one kind of parallelism, or of several joined: a part of a mesh's space.

    It is searched for plans to run, and where the search of the mesh proved no plan to be the best:
    with most choices bound it finds a plan soon that the larger space may hide.
    """

    shared: JointSearch  #: The search, whose request has no constraints.
    kind: str  #: The kind, see `strategies.kinds.parallel`.
    mesh: Mapping[str, int] | None = None  #: The mesh, where the kind is of several joined.
    #: Whether it has a look within the gap, too, for a plan that is a little cheaper.
    may_look: bool = True
    #: It is what one does without a planner: its plan is found, however dear, to compare with.
    is_usual: bool = False

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The best plan of the kind, if there is one; its bound covers no other plan."""
        shared, devices = self.shared, len(self.shared.cluster)
        least_gain = min(LEAST_GAP, budget.gap) if self.may_look else budget.gap
        if not self._is_wanted(least_gain, others):
            return SpaceResult()
        try:
            asked = replace(shared.request, parallel=self.kind, mesh=self.mesh)
            request = asked.over(devices).on(shared.graph)
            request.constraints.check(shared.graph, devices)
        except PartitionerError:
            return SpaceResult()
        (family,) = families("intra", devices, request.mesh)
        space = JointSpace(
            replace(shared, request=request),
            replace(family, name=self.kind),
            needed=False,
            least_gain=least_gain,
        )
        if self.is_usual:
            budget = replace(budget, best_s=math.inf)
        result = self._of_kind(space.search(budget, others), budget)
        if self.is_usual or self._is_wanted(budget.gap, others):
            return result
        # within the gap a kind has one look, of which only a cheaper plan counts
        goal, known_s = shared.request.objective, budget.best_s
        return SpaceResult(tuple(plan for plan in result.plans if plan.cost(goal) < known_s))

    def _of_kind(self, result: SpaceResult, budget: Budget) -> SpaceResult:
        """The plans of a result, whose bounds cover no other plan, and how to go on with them.

        A kind that was refused goes on beside a known plan, or if the clock stopped it.
        """
        plans = tuple(replace(plan, bounds_space=False) for plan in result.plans)
        of_kind = SpaceResult(plans, memory_binds=result.memory_binds)
        more, is_known = result.more, budget.best_s < math.inf
        if more is None or (result.refused and not (is_known or budget.work.stopped)):
            return of_kind
        return replace(of_kind, more=lambda budget: self._of_kind(more(budget), budget))

    def _is_wanted(self, gap: float, others: tuple[SpaceResult, ...]) -> bool:
        """Tell whether plans are to be run, or the mesh may have one cheaper by more than the gap.

        Where none is known, a plan of a kind may fit that was not found among all, unless these are
        proven not to.
        """
        if self.is_usual or self.shared.request.tune is not None:
            return True
        costs = [
            plan.cost(self.shared.request.objective) for result in others for plan in result.fitting
        ]
        if not costs:
            refused = [result.refused for result in others]
            proven = (one is not None and one.error.proven for one in refused)
            return not refused or not all(proven)
        if any(isinstance(error, OutOfTime) for one in others for _, error in one.failed):
            return True
        own = [result for result in others if self._is_part_of(result)]
        # bounds of other kinds cover these alone
        free = [one for one in others if not one.plans or any(p.bounds_space for p in one.plans)]
        least = min((result.least for result in own or free), default=0.0)
        return least < (1 - gap) * min(costs)

    def _is_part_of(self, result: SpaceResult) -> bool:
        """Test whether a result's bound is that of all plans on the kind's mesh."""
        sizes = tuple((self.mesh or {"": len(self.shared.cluster)}).values())
        groups = [plan.space.groups for plan in result.plans if plan.bounds_space]
        return any(len(of) == 1 and tuple(n for _, n in of[0].axes) == sizes for of in groups)


def _parts(family: Family, constraints: Constraints) -> Mapping[str, tuple[DeviceMesh, ...]]:
    """By node that runs on a part of a mesh's devices alone, those parts of the space's groups."""
    return {
        name: tuple(mesh.part(axis, place) for mesh in family.groups if axis in mesh.names)
        for name, (axis, place) in constraints.places.items()
    }


def gain(before: Solution, after: Solution) -> float:
    """By how much a search has brought cost and bound nearer, relative to the cost."""
    nearer = (before.cost - before.bound) - (after.cost - after.bound)
    return nearer / after.cost if after.cost > 0 else 0.0


def first_problem(graph: Graph, cluster: Cluster, request: Request) -> tuple[Family, Built]:
    """The first space of a request, as the solver's problem.

    Raises:
        ConstraintError: The pins leave a node without a strategy.
        SearchError: The request names no space.
    """
    family, *_ = families(request.strategy, len(cluster), request.mesh)
    request.constraints.check(graph, len(cluster))
    request.constraints.check_axes(sorted({axis for mesh in family.groups for axis in mesh.names}))
    prices = DeviceColumns(graph, Resharder(cluster, most_joined(graph)))
    shared = JointSearch(graph, cluster, request, Rules.of(graph), prices)
    return family, shared.problem(family, shared.options(family))


def side_by_side(graph: Graph, places: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    """Order the nodes of a graph: those that wait for nodes with a place come as late as they can.

    Devices run their nodes in one global order, and what one sends to others leaves in this order,
    too. So a device that has all nodes of its place before those of another keeps that waiting:
    places take turns, behind the nodes without a place that wait for none with one.
    """
    import networkx as nx

    placed = {value for node in graph.nodes if node.name in places for value in node.writes}
    numbers: Counter[tuple[str, int]] = Counter()
    keys: dict[str, tuple[bool, int, int, int]] = {}
    for position, node in enumerate(graph.nodes):
        place, turn = places.get(node.name), position
        rank = 2 if placed.intersection(node.reads) else 0
        if place is not None:
            rank, turn = 1, numbers[place]
            numbers[place] += 1
        keys[node.name] = node.name in graph.backward, rank, turn, position
    order: Iterator[str] = nx.lexicographical_topological_sort(
        graph.to_networkx(), key=keys.__getitem__
    )
    return order


def cover(problem: Problem, chosen: Sequence[int]) -> tuple[int, ...] | None:
    """Give each idle device the node whose move costs least; None if no plan that fits is near.

    The best throughput of a small model may need fewer devices than the request names. A request
    for four parts gets four, and a note says what fewer would cost.
    """
    state = State(tables(problem), chosen, bytes_matter=problem.limited)
    for device in range(problem.devices):
        if _node_counts(problem, state.chosen)[device]:
            continue
        # the cheapest node and choice that give the device work, and more devices than before
        best: tuple[int, int] | None = None
        least = (float("inf"), float("inf"))
        for node, pick in _moves(problem, state.chosen, device):
            if not state.allowed(node, pick):
                continue
            before = state.chosen[node]
            state.move(node, pick)
            cost = max(state.load), sum(state.load)
            rounding = ROUNDING * least[0]
            is_even = abs(cost[0] - least[0]) <= rounding
            less = cost[1] < least[1] * (1 - ROUNDING) if is_even else cost[0] < least[0]
            if state.excess_bytes() <= 0 and less:
                best, least = (node, pick), cost
            state.move(node, before)
        if best is None:
            return None
        state.move(*best)
    return tuple(state.chosen)


def _node_counts(problem: Problem, chosen: Sequence[int]) -> list[int]:
    """Nodes that load each device; communications are left out."""
    counts = [0] * problem.devices
    for choices, pick in zip(problem.nodes, chosen, strict=True):
        for device, seconds in enumerate(choices[pick].load_s):
            counts[device] += seconds > 0
    return counts


def _moves(problem: Problem, chosen: Sequence[int], device: int) -> Iterator[tuple[int, int]]:
    counts = _node_counts(problem, chosen)
    nodes = sorted(
        (choices[pick].load_s[d], node)
        for node, (choices, pick) in enumerate(zip(problem.nodes, chosen, strict=True))
        for d in range(problem.devices)
        if choices[pick].load_s[d] > 0
    )
    for _, node in nodes[:MAX_TRIES]:
        now = problem.nodes[node][chosen[node]].load_s
        for pick, choice in enumerate(problem.nodes[node]):
            pairs = enumerate(zip(now, choice.load_s, strict=True))
            idle = sum(old > 0 and new == 0 and counts[d] == 1 for d, (old, new) in pairs)
            gained = sum(new > 0 and counts[d] == 0 for d, new in enumerate(choice.load_s))
            if choice.load_s[device] > 0 and gained > idle:
                yield node, pick


#: How much dearer all moves together may make a plan: less than a kernel that is torn apart costs,
#: which is in no price.
MOST_DEARER = 2e-3


def beside_producers(
    graph: Graph, built: Built, chosen: Sequence[int], cost: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """The choices, with nodes moved to the device of the node whose kernel computes them.

    Such nodes cost next to nothing (see `cost_model.profiles.forms.chain`), so the solver is as
    content with a cut before an activation as with one behind it, which tears no kernel apart.

    Args:
        graph: The graph of the problem.
        built: The problem.
        chosen: A choice for each node.
        cost: The referee's cost of choices; no move is made that brings it above the first one by
            more than `MOST_DEARER`, and none if that is infinite.
    """
    picks = list(chosen)
    known: float | None = None
    for index, node in enumerate(graph.nodes):
        *_, producer = chain(graph, node.name) or (None,)
        if producer is None:
            continue
        above = built.candidates[producer.name][picks[graph.order[producer.name]]]
        own = built.candidates[node.name]
        if above.mesh.size() > 1 or own[picks[index]].mesh == above.mesh:
            continue
        pick = next((i for i, placed in enumerate(own) if placed.mesh == above.mesh), None)
        if pick is None:
            continue
        known = cost(picks) if known is None else known
        moved = [*picks[:index], pick, *picks[index + 1 :]]
        if math.isfinite(known) and cost(moved) <= known * (1 + MOST_DEARER):
            picks = moved
    return tuple(picks)
