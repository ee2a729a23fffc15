"""Cuts into stages: as good as brute force, proven, repeatable; refusals say what is short."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.problems.stage_problems import Spec, all_cuts, brute_force, draw_problem
from partitioner.solver.outcome import Infeasible
from partitioner.solver.stages import paths
from partitioner.solver.stages.cut import cut_stages
from partitioner.solver.stages.model import (
    Pool,
    Stage,
    StageOption,
    StageProblem,
    evaluate_cut,
    flights,
)
from partitioner.solver.stages.paths import frontier, lay_out, least_tails, most_in_flight, settle

SPECS = {
    "memory couples": Spec(),
    "no memory": Spec(memory=False),
    "nothing in flight": Spec(in_flight=False),
    "degrees": Spec(degrees=(1, 2, 3)),
    "limited degrees": Spec(degrees=(1, 2, 4), most_degrees=5, positions=3, ways=2),
    "two pools": Spec(pools=2, memory=False),
    "two pools, memory": Spec(pools=2, options=4),
    "two pools, degrees": Spec(pools=2, degrees=(1, 2), most_degrees=6),
    "three pools": Spec(pools=3, degrees=(1, 2)),
    "ways": Spec(positions=3, ways=3, pools=2, in_flight=False),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SPECS)
def test_a_cut_is_as_good_as_any(name: str) -> None:
    feasible = 0
    for seed in range(30):
        problem = draw_problem(seed, SPECS[name])
        best = brute_force(problem)
        if best is None:
            with pytest.raises(Infeasible, match="no cut into stages"):
                cut_stages(problem)
            continue
        cut = cut_stages(problem)
        outcome = evaluate_cut(problem, cut.stages)
        assert not outcome.faults
        assert max(outcome.load_s) == cut.load_s == cut.bound_s == best
        assert cut.status == "optimal"
        feasible += 1
    assert feasible > 5


#: Where neither a bound nor a shortest path decides, for the memory of coupled stages alone.
HARD = (
    (Spec(positions=6, options=4), (158, 169)),
    (Spec(positions=6, options=4, degrees=(1, 2, 3)), (14, 70, 105, 107)),
    (Spec(positions=5, options=5, degrees=(1, 2, 4)), (6, 14, 19, 47, 48, 60, 67, 87, 123, 144)),
)


@pytest.mark.parametrize(("spec", "seeds"), HARD)
def test_labels_decide_where_memory_couples(
    spec: Spec, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    search = paths.search

    def counted(*of: Any) -> Any:
        searches.append(of)
        return search(*of)

    monkeypatch.setattr(paths, "search", counted)
    for seed in seeds:
        problem = draw_problem(seed, spec)
        assert _load(problem) == brute_force(problem)
        assert searches
        searches.clear()


@pytest.mark.parametrize("name", ["two pools", "two pools, degrees", "memory couples"])
def test_searches_that_leave_labels_out_lose_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPECS[name], positions=7, options=5)
    problems = [draw_problem(seed, spec) for seed in range(25)]
    loads = [_load(problem) for problem in problems]
    monkeypatch.setattr(paths, "WIDTHS", (1, None))
    assert [_load(problem) for problem in problems] == loads
    monkeypatch.setattr(paths, "WIDTHS", (None,))
    monkeypatch.setattr(paths, "GRID", 0)
    assert [_load(problem) for problem in problems] == loads
    assert len(set(loads)) > 5


def _load(problem: StageProblem) -> float | None:
    try:
        return cut_stages(problem).load_s
    except Infeasible:
        return None


def test_equal_problems_have_equal_cuts() -> None:
    for seed in range(5):
        first, second = (
            cut_stages(draw_problem(seed, Spec(positions=12, options=6, memory=False)))
            for _ in range(2)
        )
        assert first == second


def test_a_gap_is_kept_and_the_bound_holds() -> None:
    loose = 0
    for seed in range(20):
        problem = draw_problem(seed, Spec(positions=12, options=6, memory=False))
        exact, near = cut_stages(problem), cut_stages(problem, gap=0.2)
        assert near.bound_s <= exact.load_s <= near.load_s
        assert near.load_s - near.bound_s <= 0.2 * near.load_s
        loose += near.bound_s < near.load_s
    assert loose


def test_many_positions_and_devices_are_balanced() -> None:
    """200 equal positions on 1,000 single devices: one stage a position; on 40, five each."""
    problem = StageProblem((_option(200),), (Pool(1000),))
    assert cut_stages(problem).load_s == 1.0
    cut = cut_stages(replace(problem, pools=(Pool(40),)))
    assert cut.load_s == cut.bound_s == 5.0
    assert {stage.stop - stage.start for stage in cut.stages} == {5}


def test_early_stages_hold_what_later_ones_need() -> None:
    """With 6 bytes a device, 1 a position in flight: 1 + 2 + 3 positions from the first on."""
    option = replace(_option(6), flying_bytes=_span(6), resident_bytes=_span(6) * 0)
    problem = StageProblem((option,), (Pool(3, 6.0),))
    cut = cut_stages(problem)
    assert evaluate_cut(problem, cut.stages).in_flight == (3, 2, 1)
    assert cut.load_s == 2.0
    tight = cut_stages(replace(problem, pools=(Pool(3, 4.0),)))
    assert [stage.stop for stage in tight.stages] == [1, 3, 6]
    free = cut_stages(replace(problem, pools=(Pool(3, 2.0),), in_flight=False))
    assert free.load_s == 2.0


def test_a_smaller_degree_is_kept_for_the_stages_before() -> None:
    """The last stage could take 1 device at degree 4, but then the first has no room."""

    def only(start: int, devices: int, degree: int, flying: float) -> StageOption:
        load = np.full((1, 3, 3), np.inf)
        load[0, start, start + 1] = 1.0
        return StageOption(devices, load, 0 * _span(2), flying * _span(2), degree)

    options = only(1, 1, 4, 0.0), only(1, 2, 1, 1.0), only(0, 1, 1, 1.5)
    problem = StageProblem(options, (Pool(3, 3.0),))
    assert [stage.option for stage in cut_stages(problem).stages] == [2, 1]


@pytest.mark.parametrize("seed", range(12))
def test_the_least_sum_of_degrees_is_exact(seed: int) -> None:
    problem = draw_problem(seed, Spec(degrees=(1, 2, 3)))
    problem = replace(problem, pools=(replace(problem.pools[0], devices=99),))
    sums = [
        sum(problem.options[stage.option].degree for stage in stages)
        for stages in all_cuts(problem)
        if not evaluate_cut(problem, stages).faults
    ]
    space, entries = lay_out(problem)
    tails, _ = least_tails(space, settle(space, entries))
    assert tails[0] == min(sums, default=-1)


def test_micro_batches_in_flight_follow_the_degrees() -> None:
    assert flights([1, 1, 1]) == (3, 2, 1)
    assert flights([4, 2, 1]) == (2, 2, 1)
    assert flights([1, 2, 4]) == (7, 3, 1)
    assert flights([1, 2, 4], in_flight=False) == (1, 1, 1)


def test_positions_may_be_downsets() -> None:
    """Two nodes without an edge: four downsets, and no stage from {a} to {b}."""
    load = np.full((1, 4, 4), np.inf)
    for i, j, seconds in ((0, 1, 3.0), (0, 2, 4.0), (1, 3, 4.0), (2, 3, 3.0), (0, 3, 7.0)):
        load[0, i, j] = seconds
    load[0, 2, 3] = 5.0
    nothing = np.zeros((1, 4, 4))
    problem = StageProblem((StageOption(1, load, nothing, nothing),), (Pool(2),))
    cut = cut_stages(problem)
    assert [(stage.start, stage.stop) for stage in cut.stages] == [(0, 1), (1, 3)]


def _span(positions: int) -> np.ndarray:
    at = np.arange(positions + 1.0)
    return (at[None, :] - at[:, None]).clip(0)[None]


def _option(positions: int, devices: int = 1, pool: int = 0, degree: int = 1) -> StageOption:
    load = _span(positions)
    return StageOption(devices, load, load, 0 * load, degree, pool)


def _gap_at(position: int) -> StageOption:
    load = _span(4)
    load[:, : position + 1, position + 1 :] = np.inf
    return replace(_option(4), load_s=load)


NONE = "is within the devices, whatever their memory"
REFUSED = [
    (StageProblem((_gap_at(2),), (Pool(4),)), NONE),
    (StageProblem((_option(4, 3),), (Pool(2),)), NONE),
    (StageProblem((_option(4, 2), _option(4, 3, 1)), (Pool(1), Pool(1))), NONE),
    (StageProblem((_option(4, 1, degree=4),), (Pool(2),), most_degrees=3), NONE),
    (
        StageProblem(
            (_option(4),),
            (Pool(2, 1.0),),
        ),
        r"fits the memory: the nearest is 1 bytes a device short \(1 B over a limit of 1 B\)",
    ),
]


@pytest.mark.parametrize(("problem", "message"), REFUSED)
def test_a_refusal_says_what_is_short(problem: StageProblem, message: str) -> None:
    with pytest.raises(Infeasible, match=f"^no cut into stages {message}") as error:
        cut_stages(problem)
    assert "\n" not in str(error.value)


def test_the_bytes_that_are_short_are_just_enough() -> None:
    tried = 0
    for seed in range(60):
        problem = draw_problem(seed, Spec(positions=5, degrees=(1, 2)))
        problem = _limited(problem, 3.0)
        try:
            cut_stages(problem)
        except Infeasible as error:
            if not error.bytes_short:
                continue
            needed = 3.0 + math.ceil(error.bytes_short)
            cut_stages(_limited(problem, needed))
            with pytest.raises(Infeasible):
                cut_stages(_limited(problem, needed - 1.5))
            tried += 1
    assert tried > 5


def _limited(problem: StageProblem, limit_bytes: float) -> StageProblem:
    return replace(problem, pools=(replace(problem.pools[0], limit_bytes=limit_bytes),))


def test_every_broken_rule_is_named() -> None:
    problem = StageProblem((_option(4, 2, degree=2), _gap_at(2)), (Pool(3, 1.0),), most_degrees=3)
    outcome = evaluate_cut(problem, (Stage(0, 2, 0, 0), Stage(2, 3, 1, 0), Stage(2, 3, 0, 0)))
    assert outcome.load_s == (2.0, math.inf, 1.0)
    assert outcome.held_bytes == (2.0, 1.0, 1.0)
    assert outcome.in_flight == (3, 3, 1)
    assert outcome.devices == (5,)
    assert outcome.faults == (
        "stage 0 holds 2 bytes of 1",
        "stage 1 cannot be",
        "pool 0 has 3 devices, 5 are taken",
        "stages do not follow each other from 0 to 4",
        "degrees sum to 5, over 3",
    )


def test_the_largest_number_in_flight_is_exact() -> None:
    rng = np.random.default_rng(0)
    resident, flying = rng.random(5000) * 9, rng.random(5000) * rng.integers(0, 2, 5000)
    limit = 7.3
    many = most_in_flight(limit, resident, flying, 40)
    for m in range(1, 41):
        assert ((resident + flying * m <= limit) == (many >= m)).all()
    edges = most_in_flight(
        3.0, np.array([0.0, 3.0, 3.0, np.inf]), np.array([1.0, 0.0, 1.0, 0.0]), 9
    )
    assert edges.tolist() == [3.0, 9.0, 0.0, -1.0]


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_the_frontier_has_every_row_that_none_is_below(columns: int) -> None:
    rng = np.random.default_rng(columns)
    for size in (1, 2, 30, 200):
        rows = rng.integers(0, 6, (size, columns))
        below = (rows[:, None] <= rows[None]).all(axis=2) & (rows[:, None] < rows[None]).any(axis=2)
        wanted = {tuple(row) for row in rows[~below.any(axis=0)].tolist()}
        kept = [tuple(row) for row in rows[frontier(rows)].tolist()]
        assert len(kept) == len(set(kept))
        assert set(kept) == wanted
