"""The most bytes that each device holds while a schedule runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partitioner.cost_model.memory.lifetimes import (
    Curves,
    exact_lifetimes,
    loaded_lifetimes,
    safe_lifetimes,
    usage_curves,
    with_headroom,
)
from partitioner.cost_model.memory.lives import StepLives, Uses
from partitioner.cost_model.schedule.task_list import Schedule


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
    #: The exact ones with what kernels take for themselves, each at the task where most is held
    #: with it.
    with_scratch: Mapping[int, MemoryPeak]

    @classmethod
    def of(cls, schedule: Schedule, scratch: Curves) -> Peaks:
        """Count the peaks of a schedule; `scratch` has kernels' bytes, of devices where any is."""
        uses = Uses.of(schedule)
        safe = StepLives.of(schedule, safe_lifetimes(schedule), uses)
        exact = StepLives.of(schedule, exact_lifetimes(schedule, uses.roots), uses)
        curves = dict(exact.curves())
        safe_peaks = peaks(schedule, safe.curves(), with_headroom)
        exact_peaks = peaks(schedule, curves, int)
        if not scratch:
            return cls(safe_peaks, exact_peaks, exact_peaks)
        for device, taken in scratch.items():
            curves[device] = curves.get(device, 0) + taken
        return cls(safe_peaks, exact_peaks, peaks(schedule, curves, int, headroom=False))


def peaks(
    schedule: Schedule, curves: Curves, counted: Callable[[int], int], *, headroom: bool = True
) -> Mapping[int, MemoryPeak]:
    """Peaks of devices with these bytes of activations, beside what is resident.

    Args:
        schedule: The schedule.
        curves: Bytes at each position of a task.
        counted: What so many bytes count as.
        headroom: Whether the peak is where most bytes are held with head-room.
    """
    resident: dict[int, int] = defaultdict(int)
    for key, nbytes in schedule.residents.items():
        resident[key[0]] += 0 if key in schedule.loads else nbytes
    loaded = usage_curves(schedule, loaded_lifetimes(schedule))
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
