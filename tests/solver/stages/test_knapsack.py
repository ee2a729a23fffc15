"""Ways of things packed within a limit: the least seconds, as brute force finds them."""

import itertools
import random

import numpy as np
import pytest

from partitioner.solver.stages.knapsack import Ways, frontier, pack, relaxed, steps


def draw(rng: random.Random) -> list[Ways]:
    """Up to 6 things of 1 to 3 ways; at times two are equal."""
    things = [
        tuple(
            (float(rng.randint(0, 9)), float(rng.randint(0, 12))) for _ in range(rng.randint(1, 3))
        )
        for _ in range(rng.randint(1, 6))
    ]
    if len(things) > 2 and rng.random() < 0.5:
        things[1] = things[0]
    return things


def brute_force(things: list[Ways], limit: float) -> float | None:
    sums = (
        [sum(column) for column in zip(*chosen, strict=True)]
        for chosen in itertools.product(*things)
    )
    return min((seconds for seconds, size in sums if size <= limit), default=None)


def test_the_least_seconds_are_found_and_proven() -> None:
    full = short = 0
    for seed in range(1500):
        rng = random.Random(seed)
        things, limit = draw(rng), float(rng.randint(0, 40))
        best, packed = brute_force(things, limit), pack(things, limit)
        if best is None:
            assert packed is None, seed
            short += 1
            continue
        assert packed is not None, seed
        assert packed.seconds == packed.bound_s == best, seed
        chosen = [ways[way] for ways, way in zip(things, packed.way, strict=True)]
        assert sum(size for _, size in chosen) <= limit
        assert sum(seconds for seconds, _ in chosen) == best
        full += best > sum(min(ways)[0] for ways in things)
    assert short > 100
    assert full > 150


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_many_unlike_things_are_packed_exactly(share: float) -> None:
    """The fractions of a second that rounding the relaxation loses are won back."""
    rng = random.Random(7)
    things: list[Ways] = []
    for _ in range(177):
        seconds, size = rng.uniform(1, 3), float(rng.randint(10**6, 10**8))
        things.append(
            ((seconds, size), (seconds * rng.uniform(1.2, 1.5), size // rng.randint(3, 9)))
        )
    large, small = (sum(ways[way][1] for ways in things) for way in (0, 1))
    limit = small + share * (large - small)
    packed = pack(things, limit)
    assert packed is not None
    assert packed.seconds == packed.bound_s
    # no exchange of two things' ways is better
    held = sum(ways[way][1] for ways, way in zip(things, packed.way, strict=True))
    assert held <= limit
    for u, v in itertools.combinations(range(len(things)), 2):
        gained = lost = 0.0
        for thing in (u, v):
            now, other = things[thing][packed.way[thing]], things[thing][1 - packed.way[thing]]
            gained += now[0] - other[0]
            lost += other[1] - now[1]
        assert gained <= 1e-9 or held + lost > limit


def test_what_is_left_out_lowers_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.solver.stages.knapsack.MOST_CHOICES", 1)
    open_ = 0
    for seed in range(3000):
        rng = random.Random(seed)
        things, limit = draw(rng), float(rng.randint(5, 30))
        best, packed = brute_force(things, limit), pack(things, limit)
        if best is not None:
            assert packed is not None
            assert packed.bound_s <= best <= packed.seconds
            open_ += packed.bound_s < packed.seconds
    assert open_ > 5


def test_beaten_ways_and_those_above_the_hull() -> None:
    ways = ((1.0, 10.0), (2.0, 9.0), (3.0, 2.0), (3.0, 3.0), (9.0, 1.0))
    assert frontier(ways) == (0, 1, 2, 4)
    assert steps(ways) == ((0, 2), (2, 4))


def test_the_relaxation_of_every_stretch_is_that_of_all_steps_and_bounds_the_choices() -> None:
    """It was tabled at 24 prices of a byte, and chords between them lie above it."""
    doubtful = 0
    for seed in range(60):
        rng = random.Random(seed)
        things = [
            tuple((float(i * rng.randint(1, 9)), float(40 - 10 * i)) for i in range(3))
            for _ in range(40)
        ]
        taken = sorted(
            (
                (ways[end][0] - ways[begin][0], ways[begin][1] - ways[end][1], thing)
                for thing, ways in enumerate(things)
                for begin, end in steps(ways)
            ),
            key=lambda step: step[0] / step[1],
        )
        lost, saved, of = (np.array(column, float) for column in zip(*taken, strict=True))
        start, stop = sorted(rng.sample(range(41), 2))
        need = float(rng.randint(-5, 30 * (stop - start)))
        pairs, before = np.array([[start], [stop]]), of < np.arange(41)[:, None]
        lower, upper = relaxed(lost, saved, before, pairs, np.array([need]))
        own = (of >= start) & (of < stop)
        sums = (np.cumsum(np.append(0.0, column[own])) for column in (saved, lost))
        most = float(saved[own].sum())
        wanted = np.inf if need > most else float(np.interp(need, *sums))
        assert lower[0] == pytest.approx(wanted), seed
        packed = pack(things[start:stop], 40.0 * (stop - start) - need)
        assert (packed is None) == (need > most) == np.isinf(upper[0]), seed
        if packed is not None:
            assert lower[0] - 1e-9 <= packed.seconds <= upper[0] + 1e-9, seed
            doubtful += lower[0] < upper[0] - 1e-9
    assert doubtful > 20
