"""Micro-batches that a schedule holds: a stage's from its forward pass to its B or W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from partitioner.ir.pipeline.actions import ActionKind, PipelineSchedule

_ENDS = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)
Numbers = npt.NDArray[np.int64]


def held_before(runs: Sequence[int], pairs: Numbers) -> Numbers:
    """Count the micro-batches of which tensors are held when each of some phases begins.

    Args:
        runs: The phases that a device runs, in order, each as often as there are micro-batches.
        pairs: The phases that make and that free each kind of tensors; (kinds, 2).

    Returns:
        Numbers of micro-batches; (runs, kinds).
    """
    phases = np.asarray(runs, np.int64)[:, None]
    changes = (phases == pairs[:, 0]).astype(np.int64) - (phases == pairs[:, 1])
    return np.asarray(np.cumsum(changes, axis=0) - changes)


def in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each stage the most micro-batches whose activations it holds at once.

    A stage that does not train holds those of the one micro-batch that it computes.
    """
    return tuple(np.max([held.max(axis=0) for held in _held(schedule)], axis=0).tolist())


def lane_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each lane the most activations (of any of its stages) that it holds at once."""
    return tuple(int(held.sum(axis=1).max()) for held in _held(schedule))


def _held(schedule: PipelineSchedule) -> Iterator[Numbers]:
    """Micro-batches held by stage during each forward pass of a lane; (passes, stages)."""
    pairs = np.array([(stage, schedule.stages + stage) for stage in range(schedule.stages)])
    for lane in schedule.lanes:
        forward = np.array([a.kind is ActionKind.FORWARD for a in lane])
        stages = np.array([action.stage for action in lane])
        runs = stages + schedule.stages * np.array([action.kind in _ENDS for action in lane])
        runs[~forward & (runs < schedule.stages)] = -1  # the input half of a backward pass
        held = held_before(runs, pairs) if schedule.trains else np.zeros((len(runs), len(pairs)))
        yield (held + (stages[:, None] == pairs[:, 0])).astype(np.int64)[forward]
