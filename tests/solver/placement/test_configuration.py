"""The configuration LP bounds every plan from below, and often as high as the optimum."""

import random
from dataclasses import replace

import numpy as np
import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import dnnp, placement, spmd, uneven
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.files import to_problem
from partitioner.solver.joint.incumbents import Search, relax
from partitioner.solver.placement.configuration import configure, laid_out, refuted
from partitioner.solver.placement.fleet import fleet
from partitioner.solver.placement.sweep import sweep
from partitioner.solver.problem import Choice, Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work


def mixed(seed: int) -> Problem:
    """Two accelerators and two CPUs; times are above 0 so that every device is told apart."""
    data = dnnp(seed, 7)
    for node in data["nodes"]:
        node |= {"supportedOnFpga": 1, "fpgaLatency": node["fpgaLatency"] + 0.5}
    return to_problem(parse(data))


KINDS = {
    "alike": lambda seed: placement(seed, 7, 3),
    "limited": lambda seed: placement(seed, 6, 3, limit=30),
    "uneven": lambda seed: uneven(placement(seed, 6, 3)),
    "mixed": mixed,
}


def search_from(problem: Problem, chosen: tuple[int, ...]) -> Search:
    search = Search(problem, "throughput", 1e-4, Work.within(60), 0)
    search.offer(chosen, "start")
    return search


def bounded(problem: Problem, chosen: tuple[int, ...]) -> Search:
    """A search whose bound is raised from a plan."""
    search = search_from(problem, chosen)
    assert search.fleet is not None
    configure(search, search.fleet)
    return search


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_no_plan_is_below_the_bound(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    best = brute_force(problem, "throughput")
    assert best is not None
    search = bounded(problem, best[0])
    assert search.bound <= best[1] * (1 + 1e-9)
    work = sum(min(sum(c.load_s) for c in choices) for choices in problem.nodes)
    assert search.bound >= 0.98 * work / problem.devices


def test_the_bound_is_near_the_optimum_where_work_alone_says_little() -> None:
    """Seven random nodes on three devices: sets are indivisible, and every cut costs."""
    gaps, plain = [], []
    for seed in range(6):
        problem = placement(seed, 7, 3, scale=3.0)
        best = brute_force(problem, "throughput")
        assert best is not None
        search = bounded(problem, best[0])
        assert search.proved_by == "configuration LP"
        work = sum(choices[0].load_s[0] for choices in problem.nodes) / 3
        gaps.append(1 - search.bound / best[1])
        plain.append(1 - work / best[1])
    assert sum(gaps) < sum(plain) / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_device_spends_at_least_what_its_knapsack_says(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    devices = fleet(problem)
    assert devices is not None
    rng = random.Random(seed)
    for _ in range(20):
        chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
        loads = evaluate_choices(problem, chosen).load_s
        for group, device in devices.device.items():
            spent = devices.knapsacks[group].seconds(devices.held(chosen, group))
            assert spent <= loads[device] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_accelerators_spend_exactly_what_their_knapsack_says(seed: int) -> None:
    """A value leaves and comes once, whatever the other devices are."""
    problem = mixed(seed)
    devices = fleet(problem)
    assert devices is not None
    rng = random.Random(seed)
    chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
    loads = evaluate_choices(problem, chosen).load_s
    for group, device in devices.device.items():
        spent = devices.knapsacks[group].seconds(devices.held(chosen, group))
        assert spent == pytest.approx(loads[device])


@pytest.mark.parametrize("seed", range(20))
def test_any_values_refute_no_more_than_is_true(seed: int) -> None:
    """Not only those of the LP: the bound is a proof by itself."""
    problem = mixed(seed) if seed % 2 else placement(seed, 7, 3)
    best = brute_force(problem, "throughput")
    devices = fleet(problem)
    assert best is not None
    assert devices is not None
    rng = random.Random(seed)
    values = np.array([rng.randrange(30) for _ in problem.nodes]) + 1
    total, numbers = int(values.sum()), [len(members) for members in devices.classes]
    swept = []
    for members, number in zip(devices.classes, numbers, strict=True):
        layout = laid_out(devices.knapsacks[members[0]], devices.order)
        assert layout is not None
        swept.append(sweep(layout, values, -(-total // number)))
    assert 0 < refuted(swept, numbers, total) <= best[1] * (1 + 1e-9)


def test_a_slow_device_counts_for_what_it_can_do() -> None:
    """Ten unit nodes, a device that takes 1 s for each and one that takes 9 s: 9 s at best."""
    problem = replace(placement(0, 10, 2), edges=(), holds=(), items=(), interchangeable=())
    unit = (Choice((1.0, 0.0), 0), Choice((0.0, 9.0), 1))
    search = search_from(replace(problem, nodes=(unit,) * 10), (0,) * 10)
    relax(search)
    assert search.bound == pytest.approx(9.0)


def test_only_groups_of_one_device_are_bounded() -> None:
    assert fleet(spmd(0, 4, 3)) is None
    assert fleet(placement(0, 4, 2, per_group=2)) is None
    assert fleet(placement(0, 4, 1)) is None
    assert fleet(placement(0, 4, 2)) is not None


def test_nothing_is_proven_after_the_deadline() -> None:
    problem = placement(0, 7, 3)
    search = search_from(problem, (0,) * 7)
    assert search.fleet is not None
    search.work = Work.within(0)
    configure(search, search.fleet)
    assert search.bound == 0.0
