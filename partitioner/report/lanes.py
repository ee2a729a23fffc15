"""Devices as reports show them: each in a lane or, of a large cluster, equal ones in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.report.planned import Planned
from partitioner.search.limits import MOST_EXPLICIT

#: Significant digits to which the seconds of devices in one lane agree.
DIGITS = 3


@dataclass(frozen=True)
class Lanes:
    """Sets of devices that reports show as one."""

    members: tuple[tuple[int, ...], ...]  #: Devices of each lane, ascending.
    busiest: tuple[int, ...]  #: Of each lane the device whose tasks stand for all.
    fullest: tuple[int, ...]  #: Of each lane the device whose bytes stand for all.

    @cached_property
    def of(self) -> dict[int, int]:
        """The lane of each device."""
        return {device: lane for lane, members in enumerate(self.members) for device in members}

    def among(self, devices: Iterable[int]) -> list[int]:
        """The lanes of some devices, each once."""
        return list(dict.fromkeys(self.of[device] for device in devices))


def lanes(result: Planned) -> Lanes:
    """The lanes of a plan's devices.

    Up to `MOST_EXPLICIT` devices each has a lane. Above, devices share one that are equal in the
    cluster, run the same groups' nodes and have equal figures, to `DIGITS` digits; if that leaves
    more lanes than `MOST_EXPLICIT`, their figures need not be equal.
    """
    devices = range(len(result.cluster))
    if len(devices) <= MOST_EXPLICIT:
        alone = tuple(devices)
        return Lanes(tuple((device,) for device in devices), alone, alone)
    figures = result.evaluation
    groups: dict[int, list[int]] = {device: [] for device in devices}
    for group, mesh in enumerate(result.plan.groups):
        for device in mesh.devices:
            groups[device].append(group)

    def kind(device: int) -> tuple[object, ...]:
        return (result.cluster.devices[device], *groups[device])

    def equal(device: int) -> tuple[object, ...]:
        seconds = figures.compute_s[device], figures.comm_s[device], figures.load_s[device]
        peak = figures.peak[device]
        return (
            *kind(device),
            *(f"{value:.{DIGITS}g}" for value in seconds),
            peak.bytes,
            peak.resident_bytes,
        )

    for key in (equal, kind):
        sets: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for device in devices:
            sets[key(device)].append(device)
        if len(sets) <= MOST_EXPLICIT:
            break
    return joined(result, sets.values())


def joined(result: Planned, members: Iterable[Sequence[int]]) -> Lanes:
    """Lanes of these sets of devices, with the members that stand for them."""
    figures, sets = result.evaluation, [tuple(devices) for devices in members]
    return Lanes(
        tuple(sets),
        tuple(max(lane, key=lambda device: figures.load_s.get(device, 0.0)) for lane in sets),
        tuple(max(lane, key=lambda device: figures.needed_bytes.get(device, 0)) for lane in sets),
    )
