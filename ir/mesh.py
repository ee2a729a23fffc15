"""Device meshes: named axes over devices, row-major."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

from partitioner.ir.errors import IRError

RANGE = 5  #: Fewest consecutive devices that are written as a range.
#: The axis of meshes along which each place has a whole copy of the model, and requests of its own.
COPIES = "copies"
#: Names of the axes of searched meshes, outermost first: a search may cut anything over each.
SEARCHED = ("x", "y", "z")


def by_fields(value: Any) -> tuple[Any, ...]:
    """Pickle a dataclass by its fields: the hash that it keeps is another in each process."""
    return type(value), tuple(getattr(value, one.name) for one in fields(value) if one.init)


@dataclass(frozen=True)
class DeviceMesh:
    """A device group: axes (name, size), major first, over devices in row-major order.

    A single device is the mesh without axes.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.axes, self.devices)))
        names = [name for name, _ in self.axes]
        for name in names:
            if not name.isidentifier():
                raise IRError(f"mesh axis {name!r}: axis names are letters, digits and _")
        if len(set(names)) != len(names):
            raise IRError(f"mesh axes {names} are not distinct")
        size = math.prod(size for _, size in self.axes)
        if size != len(self.devices):
            shape = " * ".join(f"{name}({size})" for name, size in self.axes) or "1"
            raise IRError(f"mesh {shape} != {len(self.devices)} devices")
        if any(size < 2 for _, size in self.axes):
            raise IRError(f"mesh {self} has an axis of size 1; leave it out")
        if len(set(self.devices)) != len(self.devices):
            raise IRError(f"mesh {self} names a device twice")

    @classmethod
    def of(cls, axes: Mapping[str, int], devices: tuple[int, ...] | None = None) -> DeviceMesh:
        """A mesh from sizes by axis; axes of size 1 are dropped; devices default to 0, 1, ..."""
        kept = tuple((name, size) for name, size in axes.items() if size != 1)
        count = math.prod(size for _, size in kept)
        return cls(kept, devices if devices is not None else tuple(range(count)))

    @classmethod
    def grid(cls, sizes: Sequence[int], devices: tuple[int, ...] | None = None) -> DeviceMesh:
        """A mesh to search, of up to three axes of these sizes, outermost first; see `of`.

        >>> str(DeviceMesh.grid((2, 4)))
        'x=2 y=4 on 0-7'
        """
        return cls.of(dict(zip(SEARCHED[: len(sizes)], sizes, strict=True)), devices)

    @classmethod
    def line(cls, count: int, axis: str = SEARCHED[0]) -> DeviceMesh:
        """A mesh of one axis over devices 0 .. count-1."""
        return cls.of({axis: count})

    @classmethod
    def single(cls, device: int) -> DeviceMesh:
        """The group of one device."""
        return cls((), (device,))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Axis names, major first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def members(self) -> frozenset[int]:
        """The devices, in no order."""
        return frozenset(self.devices)

    def size(self, axes: tuple[str, ...] | None = None) -> int:
        """Number of coordinates over these axes (all axes by default)."""
        return len(self.devices) if axes is None else _size(self, axes)

    def __hash__(self) -> int:
        return self._hash

    __reduce__ = by_fields

    def coords(self) -> tuple[tuple[int, dict[str, int]], ...]:
        """Each device with its coordinate on every axis, in row-major order."""
        return _coords(self)

    def coord(self, device: int) -> dict[str, int]:
        """Coordinate of one device."""
        point = _points(self).get(device)
        if point is None:
            raise IRError(f"device {device} is not in mesh {self}")
        return point

    def part(self, axis: str, place: int) -> DeviceMesh:
        """The mesh of the other axes over the devices at a place along an axis."""
        devices = tuple(device for device, point in self.coords() if point[axis] == place)
        return DeviceMesh(tuple((n, size) for n, size in self.axes if n != axis), devices)

    def named_as(self, meshes: Iterable[DeviceMesh]) -> DeviceMesh:
        """The first of these meshes that has the same sizes and devices; this one if none has."""
        sizes = [size for _, size in self.axes]
        alike = (mesh for mesh in meshes if [size for _, size in mesh.axes] == sizes)
        return next((mesh for mesh in alike if mesh.devices == self.devices), self)

    def linear(self, axes: tuple[str, ...], point: Mapping[str, int]) -> int:
        """Row-major index of a coordinate over these axes."""
        sizes = dict(self.axes)
        index = 0
        for name in axes:
            index = index * sizes[name] + point[name]
        return index

    def __str__(self) -> str:
        shape = " ".join(f"{name}={size}" for name, size in self.axes)
        return f"{shape} on {numbers(self.devices)}" if shape else f"device {self.devices[0]}"


@dataclass(frozen=True)
class Copies:
    """Whole copies of a model, each on devices of its own, that take the requests of a stream."""

    devices: tuple[tuple[int, ...], ...]  #: The devices of each copy, ascending.
    seconds: tuple[float, ...]  #: Predicted seconds between two requests of each copy.

    @property
    def step_s(self) -> float:
        """Seconds between requests of the stream: rates of copies add up."""
        least = min(self.seconds)
        return least and least / sum(least / seconds for seconds in self.seconds)

    def serving(self, requests: int) -> list[int]:
        """The copy that takes each request: the one that is free first.

        So each copy has one of the first requests, and after them as many as it is fast.
        """
        free, taken = [(0.0, 0, copy) for copy in range(len(self.devices))], list[int]()
        for _ in range(requests):
            busy_s, count, copy = heapq.heappop(free)
            heapq.heappush(free, (busy_s + self.seconds[copy], count + 1, copy))
            taken.append(copy)
        return taken

    def of_rank(self, rank: int, requests: int) -> list[int]:
        """The numbers of the requests that a rank has a part in."""
        taken = enumerate(self.serving(requests))
        return [number for number, copy in taken if rank in self.devices[copy]]


def copies_on(meshes: Iterable[DeviceMesh]) -> tuple[tuple[int, ...], ...]:
    """The devices of each whole copy on these meshes; () of meshes without the axis of copies."""
    devices: dict[int, set[int]] = defaultdict(set)
    for mesh in dict.fromkeys(meshes):
        for device, point in mesh.coords() if COPIES in mesh.names else ():
            devices[point[COPIES]].add(device)
    return tuple(tuple(sorted(devices[copy])) for copy in sorted(devices))


def everyone(devices: int, meshes: Iterable[DeviceMesh]) -> DeviceMesh:
    """The mesh of all devices 0 .. devices-1, over which a value is whole that all of them have.

    Of whole copies on `meshes` each has the results of its own requests.
    """
    if copies := copies_on(meshes):
        axes = {COPIES: len(copies), "tp": len(copies[0])}
        return DeviceMesh.of(axes, tuple(itertools.chain(*copies)))
    return DeviceMesh.line(devices)


def numbers(devices: Iterable[int]) -> str:
    """Text of devices in their order, runs of five and more as a range: ``"0,1,8-15"``."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) >= RANGE else list(map(str, run)) for run in runs)
    return ",".join(itertools.chain.from_iterable(parts))


@lru_cache(maxsize=65536)
def _size(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    sizes = dict(mesh.axes)
    return math.prod(sizes[name] for name in axes)


@lru_cache(maxsize=4096)
def _coords(mesh: DeviceMesh) -> tuple[tuple[int, dict[str, int]], ...]:
    points = itertools.product(*(range(size) for _, size in mesh.axes))
    return tuple(
        (device, dict(zip(mesh.names, point, strict=True)))
        for device, point in zip(mesh.devices, points, strict=True)
    )


@lru_cache(maxsize=4096)
def _points(mesh: DeviceMesh) -> dict[int, dict[str, int]]:
    return dict(_coords(mesh))
