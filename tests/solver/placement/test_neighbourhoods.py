"""Subproblems of a few free nodes, and plans that they improve."""

import itertools
import math
import random

import pytest

from helpers.problems.solver_instances import placement, spmd
from partitioner.solver import brute_force, evaluate_choices
from partitioner.solver.placement.neighbourhoods import share_anew
from partitioner.solver.placement.subproblem import set_free
from partitioner.solver.progress import Progress
from partitioner.solver.referee import triggered
from partitioner.solver.work import Work


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
    progress = Progress(problem, "throughput", 0.0, Work.within(60), 0)
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
        progress = Progress(problem, "throughput", 0.0, Work.within(seconds), 0)
        progress.offer(start, "start")
        share_anew(progress)
        return progress

    first, second, none = run(60), run(60), run(0)
    assert first.best == second.best
    assert first.cost < 0.8 * none.cost
    assert none.best == start


def test_sharing_anew_needs_two_groups() -> None:
    problem = spmd(0, 5, 3, forbid=0.0)
    progress = Progress(problem, "throughput", 0.0, Work.within(60), 0)
    progress.offer((0,) * 5, "start")
    share_anew(progress)
    assert progress.best == (0,) * 5
