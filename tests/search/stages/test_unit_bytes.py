"""Moments of lanes: what they hold, and what stages compute again to fit at all of them."""

import itertools

import numpy as np
import pytest

from partitioner.ir.pipeline import lane_moments, pipeline_schedule, textbook_lanes
from partitioner.search.stages.computed_again import ways_within
from partitioner.search.stages.unit_bytes import RESERVED, MomentRows, StageMemory


def rows_of(name: str, lanes: int, count: int) -> tuple[MomentRows, ...]:
    lane_of = textbook_lanes(name, lanes * (2 if name == "zbv" else 1))
    return tuple(map(MomentRows.of, lane_moments(pipeline_schedule(name, lane_of, count))))


def memory(units: int) -> StageMemory:
    """Each unit keeps 2, 3 and 5 bytes, 100 are at rest, and passes take 1, 20 and 40."""
    kept = np.arange(units + 1) * np.array([[2.0], [3.0], [5.0]])
    passing = np.tile([[1.0], [20.0], [40.0]], units)
    return StageMemory(100.0 * np.arange(units + 1), kept, passing, {})


def test_a_lane_holds_what_its_stages_keep_at_each_moment() -> None:
    """The last of two lanes of zbv puts off two weight gradients of each stage."""
    bounds, bytes_of = ((0, 2), (2, 4), (4, 6), (6, 8)), memory(8)
    rows = rows_of("zbv", 2, 6)[1]
    assert rows.stages == (1, 2)
    _, kept = bytes_of.stretches([bounds[stage] for stage in rows.stages])
    assert kept.tolist() == [[4.0, 6.0, 10.0]] * 2
    nbytes = rows.fixed(bytes_of, bounds) + rows.kept(kept)
    by_hand = [
        400 + (1, 20, 40)[part] + RESERVED * sum(4 * a + 6 * b + 10 * c for a, b, c in held)
        for part, held in zip(rows.running[1].tolist(), rows.held.tolist(), strict=True)
    ]
    assert nbytes.tolist() == pytest.approx(by_hand)
    waiting = rows.held[:, :, 2].sum(axis=1)
    assert waiting[int(nbytes.argmax())] > 1, "it holds most while weight gradients wait"


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_fits_at_all_moments_and_takes_few_seconds(seed: int) -> None:
    """Beside all choices; what is computed again for weight gradients may be kept for them."""
    generator = np.random.default_rng(seed)
    rows = rows_of("zbv", 3, 8)[int(generator.integers(3))]
    of = [0, 0, 0, 1, 1, 1]
    ways, nbytes = [], []
    for _ in of:
        whole = generator.integers(20, 60)
        lost = np.concatenate(([0.0], np.cumsum(generator.uniform(1, 5, 2))))
        left = whole * np.array([1.0, 0.6, 0.2])
        again = generator.uniform(0.0, 1.0) * (whole - left)
        nbytes.append(np.stack((0.3 * left, 0.7 * left, again), axis=1))
        ways.append(tuple(zip(lost.tolist(), left.tolist(), strict=True)))
    fixed = np.full(len(rows.held), 100.0)

    def most(choice: tuple[int, ...]) -> float:
        kept = np.zeros((2, 3))
        for stage, each, way in zip(of, nbytes, choice, strict=True):
            kept[stage] += each[way]
        return float((fixed + rows.kept(kept)).max())

    def seconds(choice: tuple[int, ...]) -> float:
        return sum(own[way][0] for own, way in zip(ways, choice, strict=True))

    every = list(itertools.product(range(3), repeat=len(of)))
    sizes = [most(choice) for choice in every]
    limit = min(sizes) + 0.4 * (sizes[0] - min(sizes))
    taken, used = ways_within(rows, fixed, limit, ways, nbytes, of)
    best = min(seconds(c) for c, n in zip(every, sizes, strict=True) if n <= limit)
    assert used == pytest.approx(most(tuple(taken)))
    assert used <= 1.005 * limit  # searches leave such a margin
    assert seconds(tuple(taken)) <= 1.3 * best
    least, used = ways_within(rows, fixed, 0.0, ways, nbytes, of)
    assert used == pytest.approx(most(tuple(least)))
    assert used <= 1.1 * min(sizes)
