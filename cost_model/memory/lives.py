"""Bytes that devices hold from moment to moment: the tensors of a step as columns.

A moment is a position in the schedule's tasks while a device runs one phase of one micro-batch; a
whole batch is one of both. Within a phase a tensor is held from its first task to its last. One
that a later phase reads is held once for each micro-batch in flight, from the end of the phase that
makes it to the end of the last one that reads it, in the order of the schedule. What is made once a
step is held throughout, and so is one sum of what is reduced once a step. The referee, the report
and the search of stages count by these columns (`search.stages.stage_lives` makes them for stages
that are not planned yet).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory.lifetimes import (
    Curves,
    Lifetime,
    exact_lifetimes,
    loaded_lifetimes,
    roots_of,
    safe_lifetimes,
    summed_tensors,
    with_headroom,
)
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey
from partitioner.ir.phases import Part, StepOrder

Numbers = npt.NDArray[np.int64]


def held_before(runs: Sequence[int], pairs: Numbers) -> Numbers:
    """Count the micro-batches of which tensors are held when each run of a phase begins.

    By the phases that make and that free each kind of tensors, (kinds, 2); (runs, kinds).
    """
    phases = np.asarray(runs, np.int64)[:, None]
    changes = (phases == pairs[:, 0]).astype(np.int64) - (phases == pairs[:, 1])
    return np.asarray(np.cumsum(changes, axis=0) - changes)


@dataclass(frozen=True)
class Uses:
    """The phases in which devices use local tensors."""

    roots: Mapping[LocalKey, LocalKey]  #: The tensor whose memory each view or alias names.
    #: The phases in which a tensor or a view of it is read, written, sent or received.
    by_root: Mapping[LocalKey, set[int]]
    arrived: Mapping[LocalKey, set[int]]  #: The phases in which a tensor is received.

    @classmethod
    def of(cls, schedule: Schedule, passed_on: Mapping[LocalKey, LocalKey] | None = None) -> Uses:
        """Read them from the tasks of a schedule; `passed_on` is as of `roots_of`."""
        roots = roots_of(schedule, passed_on)
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

    def of_life(self, life: Lifetime, made: int, read: int, order: StepOrder) -> tuple[int, int]:
        """The phases in which a device makes or gets a tensor, and in which it uses it last.

        A device runs the phases of its own stages alone; `made` and `read` are the phases of the
        first and the last task of the tensor, of any device.
        """
        own, place, local = order.own(life.device), order.places(life.device), life.local
        if not life.buffer and made in own and read in own and place is None:
            return made, read
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


@dataclass(frozen=True, eq=False)
class Lives:
    """The tensors of devices, one row each."""

    device: Numbers  #: Its device.
    nbytes: Numbers  #: Bytes.
    #: Positions of tasks at which it is held within the phase that makes it; the last is
    #: before the first if it is not counted so.
    first: Numbers
    last: Numbers
    #: The phases that make it and that read it last: it is held from one to the other for
    #: each micro-batch. Equal if it is not held across phases.
    made: Numbers
    read: Numbers
    always: npt.NDArray[np.bool_]  #: Whether it is held throughout, as many bytes.

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Tell which are held across phases."""
        return np.not_equal(self.made, self.read)

    def inside(self, count: int, rows: npt.NDArray[np.bool_]) -> Numbers:
        """Bytes at each of so many positions that some rows hold within their phases."""
        changes = np.zeros(count + 1, np.int64)
        rows = rows & (self.first <= self.last)
        np.add.at(changes, self.first[rows], self.nbytes[rows])
        np.add.at(changes, self.last[rows] + 1, -self.nbytes[rows])
        return np.cumsum(changes)[:-1]

    def across(
        self, rows: npt.NDArray[np.bool_], runs: Sequence[int]
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Count what some rows hold across phases, while each phase of a device runs, in order.

        Returns:
            The phases that make and that read each kind of tensors; (kinds, 2). Their bytes of one
            micro-batch. And the micro-batches of which they are held; (runs, kinds).
        """
        rows = rows & self.kept
        phases = np.stack((self.made[rows], self.read[rows]), 1)
        pairs, of = np.unique(phases, axis=0, return_inverse=True)
        nbytes = np.zeros(len(pairs), np.int64)
        np.add.at(nbytes, of.reshape(-1), self.nbytes[rows])
        return pairs, nbytes, held_before(runs, pairs)


@dataclass(frozen=True, eq=False)
class StepLives(Lives):
    """The tensors of a schedule."""

    schedule: Schedule = field(repr=False)
    tensors: Sequence[Lifetime]  #: The tensor of each row; those of all micro-batches as one.

    @classmethod
    def of(
        cls, schedule: Schedule, lifetimes: Iterable[Lifetime], uses: Uses | None = None
    ) -> StepLives:
        """Sort lifetimes along the tasks of one micro-batch by how long they are held.

        In inference the inputs of all micro-batches are there when a step begins, and its outputs
        until it ends. In training they are small, or summed.
        """
        lives = tuple(lifetimes)
        sorting = _Sorting(schedule, schedule.order, uses or Uses.of(schedule))
        rows = [sorting.row(life) for life in lives]
        tensors, *columns = zip(*rows, strict=True) if rows else ((),) * 6
        first, last, made, read, always = (np.array(column, np.int64) for column in columns)
        device = np.array([tensor.device for tensor in tensors], np.int64)
        nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
        return cls(device, nbytes, first, last, made, read, always.astype(bool), schedule, tensors)

    def curves(self) -> Curves:
        """The most bytes at each position of a task, with what earlier phases keep, by device."""
        count, curves = len(self.schedule.tasks), {}
        phase_of = np.array([task.phase for task in self.schedule.tasks], np.int64)
        for device in np.unique(self.device).tolist():
            rows = self.device == device
            curve, phases = self.inside(count, rows), self.schedule.runs(device)
            if (rows & (self.kept | self.always)).any():
                _, nbytes, held = self.across(rows, phases)
                most = np.zeros(1 + max(phases), np.int64)
                np.maximum.at(most, phases, held @ nbytes)
                curve += most[phase_of] + self.nbytes[rows & self.always].sum()
            curves[device] = curve
        return curves

    def moments(self, device: int) -> Moments:
        """Bytes of a device at each moment, without its residents and head-room."""
        count, phases = len(self.schedule.tasks), self.schedule.runs(device)
        own = self.device == device
        buffer = np.array([life.buffer for life in self.tensors], np.bool_)
        phase_of = np.array([task.phase for task in self.schedule.tasks], np.int64)
        positions = [np.flatnonzero(phase_of == phase) for phase in phases]
        run = np.repeat(np.arange(len(phases)), [len(at) for at in positions])
        position = np.concatenate(positions)
        columns = []
        for rows in (own & ~buffer, own & buffer):
            _, nbytes, held = self.across(rows, phases)
            base = held @ nbytes + self.nbytes[rows & self.always].sum()
            columns.append(self.inside(count, rows)[position] + base[run])
        return Moments(self, device, position, run, columns[0], columns[1])


@dataclass(frozen=True, eq=False)
class Moments:
    """Bytes of one device, as columns over its moments."""

    lives: StepLives  #: The tensors of all devices.
    device: int
    position: Numbers  #: In `Schedule.tasks`.
    run: Numbers  #: Index into `StepOrder.runs` of the device.
    activations: Numbers  #: Bytes of all tensors but buffers.
    buffers: Numbers  #: Bytes that communications wrote.

    @property
    def peak(self) -> int:
        """The moment at which most is held; 0 if there is none."""
        total = self.activations + self.buffers
        return int(np.argmax(total)) if total.size else 0

    @cached_property
    def in_flight(self) -> Sequence[Mapping[tuple[int, int], int]]:
        """Micro-batches of which each run holds tensors, by the phases that make and read them."""
        lives, phases = self.lives, self.lives.schedule.runs(self.device)
        pairs, _, held = lives.across(lives.device == self.device, phases)
        keys = [(made, read) for made, read in pairs.tolist()]
        return tuple(dict(zip(keys, counts, strict=True)) for counts in held.tolist())

    def at(self, moment: int) -> Iterator[tuple[Lifetime, int]]:
        """The tensors held at a moment, each with its number of micro-batches."""
        if not self.position.size:
            return
        lives, position = self.lives, int(self.position[moment])
        counts = self.in_flight[int(self.run[moment])]
        for row in np.flatnonzero(lives.device == self.device).tolist():
            times = counts.get((int(lives.made[row]), int(lives.read[row])), 0)
            times += lives.first[row] <= position <= lives.last[row]
            times += lives.always[row]
            if times:
                yield lives.tensors[row], int(times)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most bytes that a device holds."""

    bytes: int  #: Sum of the two below.
    resident_bytes: int  #: Constants and zeros, of blocks those that are held at the peak.
    activation_bytes: int  #: All other tensors at the peak.
    at: str  #: Name of the first task at the peak, "" if there is none.


def peak_bytes(schedule: Schedule) -> Mapping[int, MemoryPeak]:
    """Safe peaks, with head-room, of all devices that hold a tensor."""
    return peaks(schedule, StepLives.of(schedule, safe_lifetimes(schedule)).curves(), with_headroom)


class Peaks(NamedTuple):
    """Peaks of all devices that hold a tensor."""

    safe: Mapping[int, MemoryPeak]  #: Those of `peak_bytes`.
    exact: Mapping[int, MemoryPeak]  #: Exact peaks, at the task where a device needs most room.

    @classmethod
    def of(cls, schedule: Schedule) -> Peaks:
        """Count the peaks of a schedule."""
        uses = Uses.of(schedule)
        safe = StepLives.of(schedule, safe_lifetimes(schedule), uses)
        exact = StepLives.of(schedule, exact_lifetimes(schedule, uses.roots), uses)
        return cls(
            peaks(schedule, safe.curves(), with_headroom), peaks(schedule, exact.curves(), int)
        )


def peaks(
    schedule: Schedule, curves: Curves, counted: Callable[[int], int], *, headroom: bool = True
) -> Mapping[int, MemoryPeak]:
    """Peaks of devices with these bytes of activations, `counted` so, beside what is resident.

    With `headroom` the peak is where most bytes are held with it.
    """
    resident: dict[int, int] = defaultdict(int)
    for key, nbytes in schedule.residents.items():
        resident[key[0]] += 0 if key in schedule.loads else nbytes
    loads = loaded_lifetimes(schedule)
    loaded = StepLives.of(schedule, loads).curves() if schedule.loads else {}
    zeros = np.zeros(len(schedule.tasks), np.int64)
    most_of = {}
    for device in sorted({*resident, *curves}):
        constants, curve = resident[device], curves.get(device, zeros)
        held = loaded.get(device, zeros)
        most, name = 0, ""
        if curve.size:
            position = int(np.argmax(held + (with_headroom(curve) if headroom else curve)))
            constants += int(held[position])
            most, name = counted(int(curve[position])), schedule.tasks[position].name
        most_of[device] = MemoryPeak(constants + most, constants, most, name)
    return most_of


@dataclass(frozen=True)
class _Sorting:
    """Says how long the tensors of a step are held."""

    schedule: Schedule
    order: StepOrder
    uses: Uses

    @cached_property
    def _spans(self) -> Mapping[int, tuple[int, int]]:
        """Positions of the first and the last task of each phase."""
        spans: dict[int, tuple[int, int]] = {}
        for position, task in enumerate(self.schedule.tasks):
            spans[task.phase] = spans.get(task.phase, (position,))[0], position
        return spans

    @cached_property
    def _summed(self) -> Collection[LocalKey]:
        several = self.order.table.micro_batches > 1
        return summed_tensors(self.schedule, self.uses.roots) if several else ()

    @cached_property
    def _borders(self) -> tuple[Collection[LocalKey], Collection[LocalKey]]:
        """Parts of inputs and of outputs of all micro-batches of a step of inference in stages."""
        if self.order.is_whole or self.order.table.trains:
            return (), ()
        roots = self.uses.roots
        given = frozenset(roots.get(local, local) for local in self.schedule.outputs)
        return self.schedule.feeds.keys(), given

    def row(self, life: Lifetime) -> tuple[Lifetime, int, int, int, int, bool]:
        """The tensor, its first and last position, its phases, and whether it is always held."""
        tasks, is_once = self.schedule.tasks, self.order.phases.is_once
        count, end = self.order.table.micro_batches, self.order.phases.number(Part.REDUCE)
        local, (fed, given) = life.local, self._borders
        if local in fed and not life.buffer:
            return life._replace(nbytes=life.nbytes * count), 0, -1, 0, 0, True
        of = tasks[life.first].phase, tasks[life.last].phase
        if life.operand:
            return life, life.first, life.last, *of, False
        made, read = self.uses.of_life(life, *of, self.order)
        begin, stop = self._spans.get(made, (0, 0))
        begin, stop = max(life.first, begin), max(life.first, stop)
        if not is_once(made) and local in self._summed:
            return life, begin, stop, made, made, True
        if made == read and local not in given:
            return life, begin, max(begin, min(life.last, stop)), made, made, False
        if is_once(made):
            return life, 0, -1, made, made, True
        if is_once(read) and local not in given and count > 1:
            return life, begin, stop, made, made, True
        return life, begin, stop, made, end if local in given else read, False
