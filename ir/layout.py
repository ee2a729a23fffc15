"""Layouts of tensors on a device mesh: cut dims and partial axes.

A dim's layout assigns every element of the dim to one coordinate of the mesh axes that cut it.
From the first element to the last, the owners form ascending runs; each run is one *segment* and
is stored as the sizes that each coordinate owns of it. A coordinate's part of the dim is the
concatenation of its pieces, in order. One segment is the ordinary shard; several express Concat
of shards, fused QKV, or a shard of a minor factor of a reshaped dim. Runs are maximal, so equal
ownership has equal form.

A *windowed* layout has one interval for each coordinate instead. Neighbouring intervals may
overlap: a sliding window reads elements beyond its own part, the halo.
See docs/concepts/layouts.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

from partitioner.ir.errors import IRError
from partitioner.ir.mesh import COPIES, DeviceMesh, by_fields
from partitioner.ir.types import TensorType, dense_bytes

#: Layouts of more segments than this are not offered as strategies.
MAX_SEGMENTS = 64
#: Most segments of layouts that a proof follows, which no device will have.
MOST_FOLLOWED = 4096
_most_segments = ContextVar("most_segments", default=MAX_SEGMENTS)
#: Share of the longest part's time that moving an element must save (`loaded_cut`).
LEAST_GAIN = 0.01

Interval = tuple[int, int]  #: (start, length), elements of one dim.
Segments = tuple[tuple[int, ...], ...]


@contextmanager
def followed() -> Iterator[None]:
    """Allow layouts of many segments in a block, over axes that are none of a plan's."""
    token = _most_segments.set(MOST_FOLLOWED)
    try:
        yield
    finally:
        _most_segments.reset(token)


class LayoutError(IRError):
    """A layout that cannot be expressed; strategies that need it are not offered."""


def even_cut(size: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of `parts` balanced parts on `unit` boundaries, the larger ones first.

    >>> even_cut(80, 2, unit=16)
    (48, 32)
    """
    if size % unit:
        raise LayoutError(f"size {size} is not a multiple of unit {unit}")
    whole, extra = divmod(size // unit, parts)
    return tuple((whole + (index < extra)) * unit for index in range(parts))


def folded_cut(size: int, parts: int) -> Segments:
    """Each part has one chunk from either end, which balances work that grows with the place.

    >>> folded_cut(8, 2)
    ((2, 0), (0, 2), (0, 2), (2, 0))
    """
    owners = (*range(parts), *reversed(range(parts)))
    return owned(even_cut(size, 2 * parts), owners, parts)


def owned(sizes: Sequence[int], owners: Sequence[int], count: int) -> Segments:
    """Runs of these sizes, each of one of `count` owners."""
    return tuple(
        tuple(size if owner == one else 0 for one in range(count))
        for size, owner in zip(sizes, owners, strict=True)
    )


@lru_cache(maxsize=256)
def loaded_cut(
    loads: tuple[float, ...], speeds: tuple[float, ...], *, equal: bool = False
) -> Segments:
    """A cut of elements of unlike loads such that the slowest of the parts needs little time.

    It begins with the even cut. As long as this gains `LEAST_GAIN`, an element leaves the part that
    needs the longest, or changes places with one of another part: so few elements lie elsewhere
    than in the even cut. No part is left empty, and there are at most `MAX_SEGMENTS` segments.
    `loads` of elements and `speeds` of parts are in any one unit; `equal` parts keep their sizes.

    >>> loaded_cut((5, 4, 1, 1, 1, 0), (1, 1))
    ((1, 1), (1, 3))
    """
    sizes = even_cut(len(loads), len(speeds))
    owners = [part for part, size in enumerate(sizes) for _ in range(size)]
    ones = (1,) * len(loads)
    segments = _canonical(owned(ones, owners, len(speeds)))
    while (better := _better(owners, loads, speeds, equal=equal)) is not None:
        try:
            segments = _canonical(owned(ones, better, len(speeds)))
        except LayoutError:
            break
        owners = better
    return segments


def _better(
    owners: Sequence[int], loads: Sequence[float], speeds: Sequence[float], *, equal: bool
) -> list[int] | None:
    """The owners after the move or the change of places that gains most; None if none gains."""
    held = [0.0] * len(speeds)
    for owner, load in zip(owners, loads, strict=True):
        held[owner] += load
    seconds = [load / speed for load, speed in zip(held, speeds, strict=True)]
    busiest = max(range(len(speeds)), key=seconds.__getitem__)
    own = [i for i, owner in enumerate(owners) if owner == busiest]
    moves = [(i, part, -1) for i in own for part in range(len(speeds)) if part != busiest]
    swaps = [(i, owner, j) for i in own for j, owner in enumerate(owners) if owner != busiest]
    least_s, best = seconds[busiest] * (1 - LEAST_GAIN), None
    for i, part, j in swaps if equal or len(own) == 1 else (*moves, *swaps):
        passed = loads[i] - (loads[j] if j >= 0 else 0.0)
        here_s = (held[busiest] - passed) / speeds[busiest]
        there_s = (held[part] + passed) / speeds[part]
        if max(here_s, there_s) < least_s:
            least_s, best = max(here_s, there_s), (i, part, j)
    if best is None:
        return None
    i, part, j = best
    after = list(owners)
    after[i] = part
    if j >= 0:
        after[j] = busiest
    return after


def share_cut(size: int, weights: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Sizes of parts in proportion to `weights` on `unit` boundaries, each of at least one unit.

    By largest remainder, the first of equals first: within a unit of the exact share. Parts whose
    share is below a unit get one, and the others divide the rest in the same way. Weights are
    positive and finite.

    Raises:
        LayoutError: The size is not a multiple of the unit, or has fewer units than parts.

    >>> share_cut(80, (3.0, 1.0), unit=16)
    (64, 16)
    """
    if size % unit:
        raise LayoutError(f"size {size} is not a multiple of unit {unit}")
    units, parts = size // unit, [1] * len(weights)
    if units < len(parts):
        raise LayoutError(f"size {size} has fewer than {len(parts)} units of {unit}")
    shares = _shares(units, dict(enumerate(weights)))
    while small := [index for index, share in shares.items() if share < 1]:
        units -= len(small)
        shares = _shares(units, {i: weights[i] for i in shares if i not in small})
    for index, share in shares.items():
        parts[index] = int(share)
    remainder = units - sum(parts[index] for index in shares)
    for index in sorted(shares, key=lambda i: (int(shares[i]) - shares[i], i))[:remainder]:
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
    if len(runs) > (most := _most_segments.get()):
        raise LayoutError(f"layout has {len(runs)} segments, more than {most}")
    return tuple(map(tuple, runs)) or ((0,) * width,)


@dataclass(frozen=True, slots=True)
class DimLayout:
    """Ownership of one dim. Build it through the class methods, which canonicalise."""

    #: Mesh axes that cut the dim, in the mesh's order; () if every device has it whole.
    axes: tuple[str, ...]
    #: Per run of the dim, the elements that each coordinate of `axes` (row-major) owns. A windowed
    #: layout has one segment, the whole dim.
    segments: Segments
    #: Of a windowed layout, the interval that each coordinate of `axes` (row-major) holds.
    windows: tuple[Interval, ...] = ()
    size: int = field(init=False, repr=False, compare=False)  #: Elements of the whole dim.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(sum, self.segments)))
        object.__setattr__(self, "_hash", hash((self.axes, self.segments, self.windows)))

    def __hash__(self) -> int:
        return self._hash

    __reduce__ = by_fields

    @classmethod
    def whole(cls, size: int) -> DimLayout:
        """Make a layout that is not cut."""
        return _interned((), ((size,),))

    @classmethod
    def cut(cls, axes: tuple[str, ...], segments: Iterable[tuple[int, ...]]) -> DimLayout:
        """Cut over `axes` with explicit part sizes."""
        return _interned(axes, _canonical(segments))

    @classmethod
    def even(cls, size: int, axes: tuple[str, ...], mesh: DeviceMesh, unit: int = 1) -> DimLayout:
        """The balanced cut of one segment."""
        if not axes:
            return cls.whole(size)
        return cls.cut(axes, [even_cut(size, mesh.size(axes), unit)])

    @classmethod
    def windowed(cls, size: int, axes: tuple[str, ...], windows: Iterable[Interval]) -> DimLayout:
        """A layout of one interval for each coordinate of `axes`; neighbours may overlap.

        Intervals that follow each other without overlap are a plain cut. If every coordinate holds
        the whole dim, it is not cut.
        """
        held = tuple(windows)
        for start, length in held:
            if length < 0 or start < 0 or start + length > size:
                raise LayoutError(f"window {start}..{start + length} is not within a dim of {size}")
        if all(window == (0, size) for window in held):
            return cls.whole(size)
        lengths = tuple(length for _, length in held)
        starts = [0, *itertools.accumulate(lengths)]
        if starts.pop() == size and [start for start, _ in held] == starts:
            return cls.cut(axes, [lengths])
        return _interned(axes, ((size,),), held)

    def local_size(self, mesh: DeviceMesh, point: Mapping[str, int]) -> int:
        """Elements that a mesh coordinate holds."""
        if not self.axes:
            return self.segments[0][0]
        index = mesh.linear(self.axes, point)
        if self.windows:
            return self.windows[index][1]
        return sum(cuts[index] for cuts in self.segments)

    def pieces(self, mesh: DeviceMesh, point: Mapping[str, int]) -> tuple[Interval, ...]:
        """Intervals of the whole dim that a mesh coordinate holds, in local order."""
        return _pieces(self, mesh.linear(self.axes, point))

    def sizes(self) -> tuple[int, ...]:
        """Elements held by each coordinate of `axes`."""
        if self.windows:
            return tuple(length for _, length in self.windows)
        return tuple(map(sum, zip(*self.segments, strict=True)))

    def without(self, axes: Iterable[str], mesh: DeviceMesh) -> DimLayout:
        """Each device has what any along these axes has; LayoutError of windows or many runs."""
        dropped = frozenset(axes) & frozenset(self.axes)
        if not dropped:
            return self
        if self.windows:
            raise LayoutError(f"windows {self} are not joined over {', '.join(sorted(dropped))}")
        kept = tuple(axis for axis in self.axes if axis not in dropped)
        if not kept:
            return DimLayout.whole(self.size)
        points = itertools.product(*(range(mesh.size((axis,))) for axis in self.axes))
        owners = [mesh.linear(kept, dict(zip(self.axes, point, strict=True))) for point in points]
        runs = (owned(cuts, owners, mesh.size(kept)) for cuts in self.segments)
        return DimLayout.cut(kept, itertools.chain.from_iterable(runs))

    def scaled(self, minor: int) -> DimLayout:
        """The layout of the compound dim (this, minor) with `minor` not cut."""
        if self.windows:
            wider = [(start * minor, length * minor) for start, length in self.windows]
            return DimLayout.windowed(self.size * minor, self.axes, wider)
        return DimLayout.cut(
            self.axes, [tuple(part * minor for part in cuts) for cuts in self.segments]
        )

    @property
    def is_complete(self) -> bool:
        """Tell whether every element is held by some coordinate."""
        end = 0
        for start, length in sorted(self.windows or ((0, self.size),)):
            if start > end:
                return False
            end = max(end, start + length)
        return end == self.size

    @property
    def is_equal(self) -> bool:
        """Tell whether every coordinate holds the same number of elements."""
        return len(set(self.sizes())) == 1

    @property
    def is_in_order(self) -> bool:
        """Tell whether the places of one axis have a run of elements each, in their order."""
        return len(self.axes) == 1 and len(self.segments) == 1 and not self.windows

    @property
    def is_chunked(self) -> bool:
        """Tell whether the parts are those of ``torch.chunk``, the only cuts that DTensor has."""
        if not self.axes:
            return True
        if len(self.segments) > 1 or self.windows:
            return False
        (cuts,) = self.segments
        if len(self.axes) > 1:
            return len(set(cuts)) == 1
        chunk = -(-self.size // len(cuts))
        return cuts == tuple(max(0, min(chunk, self.size - i * chunk)) for i in range(len(cuts)))

    def __str__(self) -> str:
        if not self.axes:
            return "-"
        if self.windows:
            return cut_text(self.axes, None, self.windows)
        is_even = self.segments == (even_cut(self.size, len(self.segments[0])),)
        return cut_text(self.axes, None if is_even else self.segments)


def cut_text(
    axes: tuple[str, ...], segments: Segments | None, windows: Sequence[Interval] = ()
) -> str:
    """``"tp"`` for an even cut (segments None), ``"dp*tp:8,8,8,8|4,4,4,4"`` for another.

    Windows are ``"tp:0..5,3..8"``: from the first element to that after the last.
    """
    name = "*".join(axes)
    if windows:
        return f"{name}:" + ",".join(f"{start}..{start + size}" for start, size in windows)
    if segments is None:
        return name
    return f"{name}:" + "|".join(",".join(map(str, cuts)) for cuts in segments)


@lru_cache(maxsize=65536)
def _interned(
    axes: tuple[str, ...], segments: Segments, windows: tuple[Interval, ...] = ()
) -> DimLayout:
    """Equal layouts are mostly one object, which is quicker to compare."""
    return DimLayout(axes, segments, windows)


@lru_cache(maxsize=65536)
def _pieces(layout: DimLayout, index: int) -> tuple[Interval, ...]:
    if layout.windows:
        return (layout.windows[index],) if layout.windows[index][1] else ()
    pieces: list[Interval] = []
    run = 0
    for cuts in layout.segments:
        start, length = run + sum(cuts[:index]), cuts[index]
        if length and pieces and sum(pieces[-1]) == start:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
        elif length:
            pieces.append((start, length))
        run += sum(cuts)
    return tuple(pieces)


@lru_cache(maxsize=65536)
def product(outer: DimLayout, inner: DimLayout, mesh: DeviceMesh) -> DimLayout:
    """Layout of the compound dim (outer, inner).

    Raises:
        LayoutError: The two share an axis, the result has more than MAX_SEGMENTS segments, or the
            parts of one are windows while the other is cut or, if that is the outer one, not 1.
    """
    if not outer.axes and not inner.axes:
        return DimLayout.whole(outer.size * inner.size)
    if not inner.axes:
        return outer.scaled(inner.size)
    if outer.size == 1 and not outer.axes:
        return inner
    if outer.windows or inner.windows:
        raise LayoutError(f"a compound dim of windows has no layout: {outer} and {inner}")
    if outer.size * len(inner.segments) > 64 * _most_segments.get():
        raise LayoutError(
            f"cutting a minor factor under a major one of {outer.size} makes too many segments"
        )
    if not outer.axes:
        empty = (0,) * mesh.size(inner.axes)  # gives the width if the dim has no elements
        return DimLayout.cut(inner.axes, [empty, *inner.segments * outer.size])
    return _nested(outer, inner, mesh)


def _nested(outer: DimLayout, inner: DimLayout, mesh: DeviceMesh) -> DimLayout:
    if set(outer.axes) & set(inner.axes):
        raise LayoutError(f"axes {outer.axes} and {inner.axes} of one dim overlap")
    axes = tuple(name for name in mesh.names if name in outer.axes + inner.axes)
    spots = itertools.product(*(range(dict(mesh.axes)[axis]) for axis in axes))
    points = [dict(zip(axes, spot, strict=True)) for spot in spots]
    owners = [(mesh.linear(outer.axes, point), mesh.linear(inner.axes, point)) for point in points]
    segments: list[tuple[int, ...]] = [(0,) * len(points)]
    for outer_cuts in outer.segments:
        for owner, count in enumerate(outer_cuts):
            block = [
                tuple(inner_cuts[i] if o == owner else 0 for o, i in owners)
                for inner_cuts in inner.segments
            ]
            segments.extend(block * count)
    return DimLayout.cut(axes, segments)


def concat(parts: Iterable[DimLayout]) -> DimLayout:
    """Layout of the parts one after the other; LayoutError of windows, or parts of unlike axes."""
    layouts = list(parts)
    if len(layouts) == 1:
        return layouts[0]
    if any(layout.windows for layout in layouts):
        raise LayoutError("a sum of dims of windows has no layout")
    axes = {layout.axes for layout in layouts}
    if len(axes) > 1:
        raise LayoutError(f"parts of one dim are cut over different axes {sorted(axes)}")
    if not layouts[0].axes:
        return DimLayout.whole(sum(layout.size for layout in layouts))
    return DimLayout.cut(layouts[0].axes, itertools.chain(*(layout.segments for layout in layouts)))


def split(layout: DimLayout, sizes: Iterable[int]) -> tuple[DimLayout, ...]:
    """Inverse of `concat`: layouts of consecutive parts; LayoutError of windows."""
    if layout.windows:
        raise LayoutError(f"a dim of windows {layout} has no consecutive parts")
    owners = [(index, part) for cuts in layout.segments for index, part in enumerate(cuts) if part]
    width = len(layout.segments[0])
    parts = []
    position = 0
    for size in sizes:
        segments: list[tuple[int, ...]] = []
        while size:
            index, left = owners[position]
            take = min(size, left)
            segments.append(tuple(take if i == index else 0 for i in range(width)))
            size -= take
            if take == left:
                position += 1
            else:
                owners[position] = (index, left - take)
        parts.append(DimLayout.cut(layout.axes, segments or [(0,) * width]))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A tensor on a mesh: the layout of each dim, and the axes over which it is partial.

    `partial` has (axis, reduction) pairs in mesh order: the tensor is the reduction ("sum", "max",
    "min", "prod") of the parts along the axis.
    """

    dims: tuple[DimLayout, ...]
    partial: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))

    def __hash__(self) -> int:
        return self._hash

    __reduce__ = by_fields

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
        """Axes that cut a dim, or over which the tensor is partial."""
        cut = (axis for dim in self.dims for axis in dim.axes)
        return frozenset((*cut, *(axis for axis, _ in self.partial)))

    @property
    def is_replicated(self) -> bool:
        """Tell whether it is whole on every device of the mesh."""
        return not self.axes

    def local_shape(self, mesh: DeviceMesh, point: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the local part at a mesh coordinate."""
        return tuple(dim.local_size(mesh, point) for dim in self.dims)

    def local_type(
        self, type_: TensorType, mesh: DeviceMesh, point: Mapping[str, int]
    ) -> TensorType:
        """Type of the local part at a mesh coordinate."""
        return type_.with_shape(self.local_shape(mesh, point))

    def __str__(self) -> str:
        dims = "[" + ", ".join(map(str, self.dims)) + "]"
        return dims + "".join(f" partial({op}:{axis})" for axis, op in self.partial)


@dataclass(frozen=True, slots=True)
class Placement:
    """A value's device group and its sharding on it."""

    mesh: DeviceMesh
    sharding: Sharding
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.sharding)))

    def __hash__(self) -> int:
        return self._hash

    __reduce__ = by_fields

    def local_bytes(self, dtype: str) -> Mapping[int, int]:
        """Bytes of the local part on each device, for an element type."""
        return {
            device: dense_bytes(math.prod(self.sharding.local_shape(self.mesh, point)), dtype)
            for device, point in self.mesh.coords()
        }

    def parts(self) -> tuple[tuple[int, tuple[tuple[Interval, ...], ...]], ...]:
        """(device, pieces of every dim) for each device of the group."""
        return _parts(self)

    def region(self, point: Mapping[str, int]) -> tuple[tuple[Interval, ...], ...]:
        """Pieces of every dim at a mesh coordinate."""
        return tuple(dim.pieces(self.mesh, point) for dim in self.sharding.dims)

    def without_partial(self) -> Placement:
        """The placement after the pending reductions."""
        is_pending = bool(self.sharding.partial)
        return Placement(self.mesh, Sharding(self.sharding.dims)) if is_pending else self

    def delivered(self, count: int, copies: Sequence[tuple[int, ...]]) -> Placement:
        """The placement of a result that `count` devices get whole, or all devices of its copy."""
        everyone = DeviceMesh.line(count)
        if copies:
            axes = {COPIES: len(copies), "tp": len(copies[0])}
            everyone = DeviceMesh.of(axes, tuple(itertools.chain(*copies)))
        mesh = self.mesh if self.mesh.size() == everyone.size() else everyone
        return Placement(mesh, Sharding.replicate(self.sharding.shape))

    def __str__(self) -> str:
        return f"{self.sharding} on {self.mesh}"


@lru_cache(maxsize=65536)
def _parts(placement: Placement) -> tuple[tuple[int, tuple[tuple[Interval, ...], ...]], ...]:
    return tuple((device, placement.region(point)) for device, point in placement.mesh.coords())
