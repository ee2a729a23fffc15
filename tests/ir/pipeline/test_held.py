"""Activations held by stages and lanes."""

from __future__ import annotations

from partitioner.ir.pipeline.text import from_csv
from partitioner.ir.pipeline.timeline import in_flight, lane_in_flight


def test_held_from_forward_to_backward() -> None:
    schedule = from_csv("0F0,2F0,0F1,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1I0,1I1,1W0,1W1")
    assert in_flight(schedule) == (2, 2, 1)
    assert lane_in_flight(schedule) == (3, 2)


def test_the_input_half_of_a_backward_pass_frees_nothing() -> None:
    assert in_flight(from_csv("0F0,0I0,0W0,0F1,0I1,0W1")) == (1,)
    assert in_flight(from_csv("0F0,0I0,0F1,0W0,0I1,0W1")) == (2,)


def test_without_training_a_lane_holds_what_it_computes() -> None:
    schedule = from_csv("0F0,0F1,2F0,2F1\n1F0,1F1")
    assert in_flight(schedule) == (1, 1, 1)
    assert lane_in_flight(schedule) == (1, 1)
