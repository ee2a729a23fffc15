"""Bounds and good plans without a MILP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.local_search import MOVE_STEPS, Goal, loads, local_search, peaks
from partitioner.solver.placement.contiguous import Picks, Split, contiguous_plans
from partitioner.solver.placement.fleet import Fleet, fleet
from partitioner.solver.presolve.simplify import keep_choices
from partitioner.solver.problem import Edge, Problem, symmetric_groups
from partitioner.solver.progress import ROUNDING, Progress, device_most_over
from partitioner.solver.referee import evaluate_choices, latency_s
from partitioner.solver.work import Work

Plan = tuple[int, ...]  #: The choice of each node.
#: Plans, each with its bytes over the limits and its value.
Ranked = dict[Plan, tuple[float, float]]

#: Moves that local search tries from each start.
EFFORT = 30_000
#: The same where devices are split in pairs afterwards: 0.2 s.
QUICK = 2_000
#: The same for each choice of a node: small problems are left to the MILP early.
EFFORT_PER_CHOICE = 40
#: The steps that are left, over those of local search from all starts: others are to come.
OF_LEFT = 3
#: Plans that local search starts from.
STARTS = 2
#: Positions of the order at which the bytes are minimised for a bound on the least peak.
POSITIONS = 4
#: Where plans of equal load are told apart, the bytes of one are priced at this share of its cost,
#: or of so many seconds where nothing costs any.
BYTES_SHARE, LEAST_S = 1e-8, 1e-9
#: Steps of a greedy plan, for each choice of a node, and for each item that it may trigger.
CHOICE_STEPS, ITEM_STEPS = 2, 1
#: Prices of a byte that are tried to make a plan fit.
SQUEEZES = 8


class Search(Progress):
    """The progress, with layouts of the problem that are made when first needed."""

    @cached_property
    def eliminator(self) -> Eliminator:
        """The problem laid out for elimination."""
        return Eliminator(self.problem, self.work)

    @cached_property
    def fleet(self) -> Fleet | None:
        """The devices, if each is a group of its own."""
        return fleet(self.problem)

    def of_load(self, problem: Problem, cutoff: float = math.inf) -> Search:
        """A search for the least load of the same problem, or of one with other limits."""
        limits = self.gap, self.work, self.seed, cutoff, self.effort, self.engine
        inner = Search(problem, "throughput", *limits)
        inner.eliminator = self.eliminator  # it knows no limits
        return inner


def relax(search: Search) -> None:
    """Bound the throughput by the least weighted sum of the loads, memory left aside.

    For weights that add up to 1 no plan's largest load is below it. Where all devices carry the
    same load in every plan this is the optimum itself.
    """
    for weights in _weights(search.problem):
        answer = search.eliminator.min_sum(weights) or search.eliminator.min_near(weights)
        if answer is not None:
            _use(search, *answer)
            continue
        least = (
            min(sum(w * s for w, s in zip(weights, c.load_s, strict=True)) for c in choices)
            for choices in search.problem.nodes
        )
        search.prove(sum(least), "node loads")


def lighten(search: Search) -> None:
    """Offer, of the plans of least total load, one that holds few bytes.

    Where links are free many plans cost the same. All that a plan holds is priced so low that it
    does not make up for a difference of loads. On several groups the least total load would leave
    all but one idle.
    """
    problem = search.problem
    if search.best is None or len(problem.groups) > 1 or search.work.over:
        return
    held = sum(evaluate_choices(problem, search.best).peak_bytes)
    if not held:
        return
    price = BYTES_SHARE * max(search.cost, LEAST_S) / held
    answer = search.eliminator.min_near([1 / problem.devices] * problem.devices, price)
    if answer is not None and math.isfinite(answer[1]):
        search.offer(answer[0], "elimination")


def _use(search: Search, chosen: tuple[int, ...], bound: float) -> None:
    """Prove a bound of elimination, and offer its plan if one is allowed."""
    search.prove(bound, "elimination")
    if math.isfinite(bound):
        search.offer(chosen, "elimination")


def _weights(problem: Problem) -> list[list[float]]:
    """Weigh devices, adding up to 1: all equally, and by speed if the devices differ.

    A device's speed is the inverse of what all nodes together would load it with: slow devices
    then count for as little as they can do.
    """
    devices = problem.devices
    whole = [
        sum(max(choice.load_s[d] for choice in choices) for choices in problem.nodes)
        for d in range(devices)
    ]
    even = [1 / devices] * devices
    if not all(whole):
        return [even]
    speed = [1 / seconds for seconds in whole]
    fair = [s / sum(speed) for s in speed]
    same = all(math.isclose(a, b) for a, b in zip(fair, even, strict=True))
    return [even] if same else [even, fair]


def relax_memory(search: Search) -> None:
    """Bound the least peak by the least bytes at the positions where the best plan holds most."""
    for _ in range(POSITIONS):
        plan = search.best if search.best is not None else search.closest
        if search.over or plan is None:
            return
        outcome = evaluate_choices(search.problem, plan)
        fullest = max(range(search.problem.devices), key=outcome.peak_bytes.__getitem__)
        before = search.cost
        answer = search.eliminator.min_bytes(outcome.peak_position[fullest])
        if answer is None:
            return
        _use(search, *answer)
        if search.cost >= before:
            return


def refute(search: Search) -> None:
    """Prove that nothing fits, if at one position all plans hold more than the limits together."""
    if search.closest is None:
        return
    outcome = evaluate_choices(search.problem, search.closest)
    limits = search.problem.limit_bytes
    device = device_most_over(search.problem, outcome)
    answer = search.eliminator.min_bytes(outcome.peak_position[device])
    if answer is not None and answer[1] * len(limits) > sum(limits) * (1 + ROUNDING):
        search.prove(math.inf, "elimination")


def squeeze(
    problem: Problem, priced: Callable[[float], Plan | None], work: Work, least: Plan
) -> list[Plan]:
    """Plans of little load at several prices of a byte: the lowest at which they fit is sought.

    `priced` gives the plan at a price, None if it cannot tell; `least` is the one at no price.
    """
    limits = [limit for limit in problem.limit_bytes if math.isfinite(limit)]
    plans: list[Plan] = []
    if not limits:
        return plans
    unit = sum(evaluate_choices(problem, least).load_s) / max(sum(limits), 1.0)
    low, high = -3.0, 3.0  # powers of ten of the price, in `unit`
    for step in range(SQUEEZES):
        power = high if not step else (low + high) / 2
        plan = priced(unit * 10**power)
        if plan is None or work.over:
            return plans
        plans.append(plan)
        fits = evaluate_choices(problem, plan).excess_bytes <= 0
        if not step and not fits:
            return plans
        low, high = (low, power) if fits else (power, high)
    return plans


def squeezed(eliminator: Eliminator, least: Plan) -> list[Plan]:
    """Plans at several prices of a byte, see `squeeze`, that elimination finds."""
    weights = [1.0] * eliminator.problem.devices

    def priced(byte_price: float) -> Plan | None:
        answer = eliminator.min_sum(weights, byte_price)
        return None if answer is None else answer[0]

    return squeeze(eliminator.problem, priced, eliminator.work, least)


def starts(search: Search) -> list[tuple[int, ...]]:
    """Each device group alone, contiguous splits over groups, the least total load."""
    problem = search.problem
    picks = alone(problem, search.eliminator)
    plans = [*picks.values(), *(split.chosen for split in splits(search, picks))]
    least = _cheapest(search.eliminator)
    if least is not None:
        return [*plans, least, *squeezed(search.eliminator, least)]
    if plans:
        return plans

    # every node's choice of least work, whatever its neighbours choose
    work = [[sum(choice.load_s) for choice in choices] for choices in problem.nodes]
    plans = [tuple(seconds.index(min(seconds)) for seconds in work)]
    greedy = _greedy(search, 0.0)
    return plans if greedy is None else [greedy, *plans]


def frugal(search: Search) -> list[Plan]:
    """Plans that hold little, made node after node: cheap, whatever steps are left."""
    least = _greedy(search, 0.0)
    if least is None:
        return []
    work = Work(search.work.deadline, parent=search.work)
    return squeeze(search.problem, partial(_greedy, search), work, least)


def _greedy(search: Search, byte_price: float) -> Plan | None:
    plan, steps = along(search.problem, byte_price)
    search.work.spend(steps)
    return plan


def splits(search: Search, picks: Picks) -> list[Split]:
    """Contiguous plans of layers, if any are known, and of nodes as long as there is work."""
    layers = search.problem.layers
    plans = contiguous_plans(search.problem, picks, layers) if layers else []
    if plans and search.work.over:
        return plans
    return [*plans, *contiguous_plans(search.problem, picks)]


def seek(search: Search) -> None:
    """Offer good starts, and the plans that local search makes of the most promising."""
    # peaks make a move three times as dear, and the bound is near without many of them
    most = EFFORT // 3 if search.objective == "memory" else EFFORT
    if search.effort > 1 and search.fleet is not None:
        most = QUICK
    effort = min(most, EFFORT_PER_CHOICE * sum(map(len, search.problem.nodes)))
    ranked = offer_all(search, starts(search), "dynamic programming")
    if search.best is None or search.objective == "memory":
        ranked |= offer_all(search, frugal(search), "dynamic programming")
    if search.best is None:
        refute(search)
    if math.isinf(search.bound):
        return
    if search.objective == "memory":
        relax_memory(search)
    if search.best is not None:
        ranked |= {search.best: (0.0, search.cost)}
    if math.isfinite(search.work.left):
        effort = min(effort, int(search.work.left / (OF_LEFT * STARTS * MOVE_STEPS)))
    improve(search, ranked, peaks if search.objective == "memory" else loads, effort)


def offer_all(search: Search, plans: Iterable[tuple[int, ...]], source: str) -> Ranked:
    """Offer plans; those without a forbidden pair are ranked."""
    ranked: Ranked = {}
    for chosen in plans:
        outcome = search.offer(chosen, source)
        if outcome is not None:
            ranked[chosen] = outcome.excess_bytes, outcome.value(search.objective)
    return ranked


def improve(
    search: Search, ranked: Ranked, goal: Goal, effort: int, move_steps: float = MOVE_STEPS
) -> None:
    """Offer the plans that local search makes of the best; a move is so many steps."""
    for chosen in sorted(ranked, key=ranked.__getitem__)[:STARTS]:
        if search.over:
            return
        better = local_search(
            search.problem,
            chosen,
            goal=goal,
            effort=effort,
            work=search.work,
            move_steps=move_steps,
            seed=search.seed,
        )
        search.offer(better, "local search")


def _cheapest(eliminator: Eliminator) -> tuple[int, ...] | None:
    """The plan of least total load, if elimination can tell and one is allowed."""
    devices = eliminator.problem.devices
    answer = eliminator.min_sum([1 / devices] * devices)  # the weights of `relax`
    return answer[0] if answer is not None and math.isfinite(answer[1]) else None


def alone(problem: Problem, eliminator: Eliminator) -> Picks:
    """Plan for each group that can run every node its best plan without the others."""
    representative = {
        group: members[0] for members in symmetric_groups(problem) for group in members
    }
    groups = problem.groups
    plans: Picks = {}
    within: Picks = {}  # by place in the group: interchangeable groups take the same
    for group in groups:
        kept = tuple(
            tuple(p for p, choice in enumerate(choices) if choice.group == group)
            for choices in problem.nodes
        )
        if not all(kept):
            continue
        places = within.get(representative.get(group, group))
        if places is None:
            inside = eliminator
            if len(groups) > 1:
                inside = Eliminator(keep_choices(problem, kept), eliminator.work)
            places = _cheapest(inside)
        if places is not None:
            within[group] = places
            plans[group] = tuple(options[p] for options, p in zip(kept, places, strict=True))
    return plans


def along(problem: Problem, byte_price: float = 0.0) -> tuple[tuple[int, ...] | None, float]:
    """The choices that cost least beside those of the nodes before, in the global order.

    A choice costs its own load on all devices and that of the items that it triggers with its
    predecessors and that are not paid yet. With a `byte_price` (per byte that is held during the
    whole order) choices that hold less are preferred.

    Returns:
        The choice of each node, None if those before forbid all of a node's, and the steps that
        finding it took.
    """
    arriving: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        arriving[edge.v].append(edge)
    held: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in problem.nodes]
    for hold in problem.holds:
        held[hold.node].append(hold.items)
    by_place = byte_price / max(1, len(problem.nodes))
    prices = [
        sum(item.load_s) + by_place * sum(item.bytes) * (item.last - item.first + 1)
        for item in problem.items
    ]
    paid: set[int] = set()
    chosen: list[int] = []
    steps = 0.0

    def triggered(choice: int) -> Iterator[int]:
        node = len(chosen)
        for edge in arriving[node]:
            yield from edge.items.get((edge.out_class[chosen[edge.u]], edge.in_class[choice]), ())
        for items in held[node]:
            yield from items[choice]

    for node, choices in enumerate(problem.nodes):
        costs_s: dict[int, float] = {}
        for choice, option in enumerate(choices):
            if any(
                (edge.out_class[chosen[edge.u]], edge.in_class[choice]) in edge.forbidden
                for edge in arriving[node]
            ):
                continue
            fresh = set(triggered(choice)) - paid
            steps += CHOICE_STEPS + ITEM_STEPS * len(fresh)
            costs_s[choice] = sum(option.load_s) + sum(prices[item] for item in fresh)
        if not costs_s:
            return None, steps
        best = min(costs_s, key=costs_s.__getitem__)
        paid.update(triggered(best))
        chosen.append(best)
    return tuple(chosen), steps


#: So many node evaluations local search may spend on latency: that of a plan costs one a node.
LATENCY_EFFORT = 400_000
#: Steps of such a move, for each node.
NODE_STEPS = 5.5


def critical_path_s(problem: Problem) -> float:
    """The longest path with the best choice of every node and nothing to pay on edges."""
    done = [min(max(choice.load_s) for choice in choices) for choices in problem.nodes]
    seconds = tuple(done)
    for edge in sorted(problem.edges, key=lambda edge: edge.v):
        done[edge.v] = max(done[edge.v], done[edge.u] + seconds[edge.v])
    return max(done)


def propose(search: Search) -> None:
    """Offer plans of short latency: of the known ones and of the starts, improved by moves.

    Devices run their nodes in the given order, so that such a plan is one choice a node, too.
    """
    problem = search.problem
    known = [] if search.best is None else [search.best]
    ranked = offer_all(search, [*starts(search), *known], "dynamic programming")
    nodes, per_choice = len(problem.nodes), EFFORT_PER_CHOICE * sum(map(len, problem.nodes))
    effort = min(LATENCY_EFFORT // nodes, per_choice)
    improve(search, ranked, lambda s: (latency_s(problem, s.chosen),), effort, NODE_STEPS * nodes)
