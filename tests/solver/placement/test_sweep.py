"""Sweeps find exactly what trying all sets finds."""

import itertools
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import placement
from partitioner.solver.placement.exchange import FEWEST, MOST_ENTRIES, exchange, split
from partitioner.solver.placement.fleet import Knapsack, Star, fleet, longest_runs
from partitioner.solver.placement.sweep import MOST_OPEN, StarTerm, lay_out, sweep
from partitioner.solver.progress import Progress
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.stages.cut_orders import frontier_order
from partitioner.solver.work import Work

COUNT = 8


def sets(nodes: int) -> list[frozenset[int]]:
    return [
        frozenset(node for node in range(nodes) if mask >> node & 1) for mask in range(1 << nodes)
    ]


def random_sack(rng: random.Random) -> Knapsack:
    stars = {}
    for _ in range(7):
        centre, *leaves = rng.sample(range(COUNT), rng.choice((2, 2, 3, 4)))
        key = centre, tuple(sorted(leaves))
        stars[key] = Star(*key, rng.choice((0.0, 1.5, 2.0)), rng.random())
    return Knapsack(tuple(rng.choice((0.0, 1.0, 4.0)) for _ in range(COUNT)), tuple(stars.values()))


def order_of(stars: Iterable[Star], count: int = COUNT) -> tuple[int, ...]:
    return frontier_order(count, ((star.centre, leaf) for star in stars for leaf in star.leaves))


def star_sum(terms: list[StarTerm], inside: frozenset[int], *, values: bool) -> float:
    total = 0.0
    for term in terms:
        side = int(term.centre in inside)
        cut = any((leaf in inside) != (term.centre in inside) for leaf in term.leaves)
        seconds = term.cut_s if cut else term.whole_s
        worth = term.cut_value if cut else term.whole_value
        total += (worth if values else seconds)[side]
    return total


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(40))
def test_a_sweep_has_the_least_seconds_of_every_value(seed: int) -> None:
    rng = random.Random(seed)
    terms = []
    for _ in range(6):
        centre, *leaves = rng.sample(range(COUNT), rng.choice((1, 2, 3, 4)))
        low = [(rng.random(), rng.random()), (rng.choice((0, 1, 3)), rng.choice((0, 2)))]
        high = [tuple(a + rng.choice((0, 1, 2)) for a in pair) for pair in low]
        terms.append(StarTerm(centre, tuple(leaves), low[0], high[0], low[1], high[1]))
    inside_s, outside_s = ([rng.random() for _ in range(COUNT)] for _ in range(2))
    values = np.array([rng.choice((0, 1, 2, 7)) for _ in range(COUNT)])
    order = rng.sample(range(COUNT), COUNT)
    layout = lay_out(order, inside_s, outside_s, terms)
    assert layout is not None
    swept = sweep(layout, values, 99)
    # a question may be answered yes too often, which never costs less nor is worth less
    least = np.full(100, math.inf)
    for inside in sets(COUNT):
        value = int(values[sorted(inside)].sum() + star_sum(terms, inside, values=True))
        seconds = sum((inside_s if n in inside else outside_s)[n] for n in range(COUNT))
        seconds += star_sum(terms, inside, values=False)
        least[value] = min(least[value], seconds)
    for value in np.flatnonzero(np.isfinite(least)).tolist():
        assert swept.seconds[value] <= least[value] + 1e-9
    for value in np.flatnonzero(np.isfinite(swept.seconds[:-1])).tolist():
        inside = swept.inside(value)
        real = int(values[sorted(inside)].sum() + star_sum(terms, inside, values=True))
        seconds = sum((inside_s if n in inside else outside_s)[n] for n in range(COUNT))
        assert real <= value
        assert seconds + star_sum(terms, inside, values=False) <= swept.seconds[value] + 1e-9


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(40))
def test_values_that_saturate_count_as_the_last(seed: int) -> None:
    rng = random.Random(seed)
    sack = random_sack(rng)
    terms = [StarTerm(s.centre, s.leaves, (0.0, 0.0), (s.come_s, s.leave_s)) for s in sack.stars]
    order = order_of(sack.stars)
    layout = lay_out(order, sack.work_s, [0.0] * COUNT, terms)
    assert layout is not None
    values = np.array([rng.choice((0, 1, 3, 20)) for _ in range(COUNT)])
    most = 10
    swept = sweep(layout, values, most)
    least = [math.inf] * (most + 1)
    for inside in sets(COUNT):
        value = min(most, int(values[sorted(inside)].sum()))
        least[value] = min(least[value], sack.seconds(inside))
    assert swept.seconds.tolist() == pytest.approx(least)
    for value in range(most + 1):
        if math.isfinite(least[value]):
            inside = swept.inside(value)
            assert min(most, int(values[sorted(inside)].sum())) == value
            assert sack.seconds(inside) == pytest.approx(least[value])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(40))
def test_the_best_split_is_the_best_there_is(seed: int) -> None:
    rng = random.Random(seed)
    first, second = random_sack(rng), random_sack(rng)
    free = frozenset(rng.sample(range(COUNT), 6))
    order = [node for node in order_of((*first.stars, *second.stars)) if node in free]
    limit = first.seconds(free) + second.seconds(free)
    splits = split(first, second, order, limit)
    assert splits is not None
    best = min(
        max(first.seconds(frozenset(nodes)), second.seconds(free - frozenset(nodes)))
        for size in range(len(free) + 1)
        for nodes in itertools.combinations(sorted(free), size)
    )
    ours = [splits.on_first(quanta) for quanta in splits.within(limit)[:6]]
    least = min(max(first.seconds(nodes), second.seconds(free - nodes)) for nodes in ours)
    assert best - 1e-9 <= least <= best + 8 * limit / FEWEST


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(20))
def test_the_best_split_of_a_part_is_the_best_there_is(seed: int) -> None:
    """The other nodes of the two stay together, by device."""
    rng = random.Random(seed)
    first, second = random_sack(rng), random_sack(rng)
    nodes = rng.sample(range(COUNT), 7)
    together = [frozenset(nodes[:2]), frozenset(nodes[2:4])]
    part = [node for node in order_of((*first.stars, *second.stars)) if node in nodes[4:]]
    limit = first.seconds(frozenset(nodes)) + second.seconds(frozenset(nodes))
    splits = split(first, second, part, limit, together)
    assert splits is not None
    units = [*together, *(frozenset({node}) for node in part)]
    best = min(
        max(first.seconds(inside), second.seconds(frozenset(nodes) - inside))
        for size in range(len(units) + 1)
        for taken in itertools.combinations(units, size)
        for inside in [frozenset().union(*taken)]
    )
    ours = [splits.on_first(quanta) for quanta in splits.within(limit)[:6]]
    assert all(unit <= inside or not unit & inside for inside in ours for unit in together)
    least = min(
        max(first.seconds(inside), second.seconds(frozenset(nodes) - inside)) for inside in ours
    )
    assert best - 1e-9 <= least <= best + 8 * limit / FEWEST


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(20))
def test_longest_runs_fit_and_cannot_be_longer(seed: int) -> None:
    rng = random.Random(seed)
    sack = random_sack(rng)
    order = rng.sample(range(COUNT), COUNT)
    limit = 0.6 * sum(sack.work_s) + 1.0
    runs = longest_runs(sack, order, limit)
    fitting = {
        (start, stop): sack.seconds(frozenset(order[start:stop]))
        for start in range(COUNT)
        for stop in range(start + 1, COUNT + 1)
        if sack.seconds(frozenset(order[start:stop])) <= limit
    }
    assert bool(runs) == bool(fitting)
    for inside, seconds in runs:
        start = min(order.index(node) for node in inside)
        assert fitting[start, start + len(inside)] == pytest.approx(seconds)
        assert (start, start + len(inside) + 1) not in fitting


def test_a_graph_that_is_too_wide_is_not_swept() -> None:
    count = MOST_OPEN + 2
    terms = [
        StarTerm(u, (v,), (0.0, 0.0), (1.0, 1.0))
        for u, v in itertools.combinations(range(count), 2)
    ]
    nothing = [0.0] * count
    assert lay_out(range(count), nothing, nothing, terms) is None
    assert lay_out(range(6), nothing, nothing, []) is not None


def test_a_narrow_order_of_a_chain_lets_one_node_wait() -> None:
    stars = [Star(node, (node + 1,), 1.0, 1.0) for node in range(19)]
    order = order_of(stars, 20)
    places = [order.index(node) for node in range(20)]
    assert places in (sorted(places), sorted(places, reverse=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(6))
def test_exchange_only_improves_and_repeats(seed: int) -> None:
    problem = placement(seed, 20, 3, limit=90)
    devices = fleet(problem)
    assert devices is not None
    plans = []
    for _ in range(2):
        progress = Progress(problem, "throughput", 1e-4, Work(), seed)
        progress.offer([node * 3 // 20 for node in range(20)], "start")
        before = progress.cost
        exchange(progress, devices, 10)
        assert progress.best is not None
        assert progress.cost <= before
        assert evaluate_choices(problem, progress.best).excess_bytes <= 0
        plans.append(progress.best)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("seed", range(5))
def test_exchange_ends_near_the_best_plan(seed: int) -> None:
    problem = placement(seed, 7, 3)
    best = brute_force(problem, "throughput")
    assert best is not None
    progress = Progress(problem, "throughput", 1e-4, Work(), 0)
    progress.offer((0,) * 7, "start")
    devices = fleet(problem)
    assert devices is not None
    exchange(progress, devices, 40)
    assert best[1] - 1e-9 <= progress.cost <= 1.02 * best[1]


@pytest.mark.parametrize("seed", [0, 1])
def test_exchange_splits_in_parts_where_tables_are_too_large(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = placement(seed, 24, 3)
    devices = fleet(problem)
    assert devices is not None
    costs = []
    for most in (MOST_ENTRIES, 150_000):
        monkeypatch.setattr("partitioner.solver.placement.exchange.MOST_ENTRIES", most)
        progress = Progress(problem, "throughput", 1e-4, Work(), 0)
        progress.offer([node // 8 for node in range(24)], "start")
        before = progress.cost
        exchange(progress, devices, 3)
        costs.append(progress.cost)
    assert split(*(devices.knapsacks[g] for g in (0, 1)), devices.order, before) is None
    assert costs[1] < 0.95 * before
    assert costs[1] < 1.01 * costs[0]
