"""Windows that slide over the spatial dims of convolutions and pools, and their local padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.ir.layout import Interval
from partitioner.ir.loops.windows import Window
from partitioner.ir.ops.signature import OpaqueError, Shape


@dataclass(frozen=True, slots=True)
class Slide:
    """The window over one spatial dim."""

    kernel: int  #: Points of the window.
    #: Elements from one window to the next; of a transposed convolution, in the result.
    stride: int = 1
    dilation: int = 1  #: Elements from one point of the window to the next.
    before: int = 0  #: Padding before the first element; cropping, of a transposed convolution.
    after: int = 0  #: The same after the last element.

    @property
    def extent(self) -> int:
        """Elements from the first to the last point of the window."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def is_point(self) -> bool:
        """Tell whether each position reads the element of its own index."""
        return self.extent == self.stride == 1 and self.before == self.after == 0

    def window(self, size: int) -> Window:
        """The window over a dim of `size` elements."""
        return Window(size, self.stride, self.before, self.extent)

    def positions(self, size: int, *, ceil: bool = False) -> int:
        """The positions over a dim of `size` elements, as ONNX Runtime counts them.

        It divides towards zero, so that a window wider than its dim has a position. With `ceil`
        the last window may reach beyond the padding, but does not begin in that after the dim.
        """
        room = size + self.before + self.after - self.extent
        steps = -(-room // self.stride) if ceil or room < 0 else room // self.stride
        is_outside = ceil and steps * self.stride >= size + self.before
        return steps if is_outside else steps + 1

    def transposed(self, size: int) -> Window:
        """The window by positions of a transposed result; a stride at least, so never empty."""
        extent = max(self.extent, self.stride)
        return Window(size, 1, extent - 1 - self.before, extent, self.stride)

    def local_pads(self, read: Interval, written: Interval) -> tuple[int, int]:
        """Padding of a part that reads and writes these intervals of the whole dims."""
        start, count = written
        first = start * self.stride - self.before
        last = (start + count - 1) * self.stride - self.before + self.extent
        return read[0] - first, max(last - sum(read), 0)

    def local_rest(self, read: Interval, written: Interval) -> int:
        """Elements after the last one that a part's windows reach; none in dims that are cut."""
        last = (sum(written) - 1) * self.stride - self.before + self.extent
        return max(sum(read) - last, 0)

    def local_crops(self, read: Interval, written: Interval) -> tuple[int, int]:
        """Cropping before and after a transposed part; negative where its result goes on."""
        before = written[0] + self.before - read[0] * self.stride
        length = (read[1] - 1) * self.stride + self.extent
        return before, length - before - written[1]


@dataclass(frozen=True, slots=True)
class Zoom:
    """Upsampling of one spatial dim by a whole number."""

    factor: int  #: Elements of the result for each element of the data.
    reach: int = 0  #: Elements of the data before and after its own that a result's element reads.

    def window(self, size: int) -> Window:
        """The window over a dim of `size` elements, by positions of the result."""
        halo = self.reach * self.factor
        return Window(size, 1, self.factor - 1 + halo, self.factor + 2 * halo, self.factor)

    def gradient(self, size: int) -> Window:
        """The window over the result's gradient, of `size` elements, by positions of the data."""
        halo = self.reach * self.factor
        return Window(size, self.factor, halo, self.factor + 2 * halo)


#: Elements that one of a resampled result is made of along a dim, by mode.
TAPS: Mapping[str, int] = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
#: Elements before and after its own that one of an upsampled result reads, by mode.
REACH: Mapping[str, int] = {"nearest": 0, "linear": 1, "cubic": 2}
#: Upsampling by more is not cut: up to here, PyTorch's division by the factor in single precision
#: gives the right element of dims of any size (checked to 200,000 elements).
MOST_ZOOM = 16


def zoom(mode: str, before: int, after: int) -> Zoom | None:
    """The upsampling from one size to another; None unless parts of it are the whole's.

    By a whole number, all elements have the same weights. Weights are computed from the distance to
    the border: a power of two keeps them exact.
    """
    factor, rest = divmod(after, max(before, 1))
    exact = mode == "nearest" or factor & (factor - 1) == 0
    if rest or not exact or not 1 < factor <= MOST_ZOOM:
        return None
    return Zoom(factor, REACH[mode])


def windows(
    slides: Sequence[Slide],
    shape: Shape,
    positions: Shape,
    dims: Sequence[str],
    *,
    transposed: bool = False,
    operand: int = 0,
    points: bool = False,
) -> Mapping[tuple[int, str], Window]:
    """Windows of an operand, whose last dims are spatial, as are those of the loop's positions.

    None over dims that are read by point unless `points`: a window demands parts of one piece.
    A transposed convolution may have more positions than elements, which no point reaches.
    """
    last = -len(slides)
    if 0 in positions[last:]:
        raise OpaqueError("no window fits its image")
    spatial = zip(slides, shape[last:], positions[last:], dims[last:], strict=True)
    return {
        (operand, name): slide.transposed(size) if transposed else slide.window(size)
        for slide, size, count, name in spatial
        if points or not slide.is_point or size != count
    }


def same_pads(slide: Slide, size: int, auto: str, *, dilated: bool = True) -> Slide:
    """The window with the padding that ONNX Runtime derives from `auto_pad`, SAME_UPPER or _LOWER.

    It is the least for ``ceil(size / stride)`` positions, in halves towards zero. It is negative
    where the stride leaves out elements. Unless `dilated`, it is that of the window without
    dilation, as pools have it.
    """
    extent = slide.extent if dilated else slide.kernel
    total = (-(-size // slide.stride) - 1) * slide.stride + extent - size
    before = int((total if auto == "SAME_UPPER" else total + 1) / 2)
    return replace(slide, before=before, after=total - before)
