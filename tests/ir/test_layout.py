"""Layouts of dims: against the plain list of each element's owner."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partitioner.ir.layout import (
    MAX_SEGMENTS,
    DimLayout,
    LayoutError,
    Placement,
    Sharding,
    concat,
    even_cut,
    loaded_cut,
    product,
    share_cut,
    split,
)
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.types import TensorType

MESHES = tuple(DeviceMesh.of(axes) for axes in ({"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}))
GRID = MESHES[-1]
Rows = Sequence[tuple[int, ...]]

budget = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def rows(width: int, most: int = 3) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Segments as a caller may give them: empty parts, runs that are not maximal."""
    row = st.tuples(*[st.integers(0, most)] * width)
    return st.lists(row, min_size=1, max_size=4)


@st.composite
def layouts(draw: st.DrawFn, mesh: DeviceMesh) -> DimLayout:
    """A layout over some axes of a mesh, or none."""
    chosen = [axis for axis in mesh.names if draw(st.booleans())]
    if not chosen:
        return DimLayout.whole(draw(st.integers(0, 6)))
    axes = tuple(chosen)
    return DimLayout.cut(axes, draw(rows(mesh.size(axes))))


meshes = st.sampled_from(MESHES)
on_a_mesh = meshes.flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh)))


def owners(segments: Rows) -> list[int]:
    """The owner of each element."""
    return [index for cuts in segments for index, size in enumerate(cuts) for _ in range(size)]


def elements_of(layout: DimLayout, mesh: DeviceMesh) -> list[list[int]]:
    """Elements that each device holds."""
    return [
        [i for start, size in layout.pieces(mesh, point) for i in range(start, start + size)]
        for _, point in mesh.coords()
    ]


@budget
@given(rows(3), rows(3))
def test_equal_ownership_is_equal_form(one: Rows, other: Rows) -> None:
    left, right = DimLayout.cut(("tp",), one), DimLayout.cut(("tp",), other)
    assert owners(left.segments) == owners(one)
    assert (left == right) == (owners(one) == owners(other))


@budget
@given(rows(3))
def test_rows_of_single_elements_give_the_same_form(segments: Rows) -> None:
    singles = [tuple(int(i == owner) for i in range(3)) for owner in owners(segments)]
    assume(singles)
    assert DimLayout.cut(("tp",), singles) == DimLayout.cut(("tp",), segments)


@budget
@given(on_a_mesh)
def test_pieces_tile_the_dim_once_over_the_cut_axes(given_: tuple[DeviceMesh, DimLayout]) -> None:
    mesh, layout = given_
    by_point: dict[tuple[int, ...], list[int]] = {}
    for (_, point), elements in zip(mesh.coords(), elements_of(layout, mesh), strict=True):
        place = tuple(point[axis] for axis in layout.axes)
        assert by_point.setdefault(place, elements) == elements
    assert sorted(itertools.chain(*by_point.values())) == list(range(layout.size))


@budget
@given(on_a_mesh)
def test_pieces_are_maximal_in_order_and_as_large_as_said(
    given_: tuple[DeviceMesh, DimLayout],
) -> None:
    mesh, layout = given_
    for _, point in mesh.coords():
        pieces = layout.pieces(mesh, point)
        sizes = [size for _, size in pieces]
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(pieces))
        assert all(sizes)
        assert sum(sizes) == layout.local_size(mesh, point)
        assert sum(sizes) == layout.sizes()[mesh.linear(layout.axes, point)]


@budget
@given(st.lists(rows(2), min_size=1, max_size=4))
def test_split_is_the_inverse_of_concat(parts: list[Rows]) -> None:
    whole = [DimLayout.cut(("tp",), part) for part in parts]
    joined = concat(whole)
    assert owners(joined.segments) == [owner for part in parts for owner in owners(part)]
    assert split(joined, [layout.size for layout in whole]) == tuple(whole)


@budget
@given(rows(3), st.data())
def test_concat_is_the_inverse_of_split(segments: Rows, data: st.DataObject) -> None:
    layout = DimLayout.cut(("tp",), segments)
    at = data.draw(st.integers(0, layout.size))
    parts = split(layout, [at, layout.size - at])
    assert [part.size for part in parts] == [at, layout.size - at]
    assert concat(parts) == layout


def test_uncut_parts_join_uncut() -> None:
    assert concat([DimLayout.whole(2), DimLayout.whole(3)]) == DimLayout.whole(5)
    assert split(DimLayout.whole(5), [2, 3]) == (DimLayout.whole(2), DimLayout.whole(3))


def test_parts_over_different_axes_do_not_join() -> None:
    parts = DimLayout.even(4, ("dp",), GRID), DimLayout.even(4, ("tp",), GRID)
    with pytest.raises(LayoutError, match=r"cut over different axes \[\('dp',\), \('tp',\)\]"):
        concat(parts)


@budget
@given(meshes.flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh), layouts(mesh))))
def test_a_product_holds_the_pairs_of_what_its_factors_hold(
    given_: tuple[DeviceMesh, DimLayout, DimLayout],
) -> None:
    mesh, outer, inner = given_
    assume(not set(outer.axes) & set(inner.axes))
    layout = product(outer, inner, mesh)
    pairs = [
        [i * inner.size + j for i in major for j in minor]
        for major, minor in zip(elements_of(outer, mesh), elements_of(inner, mesh), strict=True)
    ]
    assert layout.size == outer.size * inner.size
    assert elements_of(layout, mesh) == pairs


@budget
@given(layouts(GRID), layouts(GRID), layouts(GRID))
def test_a_product_has_one_form_however_it_is_grouped(
    a: DimLayout, b: DimLayout, c: DimLayout
) -> None:
    axes = [*a.axes, *b.axes, *c.axes]
    assume(len(set(axes)) == len(axes))
    left, right = product(product(a, b, GRID), c, GRID), product(a, product(b, c, GRID), GRID)
    assert left == right


def test_a_product_of_an_even_cut_and_a_minor_factor_is_on_unit_boundaries() -> None:
    mesh = DeviceMesh.line(2, "tp")
    heads = product(DimLayout.even(5, ("tp",), mesh), DimLayout.whole(16), mesh)
    assert heads == DimLayout.even(80, ("tp",), mesh, unit=16)
    assert heads.sizes() == (48, 32)


def test_one_axis_cannot_cut_both_factors() -> None:
    cut = DimLayout.even(4, ("tp",), GRID)
    with pytest.raises(LayoutError, match=r"axes \('tp',\) and \('tp',\) of one dim overlap"):
        product(cut, cut, GRID)


def test_too_many_segments_are_refused() -> None:
    mesh = DeviceMesh.line(2, "tp")
    inner = DimLayout.even(2, ("tp",), mesh)
    most = product(DimLayout.whole(MAX_SEGMENTS), inner, mesh)
    assert len(most.segments) == MAX_SEGMENTS
    with pytest.raises(LayoutError, match=f"{MAX_SEGMENTS + 1} segments, more than {MAX_SEGMENTS}"):
        product(DimLayout.whole(MAX_SEGMENTS + 1), inner, mesh)
    with pytest.raises(LayoutError, match="under a major one of 100000 makes too many segments"):
        product(DimLayout.whole(100000), inner, mesh)


@budget
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_even_parts_differ_by_one_unit_at_most(units: int, parts: int, unit: int) -> None:
    sizes = even_cut(units * unit, parts, unit)
    assert sum(sizes) == units * unit
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] in (0, unit)


def test_an_even_cut_needs_whole_units() -> None:
    with pytest.raises(LayoutError, match="size 81 is not a multiple of unit 16"):
        even_cut(81, 2, unit=16)


weights = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def _within_one_unit(parts: Sequence[int], weights: Sequence[int], starved: int) -> bool:
    """Whether the `starved` lightest have one unit and the rest share what is left."""
    order = sorted(range(len(weights)), key=weights.__getitem__)
    poor, rich = order[:starved], order[starved:]
    total, left = sum(weights[i] for i in rich), sum(parts) - starved
    fair = [Fraction(left * weights[i], total) for i in rich]
    return all(parts[i] == 1 for i in poor) and all(
        abs(parts[i] - share) < 1 for i, share in zip(rich, fair, strict=True)
    )


@budget
@given(weights, st.integers(0, 200), st.integers(1, 5))
def test_parts_by_weight_are_whole_units_in_proportion(
    weights: list[int], more: int, unit: int
) -> None:
    units = len(weights) + more
    sizes = share_cut(units * unit, weights, unit)
    parts = [size // unit for size in sizes]
    assert sum(sizes) == units * unit
    assert [part * unit for part in parts] == list(sizes)
    assert min(parts) >= 1
    enough = units * min(weights) >= sum(weights)
    starved = (0,) if enough else range(len(weights))
    assert any(_within_one_unit(parts, weights, count) for count in starved)
    for (a, more_a), (b, more_b) in itertools.permutations(zip(weights, parts, strict=True), 2):
        assert a <= b or more_a >= more_b, "who weighs more has no less"


@budget
@given(st.integers(1, 6), st.integers(0, 40), st.floats(1e-9, 1e9), st.integers(1, 5))
def test_equal_weights_are_the_even_cut(count: int, more: int, weight: float, unit: int) -> None:
    size = (count + more) * unit
    assert share_cut(size, [weight] * count, unit) == even_cut(size, count, unit)


def test_parts_by_weight_need_whole_units_and_one_each() -> None:
    assert share_cut(10, (100.0, 1.0, 1.0)) == (8, 1, 1)
    with pytest.raises(LayoutError, match="size 81 is not a multiple of unit 16"):
        share_cut(81, (1.0, 1.0), unit=16)
    with pytest.raises(LayoutError, match="size 32 has fewer than 3 units of 16"):
        share_cut(32, (1.0, 1.0, 1.0), unit=16)


def test_layouts_print_short() -> None:
    mesh = DeviceMesh.line(2, "tp")
    texts = {
        "-": DimLayout.whole(5),
        "tp": DimLayout.even(5, ("tp",), mesh),
        "tp:48,32": DimLayout.even(80, ("tp",), mesh, unit=16),
        "tp:2,2|1,1": DimLayout.cut(("tp",), [(2, 2), (1, 1)]),
        "dp*tp": DimLayout.even(8, ("dp", "tp"), GRID),
        "tp:0..4,2..5": DimLayout.windowed(5, ("tp",), [(0, 4), (2, 3)]),
    }
    assert {str(layout) for layout in texts.values()} == set(texts)


def test_a_sharding_gives_local_types() -> None:
    cut = DimLayout.even(5, ("dp",), GRID)
    sharding = Sharding((cut, DimLayout.whole(3)), (("tp", "sum"),))
    local = [
        str(sharding.local_type(TensorType.of("float32", (5, 3)), GRID, point))
        for _, point in GRID.coords()
    ]
    assert local == ["float32[3,3]", "float32[3,3]", "float32[2,3]", "float32[2,3]"]
    assert sharding.shape == (5, 3)
    assert sharding.axes == {"dp", "tp"}
    assert str(sharding) == "[dp, -] partial(sum:tp)"


def test_a_replicated_tensor_uses_no_axis() -> None:
    assert Sharding.replicate((2, 3)).is_replicated
    assert not Sharding((DimLayout.whole(2),), (("tp", "sum"),)).is_replicated


def test_a_placement_lists_every_devices_pieces() -> None:
    mesh = DeviceMesh.of({"tp": 2}, (4, 7))
    at = Placement(mesh, Sharding((DimLayout.cut(("tp",), [(2, 1), (1, 0)]),)))
    assert at.parts() == ((4, (((0, 2), (3, 1)),)), (7, (((2, 1),),)))
    assert str(at) == "[tp:2,1|1,0] on tp=2 on 4,7"


@st.composite
def windows(draw: st.DrawFn, size: int, parts: int) -> list[tuple[int, int]]:
    """Any intervals of a dim."""
    ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    return [(low, high - low) for low, high in (draw(ends) for _ in range(parts))]


@budget
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), windows(n, 3))))
def test_windows_hold_their_elements(case: tuple[int, list[tuple[int, int]]]) -> None:
    size, held = case
    mesh = DeviceMesh.line(3, "tp")
    layout = DimLayout.windowed(size, ("tp",), held)
    wanted = [list(range(start, start + length)) for start, length in held]
    assert layout.size == size
    assert elements_of(layout, mesh) == wanted
    assert [layout.local_size(mesh, point) for _, point in mesh.coords()] == [*map(len, wanted)]
    if layout.axes:
        assert list(layout.sizes()) == [*map(len, wanted)]
    assert layout.is_equal == (len({*map(len, wanted)}) == 1)
    assert layout.is_complete == (set(range(size)) == {i for part in wanted for i in part})
    pairs = [[2 * i + j for i in part for j in (0, 1)] for part in wanted]
    assert elements_of(layout.scaled(2), mesh) == pairs


def test_windows_without_overlap_are_a_plain_cut() -> None:
    assert DimLayout.windowed(7, ("tp",), [(0, 3), (3, 4)]) == DimLayout.cut(("tp",), [(3, 4)])
    assert DimLayout.windowed(7, ("tp",), [(0, 7), (0, 7)]) == DimLayout.whole(7)


def test_no_window_reaches_beyond_its_dim() -> None:
    with pytest.raises(LayoutError, match=r"window 3\.\.8 is not within a dim of 7"):
        DimLayout.windowed(7, ("tp",), [(0, 4), (3, 5)])


def test_windows_are_no_part_of_a_compound_or_a_sum() -> None:
    halo, mesh = DimLayout.windowed(5, ("tp",), [(0, 4), (2, 3)]), DeviceMesh.line(2, "tp")
    assert not halo.is_chunked
    assert concat([halo]) == halo
    assert product(DimLayout.whole(1), halo, mesh) == halo
    with pytest.raises(LayoutError, match="a compound dim of windows has no layout"):
        product(DimLayout.whole(2), halo, mesh)
    with pytest.raises(LayoutError, match="a sum of dims of windows has no layout"):
        concat([halo, DimLayout.whole(2)])
    with pytest.raises(LayoutError, match=r"a dim of windows tp:0\.\.4,2\.\.5 has no consecutive"):
        split(halo, [2, 3])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 40), min_size=5, max_size=24),
    st.lists(st.integers(1, 3), min_size=2, max_size=5),
    st.booleans(),
)
def test_cuts_by_load_are_no_slower_than_even_ones(
    loads: list[int], speeds: list[int], equal: bool
) -> None:
    parts = len(speeds)
    mesh = DeviceMesh.of({"tp": parts})
    segments = loaded_cut(tuple(map(float, loads)), tuple(map(float, speeds)), equal=equal)
    cut, even = DimLayout.cut(("tp",), segments), DimLayout.even(len(loads), ("tp",), mesh)

    def slowest(layout: DimLayout) -> float:
        held = [layout.pieces(mesh, {"tp": part}) for part in range(parts)]
        owned = sorted(i for pieces in held for start, n in pieces for i in range(start, start + n))
        assert owned == list(range(len(loads)))
        return max(
            sum(sum(loads[start : start + n]) for start, n in pieces) / speed
            for pieces, speed in zip(held, speeds, strict=True)
        )

    assert slowest(cut) <= slowest(even)
    assert min(cut.sizes()) > 0
    if equal:
        assert cut.sizes() == even.sizes()


def test_cuts_by_load_move_few_elements() -> None:
    assert loaded_cut((1.0,) * 6, (1.0, 1.0)) == ((3, 3),)
    assert loaded_cut((1.0,) * 6, (2.0, 1.0)) == ((4, 2),)
    assert loaded_cut((4.0, 3.0, 1.0, 1.0, 1.0), (1.0,) * 3) == ((1, 0, 1), (0, 2, 1))
    assert loaded_cut((450, 400, 100, 50), (1, 1)) == ((0, 1), (2, 1))


def test_cuts_by_load_have_no_more_segments_than_layouts_may() -> None:
    loads = tuple(50.0 if i < 40 else 1.0 for i in range(256))
    segments = loaded_cut(loads, (1.0,) * 16)
    assert 1 < len(segments) <= MAX_SEGMENTS
