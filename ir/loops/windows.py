"""Sliding windows: the elements of an operand's dim that a part of a loop reads.

Position o of the loop reads the elements i with ``0 <= i * divisor - o * stride + before < extent``
that lie within the dim. A convolution or a pool has divisor 1; extent is what its kernel spans. A
transposed convolution has stride 1, and its own stride is the divisor. See ADR 0021.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from partitioner.ir.layout import DimLayout, Interval, LayoutError, Segments


@dataclass(frozen=True, slots=True)
class Window:
    """The window of one loop over one dim of an operand."""

    size: int  #: Elements of the dim.
    stride: int  #: Steps by which the window moves from one position to the next.
    before: int  #: Steps by which the window of position 0 starts before element 0.
    extent: int  #: Steps that the window spans.
    divisor: int = 1  #: Steps from one element to the next.

    def reach(self, start: int, length: int) -> Interval:
        """The positions that start..start + length read, with those outside the dim."""
        first = -((self.before - start * self.stride) // self.divisor)
        last = (start + length - 1) * self.stride - self.before + self.extent - 1
        return first, last // self.divisor + 1 - first

    def read(self, start: int, length: int) -> Interval:
        """Elements that positions start..start + length read; LayoutError if there are none."""
        first, count = self.reach(start, length)
        low, high = max(first, 0), min(first + count, self.size)
        if low >= high:
            raise LayoutError(
                f"positions {start}..{start + length} read no element of a dim of {self.size}"
            )
        return low, high - low

    def layout(self, positions: DimLayout) -> DimLayout:
        """Layout of the dim under a cut of the loop; LayoutError if a part is split or empty."""
        if not positions.axes:
            return DimLayout.whole(self.size)
        if len(positions.segments) > 1 or 0 in positions.sizes():
            raise LayoutError(f"a sliding window needs parts of one piece each, not {positions}")
        parts = positions.windows
        if not parts:
            (cuts,) = positions.segments
            starts = (sum(cuts[:index]) for index in range(len(cuts)))
            parts = tuple(zip(starts, cuts, strict=True))
        read = [self.read(start, length) for start, length in parts]
        return DimLayout.windowed(self.size, positions.axes, read)

    def positions(self, layout: DimLayout, count: int) -> DimLayout | None:
        """The cut of the loop, of `count` positions, along the dim's parts, if any; no padding."""
        if len(layout.segments) > 1 or layout.windows or not layout.axes:
            return None
        (cuts,) = layout.segments
        ends = (-(-end * self.divisor // self.stride) for end in accumulate(cuts[:-1]))
        bounds = [0, *(min(end, count) for end in ends), count]
        return DimLayout.cut(layout.axes, [tuple(b - a for a, b in pairwise(bounds))])

    def elements(self, positions: DimLayout) -> DimLayout | None:
        """The plain cut of the dim along a cut of the loop, without the halo, if any."""
        if len(positions.segments) > 1 or positions.windows or not positions.axes:
            return None
        (cuts,) = positions.segments
        ends = (end * self.stride // self.divisor for end in accumulate(cuts[:-1]))
        bounds = [0, *(min(end, self.size) for end in ends), self.size]
        return DimLayout.cut(positions.axes, [tuple(b - a for a, b in pairwise(bounds))])


@dataclass(frozen=True)
class Parts:
    """A dim that is cut in one way only: the device of position i of the loop has part i."""

    segments: Segments  #: Elements of each run of the dim that each position owns.

    @property
    def size(self) -> int:
        """Elements of the dim."""
        return sum(map(sum, self.segments))

    def layout(self, positions: DimLayout) -> DimLayout:
        """Layout of the dim under a cut of the loop; LayoutError unless each part is single."""
        if not positions.axes:
            return DimLayout.whole(self.size)
        if positions != self._single(positions.axes):
            raise LayoutError(f"a loop over parts is cut into single ones, not {positions}")
        return DimLayout.cut(positions.axes, self.segments)

    def positions(self, layout: DimLayout, count: int) -> DimLayout | None:
        """The cut of the loop, of `count` positions, that gives this layout; None without one."""
        width = len(layout.segments[0])
        if not layout.axes or layout.windows or width != count:
            return None
        cut = DimLayout.cut(layout.axes, self.segments)
        return self._single(layout.axes) if layout == cut else None

    def elements(self, positions: DimLayout) -> DimLayout | None:
        """The layout of the dim under a cut of the loop, None without one."""
        whole = not positions.axes or positions != self._single(positions.axes)
        return None if whole else self.layout(positions)

    def _single(self, axes: tuple[str, ...]) -> DimLayout:
        return DimLayout.cut(axes, [(1,) * len(self.segments[0])])
