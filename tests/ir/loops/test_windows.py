"""Windows against brute force: the elements that each position of a loop reads."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.ir.exchange import exchange
from partitioner.ir.layout import DimLayout, LayoutError, Placement, Sharding
from partitioner.ir.loops.windows import Window
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.rules.sliding import Slide, same_pads

LINE = DeviceMesh.line(3, "tp")
budget = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def reads(window: Window, position: int) -> set[int]:
    """Elements that one position reads, by the definition."""
    steps = range(window.extent)
    return {
        i
        for i in range(window.size)
        if i * window.divisor - position * window.stride + window.before in steps
    }


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Any window."""
    numbers = (draw(st.integers(1, 4)) for _ in range(3))
    stride, extent, divisor = numbers
    return Window(draw(st.integers(1, 12)), stride, draw(st.integers(-3, 4)), extent, divisor)


@budget
@given(windows(), st.integers(0, 9), st.integers(1, 6))
def test_a_part_reads_from_the_first_to_the_last_element(
    window: Window, start: int, count: int
) -> None:
    needed = set[int]().union(*(reads(window, start + i) for i in range(count)))
    try:
        low, length = window.read(start, count)
    except LayoutError:
        assert not needed
        return
    assert needed <= set(range(low, low + length))
    if needed and window.extent >= max(window.stride, window.divisor):
        assert (low, low + length) == (min(needed), max(needed) + 1)


@budget
@given(windows(), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_a_layout_holds_what_its_part_reads(window: Window, cuts: list[int]) -> None:
    try:
        layout = window.layout(DimLayout.cut(("tp",), [tuple(cuts)]))
    except LayoutError:
        return
    first = 0
    for (_, point), count in zip(LINE.coords(), cuts, strict=True):
        held = {i for s, n in layout.pieces(LINE, point) for i in range(s, s + n)}
        assert set[int]().union(*(reads(window, first + i) for i in range(count))) <= held
        first += count


def test_parts_of_overlapping_positions_read_more() -> None:
    window = Slide(3, before=1, after=1).window(9)
    twice = window.layout(window.layout(DimLayout.even(9, ("tp",), LINE)))
    assert str(twice) == "tp:0..5,1..8,4..9"


def test_parts_that_have_no_window() -> None:
    window = Slide(1, before=4, after=4).window(4)
    with pytest.raises(LayoutError, match=r"positions 0\.\.4 read no element of a dim of 4"):
        window.layout(DimLayout.even(12, ("tp",), LINE))
    with pytest.raises(LayoutError, match="a sliding window needs parts of one piece each"):
        window.layout(DimLayout.cut(("tp",), [(2, 2, 2), (2, 2, 2)]))
    with pytest.raises(LayoutError, match="a sliding window needs parts of one piece each"):
        window.layout(DimLayout.cut(("tp",), [(6, 6, 0)]))


@budget
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2)
)
def test_the_halo_is_all_that_is_exchanged(
    kernel: int, stride: int, dilation: int, before: int, after: int
) -> None:
    """Rows that a device receives: what its windows reach into, beyond its own part."""
    slide = Slide(kernel, stride, dilation, before, after)
    size = 3 * stride * 5
    count = (size + before + after - slide.extent) // stride + 1
    rows = DimLayout.even(size, ("tp",), LINE)
    positions = DimLayout.even(count, ("tp",), LINE)
    wanted = slide.window(size).layout(positions)
    whole = DimLayout.whole(4)
    source, target = (Placement(LINE, Sharding((dim, whole))) for dim in (rows, wanted))
    for device, point in LINE.coords():
        ((start, length),) = positions.pieces(LINE, point)
        ((own, held),) = rows.pieces(LINE, point)
        low = max(0, start * stride - before)
        high = min(size, (start + length - 1) * stride - before + slide.extent)
        missing = set(range(low, high)) - set(range(own, own + held))
        sent = sum(t.numel for t in exchange(source, target) if device == t.target != t.source)
        assert sent == 4 * len(missing)


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [*itertools.product((5, 6, 7), (2, 3), (1, 2))]
)
@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_gives_all_positions(size: int, kernel: int, stride: int, auto: str) -> None:
    slide = same_pads(Slide(kernel, stride), size, auto)
    positions = (size + slide.before + slide.after - kernel) // stride + 1
    assert positions == -(-size // stride)
    assert slide.after - slide.before in ((0, 1) if auto == "SAME_UPPER" else (0, -1))


@budget
@given(windows(), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(3, 12))
def test_positions_follow_the_parts_of_the_dim(window: Window, cuts: list[int], count: int) -> None:
    layout = DimLayout.cut(("tp",), [tuple(cuts)])
    positions = window.positions(layout, count)
    assert positions is not None
    owner = np.repeat(np.arange(3), cuts)
    expected = [
        owner[min(o * window.stride // window.divisor, sum(cuts) - 1)] for o in range(count)
    ]
    assert np.repeat(np.arange(3), positions.segments[0]).tolist() == expected
    elements = replace(window, size=sum(cuts)).elements(positions)
    assert elements is not None
    if sum(cuts) * window.divisor <= count * window.stride and window.stride == 1:
        assert elements == layout
    assert window.positions(DimLayout.cut(("tp",), [(1, 1, 1)] * 2), count) is None
