"""Bytes that one device holds from moment to moment of a request, or of a step in stages.

A moment is a position in the schedule's tasks while the device runs, in a plan with stages, one
phase of one micro-batch. The largest of them is the peak of `cost_model.memory.lifetimes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory.lifetimes import Lifetime, usage_curves
from partitioner.cost_model.memory.step_lives import StepLives
from partitioner.cost_model.schedule.task_list import Schedule

Numbers = npt.NDArray[np.int64]
_Kept = Sequence[tuple[Lifetime, tuple[int, int]]]


@dataclass(frozen=True)
class Held:
    """Bytes of one device, without its residents and head-room, as columns over its moments.

    Attributes:
        position: In `Schedule.tasks`.
        run: Index into `StepOrder.runs` of the device; 0 without stages.
        activations: Bytes of all tensors but buffers.
        buffers: Bytes that communications wrote.
        lives: The lifetimes; without stages all of them are `inside`.
        in_flight: Of each run, the number of micro-batches whose kept tensors are held, by the
            phases that make them and that read them last.
    """

    position: Numbers
    run: Numbers
    activations: Numbers
    buffers: Numbers
    lives: StepLives
    in_flight: Sequence[Mapping[tuple[int, int], int]]

    @property
    def peak(self) -> int:
        """The moment at which most is held; 0 if there is none."""
        total = self.activations + self.buffers
        return int(np.argmax(total)) if total.size else 0

    def at(self, moment: int) -> Iterator[tuple[Lifetime, int]]:
        """The lifetimes held at a moment, each with its number of micro-batches."""
        if not self.position.size:
            return
        position, counts = int(self.position[moment]), self.in_flight[int(self.run[moment])]
        yield from ((x, 1) for x in self.lives.inside if x.first <= position <= x.last)
        yield from ((life, n) for life, phases in self.lives.kept if (n := counts.get(phases, 0)))
        yield from ((life, 1) for life in self.lives.always)


def held(schedule: Schedule, device: int, lifetimes: Iterable[Lifetime]) -> Held:
    """The values that a device holds.

    Args:
        schedule: The schedule.
        device: The device.
        lifetimes: Those of the device.
    """
    order = schedule.order
    count = len(schedule.tasks)
    if order is None:
        lives = StepLives(tuple(lifetimes), (), (), ())
        activations = _curve(schedule, lives.inside, buffer=False)
        buffers = _curve(schedule, lives.inside, buffer=True)
        zeros = np.zeros(count, np.int64)
        return Held(np.arange(count), zeros, activations, buffers, lives, ({},))
    lives = StepLives.of(schedule, order, lifetimes)
    runs = order.runs(device)
    in_flight = tuple(_in_flight(lives.kept, [phase for phase, _ in runs]))
    phase_at = np.fromiter((task.phase for task in schedule.tasks), np.int64, count)
    positions = [np.flatnonzero(phase_at == phase) for phase, _ in runs]

    def column(*, buffer: bool) -> Numbers:
        curve = _curve(schedule, lives.inside, buffer=buffer)
        always = sum(life.nbytes for life in lives.always if life.buffer == buffer)
        sizes: Counter[tuple[int, int]] = Counter()
        for life, phases in lives.kept:
            sizes[phases] += life.nbytes if life.buffer == buffer else 0
        base = [always + sum(sizes[p] * n for p, n in counts.items()) for counts in in_flight]
        return np.concatenate([curve[at] + more for at, more in zip(positions, base, strict=True)])

    run = np.repeat(np.arange(len(runs)), [len(at) for at in positions])
    activations, buffers = column(buffer=False), column(buffer=True)
    return Held(np.concatenate(positions), run, activations, buffers, lives, in_flight)


def _curve(schedule: Schedule, lives: Iterable[Lifetime], *, buffer: bool) -> Numbers:
    """Bytes at each task position of one device's lifetimes, buffers or others."""
    curves = usage_curves(schedule, (life for life in lives if life.buffer == buffer))
    (curve,) = curves.values() or (np.zeros(len(schedule.tasks), np.int64),)
    return curve


def _in_flight(kept: _Kept, phases: Iterable[int]) -> Iterator[Mapping[tuple[int, int], int]]:
    """Micro-batches held while each phase of a device runs, by making and last reading phase."""
    pairs = sorted({pair for _, pair in kept})
    counts = dict.fromkeys(pairs, 0)
    for phase in phases:
        yield dict(counts)
        for made, read in pairs:
            counts[made, read] += (made == phase) - (read == phase)
