"""Activations held by stages and lanes."""

from __future__ import annotations

from partitioner.ir.pipeline import (
    from_csv,
    in_flight,
    lane_in_flight,
    lane_moments,
    lane_peak,
    pipeline_schedule,
)


def test_held_from_forward_to_backward() -> None:
    schedule = from_csv("0F0,2F0,0F1,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1I0,1I1,1W0,1W1")
    assert in_flight(schedule) == (2, 2, 1)
    assert lane_in_flight(schedule) == (3, 2)
    assert lane_peak(schedule, (10, 5, 100)) == (120, 10)


def test_the_input_half_of_a_backward_pass_frees_nothing() -> None:
    assert in_flight(from_csv("0F0,0I0,0W0,0F1,0I1,0W1")) == (1,)
    assert in_flight(from_csv("0F0,0I0,0F1,0W0,0I1,0W1")) == (2,)


def test_without_training_a_lane_holds_what_it_computes() -> None:
    schedule = from_csv("0F0,0F1,2F0,2F1\n1F0,1F1")
    assert in_flight(schedule) == (1, 1, 1)
    assert lane_in_flight(schedule) == (1, 1)
    assert lane_peak(schedule, (10, 5, 100)) == (100, 5)


def test_moments_of_a_lane_that_puts_weight_gradients_off() -> None:
    """Stage 0 holds three micro-batches at most; two more gradients of inputs wait for their W."""
    schedule = from_csv("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W1,0W2")
    (lane,) = lane_moments(schedule)
    assert lane.stages == (0,)
    assert {(moment.part, moment.held) for moment in lane.moments} == {
        (0, ((3, 3, 0),)),
        (1, ((3, 3, 1),)),
        (1, ((2, 3, 2),)),
        (2, ((1, 3, 2),)),
    }


def test_moments_of_whole_backward_passes_keep_what_the_forward_pass_left() -> None:
    schedule = pipeline_schedule("1f1b", (0, 1), 4)
    assert [
        {(moment.part, moment.held) for moment in lane.moments} for lane in lane_moments(schedule)
    ] == [{(0, ((2, 2, 0),)), (1, ((2, 2, 0),))}, {(0, ((1, 1, 0),)), (1, ((1, 1, 0),))}]


def test_moments_of_two_stages_on_a_lane_count_both() -> None:
    lanes = lane_moments(pipeline_schedule("zbv", (0, 1, 1, 0), 4))
    assert [lane.stages for lane in lanes] == [(0, 3), (1, 2)]
    most = [max(moment.held, key=lambda held: held[2]) for lane in lanes for moment in lane.moments]
    assert max(held[2] for held in most) == 2, "the last lane puts two of each stage off"
