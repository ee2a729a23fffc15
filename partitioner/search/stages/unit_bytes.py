"""Bytes of a sharding by its units: at rest, kept from pass to pass of a step, within a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory.lifetimes import (
    HEADROOM_PERCENT,
    exact_lifetimes,
    usage_curves,
    with_headroom,
)
from partitioner.cost_model.memory.step_lives import StepLives
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.ir.graph import Graph
from partitioner.ir.phases import Part
from partitioner.ir.pipeline import LaneMoments, Span

Floats = npt.NDArray[np.float64]

#: Bytes that are reserved for one byte of a tensor.
RESERVED = HEADROOM_PERCENT / 100
#: The passes of a micro-batch, as `Moment.part` numbers them.
_PASSES = {Part.FORWARD: 0, Part.BACKWARD: 1, Part.WEIGHT: 2}


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes of a device, of the one that holds most.

    Attributes:
        at_rest: Before each position, with head-room: stored values, and what is made or read once
            a step: sums of gradients, and the gradients of one micro-batch, which are held to the
            end of a phase; (units + 1,).
        kept: Of one micro-batch before each position, without head-room, by `Span`;
            (3, units + 1).
        passing: Most within a pass (forward, backward or input gradients, weight gradients) while
            nodes of each unit run, with head-room, without what is kept for another pass; nothing
            else is held in those that run once a step; (3, units).
        kept_bytes: Of each value that is kept, by `Span`.
    """

    at_rest: Floats
    kept: Floats
    passing: Floats
    kept_bytes: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of(cls, graph: Graph, unit_of: Mapping[str, int], tasks: Schedule) -> StageMemory:
        """Those of the tasks of a step of micro-batches on one mesh.

        Args:
            graph: The graph of a micro-batch.
            unit_of: The unit that each node goes with.
            tasks: The tasks, whose order has one stage.
        """
        order, units = tasks.order, 1 + max(unit_of.values(), default=-1)
        assert order is not None
        lives = StepLives.of(tasks, order, exact_lifetimes(tasks))
        row = {device: index for index, device in enumerate(tasks.devices)}
        unit = {value: unit_of[node.name] for value, node in graph.producers.items()}
        rest, kept = np.zeros((len(row), units)), np.zeros((len(row), len(Span), units))
        for (device, (value, _)), held in tasks.residents.items():
            if value in unit and device in row:
                rest[row[device], unit[value]] += held
        kept_locals = {life.local for life, _ in lives.kept}
        added = (life for life in lives.begun if life.local not in kept_locals)
        for life in (*lives.always, *added):
            if life.value in unit and life.device in row:
                rest[row[life.device], unit[life.value]] += with_headroom(life.nbytes)
        of_value: dict[str, Counter[tuple[int, Span]]] = {}
        for life, (made, read) in lives.kept:
            span = _span(order.phases.of(made)[0], order.phases.of(read)[0])
            if span is not None:
                of_value.setdefault(life.value, Counter())[life.device, span] += life.nbytes
            if life.value not in unit or life.device not in row:
                continue
            device, at = row[life.device], unit[life.value]
            if span is None:
                rest[device, at] += with_headroom(life.nbytes)
            else:
                kept[device, span, at] += life.nbytes
        return cls(
            _before(rest.max(axis=0)),
            _before(kept.max(axis=0)),
            _passing(tasks, lives, unit_of, units),
            {value: _most(counts) for value, counts in of_value.items()},
        )

    def stretches(self, bounds: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
        """Bytes at rest of stretches, and kept ones without head-room; (stretches, 3)."""
        starts, stops = np.array(bounds).T
        return (
            self.at_rest[stops] - self.at_rest[starts],
            (self.kept[:, stops] - self.kept[:, starts]).T,
        )


@dataclass(frozen=True, eq=False)
class MomentRows:
    """The moments of a lane as arrays.

    Attributes:
        stages: The stages of the lane.
        held: Micro-batches by moment, stage and `Span`; (moments, stages, 3).
        running: The number of the stage among these that runs, and the pass; (2, moments).
    """

    stages: tuple[int, ...]
    held: Floats
    running: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lane: LaneMoments) -> MomentRows:
        """Those of a lane."""
        held = np.array([moment.held for moment in lane.moments], np.float64)
        running = [(lane.stages.index(moment.stage), moment.part) for moment in lane.moments]
        return cls(lane.stages, held, np.array(running, np.int64).T)

    def fixed(self, memory: StageMemory, bounds: Sequence[tuple[int, int]]) -> Floats:
        """Bytes at each moment beside those that are kept for other passes.

        Args:
            memory: The bytes by unit.
            bounds: The stretch of each stage of all lanes.
        """
        own = [bounds[stage] for stage in self.stages]
        most = np.array([memory.passing[:, start:stop].max(axis=1) for start, stop in own])
        return np.asarray(memory.stretches(own)[0].sum() + most[tuple(self.running)])

    def kept(self, nbytes: Floats) -> Floats:
        """Bytes that are kept at each moment, with head-room.

        Args:
            nbytes: Of one micro-batch, by stage of the lane and `Span`.
        """
        return np.asarray(RESERVED * np.einsum("msk,sk->m", self.held, nbytes))


def _before(nbytes: Floats) -> Floats:
    """Sums before each position, along the last axis."""
    return np.insert(np.cumsum(nbytes, axis=-1), 0, 0.0, axis=-1)


def _span(made: Part, read: Part) -> Span | None:
    """The passes between which a tensor is kept; None if the last pass makes it."""
    if made is Part.FORWARD:
        return Span.TO_WEIGHT if read is Part.WEIGHT else Span.TO_INPUT
    return Span.BETWEEN if read is Part.WEIGHT else None


def _passing(tasks: Schedule, lives: StepLives, unit_of: Mapping[str, int], units: int) -> Floats:
    assert tasks.order is not None
    curves, phases = usage_curves(tasks, lives.passing), tasks.order.phases
    most = np.max(list(curves.values()), axis=0) if curves else np.zeros(len(tasks.tasks))
    passing = np.zeros((len(_PASSES), units))
    for task, nbytes in zip(tasks.tasks, most, strict=True):
        if task.placed is not None and not phases.is_once(task.phase):
            at = _PASSES.get(phases.of(task.phase)[0], 0), unit_of[task.placed.node.name]
            passing[at] = max(passing[at], with_headroom(int(nbytes)))
    return passing


def _most(counts: Mapping[tuple[int, Span], int]) -> tuple[int, int, int]:
    """Bytes by span, each of the device that holds most."""
    most = [max((n for (_, of), n in counts.items() if of is span), default=0) for span in Span]
    return most[0], most[1], most[2]
