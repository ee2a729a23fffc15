"""Pipeline schedules as data: which lane runs which action of which micro-batch, in which order."""

from partitioner.ir.pipeline.actions import (
    UNIT_DURATIONS,
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.generate import (
    SCHEDULES,
    ScheduleName,
    pipeline_schedule,
    textbook_lanes,
)
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.pipeline.timeline import (
    bubble_share,
    check,
    in_flight,
    lane_in_flight,
    makespan,
    start_times,
)

__all__ = [
    "SCHEDULES",
    "UNIT_DURATIONS",
    "Action",
    "ActionKind",
    "PipelineSchedule",
    "PipelineScheduleError",
    "ScheduleName",
    "bubble_share",
    "check",
    "from_csv",
    "in_flight",
    "lane_in_flight",
    "makespan",
    "pipeline_schedule",
    "start_times",
    "textbook_lanes",
    "to_csv",
]
