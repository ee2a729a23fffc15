"""How a tensor lies on a device mesh: cut dims and partial axes.

A dim's layout assigns every element of the dim to one coordinate of the mesh axes that cut it.
Read from the first element to the last, the owners form runs that never decrease; each run is
one *segment* and is stored as the sizes that each coordinate owns of it. A coordinate's part of
the dim is the concatenation of its pieces, in order. One segment is the ordinary shard; several
express Concat of shards, fused QKV, or a shard of a minor factor of a reshaped dim. Runs are
maximal, so equal ownership has equal form. See docs/concepts/layouts.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from partitioner.ir.errors import IRError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.types import DTYPE_BITS, TensorType

#: Layouts of more segments than this are not offered as strategies.
MAX_SEGMENTS = 64

Interval = tuple[int, int]  #: (start, length), elements of one dim.
Segments = tuple[tuple[int, ...], ...]


class LayoutError(IRError):
    """A layout that cannot be expressed; strategies that need it are left out."""


def even_cut(size: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of `parts` balanced parts on `unit` boundaries, the larger ones first.

    >>> even_cut(80, 2, unit=16)
    (48, 32)
    """
    if size % unit:
        raise LayoutError(f"size {size} is not a multiple of unit {unit}")
    whole, extra = divmod(size // unit, parts)
    return tuple((whole + (index < extra)) * unit for index in range(parts))


def share_cut(size: int, weights: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Sizes of parts in proportion to `weights` on `unit` boundaries, each of at least one unit.

    Largest remainder, the first of equals first: within a unit of the exact share. Parts whose
    share is below a unit get one, and the others share what is left in the same way.

    Args:
        size: Elements.
        weights: One a part; positive and finite.
        unit: Elements that stay together.

    Raises:
        LayoutError: The size is not a multiple of the unit, or has fewer units than parts.

    >>> share_cut(80, (3.0, 1.0), unit=16)
    (64, 16)
    """
    if size % unit:
        raise LayoutError(f"size {size} is not a multiple of unit {unit}")
    left, parts = size // unit, [1] * len(weights)
    if left < len(parts):
        raise LayoutError(f"size {size} has fewer than {len(parts)} units of {unit}")
    fair = _shares(left, dict(enumerate(weights)))
    while small := [index for index, share in fair.items() if share < 1]:
        left -= len(small)
        fair = _shares(left, {i: weights[i] for i in fair if i not in small})
    for index, share in fair.items():
        parts[index] = int(share)
    extra = left - sum(parts[index] for index in fair)
    for index in sorted(fair, key=lambda i: (int(fair[i]) - fair[i], i))[:extra]:
        parts[index] += 1
    return tuple(part * unit for part in parts)


def _shares(count: int, weights: Mapping[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {index: count * weight / total for index, weight in weights.items()}


def _canonical(segments: Iterable[tuple[int, ...]]) -> Segments:
    runs: list[list[int]] = []
    last = -1
    width = 1
    for cuts in segments:
        width = len(cuts)
        owners = [index for index, size in enumerate(cuts) if size]
        if not owners:
            continue
        if runs and last <= owners[0]:
            runs[-1] = [a + b for a, b in zip(runs[-1], cuts, strict=True)]
        else:
            runs.append(list(cuts))
        last = owners[-1]
    if len(runs) > MAX_SEGMENTS:
        raise LayoutError(f"layout has {len(runs)} segments, more than {MAX_SEGMENTS}")
    return tuple(map(tuple, runs)) or ((0,) * width,)


@dataclass(frozen=True, slots=True)
class DimLayout:
    """Ownership of one dim. Build it through the class methods, which canonicalise.

    Attributes:
        axes: Mesh axes that cut the dim, in the mesh's order; () if every device has it whole.
        segments: Runs of the dim; each lists the elements that every coordinate of `axes`
            (row-major) owns of it.
        size: Elements of the whole dim.
    """

    axes: tuple[str, ...]
    segments: Segments
    size: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(sum, self.segments)))
        object.__setattr__(self, "_hash", hash((self.axes, self.segments)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def whole(cls, size: int) -> DimLayout:
        """Not cut."""
        return _one((), ((size,),))

    @classmethod
    def cut(cls, axes: tuple[str, ...], segments: Iterable[tuple[int, ...]]) -> DimLayout:
        """Cut over `axes` with explicit part sizes."""
        return _one(axes, _canonical(segments))

    @classmethod
    def even(cls, size: int, axes: tuple[str, ...], mesh: DeviceMesh, unit: int = 1) -> DimLayout:
        """The balanced cut of one segment."""
        if not axes:
            return cls.whole(size)
        return cls.cut(axes, [even_cut(size, mesh.size(axes), unit)])

    def local_size(self, mesh: DeviceMesh, point: Mapping[str, int]) -> int:
        """Elements that a mesh coordinate holds."""
        if not self.axes:
            return self.segments[0][0]
        index = mesh.linear(self.axes, point)
        return sum(cuts[index] for cuts in self.segments)

    def pieces(self, mesh: DeviceMesh, point: Mapping[str, int]) -> tuple[Interval, ...]:
        """Intervals of the whole dim that a mesh coordinate holds, in local order."""
        return _pieces(self, mesh.linear(self.axes, point))

    def sizes(self) -> tuple[int, ...]:
        """Elements held by each coordinate of `axes`."""
        return tuple(map(sum, zip(*self.segments, strict=True)))

    def scaled(self, minor: int) -> DimLayout:
        """The layout of the compound dim (this, minor) with `minor` not cut."""
        return DimLayout.cut(
            self.axes, [tuple(part * minor for part in cuts) for cuts in self.segments]
        )

    @property
    def is_equal(self) -> bool:
        """Whether every coordinate holds as many elements as the others."""
        return not self.axes or _is_equal(self)

    @property
    def is_chunked(self) -> bool:
        """Whether the parts are those of ``torch.chunk``: DTensor knows no other cuts."""
        if not self.axes:
            return True
        if len(self.segments) > 1:
            return False
        (cuts,) = self.segments
        if len(self.axes) > 1:
            return len(set(cuts)) == 1
        most = -(-self.size // len(cuts))
        return cuts == tuple(max(0, min(most, self.size - at * most)) for at in range(len(cuts)))

    def __str__(self) -> str:
        if not self.axes:
            return "-"
        name = "".join(self.axes) if len(self.axes) == 1 else "*".join(self.axes)
        parts = len(self.segments[0])
        if len(self.segments) == 1 and self.segments[0] == even_cut(self.size, parts):
            return name
        return f"{name}:" + "|".join(",".join(map(str, cuts)) for cuts in self.segments)


@lru_cache(maxsize=65536)
def _one(axes: tuple[str, ...], segments: Segments) -> DimLayout:
    """Equal layouts are mostly one object, which is quicker to compare."""
    return DimLayout(axes, segments)


@lru_cache(maxsize=65536)
def _is_equal(layout: DimLayout) -> bool:
    return len(set(layout.sizes())) == 1


@lru_cache(maxsize=65536)
def _pieces(layout: DimLayout, index: int) -> tuple[Interval, ...]:
    found: list[Interval] = []
    start = 0
    for cuts in layout.segments:
        own = (start + sum(cuts[:index]), cuts[index])
        if own[1] and found and sum(found[-1]) == own[0]:
            found[-1] = (found[-1][0], found[-1][1] + own[1])
        elif own[1]:
            found.append(own)
        start += sum(cuts)
    return tuple(found)


@lru_cache(maxsize=65536)
def product(outer: DimLayout, inner: DimLayout, mesh: DeviceMesh) -> DimLayout:
    """Layout of the compound dim (outer, inner), outer major.

    Raises:
        LayoutError: The two share an axis, or the result has more than MAX_SEGMENTS segments.
    """
    if not outer.axes and not inner.axes:
        return DimLayout.whole(outer.size * inner.size)
    if not inner.axes:
        return outer.scaled(inner.size)
    if outer.size * len(inner.segments) > 64 * MAX_SEGMENTS:
        raise LayoutError(
            f"cutting a minor factor under a major one of {outer.size} makes too many segments"
        )
    if not outer.axes:
        nothing = (0,) * mesh.size(inner.axes)  # the width, if the dim has no elements
        return DimLayout.cut(inner.axes, [nothing, *inner.segments * outer.size])
    return _nested(outer, inner, mesh)


def _nested(outer: DimLayout, inner: DimLayout, mesh: DeviceMesh) -> DimLayout:
    if set(outer.axes) & set(inner.axes):
        raise LayoutError(f"axes {outer.axes} and {inner.axes} of one dim overlap")
    axes = tuple(name for name in mesh.names if name in outer.axes + inner.axes)
    size_of = dict(mesh.axes)
    points = [
        dict(zip(axes, p, strict=True))
        for p in itertools.product(*(range(size_of[a]) for a in axes))
    ]
    where = [(mesh.linear(outer.axes, point), mesh.linear(inner.axes, point)) for point in points]
    rows: list[tuple[int, ...]] = [(0,) * len(points)]
    for cuts in outer.segments:
        for owner, count in enumerate(cuts):
            block = [
                tuple(part[i] if o == owner else 0 for o, i in where) for part in inner.segments
            ]
            rows.extend(block * count)
    return DimLayout.cut(axes, rows)


def concat(parts: Iterable[DimLayout]) -> DimLayout:
    """Layout of the dim that is the parts one after the other.

    Raises:
        LayoutError: The parts are cut over different axes.
    """
    layouts = list(parts)
    axes = {layout.axes for layout in layouts}
    if len(axes) > 1:
        raise LayoutError(f"parts of one dim are cut over different axes {sorted(axes)}")
    if not layouts[0].axes:
        return DimLayout.whole(sum(layout.size for layout in layouts))
    return DimLayout.cut(layouts[0].axes, itertools.chain(*(layout.segments for layout in layouts)))


def split(layout: DimLayout, sizes: Iterable[int]) -> tuple[DimLayout, ...]:
    """Inverse of `concat`: the layouts of consecutive parts of a dim."""
    owners = [(index, part) for cuts in layout.segments for index, part in enumerate(cuts) if part]
    width = len(layout.segments[0])
    found = []
    position = 0
    for size in sizes:
        rows: list[tuple[int, ...]] = []
        while size:
            index, left = owners[position]
            take = min(size, left)
            rows.append(tuple(take if i == index else 0 for i in range(width)))
            size -= take
            if take == left:
                position += 1
            else:
                owners[position] = (index, left - take)
        found.append(DimLayout.cut(layout.axes, rows or [(0,) * width]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A tensor on a mesh: a layout a dim, and the axes over which it is a partial result.

    Attributes:
        dims: Layout of each dim.
        partial: (axis, reduction) pairs in mesh order: the tensor is the reduction ("sum",
            "max", "min", "prod") of the parts held along the axis.
    """

    dims: tuple[DimLayout, ...]
    partial: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def replicate(cls, shape: Iterable[int]) -> Sharding:
        """Whole on every device."""
        return cls(tuple(DimLayout.whole(size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return tuple(dim.size for dim in self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """Axes that cut or split this tensor in any way."""
        return frozenset(axis for dim in self.dims for axis in dim.axes) | {
            a for a, _ in self.partial
        }

    @property
    def is_replicated(self) -> bool:
        """Whole on every device of the mesh."""
        return not self.axes

    def local_shape(self, mesh: DeviceMesh, point: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the part at a mesh coordinate."""
        return tuple(dim.local_size(mesh, point) for dim in self.dims)

    def local_type(
        self, type_: TensorType, mesh: DeviceMesh, point: Mapping[str, int]
    ) -> TensorType:
        """Type of the part at a mesh coordinate."""
        return type_.with_shape(self.local_shape(mesh, point))

    def without_partial(self) -> Sharding:
        """The same cuts after the pending reductions."""
        return Sharding(self.dims)

    def __str__(self) -> str:
        dims = "[" + ", ".join(map(str, self.dims)) + "]"
        return dims + "".join(f" partial({op}:{axis})" for axis, op in self.partial)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a value lies: a device group and its sharding on it."""

    mesh: DeviceMesh
    sharding: Sharding
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.sharding)))

    def __hash__(self) -> int:
        return self._hash

    def local_bytes(self, dtype: str) -> Mapping[int, int]:
        """Bytes of the part on each device, for an element type."""
        return _local_bytes(self, DTYPE_BITS[dtype])

    def parts(self) -> tuple[tuple[int, tuple[tuple[Interval, ...], ...]], ...]:
        """(device, pieces of every dim) for each device of the group."""
        return _parts(self)

    def __str__(self) -> str:
        return f"{self.sharding} on {self.mesh}"


@lru_cache(maxsize=65536)
def _parts(placement: Placement) -> tuple[tuple[int, tuple[tuple[Interval, ...], ...]], ...]:
    mesh, dims = placement.mesh, placement.sharding.dims
    return tuple(
        (device, tuple(dim.pieces(mesh, point) for dim in dims)) for device, point in mesh.coords()
    )


@lru_cache(maxsize=65536)
def _local_bytes(placement: Placement, bits: int) -> Mapping[int, int]:
    mesh, sharding = placement.mesh, placement.sharding
    return {
        device: (math.prod(sharding.local_shape(mesh, point)) * bits + 7) // 8
        for device, point in mesh.coords()
    }
