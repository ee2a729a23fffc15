"""Placement at scale: orders, intervals of any order, neighbourhoods, subproblems."""

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from solver_instances import dnnp, placement, spmd

from partitioner.solver import Edge, Hold, Item, Problem, brute_force, evaluate_choices
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.dnnp_problem import to_problem
from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.incumbents import alone
from partitioner.solver.placement.contiguous import contiguous_plans
from partitioner.solver.placement.neighbourhoods import share_anew
from partitioner.solver.placement.orders import narrow_orders
from partitioner.solver.placement.subproblem import set_free
from partitioner.solver.progress import Progress
from partitioner.solver.referee import triggered


def free_instance(seed: int) -> Problem:
    """Two accelerators and a CPU without limits, every node runs anywhere."""
    data = dnnp(seed, 7)
    data |= {"maxCPUs": 1, "maxSizePerFPGA": 1e9}
    for node in data["nodes"]:
        node |= {"supportedOnFpga": 1, "colorClass": None}
    return to_problem(parse(data))


def best_split(problem: Problem, order: Sequence[int]) -> float:
    """The least largest load of all cuts of the order, devices in any order, by trying."""
    count = len(order)
    best = math.inf
    for devices in itertools.permutations(range(problem.devices)):
        for cuts in itertools.combinations_with_replacement(range(count + 1), len(devices) - 1):
            ends = (0, *cuts, count)
            chosen = [0] * count
            for device, (start, end) in zip(devices, itertools.pairwise(ends), strict=True):
                for node in order[start:end]:
                    chosen[node] = device
            best = min(best, evaluate_choices(problem, chosen).step_s)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_dp_is_exact_for_any_order_where_a_value_is_paid_once(seed: int) -> None:
    problem = free_instance(seed)
    order = list(range(len(problem.nodes)))
    random.Random(seed).shuffle(order)
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)), order)
    best = min(plans, key=lambda split: split.value)
    assert best.value == pytest.approx(best_split(problem, order))
    assert evaluate_choices(problem, best.chosen).step_s == pytest.approx(best.value)


def test_a_long_order_is_cut_at_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = placement(3, 12, 3)
    picks = alone(problem, Eliminator(problem))
    free = min(split.value for split in contiguous_plans(problem, picks))
    monkeypatch.setattr("partitioner.solver.placement.contiguous.MAX_CUTS", 5)
    plans = contiguous_plans(problem, picks)
    assert [len(set(split.chosen)) for split in plans] == [1, 2, 3]
    changes = [sum(a != b for a, b in itertools.pairwise(split.chosen)) for split in plans]
    assert changes == [0, 1, 2]
    assert min(split.value for split in plans) >= free


def test_narrow_orders_do_not_weave_two_chains_together() -> None:
    """Nodes 0, 2, 4, ... are one chain and 1, 3, 5, ... another."""
    problem = placement(0, 10, 2)
    first = problem.edges[0]
    edges = tuple(replace(first, u=v, v=v + 2) for v in range(8))
    items = {pair: tuple(paid) for pair, paid in first.items.items()}
    assert items
    copies: list[Item] = []
    unshared: list[Edge] = []
    for edge in edges:  # items of its own for every edge
        table = {}
        for pair, paid in items.items():
            table[pair] = (len(copies),)
            copies.append(problem.items[paid[0]])
        unshared.append(replace(edge, items=table))
    woven = replace(problem, edges=tuple(unshared), items=tuple(copies), holds=())
    orders = narrow_orders(woven)
    assert orders[0] == tuple(range(10))
    assert (0, 2, 4, 6, 8, 1, 3, 5, 7, 9) in orders
    for order in orders:
        assert sorted(order) == list(range(10))


@pytest.mark.parametrize("seed", range(6))
def test_a_subproblem_is_priced_as_the_whole(seed: int) -> None:
    problem = placement(seed, 8, 3, limit=math.inf)
    rng = random.Random(seed)
    plan = tuple(rng.randrange(3) for _ in range(8))
    free = {node: range(3) for node in rng.sample(range(8), 3)}
    small = set_free(problem, plan, free)
    priced = 0
    for picks in itertools.product(range(3), repeat=3):
        at = dict(zip(sorted(free), picks, strict=True))
        if any(
            n in at and at[n] not in kept for n, kept in zip(small.nodes, small.kept, strict=True)
        ):
            continue
        priced += 1
        chosen = [
            kept.index(at[n]) if n in at else 0
            for n, kept in zip(small.nodes, small.kept, strict=True)
        ]
        load = [0.0] * 3
        loads = [c[p].load_s for c, p in zip(small.problem.nodes, chosen, strict=True)]
        loads += [small.problem.items[i].load_s for i in triggered(small.problem, chosen)]
        for vector in loads:
            load = [a + b for a, b in zip(load, vector, strict=True)]
        whole = small.restore(chosen)
        assert [whole[n] for n in sorted(free)] == list(picks)
        assert evaluate_choices(problem, whole).load_s == pytest.approx(load)
    assert priced


@pytest.mark.parametrize("limit", [math.inf, 30.0])
@pytest.mark.parametrize("seed", range(4))
def test_sharing_anew_leads_from_one_device_to_the_optimum(seed: int, limit: float) -> None:
    problem = placement(seed, 7, 2, limit=limit)
    best = brute_force(problem, "throughput")
    assert best is not None
    progress = Progress(problem, "throughput", 0.0, time.monotonic() + 60, 0)
    for chosen in itertools.product(range(2), repeat=7):  # the first that fits
        progress.offer(chosen, "start")
        if progress.best is not None:
            break
    share_anew(progress)
    assert progress.cost == pytest.approx(best[1], rel=1e-4)
    assert progress.best is not None
    assert evaluate_choices(problem, progress.best).excess_bytes == 0


@pytest.mark.slow
def test_sharing_anew_repeats_itself_and_stops_at_the_deadline() -> None:
    problem = placement(5, 24, 4)
    start = tuple(v % 4 for v in range(24))

    def run(seconds: float) -> Progress:
        progress = Progress(problem, "throughput", 0.0, time.monotonic() + seconds, 0)
        progress.offer(start, "start")
        share_anew(progress)
        return progress

    first, second, none = run(60), run(60), run(0)
    assert first.best == second.best
    assert first.cost < 0.8 * none.cost
    assert none.best == start


def test_sharing_anew_needs_two_groups() -> None:
    problem = spmd(0, 5, 3, forbid=0.0)
    progress = Progress(problem, "throughput", 0.0, time.monotonic() + 60, 0)
    progress.offer((0,) * 5, "start")
    share_anew(progress)
    assert progress.best == (0,) * 5


def test_an_item_of_many_nodes_without_a_choice_is_eliminated() -> None:
    """Seventy nodes share a weight; numpy has no table of so many axes."""
    problem = placement(0, 70, 2)
    weight = Item((1.0, 0.0), (0.0, 0.0), 0, 69)
    problem = replace(
        problem,
        nodes=tuple(choices[:1] for choices in problem.nodes),
        edges=(),
        holds=tuple(Hold(v, ((0,),)) for v in range(70)),
        items=(weight,),
    )
    answer = Eliminator(problem).min_sum([1.0, 1.0])
    assert answer is not None
    assert answer[1] == pytest.approx(evaluate_choices(problem, answer[0]).step_s)
