"""The search: one loop over spaces of plans; the best plan of all spaces wins.

Small clusters: every space (all devices as a mesh, every device alone, equal sub-meshes) becomes
one joint problem (`search.spaces.explicit`), and meshes of three axes are searched one axis at a
time, large clusters in stages of equal meshes (`search.levels.staged`).
The certificate has the least bound of the spaces, so that it covers them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import remembering
from partitioner.foundations import units
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.graph import Graph
from partitioner.search.levels.meshes import device_pools
from partitioner.search.levels.staged import SplitAxesSpace, StagesSpace, axes_meshes, in_time
from partitioner.search.outcome import (
    Candidate,
    NoCheaper,
    Outcome,
    SpaceResult,
    best_of,
    too_large,
    winner,
)
from partitioner.search.request import EXPLICIT, EXPLICIT_NODES, MOST_EXPLICIT, Budget, Request
from partitioner.search.spaces.copies import CopiesSearch
from partitioner.search.spaces.exact_memory import exact_plan, second_look
from partitioner.search.spaces.explicit import JointSearch, JointSpace, KindSpace
from partitioner.search.spaces.one_device import OneDeviceSpace
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import now_s
from partitioner.strategies.constraints import ConstraintError, possible
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import DATA
from partitioner.strategies.kinds.parallel import meshes as kind_meshes
from partitioner.strategies.spaces import Family, SearchError, check_space, families

#: The kinds of parallelism of one axis that are searched beside all plans of a mesh: those that
#: differ, in training and in inference.
TRAINING_KINDS, KINDS = ("dp", "zero2", "zero3", "tp"), ("dp", "tp")
#: The same of two axes.
TRAINING_KINDS_OVER_AXES, KINDS_OVER_AXES = ("dp+tp", "zero3+tp"), ("dp+tp",)


#: A search does not go on in less than so much of the seconds that it took before: parts of it ask
#: no clock.
PART_TAKEN = 0.5
#: About the seconds of making the problem of all plans of a mesh of one axis, for each node on each
#: device, and the share of the limit from which on that is much.
SPACE_S, SCARCE = 1.5e-4, 0.1
#: A kind has one of so many parts of a search's steps at least, whatever the spaces before it left,
#: and no fewer than such a search takes.
KIND_PART, KIND_STEPS = 6, 2e6
#: Kinds have no more looks within the gap once they took this share of the steps of the others.
LOOK_PART = 0.1


class Space(Protocol):
    """A set of plans that is searched as a whole."""

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """Find its best plan.

        Args:
            budget: The budget of this space, with the cost of the best known plan.
            others: Results of the spaces searched before it.

        Raises:
            Infeasible: No plan fits, and exact liveness cannot change that.
        """
        ...


@no_collection()
def find_plan(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, rules: Rules | None = None
) -> Outcome:
    """Find the best plan.

    Args:
        graph: The graph.
        cluster: The devices.
        request: The request.
        budget: The budget of the whole search.
        rules: Rules of the graph's nodes, if they are known.

    Raises:
        Infeasible: No space has a plan within the memory limits.
        NoCheaper: None was found that costs less than the known plan of the budget.
        ConstraintError: The pins leave a node without a strategy in every space.
        SearchError: The request names no search space.
    """
    devices = len(cluster)
    check_space(request.strategy, devices, request.mesh)
    rules = rules or Rules.of(graph)
    if devices > 1 and (request.strategy == "copies" or request.keeps_copies):
        copies = CopiesSearch(
            graph, cluster, request, lambda one, of, share: find_plan(graph, one, of, share, rules)
        )
        return copies.best(budget)
    requests = request.on_meshes(devices)
    if requests != (request,):  # kinds are constraints on each mesh that the request leaves open
        requests = tuple(possible(requests, lambda one: one.on(graph)))
    if not requests:
        raise SearchError(f"{devices} devices have no mesh of the kinds")
    for one in requests:
        one.constraints.check(graph, devices)
    is_alike = len(device_pools(cluster)) == 1 or not requests[0].constraints.bound
    by_levels = is_alike or devices > MOST_EXPLICIT
    if by_levels and goes_by_levels(graph, devices, requests[0]):
        stages = possible(requests, lambda one: StagesSpace.of(graph, rules, cluster, one))
        search = _Search(request, cluster, budget).of_levels(stages)
        return _of_request(search.with_one_device(graph).winner, graph, requests)
    return _explicit(graph, cluster, requests, budget, rules)


def _of_request(outcome: Outcome, graph: Graph, requests: Sequence[Request]) -> Outcome:
    """An outcome with the graph that was searched, and the request on the mesh of its plan."""
    if len(requests) > 1:
        axes = [dict(group.axes) for group in outcome.plan.groups]
        own = (one for one in requests if one.mesh in axes)
        outcome = replace(outcome, request=next(own, requests[0]))
    return replace(outcome, of=graph)


def _that_fit(result: SpaceResult) -> SpaceResult:
    """A space without the plans that do not fit by the referee; what they prove still holds."""
    if len(result.fitting) == len(result.plans):
        return result
    bounds = [plan.solution.bound for plan in result.plans if plan.bounds_space]
    return replace(
        result, plans=result.fitting, bound=min([result.bound, *bounds]), memory_binds=True
    )


def goes_by_levels(graph: Graph, devices: int, request: Request) -> bool:
    """Tell whether plans are searched by levels, not with a column for each device.

    With constraints, or another objective than throughput, only those are of which a column each
    would be too many: decisions on single nodes are known to a search of columns alone. Kinds of
    one axis are proven in columns; of kinds of several axes, columns of large graphs end far from
    their bound, and levels find better plans in the same time.
    """
    asked = request.constraints
    many_nodes = len(graph.nodes) * devices > EXPLICIT_NODES
    large = devices > EXPLICIT or many_nodes
    if asked.bound:
        has_axes = len(request.mesh or ()) > 1
        large = devices > MOST_EXPLICIT or (many_nodes and (devices > EXPLICIT or has_axes))
    single = asked.plan is not None or asked.names_devices or asked.places
    if single or request.objective != "throughput":
        large = devices > MOST_EXPLICIT
    places_steps = bool(graph.backward) and request.strategy == "inter"  # levels share each node
    return devices > 1 and large and not (places_steps or is_decided(graph, request))


def is_decided(graph: Graph, request: Request) -> bool:
    """Tell whether a plan is kept that decides every node."""
    kept = request.constraints.plan
    return kept is not None and kept.nodes.keys() == graph.by_name.keys()


def _explicit(
    graph: Graph, cluster: Cluster, requests: Sequence[Request], budget: Budget, rules: Rules
) -> Outcome:
    request, *_ = requests
    counted, kept = cluster, request.constraints.plan
    if kept is not None and kept.blocks:  # the referee alone knows what is loaded in turn
        counted = cluster.with_memory(4 * sum(type_.nbytes for type_ in graph.types.values()))
    resharder = remembering(counted, graph)
    search = JointSearch(graph, cluster, request, rules, DeviceColumns(graph, resharder))
    meshes = axes_meshes(cluster, request)
    spaces: list[Space] = [
        JointSpace(replace(search, request=one), family)
        for one in requests
        for family in _families(graph, cluster, one)
    ]
    if meshes:
        spaces.append(SplitAxesSpace(graph, rules, cluster, meshes))
    refusing = len(spaces)  # the others never refuse
    if not meshes and len(spaces) == 1 and (named := in_time(counted, request)):
        (family,) = _families(graph, cluster, request)
        late = partial(JointSpace(search, family).search, others=())
        axes = SplitAxesSpace(graph, rules, cluster, named, request, late)
        spaces = [JointSpace(search, family, needed=False), axes]
    alone = OneDeviceSpace(graph, cluster, request)
    if alone.is_faster:
        spaces.insert(0, alone)
    elif request.tune is not None and alone.is_free and len(cluster) > 1:
        spaces.append(alone)  # it is run, too, to know if splitting pays
    if search.tries_kinds:
        kinds = TRAINING_KINDS if graph.backward else KINDS
        usual = DATA if graph.backward and budget.best_s == math.inf else None
        small = [KindSpace(search, kind, is_usual=kind == usual) for kind in kinds]
        joined = [
            KindSpace(search, kind, mesh)
            for kind in (TRAINING_KINDS_OVER_AXES if graph.backward else KINDS_OVER_AXES)
            for mesh in kind_meshes(kind, len(cluster))
        ]
        # they come last, since the space of all plans of a mesh has theirs: but where that takes
        # much of the limit, they go first, so that a plan is known
        is_scarce = SPACE_S * len(graph.nodes) * len(cluster) > SCARCE * request.time_limit_s
        first, *rest = spaces
        spaces = [*small, first, *joined, *rest] if is_scarce else [*spaces, *small, *joined]

    def decided(so_far: _Search) -> Outcome:
        outcome = _of_request(so_far.decided(search, refusing), graph, requests)
        if not so_far.unfinished:
            return outcome
        return replace(outcome, more=lambda left: decided(replace(so_far, budget=left).gone_on()))

    return decided(_Search(request, cluster, budget).searched(spaces))


def _families(graph: Graph, cluster: Cluster, request: Request) -> Sequence[Family]:
    """The spaces that have joint problems, in the order of their search.

    Raises:
        ConstraintError: A pin names an axis that no mesh has.
    """
    devices, decides = len(cluster), is_decided(graph, request)
    if not decides and request.strategy == "inter":
        devices = min(devices, MOST_EXPLICIT)  # of equal ones no more are used
    asked = request.constraints
    joint = families(request.strategy, devices, request.mesh, asked.groups, asked.kept_meshes)
    if graph.backward:  # the plans of one group are found sooner, and rule out most others
        joint = tuple(sorted(joint, key=lambda family: len(family.groups) > 1))
    axes = {axis for family in joint for group in family.groups for axis in group.names}
    asked.check_axes(sorted(axes))
    return joint[:1] if decides else joint  # all have the plan that is decided


def _is_small(space: Space) -> bool:
    """Tell whether nodes have few strategies.

    They are those of a kind over one axis, or one on each device.
    """
    if isinstance(space, JointSpace):
        return all(mesh.size() == 1 for mesh in space.family.groups)
    return isinstance(space, KindSpace) and space.mesh is None


def _turn(result: SpaceResult, request: Request) -> tuple[bool, float, float]:
    """When a search goes on: first kinds that the clock left, in turn; then the best plan."""
    if not (result.plans or result.failed or result.refused):
        return False, 0.0, 0.0
    costs = (plan.cost(request.objective) for plan in result.plans)
    return True, min(costs, default=math.inf), result.least


@dataclass(frozen=True)
class _Search:
    """The spaces of a request that were searched so far, and the budget of all of them."""

    request: Request
    cluster: Cluster
    budget: Budget
    results: Sequence[SpaceResult] = ()

    @property
    def plans(self) -> list[Candidate]:
        return [plan for result in self.results for plan in result.plans]

    @property
    def best_s(self) -> float:
        plans = [plan for result in self.results for plan in result.fitting]
        if not plans:
            return math.inf
        goal = self.request.objective
        return best_of(plans, goal, len(self.cluster)).cost(goal)

    @property
    def cutoff_s(self) -> float:
        """The cost that a plan of another space must beat to be wanted; infinite if any is.

        That is the cost of the best plan or, if several plans are to be run, that of the last of
        them.
        """
        if self.request.tune is None:
            return self.best_s
        costs = sorted(replace(self, results=[result]).best_s for result in self.results)
        return costs[self.request.tune - 1] if len(costs) >= self.request.tune else math.inf

    def share(self, parts: int, clock: int = 1) -> Budget:
        """Divide the steps and the seconds that are left, and set the cost that is to be beaten."""
        cutoff_s = min(self.budget.best_s, self.cutoff_s)
        return replace(self.budget.share(parts, clock), best_s=cutoff_s)

    def of_levels(self, spaces: Sequence[StagesSpace]) -> _Search:
        """The results of searches by levels, one for each mesh that is left open.

        Raises:
            Infeasible: None has a plan; the refusal that is short of the fewest bytes.
            ConstraintError: None has, whatever the memory is.
        """
        search = self
        errors: list[Infeasible | ConstraintError] = []
        for index, space in enumerate(spaces):
            left = len(spaces) - index
            try:
                result = space.search(search.share(left, left), tuple(search.results))
                search = replace(search, results=[*search.results, result])
            except (Infeasible, ConstraintError) as error:
                errors.append(error)
        if not search.results:
            refused = [error for error in errors if isinstance(error, Infeasible)]
            raise min(refused, key=lambda error: error.bytes_short) if refused else errors[0]
        return search

    def with_one_device(self, graph: Graph) -> _Search:
        """Add the plan of one device, if no other is better: what copies on all come to, too.

        Its bound is that of the others, which have such plans among theirs.
        """
        devices, request = len(self.cluster), self.request
        space = OneDeviceSpace(graph, self.cluster, request)
        if devices == 1 or not space.is_free:
            return self
        found = space.search(Budget.of(request), ()).plans
        alone = [replace(one, bounds_space=False) for one in found if one.evaluation.fits_exactly]
        if not alone:
            return self
        fitting = [plan for result in self.results for plan in result.fitting]
        best = best_of([*fitting, *alone], request.objective, devices)
        if not any(best is plan for plan in alone):
            return self
        return replace(self, results=[*self.results, SpaceResult((best,))])

    @property
    def winner(self) -> Outcome:
        """The best plan that fits by the referee, who counts more than the solver does."""
        fitting, stopped = [*map(_that_fit, self.results)], self.budget.work.stopped
        results = fitting if any(result.plans for result in fitting) else self.results
        outcome = winner(results, self.request, self.cluster, stopped=stopped)
        if outcome.evaluation.fits_exactly:
            return outcome
        of = (plan for plan in outcome.candidates if plan.evaluation is outcome.evaluation)
        raise too_large(next(of), self.cluster)

    def decided(self, search: JointSearch, refusing: int) -> Outcome:
        """The best plan of the spaces, so many of which refuse what they cannot plan.

        Raises:
            Infeasible: None has a plan that fits.
            NoCheaper: None has a plan that costs less than the known one of the budget.
            ConstraintError: The pins leave a node without a strategy in every space.
        """
        if not self.plans and self.request.strategy in ("auto", "inter"):
            known = self.with_one_device(search.graph)  # its space may not have been reached
            if known.best_s < self.budget.best_s:
                return known.decided(search, refusing)
        results, budget = self.results, self.budget
        if self.plans:
            looked = self._looked_again(search)
            least = OneDeviceSpace(search.graph, self.cluster, self.request).least
            results = [*looked.results, SpaceResult(bound=least)]
            return replace(looked, results=results).with_one_device(search.graph).winner
        refused = [result.refused for result in results if result.refused is not None]
        if not refused:
            failed = [error for result in results for _, error in result.failed]
            pins = [error for error in failed if isinstance(error, ConstraintError)]
            short = [error for error in failed if isinstance(error, Infeasible)]
            if math.isinf(budget.best_s):
                raise short[0] if short else max(pins, key=lambda error: error.position)
            least = min(result.least for result in results)
            raise NoCheaper("no plan was found to cost less", min(least, budget.best_s))
        budget.say("looking again at what does not fit")
        whole = all(mesh.size() == 1 for space in refused for mesh in space.space.groups)
        every_cut = whole or not search.shares  # of unlike devices, some proportions are searched
        complete = every_cut and len(refused) == refusing
        plan = second_look(refused, budget, search, complete=complete)
        return replace(self, results=[*results, SpaceResult((plan,))]).winner

    def _looked_again(self, search: JointSearch) -> _Search:
        """Take the plans, of spaces that were refused, that fit by exact liveness.

        Only those are looked for that cost less than the best plan, or the last that is wanted.
        """
        looked = self
        for index, result in enumerate(self.results):
            if result.refused is None or self.budget.work.over:
                continue
            self.budget.say(f"looking again at {result.refused.space}")
            share = looked.share(len(self.results) - index)
            plan = exact_plan(result.refused, share, search)
            if plan is not None:
                results = [*looked.results]
                results[index] = SpaceResult((plan,), result.searched)
                looked = replace(looked, results=results)
        return looked

    def searched(self, spaces: Sequence[Space]) -> _Search:
        """The results of spaces, each searched with its share of the work and the best cost.

        The clock stops a space when it has taken its share of the seconds that are left.

        What they leave of the work is for those that are open. A kind of parallelism takes no steps
        from the spaces before it; joined over axes, half of what is left. Of the clock it may take
        a third at least: it is small, and a plan of it may be far better than those of all. Where
        the first space has no plan, or bytes are wanted, those of one axis go next: they are small,
        and may have such a plan soon.
        """
        search = self
        steps = {False: 0.0, True: 0.0}  # of all spaces so far, by whether they are kinds
        waiting = list(spaces)
        while waiting:
            if search.results and (self.request.objective == "memory" or math.isinf(search.best_s)):
                waiting.sort(key=lambda other: not _is_small(other))
            space = waiting.pop(0)
            is_kind = isinstance(space, KindSpace)
            if isinstance(space, KindSpace):
                space = replace(space, may_look=steps[True] <= LOOK_PART * steps[False])
            kinds = sum(isinstance(other, KindSpace) for other in waiting)
            after = len(waiting) - kinds
            over_axes = isinstance(space, KindSpace) and space.mesh is not None
            clock = 1 + (min(after, 1) if is_kind else after) + min(kinds, 1)
            share = search.share(1 + after + over_axes, clock)
            if is_kind:
                share = share.with_steps(max(self.budget.work.steps / KIND_PART, KIND_STEPS))
            begin_s, result = now_s(), space.search(share, tuple(search.results))
            result = replace(result, took_s=now_s() - begin_s)
            search = replace(search, results=[*search.results, result])
            steps[is_kind] += share.work.spent
        return search.gone_on()

    @property
    def unfinished(self) -> dict[int, Callable[[Budget], SpaceResult]]:
        """The searches of spaces that go on, by number: that may still gain, or did not begin.

        So do those whose plan does not fit. A space that was refused goes on beside a known plan
        alone: else exact liveness is tried first.
        """
        enough_s = (1 - self.budget.gap) * self.best_s if self.best_s < math.inf else 0.0
        return {
            index: result.more
            for index, result in enumerate(self.results)
            if result.more is not None
            and (not (result.fitting or result.refused) or result.least < enough_s)
        }

    def gone_on(self) -> _Search:
        """The results once the spaces that leave a gap have what is left of the budget."""
        search, work = self, self.budget.work
        while True:
            results, unfinished = search.results, search.unfinished
            in_time = [n for n in unfinished if results[n].took_s * PART_TAKEN <= work.left_s]
            if unfinished and not in_time:
                work.stop()
            if not in_time or work.over:
                enough_s = (1 - self.budget.gap) * search.best_s
                open_results = (result for result in results if result.least < enough_s)
                open_plans = (plan for result in open_results for plan in result.plans)
                if any(plan.solution.status == "time_limit" for plan in open_plans):
                    work.stop()
                return search
            index = min(in_time, key=lambda index: _turn(search.results[index], self.request))
            failed = (str(family) for family, _ in results[index].failed)
            name = results[index].searched or next(failed, "a kind of parallelism")
            self.budget.say(f"going on with {name}: {search.standing}")
            # what the clock left without a plan begins anew: with a part of it, it would end as
            # before
            share = search.share(len(unfinished), len(unfinished) if results[index].plans else 1)
            begin_s, result = now_s(), unfinished[index](share)
            result = replace(result, took_s=now_s() - begin_s)
            search = replace(search, results=[*results[:index], result, *results[index + 1 :]])

    @property
    def standing(self) -> str:
        """The best cost, the bound and the gap of the spaces so far."""
        best = self.best_s
        if math.isinf(best):
            return "no plan yet"
        bound = min(best, *(result.least for result in self.results))
        shown = [units.cost(self.request.objective, value) for value in (best, bound)]
        gap = units.share(1 - bound / best if best else 0)
        return f"best {shown[0]}, bound {shown[1]}, gap {gap}"
