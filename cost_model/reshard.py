"""From one placement of a value to another: the communications, their order and their price.

One function serves the search, the referee and the lowering. Pending reductions are resolved
first (reduce-scatter straight to the target where its parts allow, else all-reduce); then one
exchange moves exactly the parts that each device lacks, so no sequence of collectives over single
mesh axes can move less. See docs/concepts/reshard.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.collectives import comm_seconds
from partitioner.cost_model.errors import CostError
from partitioner.ir.exchange import Transfer, components, exchange, region_numel
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Comm, CommKind


@dataclass(frozen=True)
class PricedComm:
    """A communication (names and `seq` still open) and the seconds it keeps each device busy.

    Prices by formula say too how many bytes each device sends; elsewhere the transfers tell.

    Attributes:
        comm: The communication.
        seconds: Seconds of each device that it takes.
        sent_bytes: See above.
        overlap: Share of the seconds that compute hides, if nobody waits for it at once.
    """

    comm: Comm
    seconds: Mapping[int, float]
    sent_bytes: float = 0.0
    overlap: float = 0.0

    def busy_seconds(self, *, beside: bool) -> Mapping[int, float]:
        """Seconds that it keeps each device from computing.

        Args:
            beside: Whether it passes beside compute (see `cost_model.overlap`).
        """
        if not beside or not self.overlap:
            return self.seconds
        return {device: (1 - self.overlap) * one for device, one in self.seconds.items()}


@dataclass(frozen=True)
class Hop:
    """One step of a reshard.

    Attributes:
        after: Placement that it leaves.
        comms: Communications; those of one hop are independent of each other.
        aliases: Devices whose part does not change: the same buffer serves.
        zeros: Devices that hold zeros afterwards (a whole value made a pending sum), or a part
            of no elements, which nobody needs to send.
    """

    after: Placement
    comms: tuple[PricedComm, ...] = ()
    aliases: frozenset[int] = frozenset()
    zeros: frozenset[int] = frozenset()


@dataclass
class Resharder:
    """Reshards on one cluster, each priced once."""

    cluster: Cluster
    _known: dict[tuple[str, Placement, Placement], tuple[Hop, ...]] = field(default_factory=dict)
    _prices: dict[tuple[str, Placement, Placement], tuple[Hop, ...]] = field(default_factory=dict)

    def allows(self, source: Placement, target: Placement) -> bool:
        """Whether this reshard can be priced; here, any of one tensor."""
        return source.sharding.shape == target.sharding.shape

    def hops(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        """Steps from `source` to `target` for elements of a type; () if they are equal."""
        if source == target:
            return ()
        key = (dtype, source, target)
        if key not in self._known:
            self._known[key] = self._plan(dtype, source, target)
        return self._known[key]

    def priced(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        """The steps of `hops` by what they cost: communications are those of a simpler tensor.

        Steps that cost the same, of whatever tensors, have one tuple of communications.
        """
        if source == target:
            return ()
        key = (dtype, source, target)
        if key not in self._prices:
            alike = simplest(source, target)
            real = dict(zip(_stations(*alike), _stations(source, target), strict=True))
            self._prices[key] = tuple(
                Hop(real[hop.after], hop.comms, hop.aliases, hop.zeros)
                for hop in self.hops(dtype, *alike)
            )
        return self._prices[key]

    def _plan(self, dtype: str, source: Placement, target: Placement) -> tuple[Hop, ...]:
        whole = Placement(target.mesh, target.sharding.without_partial())
        hops: list[Hop] = []
        at = source
        kinds = {op for _, op in source.sharding.partial}
        if len(kinds) > 1:
            raise CostError(f"{source} is partial by several reductions {sorted(kinds)}")
        if source.sharding.partial:
            options = [[self._all_reduce(dtype, source)]]
            scattered = self._reduce_scatter(dtype, source, whole)
            if scattered:
                options.append([scattered])
            hops = min(
                ([*head, *self._move(dtype, head[-1].after, whole)] for head in options),
                key=_busiest,
            )
        else:
            hops = self._move(dtype, at, whole)
        if target.sharding.partial:
            hops.append(self._mask(target))
        return tuple(hops)

    def _mask(self, target: Placement) -> Hop:
        """A whole value as a pending sum: the first device keeps it, the others hold zeros."""
        axes = [axis for axis, _ in target.sharding.partial]
        first = frozenset(d for d, point in target.mesh.coords() if not any(point[a] for a in axes))
        return Hop(target, (), first, frozenset(target.mesh.devices) - first)

    def _move(self, dtype: str, source: Placement, target: Placement) -> list[Hop]:
        if source == target:
            return []
        transfers = exchange(source, target)
        groups = components(transfers)
        alone = {group[0] for group in groups if len(group) == 1}
        aliases = frozenset(d for d in alone if _same_part(source, target, d))
        comms = [
            self._price(_classify(dtype, group, transfers, source, target))
            for group in groups
            if group[0] not in aliases or len(group) > 1
        ]
        empty = frozenset(d for d, want in target.parts() if not region_numel(want))
        return [Hop(target, tuple(comms), aliases, empty)]

    def _all_reduce(self, dtype: str, source: Placement) -> Hop:
        after = Placement(source.mesh, source.sharding.without_partial())
        return Hop(after, tuple(self._reductions(CommKind.ALL_REDUCE, dtype, source, after)))

    def _reduce_scatter(self, dtype: str, source: Placement, target: Placement) -> Hop | None:
        """Straight to the target, if each member's part lies within what its group reduces."""
        if source.mesh != target.mesh or len({op for _, op in source.sharding.partial}) > 1:
            return None
        if {a for a, _ in source.sharding.partial} - target.sharding.axes:
            return None
        held, wanted = dict(source.parts()), dict(target.parts())
        for device, want in wanted.items():
            if not region_numel(want):
                return None
            for own, cut in zip(held[device], want, strict=True):
                if not all(any(s <= a and a + n <= s + m for s, m in own) for a, n in cut):
                    return None
        return Hop(target, tuple(self._reductions(CommKind.REDUCE_SCATTER, dtype, source, target)))

    def _reductions(
        self, kind: CommKind, dtype: str, source: Placement, target: Placement
    ) -> Iterable[PricedComm]:
        axes = tuple(axis for axis, _ in source.sharding.partial)
        how = source.sharding.partial[0][1]
        for group in _subgroups(source.mesh, axes):
            transfers = (
                _scatter_parts(group, source, target) if kind is CommKind.REDUCE_SCATTER else ()
            )
            comm = Comm(-1, kind, group, "", "", dtype, transfers, how)
            point = source.mesh.coord(group[0])
            numel = 1
            for size in source.sharding.local_shape(source.mesh, point):
                numel *= size
            yield self._price(comm, numel)

    def _price(self, comm: Comm, numel: int = 0) -> PricedComm:
        seconds = comm_seconds(comm, numel, self.cluster)
        return PricedComm(comm, seconds, overlap=overlap_share(comm, self.cluster))


def simplest(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """Another tensor between the same groups that costs as much: few dims, of least sizes.

    What is cut nowhere is one dim in front, and so is the unit in which a dim's cuts are counted.
    The other dims are sorted.
    """
    numel, cut = 1, []
    for own, want in zip(source.sharding.dims, target.sharding.dims, strict=True):
        unit, *less = _in_units(own, want)
        numel *= unit if own.size else 0
        if own.axes or want.axes:
            cut.append(less)
    if len(cut) > 1:
        cut.sort(key=lambda pair: [(dim.axes, dim.segments) for dim in pair])
    first = DimLayout.whole(numel)
    held, wanted = ((first, *(pair[side] for pair in cut)) for side in (0, 1))
    return (
        Placement(source.mesh, Sharding(held, source.sharding.partial)),
        Placement(target.mesh, Sharding(wanted, target.sharding.partial)),
    )


@lru_cache(maxsize=65536)
def _in_units(own: DimLayout, want: DimLayout) -> tuple[int, DimLayout, DimLayout]:
    """Elements that all cuts of a dim are multiples of, and its layouts counted in them."""
    unit = math.gcd(*itertools.chain(*own.segments, *want.segments)) or 1
    less = (
        DimLayout(dim.axes, tuple(tuple(part // unit for part in cuts) for cuts in dim.segments))
        for dim in (own, want)
    )
    return unit, next(less), next(less)


def _stations(source: Placement, target: Placement) -> tuple[Placement, ...]:
    """Where a reshard may leave a value: reduced at its source, or at its target, or there."""
    return _reduced(source), _reduced(target), target


@lru_cache(maxsize=65536)
def _reduced(at: Placement) -> Placement:
    return Placement(at.mesh, at.sharding.without_partial()) if at.sharding.partial else at


def overlap_share(comm: Comm, cluster: Cluster) -> float:
    """The share of a communication that compute may hide; a local copy is compute itself."""
    return 0.0 if comm.kind is CommKind.SLICE else cluster.level(comm.ranks).overlap


def _busiest(hops: list[Hop]) -> float:
    load: dict[int, float] = {}
    for hop in hops:
        for priced in hop.comms:
            for device, seconds in priced.seconds.items():
                load[device] = load.get(device, 0.0) + seconds
    return max(load.values(), default=0.0)


def _same_part(source: Placement, target: Placement, device: int) -> bool:
    return (
        device in source.mesh.devices
        and dict(source.parts())[device] == dict(target.parts())[device]
    )


def _subgroups(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    rest = [name for name in mesh.names if name not in axes]
    for device, point in mesh.coords():
        groups.setdefault(tuple(point[name] for name in rest), []).append(device)
    return tuple(tuple(sorted(group)) for group in groups.values())


def _scatter_parts(
    group: tuple[int, ...], source: Placement, target: Placement
) -> tuple[Transfer, ...]:
    plain = Placement(source.mesh, Sharding(source.sharding.dims))
    local = {t.target: t for t in exchange(plain, target) if t.source == t.target}
    return tuple(
        Transfer(origin, device, local[device].read, local[device].write)
        for device in group
        for origin in group
    )


def _classify(
    dtype: str,
    group: tuple[int, ...],
    transfers: tuple[Transfer, ...],
    source: Placement,
    target: Placement,
) -> Comm:
    members = set(group)
    own = tuple(t for t in transfers if t.target in members)
    sources = {t.source for t in own}
    targets = {t.target for t in own}
    kind = CommKind.ALL_TO_ALL
    if len(group) == 1:
        kind = CommKind.SLICE
    elif len(sources) == 1:
        held = dict(source.parts())[min(sources)]
        wanted = dict(target.parts())
        whole = all(wanted[device] == held for device in targets)
        kind = CommKind.BROADCAST if whole else CommKind.SCATTER
        if len(group) == 2 and len(targets) == 1:
            kind = CommKind.SEND
    elif len(targets) == 1:
        kind = CommKind.GATHER
    elif sources == targets == members and _all_parts(own, group, source):
        kind = CommKind.ALL_GATHER
    return Comm(-1, kind, group, "", "", dtype, own)


def _all_parts(transfers: tuple[Transfer, ...], group: tuple[int, ...], source: Placement) -> bool:
    if len(transfers) != len(group) ** 2:
        return False
    numel = {device: region_numel(pieces) for device, pieces in source.parts()}
    sent = {(t.source, t.target): t.numel for t in transfers}
    return all(sent.get((a, b)) == numel[a] for a in group for b in group)
