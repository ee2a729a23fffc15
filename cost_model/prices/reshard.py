"""Reshards: the communications from one placement of a value to another, and their prices.

One function serves the search, the referee and the lowering. Pending reductions are resolved
first (reduce-scatter straight to the target where its parts allow, else all-reduce); then one
exchange moves exactly the parts that each device lacks, so no sequence of collectives over single
mesh axes can move less; between groups, it may move shares of equal parts, which are gathered
there. See docs/concepts/reshard.md.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.prices.collectives import comm_cost, joined_seconds, whole_bytes
from partitioner.ir.exchange import (
    Region,
    Transfer,
    components,
    exchange,
    intersect,
    region_numel,
)
from partitioner.ir.graph import Graph, Node, once_a_graph
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import COPIES, DeviceMesh
from partitioner.ir.ops import is_view, row_of, writes_stored
from partitioner.ir.program import BUCKET_BYTES, JOINING, SMALL_BYTES, Comm, CommKind

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Real:
    """The devices that the lowest ones of equal prices stand for.

    Devices of several groups of one level talk over the level above, whichever groups these are. So
    the groups close up from the lowest one on, in order.
    """

    size: int  #: Devices of a group.
    groups: tuple[int, ...]  #: The group that each of the lowest groups stands for.

    def of(self, device: int) -> int:
        """Return the device that a low one stands for."""
        return self.groups[device // self.size] * self.size + device % self.size

    def of_all(self, devices: Numbers) -> Numbers:
        """Return the devices that low ones stand for."""
        return self._groups[devices // self.size] * self.size + devices % self.size

    def low(self, device: int) -> int:
        """Return the low device that stands for a device, or -1 if none does."""
        number = self._numbers.get(device // self.size)
        return -1 if number is None else number * self.size + device % self.size

    @cached_property
    def is_low(self) -> bool:
        """Tell whether the devices are the lowest ones themselves."""
        return self.groups == (*range(len(self.groups)),)

    @cached_property
    def _groups(self) -> Numbers:
        return np.array(self.groups, np.int64)

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {group: number for number, group in enumerate(self.groups)}


def _renamed(mesh: DeviceMesh, name: Callable[[int], int]) -> DeviceMesh:
    return DeviceMesh(mesh.axes, tuple(map(name, mesh.devices)))


@dataclass(frozen=True)
class PricedComm:
    """A communication without names and `seq`, and its price."""

    comm: Comm
    seconds: Mapping[int, float]  #: Seconds that it takes on each device.
    #: Share of the seconds that compute hides, if no node waits for it at once.
    overlap: float = 0.0
    #: Least seconds of it in a bucket (see `collectives.joined_seconds`); None if it has none.
    joined: Mapping[int, float] | None = None

    def whole_seconds(self, *, beside: bool) -> Mapping[int, float]:
        """Seconds that it takes on each device; `beside` compute small ones may share buckets."""
        return self.joined if beside and self.joined is not None else self.seconds

    def busy_seconds(self, *, beside: bool) -> Mapping[int, float]:
        """Seconds that it keeps each device from computing, if it passes `beside` compute."""
        seconds = self.whole_seconds(beside=beside)
        if not beside or not self.overlap:
            return seconds
        return {device: (1 - self.overlap) * whole for device, whole in seconds.items()}

    def among(self, real: Real, comm: Comm, devices: Iterable[int]) -> PricedComm:
        """The same price of a communication among real devices: of those that `devices` are for."""
        seconds, joined = (
            some and {real.of(device): some[device] for device in devices}
            for some in (self.seconds, self.joined)
        )
        assert seconds is not None
        return replace(self, comm=comm, seconds=seconds, joined=joined)


@dataclass(frozen=True)
class Hop:
    """A step of a reshard."""

    after: Placement  #: Placement of the value after it.
    comms: tuple[PricedComm, ...] = ()  #: Communications, independent of each other.
    #: Devices whose part does not change: the same buffer serves.
    aliases: frozenset[int] = frozenset()
    #: Devices that hold zeros afterwards (a whole value becomes a pending sum), or a part of no
    #: elements, which no device needs to send.
    zeros: frozenset[int] = frozenset()
    #: Whether it has more communications, in which no device takes part that is asked for.
    has_more: bool = False

    def on(self, real: Real, observed: frozenset[int] | None = None) -> Hop:
        """The step on the devices that those of it stand for; what concerns `observed` ones alone.

        The communications are whole, but for prices of other devices.
        """
        if observed is None and real.is_low:
            return self
        chosen = self.comms_of.keys() | self.aliases | self.zeros
        if observed is not None:
            chosen &= {real.low(device) for device in observed}
        numbers = sorted({n for device in chosen for n in self.comms_of.get(device, ())})
        return Hop(
            Placement(_renamed(self.after.mesh, real.of), self.after.sharding),
            tuple(_comm_on(self.comms[number], real, chosen) for number in numbers),
            frozenset(map(real.of, self.aliases & chosen)),
            frozenset(map(real.of, self.zeros & chosen)),
            len(numbers) < len(self.comms),
        )

    @cached_property
    def comms_of(self) -> Mapping[int, Sequence[int]]:
        """The positions of the communications in which each device takes part."""
        numbers: dict[int, list[int]] = defaultdict(list)
        for number, priced in enumerate(self.comms):
            for device in priced.seconds:
                numbers[device].append(number)
        return dict(numbers)

    @cached_property
    def roles(self) -> Mapping[int, Hashable]:
        """The part that each device takes, whoever its peers are."""
        roles: dict[int, list[Hashable]] = defaultdict(list)
        for priced in self.comms:
            comm = priced.comm
            sources, targets = comm.sources(), comm.targets()
            sent = comm.sent_numel()
            for device, seconds in priced.seconds.items():
                sides = device in sources, device in targets
                role = (comm.kind, seconds, priced.overlap, sides, sent.get(device, 0))
                roles[device].append(role)
        for name, devices in (("alias", self.aliases), ("zeros", self.zeros)):
            for device in devices:
                roles[device].append(name)
        return {device: tuple(parts) for device, parts in roles.items()}


Reshard = tuple[str, Placement, Placement]  #: (element type, source, target).
_Collective = tuple[CommKind, tuple[int, ...], float, bool]  # (kind, ranks, bytes, whether joined)

#: Most devices of a mesh on which the transfers of collectives of equal parts are listed, one for
#: each pair of ranks: no programs are made for more devices.
LISTED = 64


@dataclass
class Resharder:
    """Reshards on one cluster, each priced once."""

    cluster: Cluster
    #: Most bytes of a bucket's operands on one rank, by kind (see `most_joined`); of other
    #: kinds, as many as a bucket holds.
    bucket_bytes: Mapping[CommKind, int] = field(default_factory=dict)
    _hops: dict[Reshard, tuple[Hop, ...]] = field(default_factory=dict)
    _low: dict[Reshard, tuple[Hop, ...]] = field(default_factory=dict)
    #: By two meshes, what the lowest devices stand for, and the meshes of these.
    _real: dict[tuple[DeviceMesh, DeviceMesh], tuple[Real, DeviceMesh, DeviceMesh]] = field(
        default_factory=dict
    )
    #: Prices of collectives among the lowest ranks of equal prices, by rank.
    _collectives: dict[_Collective, PricedComm] = field(default_factory=dict)

    def allows(self, source: Placement, target: Placement) -> bool:
        """Test whether the reshard has a price: every one between shardings of one shape has."""
        return source.sharding.shape == target.sharding.shape

    def hops(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        """Steps from `source` to `target`; () if they are equal."""
        if source == target:
            return ()
        key = (dtype, source, target)
        if key not in self._hops:
            low, real = self.lowest(*key)
            self._hops[key] = tuple(hop.on(real) for hop in low)
        return self._hops[key]

    def lowest(
        self, dtype: str, source: Placement, target: Placement
    ) -> tuple[tuple[Hop, ...], Real]:
        """The steps among the lowest devices of equal prices, and those that these stand for.

        The two placements are not equal.
        """
        meshes = source.mesh, target.mesh
        if meshes not in self._real:
            real = self._real_of(source.mesh.members | target.mesh.members)
            held, wanted = (_renamed(mesh, real.low) for mesh in meshes)
            self._real[meshes] = real, held, wanted
        real, held, wanted = self._real[meshes]
        key = (dtype, Placement(held, source.sharding), Placement(wanted, target.sharding))
        if key not in self._low:
            self._low[key] = self._plan(*key)
        return self._low[key], real

    def _real_of(self, devices: Collection[int]) -> Real:
        """The devices with those that may stand for them; equal ones may."""
        level = self.cluster.levels.index(self.cluster.level((min(devices), max(devices))))
        size = self.cluster.levels[level - 1].size if level else 1
        real = Real(size, tuple(sorted({device // size for device in devices})))
        specs = self.cluster.devices
        alike = self.cluster.has_equal_devices or all(
            specs[device] == specs[real.low(device)] for device in devices
        )
        return real if alike else Real(len(specs), (0,))

    def _plan(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        whole = target.without_partial()
        reductions = {op for _, op in source.sharding.partial}
        if len(reductions) > 1:
            raise CostError(f"{source} is partial by several reductions {sorted(reductions)}")
        starts: list[list[Hop]] = [[]]
        if reductions:
            scatter = self._reduce_scatter(dtype, source, whole)
            starts = [[self._all_reduce(dtype, source)], *([[scatter]] if scatter else [])]
        options = []
        for start in starts:
            for way in ((whole,), *((at, whole) for at in self._shared(source, whole))):
                option = [*start]
                for end in way:
                    option += self._move(dtype, option[-1].after if option else source, end)
                options.append(option)
        hops = min(options, key=_busiest_s)
        if target.sharding.partial:
            hops.append(self._mask(target))
        return tuple(hops)

    def _shared(self, source: Placement, target: Placement) -> Iterator[Placement]:
        """Yield the placement of shares, on other devices, of the parts that several are to hold.

        They gather the whole among themselves. There is one at most: of the first dim that divides.
        """
        mesh, dims = target.mesh, target.sharding.dims
        held = {COPIES, *target.sharding.axes}
        free = {axis for axis, size in mesh.axes if size > 1 and axis not in held}
        if not free or not mesh.members.isdisjoint(source.mesh.members):
            return
        # what the source cuts is sent as it lies
        for dim in sorted(range(len(dims)), key=lambda dim: not source.sharding.dims[dim].axes):
            axes = tuple(axis for axis in mesh.names if axis in free or axis in dims[dim].axes)
            if dims[dim].size % mesh.size(axes) or not dims[dim].size:
                continue
            share = DimLayout.even(dims[dim].size, axes, mesh)
            at = Placement(mesh, Sharding((*dims[:dim], share, *dims[dim + 1 :])))
            if overlaps(at, target)[dim] is Overlap.GATHER and self._is_even(at):
                yield at
                return

    def _is_even(self, _at: Placement) -> bool:
        """Test whether all devices hold as much."""
        return True

    def _mask(self, target: Placement) -> Hop:
        """A whole value becomes a pending sum: the first device keeps it, the others get zeros."""
        axes = [axis for axis, _ in target.sharding.partial]
        first = frozenset(d for d, point in target.mesh.coords() if not any(point[a] for a in axes))
        return Hop(target, (), first, frozenset(target.mesh.devices) - first)

    def _move(self, dtype: str, source: Placement, target: Placement) -> list[Hop]:
        if source == target:
            return []
        if source.mesh.size() > LISTED and (axes := _gathered_axes(source, target)):
            return [self._all_gather(dtype, source, target, axes)]
        transfers = exchange(source, target)
        groups = components(transfers)
        before, after = dict(source.parts()), dict(target.parts())
        alone = (group[0] for group in groups if len(group) == 1)
        aliases = frozenset(d for d in alone if d in before and before[d] == after[d])
        joins = self._joins(dtype, source, target)
        group_of = {device: group for group in groups for device in group}
        by_group: dict[tuple[int, ...], list[Transfer]] = {group: [] for group in groups}
        for transfer in transfers:
            by_group[group_of[transfer.target]].append(transfer)
        comms = [
            self._price(_classify(dtype, group, tuple(some), before, after), joins=joins)
            for group, some in by_group.items()
            if group[0] not in aliases or len(group) > 1
        ]
        empty = frozenset(d for d, pieces in target.parts() if not region_numel(pieces))
        return [Hop(target, tuple(comms), aliases, empty)]

    def _all_gather(
        self, dtype: str, source: Placement, target: Placement, axes: frozenset[str]
    ) -> Hop:
        """The step in which devices that differ along some axes give each other equal parts."""
        joins, mesh = self._joins(dtype, source, target), source.mesh
        part = math.prod(source.sharding.local_shape(mesh, mesh.coord(mesh.devices[0])))
        comms = (
            Comm(-1, CommKind.ALL_GATHER, group, "", "", dtype, part=part)
            for group in _lines(mesh, axes)
        )
        return Hop(target, tuple(self._price(comm, joins=joins) for comm in comms))

    def _all_reduce(self, dtype: str, source: Placement) -> Hop:
        after = source.without_partial()
        return Hop(after, tuple(self._reductions(CommKind.ALL_REDUCE, dtype, source, after)))

    def _reduce_scatter(self, dtype: str, source: Placement, target: Placement) -> Hop | None:
        if not scatters(source, target):
            return None
        return Hop(target, tuple(self._reductions(CommKind.REDUCE_SCATTER, dtype, source, target)))

    def _reductions(
        self, kind: CommKind, dtype: str, source: Placement, target: Placement
    ) -> Iterable[PricedComm]:
        """A communication for each group of devices that differ along the partial axes only."""
        mesh, reduction = source.mesh, source.sharding.partial[0][1]
        axes = frozenset(axis for axis, _ in source.sharding.partial)
        joins = self._joins(dtype, source, target)
        is_scatter = kind is CommKind.REDUCE_SCATTER
        sizes = {region_numel(pieces) for _, pieces in target.parts()} if is_scatter else {0}
        part = max(sizes) if len(sizes) == 1 and mesh.size() > LISTED else 0
        # by device, the copy within it that a reduced whole part would need
        pieces = exchange(source.without_partial(), target) if is_scatter and not part else ()
        kept = {piece.target: piece for piece in pieces if piece.source == piece.target}
        for group in _lines(mesh, axes):
            transfers = tuple(
                Transfer(origin, device, kept[device].read, kept[device].write)
                for device in (group if kept else ())
                for origin in group
            )
            comm = Comm(-1, kind, group, "", "", dtype, transfers, reduction, part=part)
            local_shape = source.sharding.local_shape(mesh, mesh.coord(group[0]))
            yield self._price(comm, math.prod(local_shape), joins=joins)

    def _price(self, comm: Comm, numel: int = 0, *, joins: bool = False) -> PricedComm:
        """The price of a communication; those of collectives of equal prices are found once."""
        if comm.kind not in JOINING:
            return self._price_of(comm, numel, joins=False)
        real = self._real_of(comm.ranks)
        ranks = tuple(map(real.low, comm.ranks))
        key = comm.kind, ranks, whole_bytes(comm, numel), joins
        if key not in self._collectives:
            lowered = replace(comm, ranks=ranks)
            self._collectives[key] = self._price_of(lowered, numel, joins=joins)
        return self._collectives[key].among(real, comm, ranks)

    def _price_of(self, comm: Comm, numel: int, *, joins: bool) -> PricedComm:
        seconds = comm_cost(comm, numel, self.cluster).seconds
        joined = None
        if joins:
            nbytes, most = whole_bytes(comm, numel), self.bucket_bytes.get(comm.kind, BUCKET_BYTES)
            joined = joined_seconds(comm.kind, comm.ranks, nbytes, seconds, self.cluster, most)
        overlap = overlap_share(comm, self.cluster)
        return PricedComm(comm, seconds, overlap=overlap, joined=joined)

    def _joins(self, dtype: str, source: Placement, target: Placement) -> bool:
        """Test whether ranks may join the communications: all run them, on parts of equal sizes."""
        if source.mesh != target.mesh or source.mesh.size() < len(self.cluster):
            return False
        return all(len(set(at.local_bytes(dtype).values())) == 1 for at in (source, target))


def _busiest_s(hops: Iterable[Hop]) -> float:
    """Seconds that steps take of the device with most to do."""
    load: dict[int, float] = defaultdict(float)
    for priced in (priced for hop in hops for priced in hop.comms):
        for device, seconds in priced.seconds.items():
            load[device] += seconds
    return max(load.values(), default=0.0)


def _comm_on(priced: PricedComm, real: Real, chosen: Container[int]) -> PricedComm:
    """A communication among the devices that its ranks stand for; the prices of chosen ones."""
    comm = replace(
        priced.comm,
        ranks=tuple(map(real.of, priced.comm.ranks)),
        transfers=tuple(
            Transfer(real.of(t.source), real.of(t.target), t.read, t.write)
            for t in priced.comm.transfers
        ),
    )
    return priced.among(real, comm, [d for d in priced.seconds if d in chosen])


def overlap_share(comm: Comm, cluster: Cluster) -> float:
    """Share of a communication that compute may hide; a local copy is compute itself."""
    if comm.kind is CommKind.SLICE:
        return 0.0
    return cluster.level(comm.ranks).hidden_share(comm.kind, len(comm.ranks))


def _lines(mesh: DeviceMesh, axes: frozenset[str]) -> Iterator[tuple[int, ...]]:
    """Each group of devices that differ along these axes only, ascending."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, point in mesh.coords():
        rest = tuple(at for name, at in point.items() if name not in axes)
        groups.setdefault(rest, []).append(device)
    return map(tuple, map(sorted, groups.values()))


class Overlap(Enum):
    """Relation of a device's share of a dim before a reshard to its share after it."""

    EQUAL = "equal"
    SLICE = "slice"  #: The share after lies within the share before.
    GATHER = "gather"  #: The share before lies within the share after.
    MIXED = "mixed"


def overlaps(source: Placement, target: Placement) -> tuple[Overlap, ...]:
    """The relation of the shares of each dim on one mesh, which is the same at all coordinates."""
    dims = zip(source.sharding.dims, target.sharding.dims, strict=True)
    return tuple(
        Overlap.EQUAL if before is after else _overlap(before, after, source.mesh)
        for before, after in dims
    )


@lru_cache(maxsize=65536)
def _overlap(before: DimLayout, after: DimLayout, mesh: DeviceMesh) -> Overlap:
    if before == after:
        return Overlap.EQUAL
    axes, sizes = dict.fromkeys((*before.axes, *after.axes)), dict(mesh.axes)
    is_slice = is_gather = True
    for at in itertools.product(*(range(sizes[axis]) for axis in axes)):
        point = dict(zip(axes, at, strict=True))
        held, wanted = before.pieces(mesh, point), after.pieces(mesh, point)
        common = intersect(held, wanted)
        is_slice &= common == wanted
        is_gather &= common == held
    return Overlap.SLICE if is_slice else Overlap.GATHER if is_gather else Overlap.MIXED


def scatters(source: Placement, target: Placement) -> bool:
    """Test whether a member's part, of some elements, lies within that which its group reduces."""
    axes, target_dims = {axis for axis, _ in source.sharding.partial}, target.sharding.dims
    if source.mesh != target.mesh or len({op for _, op in source.sharding.partial}) > 1:
        return False
    if axes - target.sharding.axes or any(dim.windows for dim in target_dims):  # that overlap
        return False
    within = {Overlap.GATHER, Overlap.MIXED}.isdisjoint(overlaps(source, target))
    return within and all(min(dim.sizes()) for dim in target_dims)


def _gathered_axes(source: Placement, target: Placement) -> frozenset[str]:
    """The axes along which devices lack the equal parts of all others, and nothing else."""
    axes: frozenset[str] = frozenset()
    if source.mesh != target.mesh:
        return axes
    shares = overlaps(source, target)
    for held, wanted, share in zip(source.sharding.dims, target.sharding.dims, shares, strict=True):
        if held == wanted:
            continue
        is_even = all(dim.is_equal and not dim.windows for dim in (held, wanted))
        is_less_cut = {*wanted.axes} < {*held.axes}
        if share is not Overlap.GATHER or not is_even or not is_less_cut or not min(held.sizes()):
            return frozenset()
        axes |= frozenset(held.axes) - frozenset(wanted.axes)
    return axes


def _classify(
    dtype: str,
    group: tuple[int, ...],
    transfers: tuple[Transfer, ...],
    held: Mapping[int, Region],
    wanted: Mapping[int, Region],
) -> Comm:
    members = set(group)
    sources = {transfer.source for transfer in transfers}
    targets = {transfer.target for transfer in transfers}
    kind = CommKind.ALL_TO_ALL
    if len(group) == 1:
        kind = CommKind.SLICE
    elif len(sources) == 1:
        whole = all(wanted[device] == held[min(sources)] for device in targets)
        kind = CommKind.BROADCAST if whole else CommKind.SCATTER
        if len(group) == 2 and len(targets) == 1:
            kind = CommKind.SEND
    elif len(targets) == 1:
        kind = CommKind.GATHER
    elif sources == targets == members and len(transfers) == len(group) ** 2:
        # Does every device of the group send its whole part to every one?
        numel = {device: region_numel(held[device]) for device in group}
        sent = {(transfer.source, transfer.target): transfer.numel for transfer in transfers}
        if all(sent.get((a, b)) == numel[a] for a in group for b in group):
            kind = CommKind.ALL_GATHER
    return Comm(-1, kind, group, "", "", dtype, transfers)


@once_a_graph
def beside_compute(graph: Graph) -> frozenset[str]:
    """Values whose communications pass beside compute, because no node waits for them at once.

    A value that is only written to where it is stored (a gradient) is waited for when the pass
    ends; a stored value may be sent before it is used; so may the keys of a ring's next step. The
    nodes that run meanwhile hide a share `LinkLevel.overlap` of the seconds of such a
    communication. Small ones share buckets, whose start-up each pays in part
    (`collectives.bucket_seconds`).
    """
    values: set[str] = set()
    for node in graph.nodes:
        row = row_of(node)
        if row.stored or (row.again and node.inputs[0] in values):
            values.update(node.writes)
        elif row.ahead:
            values.update(node.reads)
    return frozenset(values | _written(graph))


def brought(at: Placement, everyone: DeviceMesh) -> Placement:
    """Where a value that lies `at` is whole on every device, see `mesh.everyone`."""
    mesh = at.mesh if at.mesh.size() == everyone.size() else everyone
    return Placement(mesh, Sharding.replicate(at.sharding.shape))


def most_joined(graph: Graph) -> Mapping[CommKind, int]:
    """Bytes that buckets of each kind of collective hold at most, whatever the plan.

    What passes beside compute passes once in a pass over a group. Only what is written is summed.
    """
    beside, written = beside_compute(graph), _written(graph)

    def most(values: Collection[str]) -> int:
        views = ((value, graph.producers.get(value)) for value in values)
        sizes = (
            graph.types[value].nbytes
            for value, maker in views
            if not (maker and is_view(maker) and maker.inputs and maker.inputs[0] in values)
        )
        return max(1, min(BUCKET_BYTES, sum(min(size, SMALL_BYTES) for size in sizes)))

    gathered, summed = most(beside), most(written)
    return {kind: gathered if kind is CommKind.ALL_GATHER else summed for kind in JOINING}


def remembering(cluster: Cluster, graph: Graph) -> Resharder:
    """The reshards of the last cluster, with their prices: a graph and its forms have the same."""
    return _resharder(cluster, tuple(most_joined(graph).items()))


@lru_cache(maxsize=1)
def _resharder(cluster: Cluster, most: tuple[tuple[CommKind, int], ...]) -> Resharder:
    return Resharder(cluster, dict(most))


def _written(graph: Graph) -> set[str]:
    """Values that are only stored, and what these are views of."""
    written: set[str] = set()
    for node in reversed(graph.nodes):
        for value in node.writes:
            readers = graph.consumers[value]
            if readers and all(_only_writes(reader, value, written) for reader in readers):
                written.add(value)
    return written


def _only_writes(node: Node, value: str, written: Container[str]) -> bool:
    if not is_view(node) or node.inputs.index(value) > 0:
        return False
    return writes_stored(node) or all(result in written for result in node.writes)
