"""Factor rules: sizes, links, the layouts that a cut gives, and the way back."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.ir.errors import IRError
from partitioner.ir.layout import DimLayout, LayoutError, Sharding
from partitioner.ir.loops.factors import FactorKind, listed, parse_dim
from partitioner.ir.loops.windows import Window
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.rule import Cut, Rule

LINE = DeviceMesh.line(2, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})

MATMUL = Rule.of(
    "b m k, k n", "b m n", [(2, 6, 8), (8, 4)], [(2, 6, 4)], reduce={"k": "sum"}, flops=2
)
CONCAT = Rule.of([["d", "a"], ["d", "b"]], [["d", "a + b"]], [(4, 3), (4, 5)], [(4, 8)])
SLICE = Rule.of(
    [["pre + d + post"]],
    [["d"]],
    [(12,)],
    [(6,)],
    sizes={"pre": 2, "d": 6, "post": 4},
    dropped={"pre", "post"},
)
HEADS = Rule.of([["t", "(h d)"]], [["h", "t", "d"]], [(3, 20)], [(5, 3, 4)])
RULES = (MATMUL, CONCAT, SLICE, HEADS)

budget = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def even(
    rule: Rule, *names: str, axis: str = "tp", mesh: DeviceMesh = LINE
) -> dict[str, DimLayout]:
    """An even cut of factors over one axis."""
    return {name: DimLayout.even(rule.factors[name].size, (axis,), mesh) for name in names}


def shown(shardings: tuple[Sharding, ...]) -> list[str]:
    return [str(sharding) for sharding in shardings]


@st.composite
def segmented(draw: st.DrawFn, size: int) -> DimLayout:
    """A layout of a factor over tp with up to four rows."""
    marks = sorted(draw(st.lists(st.integers(0, size), max_size=7)))
    bounds = [0, *marks, size]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    return DimLayout.cut(("tp",), [(n, 0) if i % 2 else (0, n) for i, n in enumerate(sizes)])


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("b (h d) 1", ((("b",),), (("h", "d"),), ((),))),
        ("_", None),
        ("", ()),
    ],
)
def test_tensors_are_parsed(text: str, dims: object) -> None:
    (parsed,) = listed(text, [()])
    assert (None if parsed is None else tuple(map(parse_dim, parsed))) == dims


def test_a_sum_of_compounds_is_parsed() -> None:
    assert parse_dim("(h d) + b + 1") == (("h", "d"), ("b",), ())


def test_links_join_the_terms_of_a_sum() -> None:
    assert MATMUL.links == (("b",), ("m",), ("k",), ("n",))
    assert CONCAT.links == (("d",), ("a", "b"))
    assert SLICE.links == (("pre", "d", "post"),)


def test_a_class_with_a_whole_member_is_not_offered() -> None:
    rule = Rule.of(
        [["d", "a"], ["d", "b"]], [["d", "a + b"]], [(4, 3), (4, 5)], [(4, 8)], whole="b"
    )
    assert rule.links == (("d",),)


def test_kinds_follow_from_where_factors_stand() -> None:
    assert {name: factor.kind for name, factor in MATMUL.factors.items()} == {
        "b": FactorKind.PASS,
        "m": FactorKind.PASS,
        "k": FactorKind.REDUCE,
        "n": FactorKind.PASS,
    }
    assert SLICE.factors["pre"].kind is FactorKind.PASS


def test_cutting_a_pass_factor_cuts_the_result() -> None:
    ins, outs = MATMUL.shardings(even(MATMUL, "n"), LINE)
    assert shown(ins) == ["[-, -, -]", "[-, tp]"]
    assert shown(outs) == ["[-, -, tp]"]


def test_cutting_a_reduced_factor_leaves_a_partial_result() -> None:
    ins, outs = MATMUL.shardings(even(MATMUL, "k"), LINE)
    assert shown(ins) == ["[-, -, tp]", "[tp, -]"]
    assert shown(outs) == ["[-, -, -] partial(sum:tp)"]


def test_an_addend_is_partial_with_the_result() -> None:
    shapes = [(6, 8), (8, 4), (4,)]
    rule = Rule.of("m k, k n, n", "m n", shapes, [(6, 4)], reduce={"k": "sum"}, addends={2})
    ins, _ = rule.shardings(even(rule, "k"), LINE)
    assert shown(ins) == ["[-, tp]", "[tp, -]", "[-] partial(sum:tp)"]


def test_cutting_a_compounds_major_factor_keeps_units() -> None:
    ins, outs = HEADS.shardings(even(HEADS, "h"), LINE)
    assert shown(ins) == ["[-, tp:12,8]"]
    assert shown(outs) == ["[tp, -, -]"]


def test_cutting_both_terms_gives_a_layout_of_two_runs() -> None:
    ins, outs = CONCAT.shardings(even(CONCAT, "a", "b"), LINE)
    assert shown(ins) == ["[-, tp]", "[-, tp]"]
    assert shown(outs) == ["[-, tp:2,1|3,2]"]


def test_operands_outside_the_loops_are_whole() -> None:
    rule = Rule.of("d, _", "d", [(4,), (3,)], [(4,)])
    ins, _ = rule.shardings(even(rule, "d"), LINE)
    assert shown(ins) == ["[tp]", "[-]"]


@pytest.mark.parametrize(
    ("rule", "cut", "message"),
    [
        (CONCAT, even(CONCAT, "a"), "parts of one dim are cut over different axes"),
        (MATMUL, even(MATMUL, "m", "n"), "an axis cuts two factors"),
        (
            Rule.of("d", "d", [(4,)], [(4,)], whole="d"),
            {"d": DimLayout.even(4, ("tp",), LINE)},
            "factor 'd' is whole and cannot be cut",
        ),
    ],
    ids=["one term of a sum", "one axis twice", "whole"],
)
def test_cuts_without_a_layout(rule: Rule, cut: dict[str, DimLayout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        rule.shardings(cut, LINE)


@pytest.mark.parametrize(
    ("operands", "results", "shapes", "out_shapes", "message"),
    [
        ("a b", "a b", [(2, 3)], [(2, 4)], "factor 'b' is 4 in one dim and 3 in another"),
        ("(a b)", "(a b)", [(6,)], [(6,)], "factor 'a' has no size"),
        ("a a", "a", [(2,)], [(2,)], r"rule has 2 dims for shape \(2,\)"),
        ("(a b)", "a b", [(5,)], [(2, 3)], r"is 6, the tensor's dim is 5 of \(5,\)"),
    ],
)
def test_rules_that_do_not_fit_their_tensors(
    operands: str,
    results: str,
    shapes: list[tuple[int, ...]],
    out_shapes: list[tuple[int, ...]],
    message: str,
) -> None:
    with pytest.raises(IRError, match=message):
        Rule.of(operands, results, shapes, out_shapes)


def test_a_lost_factor_needs_a_reduction() -> None:
    with pytest.raises(IRError, match="factor 'b' is in no result, has no reduction and is not"):
        Rule.of("a b", "a", [(2, 3)], [(2,)])


def test_flops_are_the_factor_sizes_times_the_flops_a_point() -> None:
    assert MATMUL.flops == 2 * 2 * 6 * 8 * 4
    parts = [MATMUL.local_flops(even(MATMUL, "k"), LINE, point) for _, point in LINE.coords()]
    assert parts == [MATMUL.flops / 2] * 2


def test_local_sizes_follow_the_layouts() -> None:
    cut = even(CONCAT, "a", "b")
    sizes = [CONCAT.local_sizes(cut, LINE, point) for _, point in LINE.coords()]
    assert sizes == [{"d": 4, "a": 2, "b": 3}, {"d": 4, "a": 1, "b": 2}]


@budget
@given(st.sampled_from(RULES), st.data())
def test_factor_layouts_invert_shardings(rule: Rule, data: st.DataObject) -> None:
    link = data.draw(st.sampled_from(rule.links))
    cut = {name: data.draw(segmented(rule.factors[name].size)) for name in link}
    ins, outs = rule.shardings(cut, LINE)
    places = zip((*rule.operands, *rule.results), (*ins, *outs), strict=True)
    for place, (dims, sharding) in enumerate(places):
        for dim, (expr, layout) in enumerate(zip(dims or (), sharding.dims, strict=True)):
            named = {name for term in expr for name in term}
            if not named & set(cut):
                continue
            layouts = rule.factor_layouts(expr, layout, LINE)
            assert layouts is not None
            if layouts.keys() <= cut.keys():
                assert rule.shardings({**cut, **layouts}, LINE) == (ins, outs)
            else:  # a dim of two factors with all elements on one device: either may be cut
                again_ins, again_outs = rule.shardings(layouts, LINE)
                assert (*again_ins, *again_outs)[place].dims[dim] == layout


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        (HEADS, DimLayout.even(20, ("tp",), LINE, unit=2)),
        (HEADS, DimLayout.even(18, ("tp",), LINE)),
        (
            Rule.of([["(h d)"]], [["h", "d"]], [(8,)], [(2, 4)], whole="h"),
            DimLayout.even(8, ("tp",), LINE),
        ),
        (Rule.of([["(h d)"]], [["h", "d"]], [(0,)], [(0, 4)]), DimLayout.even(0, ("tp",), LINE)),
    ],
    ids=["across units", "another size", "whole factor", "empty"],
)
def test_layouts_that_no_factor_gives(rule: Rule, layout: DimLayout) -> None:
    (dims,) = rule.operands
    assert dims is not None
    assert rule.factor_layouts(dims[-1], layout, LINE) is None


def test_two_layouts_for_one_factor_are_none() -> None:
    rule = Rule.of([["d", "d"]], [["d + d"]], [(4, 4)], [(8,)])
    (dims,) = rule.results
    assert dims is not None
    layout = DimLayout.cut(("tp",), [(2, 2), (3, 1)])
    assert rule.factor_layouts(dims[0], layout, LINE) is None


@budget
@given(st.integers(1, 12).flatmap(segmented))
def test_a_cut_is_read_as_it_is_written(layout: DimLayout) -> None:
    cut = Cut.of(layout, LINE)
    assert Cut.parse(str(cut)) == cut
    assert cut.layout(layout.size, LINE) == layout


@pytest.mark.parametrize("text", ["tp", "dp*tp", "tp:48,32", "tp:8,8|4,4", "tp:0..5,3..8"])
def test_cuts_print_as_they_are_written(text: str) -> None:
    assert str(Cut.parse(text)) == text


def test_windows_are_read_as_they_are_written() -> None:
    layout = DimLayout.windowed(8, ("tp",), [(0, 5), (3, 5)])
    cut = Cut.of(layout, LINE)
    assert str(cut) == str(layout) == "tp:0..5,3..8"
    assert Cut.parse(str(cut)).layout(8, LINE) == layout


def test_an_even_cut_is_written_without_sizes() -> None:
    assert str(Cut.of(DimLayout.even(5, ("dp", "tp"), GRID), GRID)) == "dp*tp"


@pytest.mark.parametrize(
    "text",
    ["", "tp*", "tp:", "tp:a,b", "tp:3,-1", "tp:1,2|", "tp:5..3,0..8", "tp:1..2.,2..3", "*:0..1"],
)
def test_cuts_that_are_not_written_right(text: str) -> None:
    with pytest.raises(IRError, match=r"is not like 'tp', 'dp\*tp', 'tp:48,32'"):
        Cut.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp", "cut pp names axis 'pp'; the mesh is dp=2 tp=2 on 0,1,2,3"),
        ("tp*dp", r"cut tp\*dp names its axes twice or not in the order of mesh dp=2 tp=2"),
        ("tp*tp", r"cut tp\*tp names its axes twice or not in the order"),
        ("tp:3,2", "cut tp:3,2 does not fit size 8 over 2 parts"),
        ("dp*tp:5,3", "does not fit size 8 over 4 parts"),
        ("tp:0..4,2..6,4..8", "does not fit size 8 over 2 parts"),
        ("tp:0..4,2..9", r"window 2\.\.9 is not within a dim of 8"),
    ],
)
def test_cuts_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        Cut.parse(text).layout(8, GRID)


def sliding(extent: int, stride: int = 1, before: int = 0) -> Rule:
    """Windows over 9 elements, of which other operands and the result have one a position."""
    count = (9 + 2 * before - extent) // stride + 1
    window = Window(9, stride, before, extent)
    return Rule.of("s, s", "s", [(9,), (count,)], [(count,)], windows={(0, "s"): window})


def test_a_cut_loop_reads_windows() -> None:
    rule = sliding(3, before=1)
    cut = {"s": DimLayout.even(9, ("tp",), LINE)}
    ins, outs = rule.shardings(cut, LINE)
    assert shown((*ins, *outs)) == ["[tp:0..6,4..9]", "[tp]", "[tp]"]
    assert str(rule) == "s=9 (window): (s), (s) -> (s)"
    assert rule.slides(cut)
    assert not rule.slides({})
    assert not rule.is_pointwise


def test_windows_that_do_not_overlap_are_a_plain_cut() -> None:
    ins, _ = sliding(3, stride=3).shardings({"s": DimLayout.even(3, ("tp",), LINE)}, LINE)
    assert shown(ins) == ["[tp:6,3]", "[tp]"]


def test_parts_of_a_loop_may_overlap() -> None:
    """They compute what they share twice, in place of an exchange."""
    halo = DimLayout.windowed(9, ("tp",), [(0, 6), (4, 5)])
    ins, outs = sliding(3, before=1).shardings({"s": halo}, LINE)
    assert shown((*ins, *outs)) == ["[tp:0..7,3..9]", "[tp:0..6,4..9]", "[tp:0..6,4..9]"]


def test_overlapping_parts_are_not_summed_and_leave_nothing_out() -> None:
    total = Rule.of([["s"]], [[]], [(9,)], [()], reduce={"s": "sum"})
    halo = DimLayout.windowed(9, ("tp",), [(0, 6), (4, 5)])
    with pytest.raises(LayoutError, match="factor 's' is reduced: its parts cannot overlap"):
        total.shardings({"s": halo}, LINE)
    gap = DimLayout.windowed(9, ("tp",), [(0, 4), (5, 4)])
    with pytest.raises(LayoutError, match=r"no part of factor 's' has all of tp:0\.\.4,5\.\.9"):
        sliding(3, before=1).shardings({"s": gap}, LINE)


def test_a_window_is_over_one_dim_of_its_size() -> None:
    with pytest.raises(IRError, match=r"operand 0: window of 's' over 9, dims \[8\]"):
        Rule.of("s", "s", [(8,)], [(7,)], windows={(0, "s"): Window(9, 1, 0, 3)})
