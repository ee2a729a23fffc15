"""Bytes of stages that are not planned yet: the tensors of a sharding, by the units that use them.

A sharding's tasks on one mesh say which units make and use each tensor. On the devices of a stage a
tensor is held from the first of the stage's units that use it to the last; one that another stage
makes arrives as the pass begins that reads it first, and one that another stage reads is held to
the end of the pass that makes it. A view arrives as a tensor of its own. So the tensors of any
stretches are columns of `Lives`, as the referee has them of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory.lifetimes import (
    HEADROOM_PERCENT,
    Lifetime,
    exact_lifetimes,
    in_flight,
    roots_of,
    summed_tensors,
)
from partitioner.cost_model.memory.lives import Lives, Numbers, held_before
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_view, row_of
from partitioner.ir.phases import Part, Phases, RunOrder

Floats = npt.NDArray[np.float64]

#: Bytes that are reserved for one byte of a tensor.
RESERVED = HEADROOM_PERCENT / 100
_PARTS = tuple(Part)
#: Uses that count always, if the other unit is of the same stages, if it is not, and two that are
#: sends to it: one that counts then, and one that does if no stage beside begins with the unit.
_ALWAYS, _WITH, _WITHOUT, _SENT, _FAR = range(5)


class Span(IntEnum):
    """The passes between which a stage keeps a tensor of a micro-batch.

    Where backward passes are not split, all that the forward pass leaves is `TO_INPUT`.
    """

    TO_INPUT = 0  #: From the forward pass to that of input gradients.
    TO_WEIGHT = 1  #: From the forward pass to that of weight gradients.
    BETWEEN = 2  #: From input gradients to weight gradients.


_SPANS = ((Part.FORWARD, Part.BACKWARD), (Part.FORWARD, Part.WEIGHT), (Part.BACKWARD, Part.WEIGHT))


@dataclass(frozen=True, eq=False)
class LaneRuns:
    """Moments of a lane: of two of one pass, one that holds no more is left out."""

    stages: tuple[int, ...]  #: The stages of the lane, ascending.
    phases: Phases  #: Phases of these stages, numbered among themselves.
    running: Numbers  #: The phase of each moment; (moments,).
    #: Micro-batches by moment and by the phases that make and that free a tensor, with the one that
    #: runs; (moments, phases, phases).
    held: Numbers
    turns: tuple[float, ...]  #: The mean turn of each phase.

    @classmethod
    def of(cls, order: RunOrder, lane: int) -> LaneRuns:
        """The runs of a lane, whose number is that of its only device."""
        stages = tuple(stage for stage, of in enumerate(order.table.lane_of) if of == lane)
        phases = Phases(len(stages), order.phases.splits)
        runs = []
        for part, stage in (order.phases.of(phase) for phase, _ in order.runs(lane)):
            runs.append(phases.number(part, stages.index(stage) if stage in stages else 0))
        size = 1 + phases.number(Part.REDUCE)
        pairs = np.indices((size, size)).reshape(2, -1).T
        running = np.array(runs)
        occurs = np.isin(pairs, runs).all(axis=1) & (pairs[:, 0] < pairs[:, 1])
        occurs &= (pairs[:, 0] > 0) & (pairs[:, 0] < phases.number(Part.DELIVER))
        if order.table.trains and order.table.micro_batches > 1:  # what the end of a step reads
            occurs &= pairs[:, 1] < phases.number(Part.DELIVER)  # is held throughout, as one sum
        held = (held_before(runs, pairs) + (running[:, None] == pairs[:, 0])) * occurs
        moments = np.unique(np.insert(held, 0, running, axis=1), axis=0)
        best: list[Numbers] = []
        for moment in moments[np.argsort(-moments[:, 1:].sum(axis=1), kind="stable")]:
            if not any(m[0] == moment[0] and (m >= moment).all() for m in best):
                best.append(moment)
        some = np.array(best)
        turns = np.zeros(size)
        np.add.at(
            turns, running, np.arange(len(runs)) / np.bincount(running, minlength=size)[running]
        )
        return cls(
            stages, phases, some[:, 0], some[:, 1:].reshape(-1, size, size), tuple(turns.tolist())
        )

    @cached_property
    def spans(self) -> Numbers:
        """Micro-batches by moment, stage and `Span`; (moments, stages, 3)."""
        number = self.phases.number
        pairs = [
            [(number(made, stage), number(read, stage)) for made, read in _SPANS]
            for stage in range(len(self.stages))
        ]
        made, read = np.array(pairs).transpose(2, 0, 1)
        return np.asarray(self.held[:, made, read])

    def kept(self, nbytes: Floats) -> Floats:
        """Bytes kept at each moment, with head-room, by those of a micro-batch, stage and span."""
        return np.asarray(RESERVED * np.einsum("msk,sk->m", self.spans, nbytes))


@dataclass(frozen=True, eq=False)
class LaneBytes:
    """Bytes of the devices of a lane."""

    resident: Numbers  #: Stored values; (devices,).
    always: Numbers  #: Tensors that are held throughout, without head-room; (devices,).
    #: Most within each phase beside what it keeps, without head-room; (devices, phases).
    most: Numbers
    #: Of one micro-batch by the phases that make and free them; (devices, phases, phases).
    kept: Numbers

    def at(self, runs: LaneRuns) -> Floats:
        """Bytes at each moment, with head-room, of the device that holds most."""
        activations = np.einsum("mpq,dpq->md", runs.held, self.kept) + self.always
        activations += self.most[:, runs.running].T
        return np.asarray((self.resident + RESERVED * activations).max(axis=1))

    def beside(self, other: LaneBytes) -> LaneBytes:
        """Bytes with the larger of two maxima of each phase.

        The other's is that of any device where it has not as many: devices that are alike in one
        plan may not be in another.
        """
        most = other.most if len(other.most) == len(self.most) else other.most.max(axis=0)
        return replace(self, most=np.maximum(self.most, most))


@dataclass(frozen=True, eq=False)
class StageLives:
    """The tensors of a sharding on one mesh."""

    splits: bool  #: Whether backward passes are split.
    micro_batches: int  #: Micro-batches of a step.
    tensors: tuple[Lifetime, ...]
    #: Of each tensor its device's row, bytes, the unit that makes it (-1 for inputs), whether it is
    #: an input or an output of inference, or a sum of gradients, and the bytes that it takes where
    #: it is stored; (7, tensors).
    columns: Numbers
    #: Of each use its unit, tensor, position, part of the step, another unit, how it counts, and a
    #: unit of the same stages, without which it does not; by unit, (7, uses).
    uses: Numbers
    devices: int  #: Number of rows of devices.
    units: int  #: Number of units.
    positions: int  #: Number of tasks.
    _known: dict[object, LaneBytes] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, unit_of: Mapping[str, int], tasks: Schedule) -> StageLives:
        """The tensors of the tasks of a step of micro-batches on one mesh, in one stage."""
        order = tasks.order
        reading = _Reading(graph, unit_of, tasks)
        row = {device: index for index, device in enumerate(tasks.devices)}
        known = (*reading.tensors, *reading.views.values())
        tensors = tuple(life for life in known if life.device in row)
        summed = reading.summed if order.table.micro_batches > 1 else frozenset()
        trains = order.table.trains
        columns = [
            (
                row[life.device],
                life.nbytes,
                reading.maker(life),
                not trains and life.local in tasks.feeds and not life.buffer,
                not trains and life.local in reading.outputs and not life.operand,
                life.local in summed and not life.operand,
                tasks.residents.get(life.local, 0),
            )
            for life in tensors
        ]
        number = {life: index for index, life in enumerate(tensors)}
        places = reading.places
        uses = sorted(
            (
                use.unit,
                number[life],
                places[use.position],
                *(use.part, use.other, use.how, use.through),
            )
            for life, use in reading.uses()
            if life in number
        )
        return cls(
            order.phases.splits,
            order.table.micro_batches,
            tensors,
            np.array(columns, np.int64).reshape(-1, 7).T,
            np.array(uses, np.int64).reshape(-1, 7).T,
            len(row),
            1 + max(unit_of.values(), default=-1),
            len(tasks.tasks),
        )

    @cached_property
    def _begins(self) -> Numbers:
        """The first use of each unit, and the number of uses behind the last."""
        return np.searchsorted(self.uses[0], np.arange(self.units + 1))

    def lane(self, runs: LaneRuns, bounds: Sequence[tuple[int, int]]) -> LaneBytes:
        """The bytes of a lane, by the stretch of units of each stage of all lanes."""
        own = tuple(bounds[stage] for stage in runs.stages)
        key = own, runs.turns if len(own) > 1 else ()
        if key not in self._known:
            lives, rows = self.lives(own, runs.phases, runs.turns)
            # A constant is stored by all stages that read it, another value by its maker's.
            maker, stored = self.columns[2, rows], np.zeros(self.devices, np.int64)
            rows = rows[_is_in(maker, own) | (maker < 0)]
            np.add.at(stored, self.columns[0, rows], self.columns[6, rows])
            self._known[key] = self._summed_up(lives, stored, 1 + runs.phases.number(Part.REDUCE))
        return self._known[key]

    def lives(
        self, own: Sequence[tuple[int, int]], phases: Phases, turns: Sequence[float]
    ) -> tuple[Lives, Numbers]:
        """The tensors of the devices that run some stretches as stages, and their numbers.

        Positions are those of the tasks, each phase's behind the one before. A stage that no other
        waits for computes all its gradients as weight gradients if backward passes are split.
        `turns` has the mean turn of each phase.
        """
        spans = [slice(self._begins[start], self._begins[stop]) for start, stop in own]
        uses = np.concatenate([self.uses[:, span] for span in spans], 1)
        unit, tensor, at, part, other, how, through = uses
        number = np.array(
            [[phases.number(part, stage) for part in _PARTS] for stage in range(len(own))]
        )
        if self.splits:
            part_of = _PARTS.index
            for index, (start, _) in enumerate(own):
                if start == 0:
                    number[index, part_of(Part.BACKWARD)] = number[index, part_of(Part.WEIGHT)]
        stage, beside = np.zeros(len(unit), np.int64), np.zeros(len(unit), np.bool_)
        for index, (start, stop) in enumerate(own):
            of = (unit >= start) & (unit < stop)
            stage[of], beside[of] = index, (other[of] == stop) | (other[of] == start - 1)
        counts = (how == _ALWAYS) | ((how == _WITH) == _is_in(other, own))
        counts &= ((how != _FAR) | ~beside) & _is_in(through, own)
        tensor, at, is_sent = tensor[counts], at[counts], how[counts] >= _SENT
        phase = number[stage[counts], part[counts]]
        size = 1 + phases.number(Part.REDUCE)
        begins, ends = np.full(size, self.positions), np.zeros(size, np.int64)
        np.minimum.at(begins, phase[~is_sent], at[~is_sent])
        np.maximum.at(ends, phase[~is_sent], at[~is_sent])
        at = np.where(is_sent, np.minimum(at, ends[phase]), at) + phase * self.positions
        begins, ends = (n + np.arange(size) * self.positions for n in (begins, ends))
        order = np.argsort(tensor, kind="stable")
        rows, first_use = np.unique(tensor[order], return_index=True)
        if not len(rows):
            none = np.zeros(0, np.int64)
            return Lives(none, none, none, none, none, none, none.astype(bool)), none
        device, nbytes, maker, fed, given, summed, stored = self.columns[:, rows]
        first, last = (f.reduceat(at[order], first_use) for f in (np.minimum, np.maximum))
        made, ranks = first // self.positions, np.argsort(np.argsort(turns))
        of_rank = np.argsort(turns)
        read = phase if len(own) == 1 else ranks[phase]
        read = np.maximum.reduceat(read[order], first_use)
        read = read if len(own) == 1 else of_rank[read]
        is_made = _is_in(maker, own)
        nbytes = np.where((stored > 0) & (is_made | (maker < 0)), 0, nbytes)
        first = np.where(is_made | (maker < 0), first, begins[made])
        given = (given == 1) & is_made
        end, once = size - 1, np.array([phases.is_once(phase) for phase in range(size)])
        sent = (stored > 0) & ~is_made  # once a step, to other stages
        joined = once[read] & ~given & (self.micro_batches > 1) & (made != read)
        always = (
            (fed == 1) | (summed == 1) & ~once[made] | (once[made] & (made != read)) | joined | sent
        )
        kept = ~always & ((made != read) | given)
        last = np.where(always | kept, ends[made], last)
        last = np.where((fed == 1) | sent | (once[made] & always), -1, last)
        nbytes = np.where(fed == 1, self.micro_batches * nbytes, nbytes)
        read = np.where(kept, np.where(given, end, read), made)
        return Lives(device, nbytes, first, last, made, read, always), rows

    def _summed_up(self, lives: Lives, stored: Numbers, size: int) -> LaneBytes:
        devices = self.devices
        always, most = np.zeros(devices, np.int64), np.zeros((devices, size), np.int64)
        kept = np.zeros((devices, size, size), np.int64)
        np.add.at(always, lives.device[lives.always], lives.nbytes[lives.always])
        of = lives.kept
        np.add.at(kept, (lives.device[of], lives.made[of], lives.read[of]), lives.nbytes[of])
        for device in range(devices):
            rows = (lives.device == device) & (lives.first <= lives.last)
            changes = np.concatenate((lives.nbytes[rows], -lives.nbytes[rows]))
            keys = np.concatenate((2 * lives.first[rows] + 1, 2 * lives.last[rows] + 2))
            order = np.argsort(keys, kind="stable")
            held = np.cumsum(changes[order])
            np.maximum.at(most[device], np.tile(lives.made[rows], 2)[order], held)
        return LaneBytes(stored, always, most - kept.sum(axis=2), kept)

    @cached_property
    def _of_one(self) -> tuple[Lives, Numbers]:
        """The tensors of all units as one stage, of which none is the lowest."""
        whole, phases = ((0, self.units),), Phases(1, self.splits)
        return replace(self, splits=False).lives(whole, phases, ())

    @cached_property
    def kept_bytes(self) -> Mapping[str, Numbers]:
        """Bytes of each value that one stage of all units keeps, of the fullest device, by span."""
        (lives, rows), phases = self._of_one, Phases(1, self.splits)
        spans = {tuple(map(phases.number, pair)): span for span, pair in enumerate(_SPANS)}
        sizes: dict[str, Numbers] = {}
        for index in np.flatnonzero(lives.kept).tolist():
            span = spans.get((int(lives.made[index]), int(lives.read[index])))
            value = self.tensors[rows[index]].value
            if span is not None:
                own = sizes.setdefault(value, np.zeros((self.devices, len(Span)), np.int64))
                own[lives.device[index], span] += lives.nbytes[index]
        return {value: own.max(axis=0) for value, own in sizes.items()}

    @cached_property
    def sums(self) -> tuple[Floats, Floats]:
        """Bytes at rest before each unit, with head-room, and those that are kept, without it.

        As if each tensor were of one unit: that which makes it or, if it is kept, reads it last.
        Each shape is (units + 1,).
        """
        (lives, rows), shape = self._of_one, (self.devices, self.units)
        unit, tensor = self.uses[:2, np.argsort(self.uses[2], kind="stable")]
        last = np.zeros(len(self.tensors), np.int64)
        last[tensor] = unit
        rest, kept = np.zeros(shape), np.zeros(shape)
        of = lives.always
        maker = np.maximum(self.columns[2, rows[of]], 0)
        np.add.at(rest, (lives.device[of], maker), RESERVED * lives.nbytes[of])
        of = lives.kept
        np.add.at(kept, (lives.device[of], last[rows[of]]), lives.nbytes[of])
        maker = np.maximum(self.columns[2], 0)
        np.add.at(rest, (self.columns[0], maker), self.columns[6])
        before = [np.insert(np.cumsum(each.max(axis=0)), 0, 0.0) for each in (rest, kept)]
        return before[0], before[1]


def _is_in(units: Numbers, own: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.logical_or.reduce([(units >= a) & (units < b) for a, b in own]))


class _Use(NamedTuple):
    unit: int
    position: int  #: Of the task.
    part: int  #: Of the step, in `_PARTS`.
    other: int  #: The unit that `how` is about.
    how: int
    through: int  #: A unit of the same stages, without which it does not count.


@dataclass(frozen=True)
class _Reading:
    """Reads which units use the tensors of the tasks on one mesh."""

    graph: Graph
    unit_of: Mapping[str, int]
    tasks: Schedule

    @cached_property
    def _roots(self) -> Mapping[LocalKey, LocalKey]:
        return roots_of(self.tasks)

    @cached_property
    def tensors(self) -> tuple[Lifetime, ...]:
        """The tensors, each once; of stored ones, what they take where they are not stored."""
        residents, types = self.tasks.residents, self.graph.types
        lives = dict.fromkeys(exact_lifetimes(self.tasks, self._roots))
        made = {life.local for life in lives}
        constants = (Lifetime(*x, 0, 0, -1) for x in residents if x not in made)
        return tuple(
            life._replace(nbytes=life.key[1].local_bytes(types[life.value].dtype)[life.device])
            if life.local in residents
            else life
            for life in (*lives, *constants)
        )

    @cached_property
    def summed(self) -> frozenset[LocalKey]:
        return summed_tensors(self.tasks, self._roots)

    @cached_property
    def outputs(self) -> frozenset[LocalKey]:
        return frozenset(self._roots.get(local, local) for local in self.tasks.outputs)

    def maker(self, life: Lifetime) -> int:
        """The unit that makes a tensor; -1 for an input or a constant."""
        node = self.graph.producers.get(life.value)
        return -1 if node is None or life.last < 0 else self.unit_of[node.name]

    @cached_property
    def places(self) -> Sequence[int]:
        """The place of each task among all of them as the graph has its nodes.

        Gradients of inputs and of weights take turns in it, as where one pass computes both.
        """
        number = {node.name: index for index, node in enumerate(self.graph.nodes)}
        reached: dict[int, int] = defaultdict(int)  # by phase
        keys = []
        for task in self.tasks.tasks:
            reached[task.phase] = max(reached[task.phase], number.get(task.of_node, 0))
            keys.append(reached[task.phase])
        order = np.argsort(keys, kind="stable")
        places: Sequence[int] = np.argsort(order).tolist()
        return places

    def _unit(self, task: Task) -> int:
        """The unit of a task; -1 for another name of a tensor."""
        return self.unit_of.get(task.of_node, -1)

    @cached_property
    def views(self) -> Mapping[LocalKey, Lifetime]:
        """Views of what is not stored, as the tensors that they are where others receive them.

        Other names of a value are not among them: they come with it.
        """
        return {
            (device, key): Lifetime(device, key, nbytes, at, at)
            for at, task in enumerate(self.tasks.tasks)
            if task.placed is not None and is_view(task.placed.node)
            if not (row_of(task.placed.node).again or row_of(task.placed.node).either)
            for device, key, nbytes in task.writes
            if self._roots[device, key] not in self.tasks.residents
        }

    @cached_property
    def _viewed(self) -> Mapping[LocalKey, LocalKey]:
        """Map each view or other name to the value that it is of."""
        tasks = self.tasks.tasks
        viewed = {new: old for task in tasks for new, old in task.aliases}
        for task in tasks:
            if task.placed is not None and is_view(task.placed.node):
                operand = task.placed.operands()[0]
                viewed |= {(device, key): (device, operand) for device, key, _ in task.writes}
        return viewed

    def _received(self, local: LocalKey, unit: int) -> Iterator[tuple[Lifetime, int, int]]:
        """Yield the views, of which a unit reads one, in whose place a stage may receive a tensor.

        Each comes with its maker, and with the unit that reads it: a stage with that one and
        without the maker receives it.
        """
        through = unit
        while True:
            view = self.views.get(local)
            if view is not None and (maker := self.maker(view)) != through:
                yield view, maker, through
                through = maker
            if local not in self._viewed:
                return
            local = self._viewed[local]

    def uses(self) -> Iterator[tuple[Lifetime, _Use]]:
        tasks, order, parts = self.tasks.tasks, self.tasks.order, self._parts
        for life in (life for life in self.tensors if life.last >= 0):
            maker, end = self.maker(life), tasks[life.last]
            unit, part = self._unit(tasks[life.first]), parts[tasks[life.first].phase]
            yield life, _Use(unit, life.first, part, unit, _ALWAYS, unit)
            of_end = self._unit(end)
            yield life, _Use(of_end, life.last, parts[end.phase], maker, _WITH, of_end)
            if life.local in self.outputs and order.phases.is_once(end.phase):
                yield life, _Use(maker, life.last, parts[end.phase], maker, _ALWAYS, maker)
        yield from self._reads()
        for one in in_flight(self.tasks, self._roots):
            operand = None if one.operand is None else self._alone.get(one.operand)
            if operand is not None:
                unit, part = self._unit(tasks[one.until]), parts[tasks[one.until].phase]
                yield operand, _Use(unit, one.until, part, self.maker(operand), _WITH, unit)

    @cached_property
    def _parts(self) -> Mapping[int, int]:
        """The number of each phase's part of the step."""
        phases = self.tasks.order.phases
        numbers = {task.phase for task in self.tasks.tasks}
        return {phase: _PARTS.index(phases.of(phase)[0]) for phase in numbers}

    @cached_property
    def _alone(self) -> Mapping[LocalKey, Lifetime | None]:
        """The tensors by name; None for those in buckets, of which there are several."""
        alone: dict[LocalKey, Lifetime | None] = {}
        for life in self.tensors:
            alone[life.local] = None if life.local in alone else life
        return alone

    def _reads(self) -> Iterator[tuple[Lifetime, _Use]]:
        """Yield the uses by tasks that read, and by what is sent for them."""
        tasks, parts = self.tasks.tasks, self._parts
        first: dict[tuple[int, int], str] = {}  # node that runs first of a unit's part
        sent: dict[str, int] = {}  # by node: where what is sent for it has been made
        for at, task in enumerate(tasks):
            unit, part, node = self._unit(task), parts[task.phase], task.of_node
            is_first = unit >= 0 and first.setdefault((unit, part), node) == node
            for local in task.reads:
                read = self._alone.get(self._roots.get(local, local))
                if read is None or unit < 0:
                    continue
                maker, home = self.maker(read), tasks[read.first]
                apart = unit != maker and maker >= 0
                how, through = _WITH if task.comm is not None and apart else _ALWAYS, unit
                for view, through, reader in self._received(local, unit):
                    yield view, _Use(unit, at, part, through, _WITHOUT, reader)
                yield read, _Use(unit, at, part, maker, how, through)
                if apart and home.placed is not None:  # sent as soon as the others are free
                    sent[node] = max(sent.get(node, 0), read.first)
                    of = parts[home.phase]
                    leaves = sent[node] if is_first else at
                    yield read, _Use(maker, leaves, of, unit, _SENT, maker)
                    yield read, _Use(maker, at, of, unit, _FAR, maker)
