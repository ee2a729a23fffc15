"""The referee of schedules names the first fault; executing the lanes finds deadlocks."""

from __future__ import annotations

import pytest

from partitioner.ir.pipeline.actions import (
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.pipeline.text import from_csv
from partitioner.ir.pipeline.timeline import check

CHAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


def test_good_tables_pass() -> None:
    for text in (
        CHAIN,
        "0F0,0F1\n1F0,1F1",
        "0F0,0I0,0W0",
        "0F0,0F1,0I0,0B1,0W0\n1F0,1F1,1B0,1I1,1W1",
        "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0",
        "0F0,2F0,2B0,0B0\n1F0,1B0",
    ):
        check(from_csv(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHAIN.replace("0F0,0F1", "0F1,0F0"), "lane 0: 0F1 stands where 0F0 is due"),
        (CHAIN.replace("0F0,0F1", "0F0,0F1,0F1"), "lane 0: 0F1 stands where 0F2 is due"),
        ("0F0,0F1\n1F0", "lane 1: 1F1 is missing"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "lane 0: stage 0 runs micro-batch 1 backward 0 times"),
        (CHAIN + ",1B1", "lane 1: stage 1 runs micro-batch 1 backward 2 times as 1B1, 0 as 1I1"),
        ("0F0,0B0,0W0", "backward 1 times as 0B0, 0 as 0I0, 1 as 0W0: it must be one B, or one I"),
        ("0F0,0I0", "0 times as 0B0, 1 as 0I0, 0 as 0W0"),
        ("0F0,0W0", "0 times as 0B0, 0 as 0I0, 1 as 0W0"),
        ("0F0,0W0,0I0", "lane 0: 0W0 waits for 0I0, which stands after it"),
        ("0B0,0F0", "lane 0: 0B0 waits for 0F0, which stands after it"),
        ("1F0,1B0,0F0,0B0", "lane 0: 1F0 waits for 0F0, which stands after it"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "lane 0: 0B0 waits for 1B0, which lane 1 runs after 1F1 and cannot start",
        ),
        (
            "0F0,0B0,2F0,2B0\n1F0,1B0",
            "lane 0: 0B0 waits for 1B0, which lane 1 runs and cannot start: the lanes wait",
        ),
        ("0F0,0F1,0B0\n1F5", "lane 1: 1F5 stands where 1F0 is due"),
        ("0F0,0F999999999", "lane 0: 0F999999999 stands where 0F1 is due"),
        ("0F0,0B999999999", "lane 0: stage 0 runs micro-batch 0 backward 0 times"),
    ],
)
def test_faults(text: str, message: str) -> None:
    with pytest.raises(PipelineScheduleError, match=message) as raised:
        check(from_csv(text))
    assert "\n" not in str(raised.value)


F0 = Action(0, ActionKind.FORWARD, 0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (PipelineSchedule("x", (), 1, ()), "at least one stage"),
        (PipelineSchedule("x", (0,), 0, ((F0,),)), "0 micro-batches: a schedule has at least one"),
        (PipelineSchedule("x", (0, -1), 1, ((F0,),)), "lane -1: lanes count from 0"),
        (
            PipelineSchedule("x", (0, 2), 1, ((F0,), (), ())),
            r"lane 1 runs no stage: lanes of the stages are 0,2, and all of 0\.\.2 must be",
        ),
        (PipelineSchedule("x", (0,), 1, ()), "0 rows of actions for 1 lanes"),
        (
            PipelineSchedule("x", (0, 1), 1, ((), (F0,))),
            "lane 1: 0F0 is of stage 0, which lane 0 runs",
        ),
        (
            PipelineSchedule("x", (0,), 1, ((Action(1, ActionKind.FORWARD, 0),),)),
            r"lane 0: 1F0 is out of range: there are stages 0\.\.0 and micro-batches 0\.\.0",
        ),
        (
            PipelineSchedule("x", (0,), 1, ((Action(0, ActionKind.SEND_F, 0),),)),
            "lane 0: 0SEND_F0 computes nothing; a schedule holds F, B, I and W",
        ),
    ],
)
def test_faults_that_no_table_has(schedule: PipelineSchedule, message: str) -> None:
    with pytest.raises(PipelineScheduleError, match=message):
        check(schedule)


def test_edges_say_what_waits() -> None:
    towers = from_csv("1F0,0F0,2F0,2B0,1B0,0B0")
    check(towers, [(0, 2), (1, 2)])
    with pytest.raises(PipelineScheduleError, match="lane 0: 1F0 waits for 0F0, which stands"):
        check(towers)
    skip = from_csv("0F0,0B0,2F0,2B0\n1F0,1B0")
    check(skip, [(0, 1)])
    with pytest.raises(PipelineScheduleError, match="lane 0: 0B0 waits for 2B0, which stands"):
        check(skip, [(0, 1), (0, 2)])


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 2), (-1, 0)])
def test_edges_lead_to_later_stages(edge: tuple[int, int]) -> None:
    schedule = pipeline_schedule("forward", (0, 1), 1)
    with pytest.raises(PipelineScheduleError, match=rf"edge {edge[0]}-{edge[1]}: an edge leads"):
        check(schedule, [edge])
