"""Dims that lie in given parts: position i of a loop stands for a list of elements of the dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.ir.layout import DimLayout, LayoutError, Segments


@dataclass(frozen=True)
class Parts:
    """A dim that is cut in one way only, in as many parts as a loop has positions.

    It takes the place of a `Window`: the loop is cut into single positions, and the device of
    position i has the elements that coordinate i owns.
    """

    segments: Segments  #: Elements of each run of the dim that each position owns.

    @property
    def size(self) -> int:
        """Elements of the dim."""
        return sum(map(sum, self.segments))

    def layout(self, positions: DimLayout) -> DimLayout:
        """The layout of the dim under a cut of the loop.

        Raises:
            LayoutError: The loop is not cut into single positions.
        """
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


def owned(sizes: Sequence[int], owners: Sequence[int], count: int) -> Segments:
    """Runs of these sizes, each of one of `count` owners."""
    return tuple(
        tuple(size if owner == one else 0 for one in range(count))
        for size, owner in zip(sizes, owners, strict=True)
    )
