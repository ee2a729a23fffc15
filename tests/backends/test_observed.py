"""Events of ranks become figures of tasks: waiting is told from work, clocks are put together."""

from pathlib import Path

import pytest

from partitioner.backends.launch import load_logs, save_log
from partitioner.backends.observed import (
    Event,
    RankLog,
    Role,
    Step,
    measured_ranks,
    recorded_step_s,
)
from partitioner.backends.process_group import offset_of


def compute(node: str, begin: float, end: float) -> Event:
    return Event((node,), (), "MatMul", Role.COMPUTE, begin, end)


def comm(role: Role, begin: float, end: float) -> Event:
    return Event((), (3,), "all_reduce", role, begin, end)


def log(*steps: Step, peak_bytes: int | None = 7) -> RankLog:
    return RankLog("fake 1.0", 1, steps, (1.0,), peak_bytes)


def collective(late_s: float, shift: float) -> tuple[Step, Step]:
    """A step of two ranks whose second comes `late_s` later to an all-reduce of one second."""
    first = (
        compute("a", shift, shift + 1),
        comm(Role.SEND, shift + 1, shift + 1),
        comm(Role.RECEIVE, shift + 1, shift + 2 + late_s),
    )
    second = (
        compute("a", shift, shift + 1 + late_s),
        comm(Role.SEND, shift + 1 + late_s, shift + 1 + late_s),
        comm(Role.RECEIVE, shift + 1 + late_s, shift + 2 + late_s),
    )
    end = shift + 2 + late_s
    return Step(shift, end, first), Step(shift, end, second)


def test_waiting_for_the_last_rank_is_not_the_work_of_a_communication() -> None:
    steps = [collective(late, shift) for late, shift in ((0.5, 10.0), (0.25, 20.0), (0.75, 30.0))]
    first, second = (log(*ranks) for ranks in zip(*steps, strict=True))
    one, other = measured_ranks([first, second])
    (a, reduced), (_, reduced_there) = one.tasks, other.tasks
    assert (a.nodes, a.start_s, a.seconds) == (("a",), 0.0, 1.0)
    assert reduced.comms == (3,)
    assert reduced.seconds == pytest.approx(1.0)
    assert reduced.waited_s == pytest.approx(0.5)
    assert reduced.start_s == pytest.approx(1.0)
    assert (reduced_there.seconds, reduced_there.waited_s) == (pytest.approx(1.0), 0.0)
    assert recorded_step_s([first, second]) == pytest.approx(2.5)
    assert one.peak_bytes == 7


def test_a_sender_waits_for_nobody() -> None:
    sender = Step(0.0, 2.0, (comm(Role.SEND, 1.0, 2.0),))
    receiver = Step(0.0, 5.0, (comm(Role.RECEIVE, 0.0, 5.0),))
    (sent,), (received,) = (rank.tasks for rank in measured_ranks([log(sender), log(receiver)]))
    assert (sent.seconds, sent.waited_s) == (1.0, 0.0)
    assert (received.seconds, received.waited_s) == (4.0, 1.0)


def test_events_of_one_task_are_added_and_stand_where_the_longest_is() -> None:
    step = Step(0.0, 9.0, (compute("a", 1.0, 2.0), compute("b", 2.0, 4.0), compute("a", 5.0, 8.0)))
    (rank,) = measured_ranks([log(step)])
    tasks = {task.nodes: task for task in rank.tasks}
    assert tasks["a",].seconds == 4.0
    assert tasks["a",].start_s == 5.0
    assert tasks["b",].spread == 0.0


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    first, _ = collective(0.5, 10.0)
    written = log(first, peak_bytes=None)
    save_log(tmp_path, 0, written)
    assert load_logs(tmp_path, 1) == (written,)
    assert written.shifted(10.0).steps[0].events[0].begin_s == 0.0


def test_clocks_of_one_machine_are_one_and_others_are_moved() -> None:
    spans = [(float(at), at + 0.5) for at in range(4)]
    skewed = [(begin - 0.1, end + 0.1) for begin, end in spans]
    assert offset_of(spans, skewed) == 0.0
    ahead = [(begin + 1000, end + 1000) for begin, end in spans]
    assert offset_of(ahead, spans) == pytest.approx(1000)
    assert offset_of(spans, ahead) == pytest.approx(-1000)
