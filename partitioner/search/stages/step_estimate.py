"""An estimate of the seconds of a step by the figures of its stages, for comparing cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from partitioner.ir.phases import RunOrder
from partitioner.ir.pipeline.actions import Action, ActionKind, PipelineSchedule
from partitioner.ir.pipeline.timeline import dataflow, in_flight, needs, start_times
from partitioner.search.stages.figures import FORWARD, INPUT, ONCE, ROUNDING, WEIGHT, StageFigures
from partitioner.search.stages.stage_lives import Floats, LaneRuns

#: The order of an estimate's durations: of each kind of action, those of all stages.
_DURATIONS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.FULL_BACKWARD,
)


class StepEstimate:
    """Seconds of a step by the figures of a chain of stages, without a plan: for comparing cuts."""

    def __init__(self, figures: StageFigures, table: PipelineSchedule) -> None:
        self.figures = figures
        self.table = table
        self.held = in_flight(table)
        self.splits = table.splits_backward
        order = RunOrder(table, tuple((lane,) for lane in range(len(table.lanes))))
        self.runs = tuple(LaneRuns.of(order, lane) for lane in range(len(table.lanes)))
        unlike_lanes = [*dict.fromkeys(figures.of_lanes)]
        self._sums = np.stack([lane.load_sums for lane in unlike_lanes])
        lane_numbers = [unlike_lanes.index(figures.of_lanes[lane]) for lane in table.lane_of]
        self._sums_of = np.array(lane_numbers)  # of each stage its row of `_sums`
        self._pace = figures.paces[[*table.lane_of]]  # by stage
        starts = start_times(table)
        timed = sorted(
            (start, lane, index)
            for lane, begun in enumerate(starts)
            for index, start in enumerate(begun)
        )
        numbers: dict[Action, int] = {}
        stages, lanes = len(table.lane_of), len(table.lanes)
        self._runs = np.zeros((lanes, len(_DURATIONS) * stages))  # of each duration, by lane
        self._passing = np.zeros((lanes, stages))  # messages over each boundary; the last is none
        # Lane, the action waited for, the boundary between them, the duration's number in
        # `seconds`, and the boundary that the result is sent over; -1 for none.
        self._order: list[tuple[int, int, int, int, int]] = []
        for _, lane, index in timed:
            action = table.lanes[lane][index]
            need, boundary = self._awaited(action, numbers)
            numbers[action] = len(self._order)
            sent = action.stage if action.kind is ActionKind.FORWARD else action.stage - 1
            if action.kind is ActionKind.BACKWARD_WEIGHT or not 0 <= sent < stages - 1:
                sent = -1
            duration = _DURATIONS.index(action.kind) * stages + action.stage
            self._order.append((lane, need, boundary, duration, sent))
            self._runs[lane, duration] += 1
            self._passing[lane, [sent, boundary]] += 1

    def _awaited(self, action: Action, numbers: Mapping[Action, int]) -> tuple[int, int]:
        """The action that one waits for, and the end between their lanes; -1 for none."""
        stage, lane_of = action.stage, self.table.lane_of
        for one in chain(*needs(action, dataflow(len(lane_of)))):
            if one.stage != stage and one in numbers:
                is_apart = lane_of[one.stage] != lane_of[stage]
                return numbers[one], min(one.stage, stage) if is_apart else -1
        return -1, -1

    def least_s(self, ends: Sequence[int], again: Floats | None = None) -> float:
        """No step takes less: the seconds that the busiest lane is busy; args as of `seconds`."""
        durations, (_, busy), once = self._figures(ends, again)
        of_lane = self._runs @ durations + self._passing @ busy
        np.add.at(of_lane, list(self.table.lane_of), once)
        return float(of_lane.max()) * (1 - ROUNDING)

    def _figures(self, ends: Sequence[int], again: Floats | None) -> tuple[Floats, Floats, Floats]:
        """Durations of the actions, seconds of messages over boundaries, and those of once a step.

        Messages have rows as of `StageFigures.messages`; nothing is sent at the last boundary.
        """
        bounds = np.array((0, *ends))
        sums, of = self._sums, self._sums_of
        parts = (sums[of, :, bounds[1:]] - sums[of, :, bounds[:-1]]).T
        messages = self.figures.messages[:, bounds[1:]]
        messages[:, -1] = 0.0
        if again is not None:
            parts[INPUT] += again * self._pace
        both = parts[INPUT] + parts[WEIGHT]
        durations = np.concatenate((parts[FORWARD], parts[INPUT], parts[WEIGHT], both))
        return durations, messages, parts[ONCE]

    def seconds(self, ends: Sequence[int], again: Floats | None = None) -> float:
        """Seconds of a step of stages with these ends, exclusive.

        `again` has the seconds of a micro-batch that each computes again, on the devices of the
        figures; None for none.
        """
        figures, messages, once = self._figures(ends, again)
        durations, (whole, busy) = figures.tolist(), messages.tolist()
        free = [0.0] * len(self.table.lanes)
        done: list[float] = []
        for lane, need, boundary, duration, sent in self._order:
            begin = free[lane]
            if boundary >= 0:
                begin = max(begin + busy[boundary], done[need] + whole[boundary])
            elif need >= 0:
                begin = max(begin, done[need])
            end = begin + durations[duration]
            done.append(end)
            free[lane] = end + busy[sent]
        for stage, lane in enumerate(self.table.lane_of):
            free[lane] += float(once[stage])
        return max(free)
