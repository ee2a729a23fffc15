"""Turns: what a rank runs at a time, and when others send to it."""

import pytest

from partitioner.backends.onnx.running.turns import Action, MicroBatchTurns, Role, Turns
from partitioner.ir.phases import RunOrder
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.program import Comm, CommKind

LANES = (0, 1, 0)  # stages 0 and 2 are on the same device


def acting(phase: int) -> Action:
    """A part of a rank's steps."""
    return Action(0, Role.COMPUTE, phase, (), ())


def micro_batches(requests: int = 2, count: int = 3) -> MicroBatchTurns:
    order = RunOrder(pipeline_schedule("forward", LANES, count), ((0,), (1,)))
    return MicroBatchTurns(requests, order)


def message(phase: int, target_phase: int) -> Comm:
    return Comm(
        0, CommKind.SEND, (0, 1), "a", "a", "float32", phase=phase, target_phase=target_phase
    )


@pytest.mark.parametrize("turns", [Turns(1), Turns(4), micro_batches(), micro_batches(1, 5)])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_pass_runs_each_step_once_in_the_turn_that_others_compute(
    turns: Turns, rank: int
) -> None:
    steps = [acting(1), acting(3)] if rank == 0 else [acting(2), acting(2)]
    ran = {}
    done = []
    for index, turn in enumerate(turns.of_rank(rank, steps)):
        for step, number in turn.actions:
            assert (step, number) not in ran
            ran[step, number] = index
        done += [turn.done] if turn.done is not None else []
    assert ran == {
        (step, number): turns.turn(rank, step.phase, number)
        for step in steps
        for number in range(turns.passes)
    }
    assert done == list(range(turns.requests))


def test_several_requests_shift_phases_and_a_single_one_has_one_round() -> None:
    steps = [acting(0), acting(1)]
    names = [[("ab"[s.phase], n) for s, n in turn.actions] for turn in Turns(2).of_rank(0, steps)]
    assert names == [[("a", 0)], [("a", 1), ("b", 0)], [("b", 1)]]
    (turn,) = Turns(1).of_rank(0, steps)
    assert [number for _, number in turn.actions] == [0, 0]


def test_a_step_of_once_a_request_runs_for_its_first_micro_batch_alone() -> None:
    turns = list(micro_batches().of_rank(1, [acting(0), acting(2)]))
    ran = [(step.phase, number) for turn in turns for step, number in turn.actions]
    assert ran == [
        *((0, 0), (2, 0), (2, 1), (2, 2)),
        *((0, 3), (2, 3), (2, 4), (2, 5)),
    ]


def test_data_is_expected_a_turn_ahead() -> None:
    """Rank 1 runs stage 1, phase 2, in turns 1, 2 and 3 of a request: behind the setup."""
    turns, comm = micro_batches(), message(1, 2)
    expected = {now: turns.is_expected(1, comm, 2, now) for now in range(4)}
    assert expected == {0: False, 1: False, 2: True, 3: True}
    rounds = Turns(3)
    assert not rounds.is_expected(1, comm, 1, 1)
    assert rounds.is_expected(1, comm, 1, 2)


def test_a_sender_waits_for_data_once_the_receiver_cannot_be_behind() -> None:
    turns, comm = micro_batches(), message(1, 2)
    last = len(turns.order.runs(0)) - 1  # of the first request
    assert [turns.taken(0, comm, number) for number in range(4)] == [*[last] * 3, 2 * last + 1]
    assert Turns(3).taken(0, comm, 1) == 3
