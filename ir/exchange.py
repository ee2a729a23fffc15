"""Which parts of a tensor go from where to where when its placement changes.

One function answers for every pair of placements without pending reductions, on one mesh or
across meshes; each part that a device lacks is sent once, by one holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from partitioner.ir.errors import IRError
from partitioner.ir.layout import Interval, Placement

Region = tuple[tuple[Interval, ...], ...]  #: Per dim, intervals; the region is their product.


def region_numel(region: Region) -> int:
    """Elements of a region."""
    total = 1
    for intervals in region:
        one = len(intervals) == 1  # nearly always, and this is called very often
        total *= intervals[0][1] if one else sum(length for _, length in intervals)
    return total


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part on its way.

    Attributes:
        source: Device that holds it.
        target: Device that wants it (may be the source: a local copy).
        read: The part in the source's local tensor.
        write: The part in the target's local tensor.
    """

    source: int
    target: int
    read: Region
    write: Region

    @property
    def numel(self) -> int:
        """Elements moved."""
        return region_numel(self.read)


def intersect(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Common intervals of two ascending interval lists."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if low < high:
            found.append((low, high - low))
        if sum(a[i]) <= sum(b[j]):
            i += 1
        else:
            j += 1
    return tuple(found)


def localize(pieces: tuple[Interval, ...], wanted: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Global intervals as intervals of the local concatenation of `pieces`, neighbours merged.

    Both are ascending, and each wanted interval lies within one piece.
    """
    found: list[Interval] = []
    index = base = 0
    for start, length in wanted:
        while sum(pieces[index]) <= start:
            base += pieces[index][1]
            index += 1
        local = base + start - pieces[index][0]
        if found and sum(found[-1]) == local:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((local, length))
    return tuple(found)


@lru_cache(maxsize=65536)
def _overlap(
    own: tuple[Interval, ...], want: tuple[Interval, ...]
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]] | None:
    """What two sides of one dim share, in the local coordinates of each; None if nothing."""
    part = intersect(own, want)
    return (localize(own, part), localize(want, part)) if part else None


def exchange(source: Placement, target: Placement) -> tuple[Transfer, ...]:
    """Transfers that turn one placement into another.

    Every target device gets each part it wants from itself if it holds it, else from the holder
    that shares most mesh coordinates with it (across meshes: holders take turns).

    Raises:
        IRError: A placement is partial; reduce first.
    """
    if source.sharding.partial or target.sharding.partial:
        raise IRError(f"exchange of partial tensors: {source} -> {target}")
    holders: dict[Region, list[tuple[int, Mapping[str, int]]]] = {}
    points = dict(source.mesh.coords())
    for device, pieces in source.parts():
        holders.setdefault(pieces, []).append((device, points[device]))
    found = []
    same_mesh = source.mesh == target.mesh
    for index, (device, wanted) in enumerate(target.parts()):
        at = points.get(device) if same_mesh else None
        for pieces, owners in holders.items():
            parts = [_overlap(own, want) for own, want in zip(pieces, wanted, strict=True)]
            if not all(parts):
                continue
            owner = _choose(owners, device, at, index)
            read, write = (tuple(side) for side in zip(*parts, strict=True)) if parts else ((), ())
            found.append(Transfer(owner, device, read, write))
    return tuple(sorted(found, key=lambda t: (t.target, t.source, t.write)))


def _choose(
    owners: list[tuple[int, Mapping[str, int]]],
    device: int,
    at: Mapping[str, int] | None,
    index: int,
) -> int:
    names = [owner for owner, _ in owners]
    if device in names:
        return device
    if at is None:
        return names[index % len(names)]
    return max(owners, key=lambda owner: (sum(at[a] == v for a, v in owner[1].items()), -owner[0]))[
        0
    ]


def components(transfers: tuple[Transfer, ...]) -> tuple[tuple[int, ...], ...]:
    """Device groups that exchange among themselves, each ascending, ordered by first device."""
    group_of: dict[int, set[int]] = {}
    for transfer in transfers:
        one = group_of.setdefault(transfer.source, {transfer.source})
        if transfer.target in one:
            continue
        other = group_of.get(transfer.target, {transfer.target})
        one |= other
        group_of.update(dict.fromkeys(other, one))
    return tuple(dict.fromkeys(tuple(sorted(group_of[device])) for device in sorted(group_of)))
