"""The layouts of a large cluster: how its devices are split into equal stages with a mesh each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.mesh import DeviceMesh


@dataclass(frozen=True)
class DevicePool:
    """Neighbouring devices of one specification: `count` of them from `first` on."""

    first: int
    count: int


def device_pools(cluster: Cluster) -> tuple[DevicePool, ...]:
    """The runs of equal devices of a cluster."""
    runs = itertools.groupby(range(len(cluster)), key=cluster.devices.__getitem__)
    devices = [tuple(run) for _, run in runs]
    return tuple(DevicePool(run[0], len(run)) for run in devices)


def sizes(pool: DevicePool, cluster: Cluster) -> tuple[int, ...]:
    """Devices that a stage may take: each divides the next, so that stages of all sizes pack.

    Groups of a size lie within whole groups of each level of the cluster, or are made of them.

    >>> from partitioner.cost_model.cluster.resolve import resolve_cluster
    >>> sizes(DevicePool(0, 24), resolve_cluster("3x8xh100"))
    (1, 2, 4, 8, 24)
    """
    products = itertools.accumulate(_factors(pool.count), lambda a, b: a * b, initial=1)
    return tuple(
        size
        for size in products
        if size == pool.count
        or all(
            (level.size % size == 0 and pool.first % size == 0)
            or (size % level.size == 0 and pool.first % level.size == 0)
            for level in cluster.levels
        )
    )


def _factors(count: int) -> Iterator[int]:
    prime = 2
    while count > 1:
        while count % prime == 0:
            yield prime
            count //= prime
        prime += 1


def split_from(fine: DeviceMesh, coarse: DeviceMesh) -> tuple[int, ...]:
    """For each axis of a mesh the axis of another one that it is a part of; empty if it is none.

    >>> split_from(DeviceMesh.of({"a": 2, "b": 3, "c": 4}), DeviceMesh.of({"x": 6, "y": 4}))
    (0, 0, 1)
    """
    origins: list[int] = []
    for index, (_, size) in enumerate(coarse.axes):
        part = 1
        while part < size and len(origins) < len(fine.axes):
            part *= fine.axes[len(origins)][1]
            origins.append(index)
        if part != size:
            return ()
    return tuple(origins) if coarse.devices == fine.devices else ()


def meshes(first: int, size: int, cluster: Cluster) -> Iterator[DeviceMesh]:
    """Meshes of a stage: one axis, then two whose minor one stays within the innermost level.

    Then three: those of two whose first axis is split where the groups of a level end. So they
    can repeat over the nodes what they store in parts within each. Where a stage lies within one
    level, the outermost axis is as long as its least prime factor.
    """
    devices, node = tuple(range(first, first + size)), cluster.levels[0].size
    yield DeviceMesh.grid((size,), devices)
    minors = [
        minor
        for minor in range(2, min(size, node + 1))
        if size % minor == 0
        and (len(cluster.levels) == 1 or (first % minor == 0 and node % minor == 0))
    ]
    for minor in minors:
        yield DeviceMesh.grid((size // minor, minor), devices)
    ends = [level.size for level in cluster.levels if size % level.size == 0 and level.size < size]
    ends = ends or [size // next(_factors(size), 1)]
    for end, minor in itertools.product(ends, minors):
        if end % minor == 0 and minor < end:
            yield DeviceMesh.grid((size // end, end // minor, minor), devices)


@dataclass(frozen=True)
class Layout:
    """A way to run a stage: a mesh of the first devices of one of the pools."""

    pool: int
    mesh: DeviceMesh

    def __str__(self) -> str:
        shape = " ".join(f"{axis}={size}" for axis, size in self.mesh.axes)
        return shape or "one device"


def layouts(
    cluster: Cluster, strategy: str, mesh: Mapping[str, int] | None, kept: Sequence[DeviceMesh] = ()
) -> tuple[Layout, ...]:
    """Layouts of a request: fewer axes first, larger stages first.

    Strategy "intra" is one stage of all devices, which are of one pool then, and "inter" stages of
    one device. The mesh is that of an intra plan; None for all. A searched mesh of the same shape
    as one of those of a kept plan has its axes.
    """
    pools = device_pools(cluster)
    if mesh is not None:
        return (Layout(0, DeviceMesh.of(mesh)),) if len(pools) == 1 else ()
    options = [
        Layout(index, shape.named_as(kept))
        for index, pool in enumerate(pools)
        for size in reversed(sizes(pool, cluster))
        if (strategy != "inter" or size == 1) and (strategy != "intra" or size == len(cluster))
        for shape in meshes(pool.first, size, cluster)
    ]
    return tuple(sorted(options, key=lambda layout: max(1, len(layout.mesh.axes))))
