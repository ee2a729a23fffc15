"""Lifetimes in a step of a plan with stages: what is held within a phase, and across phases.

A tensor that a later phase reads is held, once for each micro-batch in flight, from the end of the
phase that makes it to the end of the last one that reads it, in the order of the schedule. What is
made once a step is held throughout, and so is one sum of what is reduced once a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.cost_model.memory.lifetimes import (
    Curves,
    Lifetime,
    roots_of,
    summed_tensors,
    usage_curves,
)
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey
from partitioner.ir.phases import Part, StepOrder
from partitioner.ir.pipeline import ActionKind


@dataclass(frozen=True)
class Uses:
    """The phases in which devices use local tensors.

    Attributes:
        roots: The tensor whose memory each view or alias names.
        by_root: The phases in which a tensor or a view of it is read, written, sent or received.
        arrived: The phases in which a tensor is received.
    """

    roots: Mapping[LocalKey, LocalKey]
    by_root: Mapping[LocalKey, set[int]]
    arrived: Mapping[LocalKey, set[int]]

    @classmethod
    def of(cls, schedule: Schedule) -> Uses:
        """Read them from the tasks of a schedule."""
        roots = roots_of(schedule)
        by_root: dict[LocalKey, set[int]] = defaultdict(set)
        arrived: dict[LocalKey, set[int]] = defaultdict(set)
        for task in schedule.tasks:
            for local in task.reads:
                by_root[roots.get(local, local)].add(task.phase)
            for device, key, _ in task.writes:
                local = device, key
                by_root[roots.get(local, local)].add(task.target_phase)
                if task.comm is not None:
                    arrived[local].add(task.target_phase)
        return cls(roots, by_root, arrived)

    def of_life(
        self,
        life: Lifetime,
        made: int,
        read: int,
        own: Container[int],
        place: Mapping[int, float] | None = None,
    ) -> tuple[int, int]:
        """The phases in which a device makes or gets a tensor, and in which it uses it last.

        Args:
            life: The tensor.
            made, read: The phases of its first and its last task, of any device.
            own: The phases that the device runs.
            place: The turns of these phases, if they run in another order than that of numbers.
        """
        if not life.buffer and made in own and read in own and place is None:
            return made, read
        local = life.local
        used = self.by_root.get(self.roots.get(local, local)) or {made}
        if place is not None:
            read = max({read, *used} & place.keys(), key=place.__getitem__, default=read)
            if not life.buffer and made in own and read in own:
                return made, read
        begun = made
        if life.buffer:
            arrived = self.arrived.get(local, used)
            begun = min((phase for phase in arrived if phase >= made), default=min(used))
        elif made not in own:
            begun = min(used)
        return begun, read if read in own else max(used)


@dataclass(frozen=True)
class StepLives:
    """The lifetimes of a step of a plan with stages, by how long they are held.

    Attributes:
        passing: Tensors that are made and read within a phase, as positions in `Schedule.tasks`.
        begun: Of the tensors below, from the task that writes each to the end of its phase.
        kept: Tensors that a later phase reads, with the phases that make them and that read them
            last: held once for each micro-batch in between.
        always: Tensors that are made once a step, those of several micro-batches that are read
            once, and gradients that are added up: held throughout. In inference also the
            inputs of all micro-batches, one after the other as one tensor.
    """

    passing: Sequence[Lifetime]
    begun: Sequence[Lifetime]
    kept: Sequence[tuple[Lifetime, tuple[int, int]]]
    always: Sequence[Lifetime]

    @property
    def inside(self) -> Sequence[Lifetime]:
        """All that is held within a phase."""
        return (*self.passing, *self.begun)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        order: StepOrder,
        lifetimes: Iterable[Lifetime],
        uses: Uses | None = None,
    ) -> StepLives:
        """Sort lifetimes along the tasks of one micro-batch by how long they are held.

        A device runs the phases of its own stages alone: it holds a tensor from the phase in which
        it makes or gets it to the last one of its own that uses it.
        """
        phase_at = [task.phase for task in schedule.tasks]
        start_of: dict[int, int] = {}
        for position, phase in enumerate(phase_at):
            start_of.setdefault(phase, position)
        end_of = {phase: position for position, phase in enumerate(phase_at)}
        uses = uses or Uses.of(schedule)
        passing: list[Lifetime] = []
        begun: list[Lifetime] = []
        kept: list[tuple[Lifetime, tuple[int, int]]] = []
        fed, given = _borders(schedule, order, uses)
        end, count = order.phases.number(Part.REDUCE), order.table.micro_batches
        summed = summed_tensors(schedule, uses.roots) if count > 1 else frozenset()
        lifetimes = tuple(lifetimes)
        inputs = {x for x in lifetimes if x.local in fed and not x.buffer} if fed else set()
        always = [
            x._replace(nbytes=x.nbytes * count) for x in sorted(inputs, key=lambda x: x.value)
        ]
        once = {phase for phase in range(end + 1) if order.phases.is_once(phase)}
        own_of = {device: order.own(device) for device in {x.device for x in lifetimes}}
        for life in (x for x in lifetimes if x not in inputs) if inputs else lifetimes:
            local, phases = life.local, (phase_at[life.first], phase_at[life.last])
            device = life.device
            made, read = uses.of_life(life, *phases, own_of[device], order.places(device))
            begin, stop = max(life.first, start_of.get(made, 0)), end_of.get(made, 0)
            span = life._replace(first=begin, last=max(life.first, stop))
            is_given = bool(given) and local in given
            if made not in once and local in summed:
                always.append(life)
                begun.append(span)
                continue
            if made == read and not is_given:
                passing.append(span._replace(last=max(begin, min(life.last, span.last))))
                continue
            if made in once or (read in once and not is_given and count > 1):
                always.append(life)
            else:
                kept.append((life, (made, end if is_given else read)))
            if made not in once:
                begun.append(span)
        return cls(passing, begun, kept, always)


def _borders(
    schedule: Schedule, order: StepOrder, uses: Uses
) -> tuple[frozenset[LocalKey], frozenset[LocalKey]]:
    """Parts of inputs and of outputs of all micro-batches of a step of inference.

    Inputs are there when it begins, outputs until it ends. In training they are small, or summed.
    """
    if any(a.kind is not ActionKind.FORWARD for lane in order.table.lanes for a in lane):
        return frozenset(), frozenset()
    given = frozenset(uses.roots.get(local, local) for local in schedule.outputs)
    return frozenset(schedule.feeds), given


def step_curves(
    schedule: Schedule, order: StepOrder, lifetimes: Sequence[Lifetime], uses: Uses | None
) -> Curves:
    """Count the most activation bytes at each task position, of a plan with stages.

    While a phase runs, all that earlier phases keep is held.
    """
    lives = StepLives.of(schedule, order, lifetimes, uses)
    phase_at = np.fromiter((task.phase for task in schedule.tasks), np.int64, len(schedule.tasks))
    phases_end = 1 + order.phases.number(Part.REDUCE)
    kept: dict[int, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    always: dict[int, int] = defaultdict(int)
    for life, phases in lives.kept:
        kept[life.device][phases] += life.nbytes
    for life in lives.always:
        always[life.device] += life.nbytes
    curves = dict(usage_curves(schedule, lives.inside))
    for device in {*kept, *always}:
        held = np.zeros(phases_end, np.int64)
        for phase, nbytes in _most_held(kept[device], order.runs(device)).items():
            held[phase] = nbytes
        base = held[phase_at]
        zeros = np.zeros(len(phase_at), np.int64)
        curves[device] = curves.get(device, zeros) + base + always[device]
    return curves


def _most_held(
    kept: Mapping[tuple[int, int], int], runs: Iterable[tuple[int, int]]
) -> Mapping[int, int]:
    """Count the most bytes that other phases keep while a phase runs, by phase.

    `kept` has the bytes of a micro-batch by the phases that make them and that read them last.
    """
    held, most = 0, defaultdict[int, int](int)
    made: dict[int, int] = defaultdict(int)
    freed: dict[int, int] = defaultdict(int)
    for (first, last), nbytes in kept.items():
        made[first] += nbytes
        freed[last] += nbytes
    for phase, _ in runs:
        most[phase] = max(most[phase], held)
        held += made[phase] - freed[phase]
    return most
