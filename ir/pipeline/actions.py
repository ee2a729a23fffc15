"""Actions of a pipeline, and the schedule that gives each lane its actions in order.

A *stage* is a part of the model; its index counts along the flow of data. A *lane* is the set of
ranks that runs a stage; several stages may share a lane. Micro-batches count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from partitioner.ir.errors import IRError


class PipelineScheduleError(IRError):
    """A pipeline schedule that breaks its rules, or that cannot be made as asked."""


class ActionKind(StrEnum):
    """The work of a lane for a stage, in the words of torch.distributed.pipelining."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"  #: The gradients of the stage's inputs: what the stage before waits for.
    BACKWARD_WEIGHT = "W"  #: The gradients of the stage's weights: nothing waits for them.
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"

    @property
    def computes(self) -> bool:
        """Tell whether schedules hold actions of this kind; the others stand in lowered tables."""
        return self in UNIT_DURATIONS


#: Durations of the kinds that compute: a full backward pass costs two forward passes, and its two
#: halves one each, as in the zero-bubble paper (arXiv:2401.10241, section 2).
UNIT_DURATIONS: Mapping[ActionKind, int] = MappingProxyType(
    {
        ActionKind.FORWARD: 1,
        ActionKind.FULL_BACKWARD: 2,
        ActionKind.BACKWARD_INPUT: 1,
        ActionKind.BACKWARD_WEIGHT: 1,
    }
)


class Action(NamedTuple):
    """A computation of a stage for a micro-batch."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each lane, in the order in which the lane runs them.

    Nothing is checked here: `partitioner.ir.pipeline.timeline` says whether it can run.
    """

    name: str
    lane_of: tuple[int, ...]  #: Lane of each stage.
    micro_batches: int
    lanes: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lane_of)

    @cached_property
    def trains(self) -> bool:
        """Tell whether there are backward passes."""
        backward = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT)
        return any(action.kind in backward for lane in self.lanes for action in lane)

    @property
    def splits_backward(self) -> bool:
        """Tell whether gradients of inputs and of weights are computed apart."""
        halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        return any(action.kind in halves for lane in self.lanes for action in lane)
