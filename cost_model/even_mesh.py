"""Prices on large meshes whose cuts are all even: one device stands for all of them.

Where every layout gives every device the same share, all devices do the same work, and what a
reshard costs depends on the axes that cut each dim, not on the number of devices. So strategies
and layouts are derived on a *stand-in*: a mesh with the same axes, each as long as its least prime
factor. Here they are priced at the axes' real lengths by closed formulas, in time that does not
grow with the mesh.

Within a group, a reshard costs what `reshard.Resharder` says of the busiest device of the real
mesh, to rounding. Reshards in which a dim's shares before and after lie across each other (it goes
from one axis to another: devices on the diagonal keep theirs, the others do not) are not priced:
`allows` says so, and plans do without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

import numpy as np

from partitioner.cost_model.cluster import Cluster, LinkLevel
from partitioner.cost_model.collectives import collective
from partitioner.cost_model.compute import compute_dtype, kernel_seconds
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.reshard import Hop, PricedComm, Resharder, overlap_share
from partitioner.ir.exchange import intersect
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import DTYPE_BITS


def stand_in(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the same axes, each as long as its least prime factor.

    >>> str(stand_in(DeviceMesh.of({"dp": 128, "tp": 9})))
    'dp=2 tp=3 on 0-5'
    """
    return DeviceMesh.of({axis: _least_factor(size) for axis, size in mesh.axes})


def _least_factor(size: int) -> int:
    return next((p for p in range(2, math.isqrt(size) + 1) if size % p == 0), size)


class Overlap(Enum):
    """How a device's share of a dim before a reshard lies to its share after it."""

    EQUAL = "equal"
    SLICE = "slice"  #: The share wanted lies within the share held.
    GATHER = "gather"  #: The share held lies within the share wanted.
    MIXED = "mixed"


@dataclass(frozen=True)
class EvenMesh:
    """A group of equal devices, and the stand-in that its layouts are written on.

    Attributes:
        mesh: The group.
        model: Its stand-in.
        cluster: Devices and links.
    """

    mesh: DeviceMesh
    model: DeviceMesh
    cluster: Cluster

    @property
    def device(self) -> int:
        """The device that stands for all."""
        return self.mesh.devices[0]

    def parts(self, axes: tuple[str, ...]) -> int:
        """In how many parts these axes cut."""
        return self.mesh.size(axes)

    def fits(self, layout: DimLayout) -> bool:
        """Whether the real axes cut each segment evenly, as those of the stand-in do."""
        return not layout.axes or _fits(layout, self.parts(layout.axes))

    def admits(self, placed: PlacedNode) -> bool:
        """Whether a strategy on the stand-in is one on the mesh."""
        dims = (
            dim for _, at in (*placed.operands(), *placed.results()) for dim in at.sharding.dims
        )
        return all(map(self.fits, (*placed.layouts.values(), *dims)))

    def local_size(self, layout: DimLayout) -> int:
        """Elements of a dim on each device."""
        return layout.size // self.parts(layout.axes)

    def local_numel(self, at: Placement) -> int:
        """Elements on each device; on a single device all of them."""
        if not at.mesh.axes:
            return math.prod(at.sharding.shape)
        return math.prod(map(self.local_size, at.sharding.dims))

    def local_bytes(self, at: Placement, dtype: str) -> int:
        """Bytes on each device."""
        return (self.local_numel(at) * DTYPE_BITS[dtype] + 7) // 8

    def line(self, axes: frozenset[str]) -> tuple[int, ...]:
        """The devices that differ from the first one along these axes only, itself included."""
        return _line(self.mesh, axes)

    def node_seconds(self, graph: Graph, placed: PlacedNode) -> float:
        """Seconds that each device spends on its part; see `compute.node_seconds`."""
        row = row_of(placed.node)
        free = row is not None and (row.stored or (row.view and row.moved is None))
        if free or placed.absent:
            return 0.0
        node, rule = placed.node, placed.rule
        flops = 0.0
        if rule is not None:
            cut = {name: self.local_size(layout) for name, layout in placed.layouts.items()}
            local = (cut.get(name, rule.factors[name].size) for name in rule.points)
            flops = rule.flops_per_point * math.prod(local)
        names = (*node.inputs, *node.captures), node.outputs
        ins, outs = (
            tuple(
                self.local_bytes(at, graph.types[name].dtype) if at is not None else 0
                for name, at in zip(side, places, strict=True)
            )
            for side, places in zip(names, (placed.ins, placed.outs), strict=True)
        )
        moved = sum(ins) + sum(outs)
        if row is not None and row.moved is not None:
            moved = row.moved(ins[: len(node.inputs)], outs)
        spec = self.cluster.devices[self.device]
        return kernel_seconds(flops, moved, compute_dtype(graph, placed), spec)


@lru_cache(maxsize=65536)
def _fits(layout: DimLayout, parts: int) -> bool:
    return all(
        len(set(cuts)) == 1 and sum(cuts) % parts == 0 and cuts[0] > 0 for cuts in layout.segments
    )


@lru_cache(maxsize=4096)
def _line(mesh: DeviceMesh, axes: frozenset[str]) -> tuple[int, ...]:
    grid = np.array(mesh.devices).reshape([size for _, size in mesh.axes])
    picked = grid[tuple(slice(None) if name in axes else 0 for name in mesh.names)]
    return tuple(int(device) for device in np.asarray(picked).flat)


@dataclass
class EvenResharder(Resharder):
    """Reshards within one group of equal devices and between two such groups, by formula.

    Placements are on the group's stand-in or, for the other group, on `other`'s; a single
    device of the stand-in is one device of the group. Seconds are those of `even.device`.

    Attributes:
        even: The group.
        other: Another group, on a stand-in of other devices: what leaves for it and arrives from
            it is priced as between the devices that stand for the two.
    """

    even: EvenMesh = field(kw_only=True)
    other: EvenMesh | None = field(default=None, kw_only=True)
    _reach: dict[tuple[int, ...], Mapping[LinkLevel, int]] = field(default_factory=dict)

    def allows(self, source: Placement, target: Placement) -> bool:
        """Whether no dim's shares lie across each other."""
        if source.mesh != target.mesh:
            return True
        dims = zip(source.sharding.dims, target.sharding.dims, strict=True)
        return not any(
            held is not wanted and overlap(held, wanted, source.mesh) is Overlap.MIXED
            for held, wanted in dims
        )

    def priced(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        """As `hops`: formulas know nothing but prices."""
        return self.hops(dtype, source, target)

    def _all_reduce(self, dtype: str, source: Placement) -> Hop:
        after = Placement(source.mesh, source.sharding.without_partial())
        axes = frozenset(axis for axis, _ in source.sharding.partial)
        return self._hop(
            CommKind.ALL_REDUCE, axes, self.even.local_numel(source), dtype, source, after
        )

    def _reduce_scatter(self, dtype: str, source: Placement, target: Placement) -> Hop | None:
        if source.mesh != target.mesh or len({op for _, op in source.sharding.partial}) > 1:
            return None
        axes = frozenset(axis for axis, _ in source.sharding.partial)
        if axes - target.sharding.axes:
            return None
        if any(kind in (Overlap.GATHER, Overlap.MIXED) for kind in self._kinds(source, target)):
            return None
        return self._hop(
            CommKind.REDUCE_SCATTER, axes, self.even.local_numel(target), dtype, source, target
        )

    def _hop(
        self,
        kind: CommKind,
        axes: frozenset[str],
        numel: int,
        dtype: str,
        source: Placement,
        target: Placement,
    ) -> Hop:
        """A collective over the line of the axes; `numel` as the formulas take it (a member's)."""
        ranks = self.even.line(axes)
        item = DTYPE_BITS[dtype] / 8
        whole = numel * item * (1 if kind is CommKind.ALL_REDUCE else len(ranks))
        found = collective(kind, ranks, whole, self.cluster)
        launch = self.cluster.devices[self.even.device].launch_s
        passes = 2 if kind is CommKind.ALL_REDUCE else 1
        sent = passes * whole * (len(ranks) - 1) / len(ranks)
        return Hop(
            target, (self._priced(kind, ranks, dtype, source, launch + found.seconds, sent),)
        )

    def _priced(
        self,
        kind: CommKind,
        ranks: tuple[int, ...],
        dtype: str,
        source: Placement,
        seconds: float,
        sent: float = 0.0,
    ) -> PricedComm:
        comm = Comm(-1, kind, ranks, "", "", dtype, ())
        busy = {self.column(source.mesh): seconds}
        return PricedComm(comm, busy, sent, overlap_share(comm, self.cluster))

    def column(self, mesh: DeviceMesh) -> int:
        """The device that stands for the group of a stand-in, or of one of its devices."""
        if self.other is not None and self._is_other(mesh):
            return self.other.device
        return self.even.device

    def _is_other(self, mesh: DeviceMesh) -> bool:
        return self.other is not None and mesh.devices[0] in self.other.model.devices

    def _mask(self, target: Placement) -> Hop:
        """All devices but the first hold zeros, so the one that stands for all does."""
        return Hop(target, (), zeros=frozenset((self.column(target.mesh),)))

    def _move(self, dtype: str, source: Placement, target: Placement) -> list[Hop]:
        if source == target:
            return []
        if self._is_other(source.mesh) != self._is_other(target.mesh):
            return [self._across(dtype, source, target)]
        if source.mesh != target.mesh:
            return [self._to_or_from_one(dtype, source, target)]
        kinds = self._kinds(source, target)
        if all(kind is Overlap.EQUAL for kind in kinds):
            return [Hop(target, (), frozenset((self.column(target.mesh),)))]
        numel = self.even.local_numel(target)
        if all(kind in (Overlap.EQUAL, Overlap.SLICE) for kind in kinds):
            spec = self.cluster.devices[self.even.device]
            copied = 2 * numel * DTYPE_BITS[dtype] / 8 / spec.memory_bytes_per_s
            seconds = max(spec.launch_s, copied)
            ranks = (self.even.device,)
            return [Hop(target, (self._priced(CommKind.SLICE, ranks, dtype, source, seconds),))]
        if Overlap.MIXED in kinds:
            raise CostError(f"{source} -> {target} is not priced on a large mesh")
        pairs = zip(source.sharding.dims, target.sharding.dims, kinds, strict=True)
        gathered = [(held, want) for held, want, kind in pairs if kind is Overlap.GATHER]
        axes = frozenset(a for held, want in gathered for a in set(held.axes) - set(want.axes))
        if Overlap.SLICE in kinds:
            return [self._all_to_all(dtype, source, target, axes)]
        part = self.even.local_numel(source)
        return [self._hop(CommKind.ALL_GATHER, axes, part, dtype, source, target)]

    def _kinds(self, source: Placement, target: Placement) -> tuple[Overlap, ...]:
        dims = zip(source.sharding.dims, target.sharding.dims, strict=True)
        return tuple(overlap(held, wanted, source.mesh) for held, wanted in dims)

    def _all_to_all(
        self, dtype: str, source: Placement, target: Placement, axes: frozenset[str]
    ) -> Hop:
        """Each device gets an equal share from every device along the axes."""
        ranks = self.even.line(axes)
        share = self.even.local_numel(target) / len(ranks) * DTYPE_BITS[dtype] / 8
        seconds = self._pairwise(self._levels(ranks), share)
        sent = share * (len(ranks) - 1)
        priced = self._priced(CommKind.ALL_TO_ALL, ranks, dtype, source, seconds, sent)
        return Hop(target, (priced,))

    def _levels(self, ranks: tuple[int, ...]) -> Mapping[LinkLevel, int]:
        """How many of the others the first rank reaches over each level."""
        if ranks not in self._reach:
            found: dict[LinkLevel, int] = {}
            for rank in ranks[1:]:
                level = self.cluster.level((ranks[0], rank))
                found[level] = found.get(level, 0) + 1
            self._reach[ranks] = found
        return self._reach[ranks]

    def _pairwise(self, peers: Mapping[LinkLevel, int], share: float) -> float:
        launch = self.cluster.devices[self.even.device].launch_s
        waits = sum(level.latency_s * count for level, count in peers.items())
        wires = (share * n / level.bandwidth_bytes_per_s for level, n in peers.items())
        return launch + waits + max(wires, default=0.0)

    def _to_or_from_one(self, dtype: str, source: Placement, target: Placement) -> Hop:
        """Between the group and one device of it (an op that is kept whole), its busiest."""
        ranks = self.even.line(frozenset(self.even.mesh.names))
        item, others = DTYPE_BITS[dtype] / 8, len(ranks) - 1
        if not target.mesh.axes and source.sharding.is_replicated:
            return Hop(target, (), frozenset((self.column(target.mesh),)))
        if not target.mesh.axes:
            share = self.even.local_numel(source) * item
            pieces = math.prod(self.even.parts(dim.axes) for dim in source.sharding.dims)
            far = {self.cluster.level(ranks): pieces - 1}
            peers = self._levels(ranks) if pieces == len(ranks) else far
            priced = self._priced(
                CommKind.GATHER, ranks, dtype, source, self._pairwise(peers, share)
            )
            return Hop(target, (priced,))
        share = self.even.local_numel(target) * item
        if target.sharding.is_replicated:
            launch = self.cluster.devices[self.even.device].launch_s
            found = collective(CommKind.BROADCAST, ranks, share, self.cluster)
            kind, seconds = CommKind.BROADCAST, launch + found.seconds
        else:
            kind, seconds = CommKind.SCATTER, self._pairwise(self._levels(ranks), share)
        return Hop(target, (self._priced(kind, ranks, dtype, source, seconds, share * others),))

    def _across(self, dtype: str, source: Placement, target: Placement) -> Hop:
        """To another group: each device there gets its share from those who hold its pieces.

        Holders take turns, so each sends as much as a device there receives.
        """
        assert self.other is not None
        here, there = self.even, self.other
        if self._is_other(source.mesh):
            here, there = there, here
        level = self.cluster.level((here.device, there.device))
        pieces = 1
        for held, want in zip(source.sharding.dims, target.sharding.dims, strict=True):
            before = held.size // (here.parts(held.axes) if source.mesh.axes else 1)
            after = want.size // (there.parts(want.axes) if target.mesh.axes else 1)
            pieces *= max(1, -(-after // max(before, 1)))
        nbytes = there.local_numel(target) * DTYPE_BITS[dtype] / 8
        ends = here.device, there.device
        launch = max(self.cluster.devices[device].launch_s for device in ends)
        seconds = launch + pieces * level.latency_s + nbytes / level.bandwidth_bytes_per_s
        comm = Comm(-1, CommKind.ALL_TO_ALL, ends, "", "", dtype, ())
        busy = dict.fromkeys(ends, seconds)
        return Hop(target, (PricedComm(comm, busy, nbytes, level.overlap),))


@lru_cache(maxsize=65536)
def overlap(held: DimLayout, wanted: DimLayout, mesh: DeviceMesh) -> Overlap:
    """How the shares of one dim lie to each other, alike at all coordinates of the stand-in."""
    if held == wanted:
        return Overlap.EQUAL
    within = covers = True
    for before, after in _shares(held, wanted, mesh):
        common = intersect(before, after)
        within &= common == after
        covers &= common == before
    return Overlap.SLICE if within else Overlap.GATHER if covers else Overlap.MIXED


def _shares(
    held: DimLayout, wanted: DimLayout, mesh: DeviceMesh
) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]:
    axes = {*held.axes, *wanted.axes}
    for _, point in mesh.coords():
        if not any(point[name] for name in mesh.names if name not in axes):
            yield held.pieces(mesh, point), wanted.pieces(mesh, point)
