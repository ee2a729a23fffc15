"""Transfers of parts of a tensor when its placement changes.

`exchange` serves every pair of placements without pending reductions, on one mesh or across
meshes; each part that a device lacks is sent once, by one holder. From a plain cut to a windowed
one, it is the halo exchange.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from partitioner.ir.errors import IRError
from partitioner.ir.layout import Interval, Placement
from partitioner.ir.mesh import COPIES

Intervals = tuple[Interval, ...]  #: Ascending, disjoint.
Region = tuple[Intervals, ...]  #: Intervals of each dim; the region is their product.
#: A holder's part, and the elements that it has of another part, in its own and in their place.
_Overlap = tuple[Region, Region, Region]


def region_numel(region: Region) -> int:
    """Elements of a region."""
    total = 1
    for intervals in region:
        single = len(intervals) == 1  # nearly always, and this is called very often
        total *= intervals[0][1] if single else sum(length for _, length in intervals)
    return total


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part sent from a device to another, or copied on one device (source == target)."""

    source: int  #: Device that holds the part.
    target: int  #: Device that lacks it.
    read: Region  #: The part in the source's local tensor.
    write: Region  #: The part in the target's local tensor.

    @property
    def numel(self) -> int:
        """Elements moved."""
        return region_numel(self.read)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Common intervals of two interval lists."""
    common = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if low < high:
            common.append((low, high - low))
        if sum(a[i]) <= sum(b[j]):
            i += 1
        else:
            j += 1
    return tuple(common)


def nested(outer: Region, inner: Region) -> Region:
    """The region of a tensor that is a region of a region of it, packed.

    >>> nested((((4, 2), (8, 2)),), (((1, 2),),))
    (((5, 1), (8, 1)),)
    """
    region: list[Intervals] = []
    for around, intervals in zip(outer, inner, strict=False):
        found: list[Interval] = []
        for start, length in intervals:
            at = 0  # where the outer interval begins in the packed region
            for begin, size in around:
                low, high = max(start, at), min(start + length, at + size)
                if low < high:
                    found.append((begin + low - at, high - low))
                at += size
        region.append(tuple(found))
    return tuple(region)


def localize(pieces: Intervals, wanted: Intervals) -> Intervals:
    """Intervals, each in one piece, in the concatenation of `pieces`; neighbours are merged."""
    local: list[Interval] = []
    index = base = 0
    for start, length in wanted:
        while sum(pieces[index]) <= start:
            base += pieces[index][1]
            index += 1
        position = base + start - pieces[index][0]
        if local and sum(local[-1]) == position:
            local[-1] = (local[-1][0], local[-1][1] + length)
        else:
            local.append((position, length))
    return tuple(local)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The parts of `a` that are not in `b`."""
    left = []
    for start, length in a:
        low, end = start, start + length
        for other, size in b:
            if other >= end or other + size <= low:
                continue
            if other > low:
                left.append((low, other - low))
            low = other + size
        if low < end:
            left.append((low, end - low))
    return tuple(left)


@lru_cache(maxsize=65536)
def _overlap(
    held: Intervals, offered: Intervals, wanted: Intervals
) -> tuple[Intervals, Intervals] | None:
    """Elements both offered and wanted, in local coordinates of each side; None if none are."""
    part = intersect(offered, wanted)
    return (localize(held, part), localize(wanted, part)) if part else None


@lru_cache(maxsize=65536)
def _offers(held: tuple[Intervals, ...], own: Intervals | None) -> Mapping[Intervals, Intervals]:
    """The elements of a dim that each holder offers, each once; a device takes its `own` itself."""
    first = [own] if own is not None else []
    offers: dict[Intervals, Intervals] = {}
    taken: Intervals = ()
    for part in (*first, *(part for part in held if part != own)):
        offers[part] = subtract(part, taken)
        taken = tuple(sorted((*taken, *offers[part])))
    return offers


@dataclass(frozen=True)
class _Holders:
    """The devices that hold one part, with their coordinates on the mesh, in its order."""

    points: Mapping[int, Mapping[str, int]]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(self.points)

    @cached_property
    def by_point(self) -> Mapping[tuple[int, ...], int]:
        return {tuple(point.values()): device for device, point in self.points.items()}

    @cached_property
    def common(self) -> tuple[int | None, ...]:
        """The coordinate on each axis that all holders have; None if they differ on the axis."""
        columns = zip(*self.by_point, strict=True)
        return tuple(column[0] if len({*column}) == 1 else None for column in columns)

    def serving(self, device: int, point: Mapping[str, int] | None, turn: int) -> int:
        """The holder that serves a device at a coordinate of the mesh (None: not on it)."""
        if device in self.points:
            return device
        if point is None:
            return self.devices[turn % len(self.devices)]
        # None shares more coordinates than one that has the device's on all axes but those on
        # which all holders have one coordinate.
        at = zip(self.common, point.values(), strict=True)
        nearest = self.by_point.get(tuple(own if one is None else one for one, own in at))
        if nearest is not None:
            return nearest
        shared = {
            owner: sum(point[axis] == value for axis, value in held.items())
            for owner, held in self.points.items()
        }
        return max(shared, key=lambda owner: (shared[owner], -owner))


def listed(source: Placement, target: Placement, ranks: Collection[int]) -> tuple[Transfer, ...]:
    """Transfers of an all-gather, or of a reduce-scatter of pending sums, among some devices.

    Of a reduce-scatter each device gets its part of the terms of all of them.
    """
    if not source.sharding.partial:
        return tuple(t for t in exchange(source, target) if t.target in ranks)
    pieces = exchange(source.without_partial(), target)
    kept = {piece.target: piece for piece in pieces if piece.source == piece.target}
    return tuple(
        Transfer(origin, device, kept[device].read, kept[device].write)
        for device in ranks
        for origin in ranks
    )


def exchange(source: Placement, target: Placement) -> tuple[Transfer, ...]:
    """Transfers that turn one placement into another.

    A target device takes each part from itself if it holds it, else from the holder that shares
    most mesh coordinates with it (across meshes: the holders of each part take turns, so that on
    meshes of one shape devices at equal coordinates exchange). Whole copies exchange nothing.
    """
    if source.sharding.partial or target.sharding.partial:
        raise IRError(f"exchange of partial tensors: {source} -> {target}")
    if COPIES in source.mesh.names and COPIES in target.mesh.names:
        of_copies = (
            [Placement(at.mesh.part(COPIES, copy), at.sharding) for at in (source, target)]
            for copy in range(dict(source.mesh.axes)[COPIES])
        )
        found = itertools.chain.from_iterable(exchange(one, other) for one, other in of_copies)
        return tuple(sorted(found, key=lambda t: (t.target, t.source, t.write)))
    by_part: dict[Region, dict[int, Mapping[str, int]]] = {}
    points = dict(source.mesh.coords())
    for device, pieces in source.parts():
        by_part.setdefault(pieces, {})[device] = points[device]
    holders = {pieces: _Holders(at) for pieces, at in by_part.items()}
    transfers = []
    same_mesh = source.mesh == target.mesh
    windows = [bool(dim.windows) for dim in source.sharding.dims]
    mine = dict(source.parts())
    pairs: dict[Region, list[_Overlap]] = {}  # by the wanted part, where parts are offered as held
    turns: dict[Region, int] = defaultdict(int)
    for device, wanted in target.parts():
        point = points.get(device) if same_mesh else None
        own = mine.get(device)
        if any(windows):
            overlaps = _overlaps(holders, _dim_offers(windows, holders, own), wanted)
        elif own is not None and all(  # it has all of it: then no other part has any of it
            part and intersect(held, part) == part for held, part in zip(own, wanted, strict=True)
        ):
            overlaps = _overlaps((own,), None, wanted)
        else:
            if wanted not in pairs:
                pairs[wanted] = _overlaps(holders, None, wanted)
            overlaps = pairs[wanted]
        for pieces, read, write in overlaps:
            owner = holders[pieces].serving(device, point, turns[pieces])
            turns[pieces] += owner != device
            transfers.append(Transfer(owner, device, read, write))
    return tuple(sorted(transfers, key=lambda t: (t.target, t.source, t.write)))


def _overlaps(
    holders: Iterable[Region],
    offers: Sequence[dict[Intervals, Intervals]] | None,
    wanted: Region,
) -> list[_Overlap]:
    """Intersect distinct parts, or what `_dim_offers` leaves of them, with a wanted part."""
    overlaps = []
    for pieces in holders:
        offered = pieces if offers is None else map(dict.__getitem__, offers, pieces)
        parts = [
            _overlap(held, offer, want)
            for held, offer, want in zip(pieces, offered, wanted, strict=True)
        ]
        if all(parts):
            read, write = (tuple(side) for side in zip(*parts, strict=True)) if parts else ((), ())
            overlaps.append((pieces, read, write))
    return overlaps


def _dim_offers(
    windows: Sequence[bool], holders: Iterable[Region], own: Region | None
) -> list[dict[Intervals, Intervals]]:
    """List by dim what each distinct part of the dim offers to a device that holds `own`."""
    offers = []
    for dim, windowed in enumerate(windows):
        parts = tuple(dict.fromkeys(region[dim] for region in holders))
        mine = own[dim] if own is not None else None
        offers.append(dict(_offers(parts, mine) if windowed else zip(parts, parts, strict=True)))
    return offers


def components(transfers: tuple[Transfer, ...]) -> tuple[tuple[int, ...], ...]:
    """Device groups that exchange among themselves, each ascending, ordered by first device."""
    group_of: dict[int, set[int]] = {}
    for transfer in transfers:
        group = group_of.setdefault(transfer.source, {transfer.source})
        if transfer.target in group:
            continue
        other = group_of.get(transfer.target, {transfer.target})
        group |= other
        group_of.update(dict.fromkeys(other, group))
    groups = {id(group_of[device]): group_of[device] for device in sorted(group_of)}
    return tuple(tuple(sorted(group)) for group in groups.values())


def sent_numel(transfers: Iterable[Transfer]) -> Mapping[int, int]:
    """Elements that each device sends to others; no entry for one that sends none."""
    total: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        if transfer.source != transfer.target:
            total[transfer.source] += transfer.numel
    return total
