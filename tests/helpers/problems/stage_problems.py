"""Random problems of cutting an order into stages, and brute force over all cuts."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from partitioner.solver.stages.model import Pool, Stage, StageOption, StageProblem, evaluate_cut


@dataclass(frozen=True)
class Spec:
    """Sizes and features of a random problem."""

    positions: int = 4
    options: int = 3
    pools: int = 1
    degrees: tuple[int, ...] = (1,)
    memory: bool = True
    in_flight: bool = True
    most_degrees: int | None = None
    ways: int = 1


def checked(problem: StageProblem) -> StageProblem:
    """The same problem, once its options fit each other and the pools, and nothing is negative."""
    shape = problem.options[0].load_s.shape
    assert len(shape) == 3
    assert shape[1] == shape[2] > 1
    assert all(pool.devices >= 0 and pool.limit_bytes >= 0 for pool in problem.pools)
    for option in problem.options:
        assert min(option.devices, option.degree) > 0
        assert 0 <= option.pool < len(problem.pools)
        for array in (option.load_s, option.resident_bytes, option.flying_bytes):
            assert array.shape[0] == option.load_s.shape[0]
            assert array.shape[1:] == shape[1:]
            assert array.min() >= 0
    return problem


def draw_problem(seed: int, spec: Spec) -> StageProblem:
    """Loads grow with the interval but for noise, so that they are not monotone."""
    rng = np.random.default_rng(seed)
    pick = random.Random(seed)
    positions, ways = spec.positions, spec.ways
    work = rng.integers(1, 9, positions)
    size = rng.integers(1, 9, positions)
    options = []
    for _ in range(spec.options):
        devices, degree = pick.choice((1, 1, 2, 3, 4)), pick.choice(spec.degrees)
        shape = (ways, positions + 1, positions + 1)
        load, resident = np.zeros(shape), np.zeros(shape)
        for i, j in itertools.combinations(range(positions + 1), 2):
            load[:, i, j] = work[i:j].sum() / devices + rng.integers(0, 4, ways) / 2
            resident[:, i, j] = size[i:j].sum() / devices + rng.integers(0, 3, ways)
        load[rng.random(shape) < 0.15] = np.inf
        options.append(
            StageOption(
                devices,
                load,
                resident,
                np.floor(resident / pick.choice((2, 3))),
                degree,
                pick.randrange(spec.pools),
            )
        )
    limits = [
        pick.choice((8.0, 14.0, 22.0)) if spec.memory else math.inf for _ in range(spec.pools)
    ]
    pools = tuple(Pool(pick.randint(1, 5 if spec.pools > 1 else 8), limit) for limit in limits)
    return checked(StageProblem(tuple(options), pools, spec.most_degrees, spec.in_flight))


def all_cuts(problem: StageProblem) -> Iterator[tuple[Stage, ...]]:
    """Every chain of stages from the first position to the last, whatever the rules."""

    def tails(start: int) -> Iterator[tuple[Stage, ...]]:
        if start == problem.positions:
            yield ()
            return
        for stop in range(start + 1, problem.positions + 1):
            for tail in tails(stop):
                for index, option in enumerate(problem.options):
                    for way in range(len(option.load_s)):
                        yield (Stage(start, stop, index, way), *tail)

    yield from tails(0)


def brute_force(problem: StageProblem) -> float | None:
    """The least largest load; None if no cut is allowed."""
    priced = (evaluate_cut(problem, stages) for stages in all_cuts(problem))
    return min((max(outcome.load_s) for outcome in priced if not outcome.faults), default=None)
