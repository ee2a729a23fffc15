"""Schedules by name: any lanes and edges for three of them, refusals of the others, bubbles."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.ir.pipeline.actions import PipelineSchedule, PipelineScheduleError
from partitioner.ir.pipeline.generate import SCHEDULES, pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import to_csv
from partitioner.ir.pipeline.timeline import (
    bubble_share,
    check,
    in_flight,
    lane_in_flight,
    makespan,
    start_times,
)

budget = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]] | None]:
    """Lanes of up to 8 stages on up to 5 lanes, and any edges between them (None: the chain)."""
    stages = draw(st.integers(1, 8))
    lanes = draw(st.integers(1, min(5, stages)))
    rest = draw(st.lists(st.integers(0, lanes - 1), min_size=stages - lanes, max_size=stages))
    lane_of = draw(st.permutations([*range(lanes), *rest[: stages - lanes]]))
    pairs = list(itertools.combinations(range(stages), 2))
    some = st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([])
    return tuple(lane_of), draw(st.none() | some)


@pytest.mark.slow
@budget
@given(assignments(), st.integers(1, 9))
def test_any_lanes_and_edges(
    assignment: tuple[tuple[int, ...], list[tuple[int, int]] | None], micro_batches: int
) -> None:
    lane_of, edges = assignment
    made = {
        name: pipeline_schedule(name, lane_of, micro_batches, edges)
        for name in ("gpipe", "1f1b", "forward")
    }
    for schedule in made.values():
        check(schedule, edges)
        start_times(schedule, edges)
        again = pipeline_schedule(schedule.name, lane_of, micro_batches, edges)
        assert again == schedule
    assert (made["forward"].trains, made["gpipe"].trains) == (False, True)
    assert in_flight(made["gpipe"]) == (micro_batches,) * len(lane_of)
    pairs = zip(in_flight(made["1f1b"]), in_flight(made["gpipe"]), strict=True)
    assert all(ours <= most for ours, most in pairs)
    pairs = zip(lane_in_flight(made["1f1b"]), lane_in_flight(made["gpipe"]), strict=True)
    assert all(ours <= most for ours, most in pairs)
    assert set(in_flight(made["forward"])) == {1}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chain_serves_any_edges(name: str) -> None:
    lane_of = textbook_lanes(name, 6)
    for seed in range(8):
        pairs = itertools.combinations(range(6), 2)
        edges = [pair for i, pair in enumerate(pairs) if (i * 7 + seed) % 3]
        check(pipeline_schedule(name, lane_of, 6, edges), edges)


def test_1f1b_of_a_unet_and_of_two_towers() -> None:
    unet = pipeline_schedule("1f1b", (0, 1, 2, 1, 0), 6, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
    assert in_flight(unet) == (5, 4, 3, 2, 1)
    towers = [(0, 2), (1, 2)]
    both = pipeline_schedule("1f1b", (0, 1, 2), 6, towers)
    assert in_flight(both) == (2, 2, 1)
    starts = start_times(both, towers)
    assert starts[0][0] == starts[1][0] == 0
    share = bubble_share(both, starts)
    assert share == pytest.approx(bubble_of(pipeline_schedule("1f1b", (0, 1), 6)))


def test_stages_in_a_row_on_one_lane_hold_no_more_than_one_stage() -> None:
    assert in_flight(pipeline_schedule("1f1b", (0, 0, 0, 1), 6)) == (2, 2, 2, 1)


def test_a_lane_that_is_visited_again_computes_meanwhile() -> None:
    assert to_csv(pipeline_schedule("1f1b", (0, 1, 0), 3)) == (
        "0F0,0F1,2F0,0F2,2B0,2F1,2B1,2F2,0B0,0B1,2B2,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n"
    )


def bubble_of(schedule: PipelineSchedule) -> float:
    return bubble_share(schedule, start_times(schedule))


def test_bubbles_are_those_of_the_papers() -> None:
    """Of S lanes and M micro-batches: (S - 1) / (M + S - 1); a third of it for ZB-H1; V-fold
    less for V stages a lane (interleaved)."""
    lanes, m = 4, 16
    textbook = (lanes - 1) / (m + lanes - 1)
    assert bubble_of(pipeline_schedule("gpipe", range(lanes), m)) == pytest.approx(textbook)
    assert bubble_of(pipeline_schedule("1f1b", range(lanes), m)) == pytest.approx(textbook)
    third = (lanes - 1) / (3 * m + lanes - 1)
    assert bubble_of(pipeline_schedule("zb1", range(lanes), m)) == pytest.approx(third)
    halved = (lanes - 1) / (2 * m + lanes - 1)
    looped = pipeline_schedule("interleaved", textbook_lanes("interleaved", 8), m)
    assert bubble_of(looped) == pytest.approx(halved)


def test_zbv_has_the_bubble_of_its_first_forward_passes() -> None:
    """In the steady phase no lane waits: a lane idles for its first input and its last W only."""
    schedule = pipeline_schedule("zbv", textbook_lanes("zbv", 8), 16)
    starts = start_times(schedule)
    assert makespan(schedule, starts) == 2 * 16 * 3 + 3
    assert lane_in_flight(schedule) == (8, 8, 8, 8)


@pytest.mark.parametrize("name", ["1f1b", "zb1"])
def test_in_flight_of_1f1b_and_of_zb_h1(name: str) -> None:
    schedule = pipeline_schedule(name, range(4), 9)
    assert in_flight(schedule) == ((4, 3, 2, 1) if name == "1f1b" else (4, 4, 4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pipeline_schedule("zb2", (0,), 1),
            "unknown schedule 'zb2': there are gpipe, 1f1b, interleaved, zb1, zbv, dualpipev, for",
        ),
        (lambda: pipeline_schedule("gpipe", (), 1), "a schedule has at least one stage"),
        (lambda: pipeline_schedule("gpipe", (0, 2), 1), "lane 1 runs no stage"),
        (lambda: pipeline_schedule("gpipe", (0,), 0), "0 micro-batches"),
        (lambda: pipeline_schedule("gpipe", (0, 1), 1, [(1, 0)]), "edge 1-0"),
        (
            lambda: pipeline_schedule("interleaved", (0, 1, 2), 3),
            r"interleaved: one stage a lane \(lanes 0,1,2\) has nothing to interleave; take 1f1b",
        ),
        (
            lambda: pipeline_schedule("interleaved", (0, 1, 1, 0), 4),
            "interleaved: lanes 0,1,1,0 of 4 stages; it needs .* in turn, like 0,1,0,1",
        ),
        (
            lambda: pipeline_schedule("interleaved", (0, 1, 0, 1), 5),
            "interleaved: 5 micro-batches are not 2 equal rounds on 2 lanes; take 4 or 6 micro",
        ),
        (
            lambda: pipeline_schedule("zb1", (0, 1, 0), 4),
            "zb1: lanes 0,1,0 of 3 stages; it needs the same number .* like 0,1$",
        ),
        (
            lambda: pipeline_schedule("zb1", (0, 1, 2, 3) * 2, 14),
            "are not 3 equal rounds.*take 12 or 15",
        ),
        (
            lambda: pipeline_schedule("zbv", (0, 1, 2), 4),
            "zbv: lanes 0,1,2 of 3 stages; it needs two stages .* like 0,1,2,2,1,0",
        ),
        (lambda: pipeline_schedule("dualpipev", (0, 1, 0, 1), 4), "dualpipev: .*like 0,1,1,0"),
        (
            lambda: pipeline_schedule("dualpipev", (0, 1, 1, 0), 3),
            "dualpipev: 3 micro-batches for 4 stages; it needs at least as many micro-batches as",
        ),
        (
            lambda: textbook_lanes("zbv", 5),
            "zbv: 5 stages do not fill lanes of two stages; name the lanes, or take 4 or 6 stages",
        ),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PipelineScheduleError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_every_number_of_micro_batches_is_served_or_refused() -> None:
    for name, lanes, m in itertools.product(SCHEDULES, range(1, 7), range(1, 26)):
        uneven = name == "interleaved" and m % max(1, m // lanes)
        few = name == "dualpipev" and m < 2 * lanes
        lane_of = textbook_lanes(name, 2 * lanes)
        if uneven or few:
            with pytest.raises(PipelineScheduleError, match=f"{name}: {m} micro-batches"):
                pipeline_schedule(name, lane_of, m)
        else:
            check(pipeline_schedule(name, lane_of, m))
