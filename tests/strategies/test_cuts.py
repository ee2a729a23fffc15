"""The cuts of a class: balanced, by speed, linked factors in proportion to each other."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.rule import Rule
from partitioner.strategies.derive import ClassCuts

TRIO = DeviceMesh.line(3)
GRID = DeviceMesh.of({"dp": 2, "tp": 2})
TP = ("tp",)


def joined(*sizes: int) -> Rule:
    """A Concat: one class of as many factors."""
    names = [f"f{index}" for index in range(len(sizes))]
    return Rule.of(
        [[name] for name in names], [[" + ".join(names)]], [[n] for n in sizes], [[sum(sizes)]]
    )


def own(
    rule: Rule, mesh: DeviceMesh, speeds: tuple[float, ...] | None, axes: tuple[str, ...] = TP
) -> list[dict[str, tuple[int, ...]]]:
    (link,) = rule.links
    cuts = ClassCuts(mesh, speeds).of_class(rule, link, axes)
    return [{name: layout.sizes() for name, layout in cut.items()} for cut in cuts]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.integers(3, 60),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_linked_factors_are_cut_in_proportion_to_each_other(
    speeds: list[int], units: int, minors: list[int]
) -> None:
    """Heads of several sizes, say: as many of each on a device."""
    rule = joined(*(units * minor for minor in minors))
    even, *rest = own(rule, TRIO, tuple(map(float, speeds)))
    assert all(max(sizes) - min(sizes) <= 1 for sizes in even.values())
    assert len(rest) <= 1
    assert even not in rest
    for cut in rest:
        shares = {tuple(Fraction(size, sum(sizes)) for size in sizes) for sizes in cut.values()}
        assert len(shares) == 1
        assert min(map(min, cut.values())) >= 1
    if len(set(speeds)) == 1:
        assert not rest


def test_each_factor_by_itself_without_a_common_unit() -> None:
    even, shared = own(joined(17, 8), DeviceMesh.line(2), (3.0, 1.0))
    assert even == {"f0": (9, 8), "f1": (4, 4)}
    assert shared == {"f0": (13, 4), "f1": (6, 2)}


def test_too_few_elements_have_the_balanced_cut_only() -> None:
    assert len(own(joined(2), TRIO, (3.0, 2.0, 1.0))) == 1
    assert len(own(joined(3), TRIO, (3.0, 2.0, 1.0))) == 1
    assert own(joined(8, 0), DeviceMesh.line(2), (3.0, 1.0))[0] == {"f0": (4, 4), "f1": (0, 0)}


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [(("dp",), (45, 15)), (("tp",), None), (("dp", "tp"), (24, 24, 6, 6))],
    ids=str,
)
def test_a_coordinate_is_as_fast_as_its_slowest_device(
    axes: tuple[str, ...], sizes: tuple[int, ...] | None
) -> None:
    """Two fast devices and two slow ones: the slow ones bind over tp, and there all are alike."""
    speeds = (3.0, 4.0, 1.0, 1.0) if sizes is None or len(sizes) == 2 else (4.0, 4.0, 1.0, 1.0)
    found = own(joined(60), GRID, speeds, axes)
    assert found[1:] == ([{"f0": sizes}] if sizes else [])


@pytest.mark.parametrize(
    ("held", "rest"), [((13, 4), (6, 2)), ((9, 8), (4, 4)), ((10, 7), (4, 4)), ((12, 5), (6, 2))]
)
def test_what_is_linked_to_a_found_cut_is_of_its_kind(
    held: tuple[int, ...], rest: tuple[int, ...]
) -> None:
    choice = ClassCuts(DeviceMesh.line(2), (3.0, 1.0))
    found = {"f0": DimLayout.cut(TP, [held])}
    cut = choice.complete(joined(17, 8), TP, found)
    assert {name: layout.sizes() for name, layout in cut.items()} == {"f0": held, "f1": rest}
    assert choice.is_by_speed(found.values()) == (rest == (6, 2))
    assert not ClassCuts(DeviceMesh.line(2), None).is_by_speed(found.values())
