"""Prices on large meshes where all cuts are even: one representative device is priced.

If every layout gives each device an equal share, all devices do the same work, and the price of a
reshard depends on the axes that cut each dim, not on the number of devices. So strategies and
layouts are derived on a *stand-in*: a mesh with the same axes, each as long as its least prime
factor. Here they are priced at the axes' real lengths by closed formulas, in time that does not
grow with the mesh.

Within a group, a reshard costs what `reshard.Resharder` gives for the busiest device of the real
mesh, to rounding. Where, of a dim, neither the share before nor that after contains the other,
devices do unlike work. If the dim is cut over more axes before or after (a weight that is stored
over an outer axis, too), the messages of all devices of the real mesh are listed, once for each
pair of sets of axes, on more than `MOST_RANKS` devices and up to `MOST_LISTED`. Else the reshard
has no price (the dim moves from one axis to another): `EvenResharder.allows` is False for it, and
plans do without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.executors import MOST_RANKS
from partitioner.cost_model.prices.collectives import (
    COUNT_BYTES,
    Wires,
    collective,
    dispatch_s,
    joined_seconds,
    pairwise,
    tabled,
)
from partitioner.cost_model.prices.compute import (
    call_estimate,
    is_free,
    kernel_estimate,
    moved_bytes,
)
from partitioner.cost_model.prices.reshard import (
    Hop,
    Overlap,
    PricedComm,
    Real,
    Reshard,
    Resharder,
    overlap_share,
    overlaps,
    scatters,
)
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Interval, Placement, Sharding
from partitioner.ir.loops.factors import Dispatch
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import dense_bytes, item_bytes

#: Most devices of a mesh whose messages are listed: those of 1,024 take a second.
MOST_LISTED = 1024


def stand_in(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the same axes, each as long as its least prime factor.

    >>> str(stand_in(DeviceMesh.of({"dp": 128, "tp": 9})))
    'dp=2 tp=3 on 0-5'
    """
    return DeviceMesh.of(
        {
            axis: next((p for p in range(2, math.isqrt(size) + 1) if size % p == 0), size)
            for axis, size in mesh.axes
        }
    )


@dataclass(frozen=True)
class EvenMesh:
    """A group of equal devices, and the stand-in mesh that its layouts are written on."""

    mesh: DeviceMesh
    model: DeviceMesh  #: The stand-in.
    cluster: Cluster

    @property
    def device(self) -> int:
        """The representative."""
        return self.mesh.devices[0]

    def fits(self, layout: DimLayout) -> bool:
        """Test whether the real axes cut each segment evenly, as those of the stand-in do."""
        return not layout.axes or _fits(layout, self.mesh.size(layout.axes))

    def admits(self, placed: PlacedNode) -> bool:
        """Test whether a strategy on the stand-in is one on the mesh."""
        dims = (
            dim for _, at in (*placed.operands(), *placed.results()) for dim in at.sharding.dims
        )
        return all(map(self.fits, (*placed.layouts.values(), *dims)))

    def parts(self, layout: DimLayout) -> int:
        """The number of parts of a dim."""
        return self.mesh.size(layout.axes)

    def local_size(self, layout: DimLayout) -> int:
        """Elements of a dim on each device."""
        return layout.size // self.parts(layout)

    def copies(self, at: Placement) -> int:
        """The number of devices that hold the same part of a tensor."""
        if not at.mesh.axes:
            return 1
        return self.mesh.size() // math.prod(map(self.parts, at.sharding.dims))

    def local_shape(self, at: Placement) -> tuple[int, ...]:
        """Shape of a tensor on each device; the whole one if it is on a single device."""
        if not at.mesh.axes:
            return at.sharding.shape
        return tuple(map(self.local_size, at.sharding.dims))

    def local_numel(self, at: Placement) -> int:
        """Elements of a tensor on each device; all of them if it is on a single device."""
        return math.prod(self.local_shape(at))

    def local_bytes(self, at: Placement, dtype: str) -> int:
        """Bytes of a tensor on each device."""
        return dense_bytes(self.local_numel(at), dtype)

    def line(self, axes: frozenset[str]) -> tuple[int, ...]:
        """The devices that differ from the representative along these axes only, it included."""
        return _line(self.mesh, axes)

    def node_seconds(self, graph: Graph, placed: PlacedNode) -> float:
        """Seconds that each device spends on its part; see `compute.node_seconds`."""
        if placed.sent:
            inside_s = self.node_seconds(graph, placed.inside(graph))
            return inside_s + self._dispatch_seconds(placed)
        if is_free(placed):
            return call_estimate(placed, self.cluster.devices[self.device]).seconds
        rule, popularity = placed.rule, 1.0
        if rule is None:
            flops = estimated_flops(graph, placed.node)
        else:
            sizes = {name: self.local_size(layout) for name, layout in placed.layouts.items()}
            loops = (sizes.get(name, rule.factors[name].size) for name in rule.points)
            flops = rule.flops_per_point * math.prod(loops)
            if rule.rising in placed.layouts:  # the last device has the most to do
                part, size = sizes[rule.rising], rule.factors[rule.rising].size
                flops *= rule.steepness([(size - part, part)])
            dispatch = rule.dispatch
            if dispatch is not None and dispatch.loads and dispatch.owners in placed.layouts:
                owners = placed.layouts[dispatch.owners]
                load = dispatch.load(self._busiest(dispatch, placed), owners.size)
                popularity = load * self.parts(owners)
            flops *= popularity
        moved = moved_bytes(graph, placed, self.local_bytes)
        spec, shape = self.cluster.devices[self.device], self.local_shape
        return kernel_estimate(
            graph, placed, spec, flops, moved, shape, popularity=popularity
        ).seconds

    def _dispatch_seconds(self, placed: PlacedNode) -> float:
        assert placed.rule is not None
        dispatch = placed.rule.dispatch
        assert dispatch is not None
        rows, owners = placed.layouts[dispatch.rows], placed.layouts[dispatch.owners]
        share = dispatch.share(self._busiest(dispatch, placed), owners.size)
        moved = self.local_size(rows) * share
        sizes = moved * dispatch.there_bytes, moved * dispatch.back_bytes
        ranks = self.line(frozenset(placed.sent))
        return sum(
            dispatch_s(ranks, nbytes, self.cluster)[self.device] for nbytes in (COUNT_BYTES, *sizes)
        )

    def _busiest(self, dispatch: Dispatch, placed: PlacedNode) -> tuple[Interval]:
        """The part of the owners of a node with the largest load, all parts being of one size."""
        owners = placed.layouts[dispatch.owners]
        part = self.local_size(owners)
        parts = ((start, part) for start in range(0, owners.size, part))
        return (max(parts, key=lambda at: dispatch.load([at], owners.size)),)


@lru_cache(maxsize=65536)
def _fits(layout: DimLayout, parts: int) -> bool:
    return not layout.windows and all(
        len(set(cuts)) == 1 and sum(cuts) % parts == 0 and cuts[0] > 0 for cuts in layout.segments
    )


@lru_cache(maxsize=4096)
def _line(mesh: DeviceMesh, axes: frozenset[str]) -> tuple[int, ...]:
    grid = np.array(mesh.devices).reshape([size for _, size in mesh.axes])
    line = grid[tuple(slice(None) if name in axes else 0 for name in mesh.names)]
    return tuple(int(device) for device in np.asarray(line).flat)


@lru_cache(maxsize=65536)
def _shared(
    held: tuple[int, ...], before: int, wanted: tuple[int, ...], after: int
) -> tuple[int, int, int]:
    """Compare even cuts of a dim's segments into parts: what their parts overlap, at most.

    The most parts of the first that one of the second overlaps, the most of the second that one of
    the first overlaps, and the most elements of an overlap.

    >>> _shared((12,), 3, (12,), 2)
    (2, 2, 4)
    >>> _shared((12,), 2, (6, 6), 2)
    (2, 2, 3)
    """
    starts = []
    for sizes, parts in ((held, before), (wanted, after)):
        each = np.array(sizes)[:, None] // parts * np.arange(parts)
        starts.append((each + (np.cumsum(sizes) - sizes)[:, None]).ravel())
    points = np.unique(np.concatenate(starts))
    first, second = (
        (np.searchsorted(at, points, side="right") - 1) % parts
        for at, parts in zip(starts, (before, after), strict=True)
    )
    pairs, index = np.unique(first * after + second, return_inverse=True)
    most = np.bincount(index, np.diff(points, append=sum(held))).max()
    return (
        int(np.bincount(pairs % after).max()),
        int(np.bincount(pairs // after).max()),
        int(most),
    )


def _mixed(source: Placement, target: Placement) -> tuple[DimLayout, DimLayout]:
    """The layouts of the dim whose shares overlap in part only."""
    dims = zip(source.sharding.dims, target.sharding.dims, strict=True)
    pairs = zip(dims, overlaps(source, target), strict=True)
    return next(pair for pair, share in pairs if share is Overlap.MIXED)


@dataclass(frozen=True)
class _Listed:
    """A communication of a reshard, of which some devices have more to do than others."""

    kind: CommKind
    ranks: tuple[int, ...]
    wires: frozenset[Wires]  #: Of all ranks.


@dataclass
class EvenResharder(Resharder):
    """Reshards within one group of equal devices and between two such groups, by formula.

    Placements are on the group's stand-in or, for the other group, on that of `other`; a single
    device of the stand-in is one device of the group. Seconds are those of the representative.
    """

    even: EvenMesh = field(kw_only=True)  #: The group.
    #: Another group, on a stand-in of other devices: reshards between the two groups are priced as
    #: between their representatives.
    other: EvenMesh | None = field(default=None, kw_only=True)
    #: Most devices of a mesh whose messages are not listed: a search of one axis after the other
    #: ended with worse plans where it had these reshards to choose from, too.
    most_unlisted: int = field(default=MOST_RANKS, kw_only=True)
    _peers: dict[tuple[int, ...], Mapping[LinkLevel, int]] = field(default_factory=dict)
    _listed: dict[tuple[tuple[str, ...], ...], Sequence[_Listed]] = field(default_factory=dict)

    def allows(self, source: Placement, target: Placement) -> bool:
        """Test whether the reshard has a price: see the module."""
        if source.mesh != target.mesh:
            return True
        shares = overlaps(source, target)
        if Overlap.MIXED not in shares:
            return True
        unlike = [how for how in shares if how is not Overlap.EQUAL]
        held, wanted = _mixed(source, target)
        is_plain = all(len(dim.segments) == 1 for dim in (held, wanted))
        is_nested = {*held.axes} < {*wanted.axes} or {*wanted.axes} < {*held.axes}
        is_listed = self.most_unlisted < self.even.mesh.size() <= MOST_LISTED
        return len(unlike) == 1 and is_plain and is_nested and is_listed

    def _real_of(self, devices: Collection[int]) -> Real:
        """The devices themselves: those of a stand-in are not those of the cluster."""
        return Real(1 + max(devices), (0,))

    def column(self, mesh: DeviceMesh) -> int:
        """The representative of the group of a stand-in, or of one of its devices."""
        if self.other is not None and self._is_other(mesh):
            return self.other.device
        return self.even.device

    def _is_other(self, mesh: DeviceMesh) -> bool:
        return self.other is not None and mesh.devices[0] in self.other.model.devices

    def _all_reduce(self, dtype: str, source: Placement) -> Hop:
        axes = frozenset(axis for axis, _ in source.sharding.partial)
        numel, target = self.even.local_numel(source), source.without_partial()
        return self._collective(CommKind.ALL_REDUCE, axes, numel, (dtype, source, target))

    def _reduce_scatter(self, dtype: str, source: Placement, target: Placement) -> Hop | None:
        if not scatters(source, target):
            return None
        axes = frozenset(axis for axis, _ in source.sharding.partial)
        numel = self.even.local_numel(target)
        return self._collective(CommKind.REDUCE_SCATTER, axes, numel, (dtype, source, target))

    def _mask(self, target: Placement) -> Hop:
        """All devices but the first hold zeros, so the representative is priced as one of them."""
        return Hop(target, zeros=frozenset((self.column(target.mesh),)))

    def _move(self, dtype: str, source: Placement, target: Placement) -> list[Hop]:
        if source == target:
            return []
        if self._is_other(source.mesh) != self._is_other(target.mesh):
            return [self._across((dtype, source, target))]
        if self._is_other(source.mesh):
            return [*self._of_other.hops(dtype, source, target)]
        if source.mesh != target.mesh:
            return [self._to_or_from_one((dtype, source, target))]
        return [self._within((dtype, source, target))]

    @cached_property
    def _of_other(self) -> EvenResharder:
        """The reshards of the other group."""
        assert self.other is not None
        return EvenResharder(self.cluster, even=self.other)

    def _is_even(self, at: Placement) -> bool:
        even = self.other if self.other is not None and self._is_other(at.mesh) else self.even
        return all(map(even.fits, at.sharding.dims))

    def _within(self, reshard: Reshard) -> Hop:
        dtype, source, target = reshard
        shares = overlaps(source, target)
        if Overlap.MIXED in shares:
            if not self.allows(source, target):
                raise CostError(f"{source} -> {target} is not priced on a large mesh")
            return self._of_all(reshard)
        if {*shares} <= {Overlap.EQUAL}:
            return self._alias(target)
        numel = self.even.local_numel(target)
        if Overlap.GATHER not in shares:
            device = self.even.device
            spec = self.cluster.devices[device]
            copy_s = 2 * numel * item_bytes(dtype) / spec.memory_bytes_per_s
            seconds = max(spec.launch_s, copy_s)
            return self._hop(CommKind.SLICE, (device,), reshard, seconds)
        pairs = zip(source.sharding.dims, target.sharding.dims, shares, strict=True)
        gathered = [(before, after) for before, after, how in pairs if how is Overlap.GATHER]
        axes = frozenset(a for before, after in gathered for a in {*before.axes} - {*after.axes})
        if Overlap.SLICE not in shares:
            part = self.even.local_numel(source)
            return self._collective(CommKind.ALL_GATHER, axes, part, reshard)
        # each device gets an equal share from every device along the axes
        ranks = self.even.line(axes)
        share = numel / len(ranks) * item_bytes(dtype)
        in_table = tabled(CommKind.ALL_TO_ALL, ranks, share * len(ranks), self.cluster)
        if in_table is None:
            seconds = self._pairwise_s(self._peers_of(ranks), share, both_ways=True)
        else:
            spec = self.cluster.devices[self.even.device]
            seconds = in_table.start_s(spec) + in_table.seconds
        return self._hop(CommKind.ALL_TO_ALL, ranks, reshard, seconds)

    def _of_all(self, reshard: Reshard) -> Hop:
        """The step in which devices do unlike work: its busiest counts."""
        dtype, source, target = reshard
        held, wanted = _mixed(source, target)
        used = {axis for dim in source.sharding.dims if dim is not held for axis in dim.axes}
        others = tuple(axis for axis in self.even.mesh.names if axis in used)
        key = held.axes, wanted.axes, others
        if key not in self._listed:
            self._listed[key] = tuple(self._messages(*key))
        item = item_bytes(dtype) * self.even.local_numel(source)
        if len(wanted.axes) > len(held.axes):  # of the parts that are listed, each has several
            item /= self.even.parts(wanted) // self.even.parts(held)

        def seconds(listed: _Listed) -> float:
            start_s = self._start_s([self.cluster.level(listed.ranks)], self.even.device)
            return start_s + max(wires.seconds(item) for wires in listed.wires)

        busiest = max(self._listed[key], key=seconds)
        return self._hop(busiest.kind, busiest.ranks, reshard, seconds(busiest))

    def _messages(
        self, held: tuple[str, ...], wanted: tuple[str, ...], others: tuple[str, ...]
    ) -> Iterator[_Listed]:
        """List the messages by which a dim cut over some axes is cut over others.

        Its smallest parts have one element; another dim is cut over the `others`.
        """
        mesh = self.even.mesh
        sizes = mesh.size(max(held, wanted, key=len)), mesh.size(others)
        source, target = (
            Placement(
                mesh,
                Sharding(
                    tuple(
                        DimLayout.even(size, over, mesh)
                        for size, over in zip(sizes, (axes, others), strict=True)
                    )
                ),
            )
            for axes in (held, wanted)
        )
        for hop in Resharder(self.cluster).hops("int8", source, target):
            for comm in (priced.comm for priced in hop.comms):
                if comm.kind is not CommKind.SLICE:
                    wires = frozenset(pairwise(comm, self.cluster).values())
                    yield _Listed(comm.kind, comm.ranks, wires)

    def _to_or_from_one(self, reshard: Reshard) -> Hop:
        """Reshard between the group and one device of it (an op kept whole), its busiest."""
        dtype, source, target = reshard
        ranks = self.even.line(frozenset(self.even.mesh.names))
        if not target.mesh.axes:
            if source.sharding.is_replicated:
                return self._alias(target)
            share = self.even.local_numel(source) * item_bytes(dtype)
            pieces = math.prod(self.even.mesh.size(dim.axes) for dim in source.sharding.dims)
            far = {self.cluster.level(ranks): pieces - 1}
            peers = self._peers_of(ranks) if pieces == len(ranks) else far
            seconds = self._pairwise_s(peers, share)
            return self._hop(CommKind.GATHER, ranks, reshard, seconds)
        share = self.even.local_numel(target) * item_bytes(dtype)
        if target.sharding.is_replicated:
            kind = CommKind.BROADCAST
            seconds = self._collective_s(kind, ranks, share)
        else:
            kind, seconds = CommKind.SCATTER, self._pairwise_s(self._peers_of(ranks), share)
        return self._hop(kind, ranks, reshard, seconds)

    def _across(self, reshard: Reshard) -> Hop:
        """Reshard to another group: holders of a piece take turns; the busiest count."""
        dtype, source, target = reshard
        assert self.other is not None
        here, there = self.even, self.other
        if self._is_other(source.mesh):
            here, there = there, here
        sent = received = numel = 1  # shares of a part, and the most elements of one
        for held, wanted in zip(source.sharding.dims, target.sharding.dims, strict=True):
            before, after = here.parts(held), there.parts(wanted)
            sizes, others = (tuple(map(sum, dim.segments)) for dim in (held, wanted))
            of_target, of_source, most = _shared(sizes, before, others, after)
            received, sent, numel = received * of_target, sent * of_source, numel * most
        copies, holders = there.copies(target), here.copies(source)
        messages = -(-sent * copies // holders)
        nbytes = there.local_numel(target) * item_bytes(dtype)
        wanted_numel = copies * here.local_numel(source)  # of a part, by all
        sent_bytes = min(messages * numel, wanted_numel) * item_bytes(dtype)
        ends = here.device, there.device
        level, kind = self.cluster.level(ends), CommKind.ALL_TO_ALL

        def messages_s(device: int, count: int, size: float) -> float:
            wires_s = count * level.message_s + level.transfer_s(size)
            return self._start_s([level], device) + wires_s

        busy = {
            here.device: messages_s(here.device, messages, sent_bytes),
            there.device: messages_s(there.device, received, nbytes),
        }
        if sent == received == 1 < messages:  # a holder's whole part goes to all that it serves
            kind, free = CommKind.BROADCAST, frozenset(target.mesh.names) - target.sharding.axes
            served = there.line(free)[::holders]
            ranks = (here.device, *served)
            busy = {device: self._collective_s(kind, ranks, nbytes, device) for device in ends}
            if copies < 2 * holders:  # another holder serves one device
                busy = {d: max(s, messages_s(d, 1, nbytes)) for d, s in busy.items()}
        comm = Comm(-1, kind, ends, "", "", dtype)
        hidden = level.hidden_share(kind, received + messages)
        return Hop(target, (PricedComm(comm, busy, hidden),))

    def _alias(self, target: Placement) -> Hop:
        return Hop(target, aliases=frozenset((self.column(target.mesh),)))

    def _collective(
        self, kind: CommKind, axes: frozenset[str], numel: int, reshard: Reshard
    ) -> Hop:
        """A collective over the line of the axes; `numel` of the part that each member has."""
        ranks = self.even.line(axes)
        whole = numel * item_bytes(reshard[0]) * (1 if kind is CommKind.ALL_REDUCE else len(ranks))
        seconds, joined = self._collective_s(kind, ranks, whole), None
        if self.even.mesh.size() == len(self.cluster):
            alone_s = {self.even.device: seconds}
            joined = joined_seconds(kind, ranks, whole, alone_s, self.cluster)
        return self._hop(kind, ranks, reshard, seconds, joined)

    def _hop(
        self,
        kind: CommKind,
        ranks: tuple[int, ...],
        reshard: Reshard,
        seconds: float,
        joined: Mapping[int, float] | None = None,
    ) -> Hop:
        dtype, source, target = reshard
        comm = Comm(-1, kind, ranks, "", "", dtype)
        device, share = self.column(source.mesh), overlap_share(comm, self.cluster)
        return Hop(target, (PricedComm(comm, {device: seconds}, share, joined),))

    def _collective_s(
        self, kind: CommKind, ranks: tuple[int, ...], nbytes: float, device: int | None = None
    ) -> float:
        best, own = collective(kind, ranks, nbytes, self.cluster), self.even.device
        return best.start_s(self.cluster.devices[own if device is None else device]) + best.seconds

    def _start_s(self, levels: Iterable[LinkLevel], device: int) -> float:
        is_known = all(level.is_measured for level in levels)
        return self.cluster.devices[device].start_s(is_known=is_known)

    def _peers_of(self, ranks: tuple[int, ...]) -> Mapping[LinkLevel, int]:
        """Number of the other ranks that the first one reaches over each level."""
        if ranks not in self._peers:
            peers: dict[LinkLevel, int] = {}
            for rank in ranks[1:]:
                level = self.cluster.level((ranks[0], rank))
                peers[level] = peers.get(level, 0) + 1
            self._peers[ranks] = peers
        return self._peers[ranks]

    def _pairwise_s(
        self, peers: Mapping[LinkLevel, int], share: float, *, both_ways: bool = False
    ) -> float:
        waits = sum(level.message_s * count for level, count in peers.items())
        if both_ways:
            waits += max((level.waiting_s for level in peers), default=0.0)
        wires = (
            level.exchanged_contents_s(share * n) if both_ways else level.transfer_s(share * n)
            for level, n in peers.items()
        )
        return self._start_s(peers, self.even.device) + waits + max(wires, default=0.0)
