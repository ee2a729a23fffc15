"""Contiguous plans are the best cuts of an order."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.problems.solver_instances import dnnp, placement
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.files import to_problem
from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.incumbents import alone
from partitioner.solver.placement.contiguous import contiguous_plans
from partitioner.solver.problem import Hold, Item, Problem
from partitioner.solver.referee import evaluate_choices


def splits(problem: Problem, devices: int) -> float:
    """The least largest load over all contiguous splits, the order of devices being free."""
    count = len(problem.nodes)
    best = math.inf
    for parts in range(1, devices + 1):
        for cuts in itertools.combinations(range(1, count), parts - 1):
            bounds = (0, *cuts, count)
            chosen = [d for d in range(parts) for _ in range(bounds[d], bounds[d + 1])]
            best = min(best, evaluate_choices(problem, chosen).step_s)
    return best


def chain(problem: Problem) -> Problem:
    """Only the edges between neighbours."""
    return replace(problem, edges=tuple(e for e in problem.edges if e.v == e.u + 1))


@pytest.mark.parametrize("seed", range(8))
def test_contiguous_plans_are_exact_on_chains(seed: int) -> None:
    problem = chain(placement(seed, 9, 3))
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    best = min(plans, key=lambda split: split.value)
    assert best.value == pytest.approx(splits(problem, 3))
    assert evaluate_choices(problem, best.chosen).step_s == pytest.approx(best.value)


@pytest.mark.parametrize("seed", range(8))
def test_contiguous_plans_bound_splits_from_below(seed: int) -> None:
    problem = placement(seed, 9, 3)
    value = min(
        split.value for split in contiguous_plans(problem, alone(problem, Eliminator(problem)))
    )
    assert value <= splits(problem, 3) * (1 + 1e-9)


def test_contiguous_plans_fit_weights_into_the_limit() -> None:
    """Five weights of 6 bytes on three devices of 12: two, two and one."""
    problem = chain(placement(2, 5, 3))
    weights = [Item((0.0,) * 3, tuple(6.0 * (d == e) for e in range(3)), 0, 4) for d in range(3)]
    holds = tuple(Hold(v, tuple((3 * v + d,) for d in range(3))) for v in range(5))
    problem = replace(
        problem,
        limit_bytes=(12.0,) * 3,
        items=tuple(weights * 5),
        holds=holds,
        edges=tuple(replace(edge, items={}) for edge in problem.edges),
    )
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    assert [len(set(split.chosen)) for split in plans] == [3]
    assert evaluate_choices(problem, plans[0].chosen).excess_bytes == 0


def test_contiguous_plans_use_each_unlike_device_once() -> None:
    problem = chain(placement(2, 8, 3))
    nodes = tuple(
        tuple(
            replace(c, load_s=tuple(s * (1 + d) for d, s in enumerate(c.load_s))) for c in choices
        )
        for choices in problem.nodes
    )
    problem = replace(problem, nodes=nodes, interchangeable=())
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    assert [len(set(split.chosen)) for split in plans] == [1, 2, 3]
    value = min(split.value for split in plans)
    best = math.inf
    for order in itertools.permutations(range(3)):
        for i, j in itertools.combinations_with_replacement(range(9), 2):
            chosen = [order[0]] * i + [order[1]] * (j - i) + [order[2]] * (8 - j)
            best = min(best, evaluate_choices(problem, chosen).step_s)
    assert value == pytest.approx(best)


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
    parts = [(node,) for node in order]
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)), parts)
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
