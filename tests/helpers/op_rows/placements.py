"""Random placements of tensors, and devices simulated with NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from partitioner.cost_model.prices.reshard import Hop
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Comm, CommKind

Parts = Mapping[int, np.ndarray]  #: Each device's local tensor.

#: One device, lines, grids; some share all devices, some a few, some none.
MESHES = (
    DeviceMesh.single(0),
    DeviceMesh.single(5),
    DeviceMesh.line(2, "tp"),
    DeviceMesh.line(4, "tp"),
    DeviceMesh.of({"tp": 3}, (1, 2, 3)),
    DeviceMesh.of({"tp": 2}, (4, 5)),
    DeviceMesh.of({"dp": 2, "tp": 2}),
    DeviceMesh.of({"dp": 2, "tp": 2}, (5, 3, 4, 0)),
    DeviceMesh.of({"dp": 3, "tp": 2}),
)
MERGE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def placement(
    mesh: DeviceMesh, *dims: DimLayout, partial: tuple[tuple[str, str], ...] = ()
) -> Placement:
    """A placement from its dims."""
    return Placement(mesh, Sharding(dims, partial))


def random_placement(
    rng: np.random.Generator, shape: tuple[int, ...], mesh: DeviceMesh, *, partial: str = ""
) -> Placement:
    """Each axis cuts one dim, leaves the tensor pending (if `partial` names a reduction), or not.

    Cuts are even, uneven, of several segments, or windows; every device holds something.
    """
    by_dim: dict[int, list[str]] = {}
    pending = []
    for axis in mesh.names:
        pick = int(rng.integers(-1, len(shape) + bool(partial)))
        if pick == len(shape):
            pending.append((axis, partial))
        elif pick >= 0:
            by_dim.setdefault(pick, []).append(axis)
    dims = tuple(
        _random_cut(rng, size, tuple(by_dim.get(dim, ())), mesh) for dim, size in enumerate(shape)
    )
    return Placement(mesh, Sharding(dims, tuple(pending)))


def _random_cut(
    rng: np.random.Generator, size: int, axes: tuple[str, ...], mesh: DeviceMesh
) -> DimLayout:
    parts = mesh.size(axes)
    if not axes or size < parts:
        return DimLayout.whole(size)
    how = rng.integers(4)
    if how == 0:
        return DimLayout.even(size, axes, mesh)
    owners = np.concatenate([np.arange(parts), rng.integers(parts, size=size - parts)])
    rng.shuffle(owners)
    if how in (1, 3):
        owners.sort()
    if how == 3:
        ends = [np.flatnonzero(owners == part)[[0, -1]] for part in range(parts)]
        reach = rng.integers(0, 4, (parts, 2))
        halos = [
            (max(0, int(low - before)), min(size, int(high + 1 + after)))
            for (low, high), (before, after) in zip(ends, reach, strict=True)
        ]
        return DimLayout.windowed(size, axes, [(low, high - low) for low, high in halos])
    return DimLayout.cut(axes, [tuple(int(i == o) for i in range(parts)) for o in owners])


def take(array: np.ndarray, region: Region) -> np.ndarray:
    """The region of an array."""
    return array[_index(region)]


def put(array: np.ndarray, region: Region, part: np.ndarray) -> None:
    """Write a region of an array."""
    array[_index(region)] = part


def _index(region: Region) -> tuple[np.ndarray, ...]:
    axes = [np.array([i for s, n in dim for i in range(s, s + n)], np.int64) for dim in region]
    return np.ix_(*axes)


def cut(whole: np.ndarray, at: Placement, rng: np.random.Generator | None = None) -> Parts:
    """Each device's part; pending reductions are terms that reduce to it (drawn from `rng`)."""
    terms = _terms(whole, at, rng)
    axes = [axis for axis, _ in at.sharding.partial]
    points = dict(at.mesh.coords())
    return {
        device: take(terms[tuple(points[device][a] for a in axes)], pieces)
        for device, pieces in at.parts()
    }


def _terms(
    whole: np.ndarray, at: Placement, rng: np.random.Generator | None
) -> dict[tuple[int, ...], np.ndarray]:
    sizes = dict(at.mesh.axes)
    spots = list(itertools.product(*(range(sizes[axis]) for axis, _ in at.sharding.partial)))
    if len(spots) == 1:
        return {spots[0]: whole}
    assert rng is not None, "pending reductions need random terms"
    how = at.sharding.partial[0][1]
    terms = {spot: rng.integers(-9, 9, whole.shape).astype(whole.dtype) for spot in spots[1:]}
    if how == "sum":
        terms[spots[0]] = whole - sum(terms.values())
    else:
        worse = np.minimum if how == "max" else np.maximum
        terms = {spot: worse(term, whole) for spot, term in terms.items()}
        terms[spots[0]] = whole
    return terms


def receive(transfers: tuple[Transfer, ...], parts: Parts, at: Placement) -> dict[int, np.ndarray]:
    """The part of every device of `at` after the transfers; nan where no element arrived."""
    points = dict(at.mesh.coords())
    received = {d: np.full(at.sharding.local_shape(at.mesh, points[d]), np.nan) for d in points}
    for t in transfers:
        put(received[t.target], t.write, take(parts[t.source], t.read))
    return received


def apply(hop: Hop, parts: Parts) -> Parts:
    """Run one hop: communications, aliases, zeros."""
    at = hop.after
    points = dict(at.mesh.coords())
    after: dict[int, np.ndarray] = {d: parts[d] for d in hop.aliases}
    for device in hop.zeros:
        after[device] = np.zeros(at.sharding.local_shape(at.mesh, points[device]))
    for priced in hop.comms:
        received = _run(priced.comm, parts, at)
        assert not received.keys() & after.keys(), "a device gets its part twice"
        after.update(received)
    return after


def _run(comm: Comm, parts: Parts, at: Placement) -> Parts:
    if comm.kind is CommKind.ALL_REDUCE:
        total = _merge([parts[rank] for rank in comm.ranks], comm.reduce)
        return dict.fromkeys(comm.ranks, total)
    if comm.kind is CommKind.REDUCE_SCATTER:
        scattered = {}
        for rank in comm.ranks:
            arriving = [t for t in comm.transfers if t.target == rank]
            assert sorted(t.source for t in arriving) == sorted(comm.ranks)
            term = _merge([take(parts[t.source], t.read) for t in arriving], comm.reduce)
            shape = at.sharding.local_shape(at.mesh, at.mesh.coord(rank))
            scattered[rank] = np.full(shape, np.nan)
            put(scattered[rank], arriving[0].write, term)
        return scattered
    assert {t.source for t in comm.transfers} | {t.target for t in comm.transfers} == {*comm.ranks}
    received = receive(comm.transfers, parts, at)
    return {device: received[device] for device in comm.targets()}


def _merge(terms: list[np.ndarray], how: str) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = MERGE[how](total, term)
    return total
