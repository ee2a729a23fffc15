"""Values of JSON against types."""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest

from partitioner.ir.checks import fits, read


class _More(TypedDict, total=False):
    more: list[float]


class _Entry(_More):
    name: str
    count: int | None


@dataclass(frozen=True)
class _Figures:
    device: int
    rate: float | None = None

    @property
    def is_known(self) -> bool:
        return self.rate is not None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("a", str),
        (0, int),
        (1, float),
        (2.5, float),
        (None, float | None),
        ([1, 2], list[int]),
        ([1, 2], tuple[int, ...]),
        ({"a": [1]}, dict[str, list[int]]),
        ("less", Literal["less", "more"]),
        ({"name": "a", "count": None}, _Entry),
        ({"name": "a", "count": 1, "more": [0.5]}, _Entry),
        ({"device": 1, "rate": 0.5}, _Figures),
        ({"device": 1}, _Figures),  # as a file of an earlier version has it
        (4, lambda value: value % 2 == 0),
    ],
)
def test_what_fits(value: object, kind: Any) -> None:
    assert fits(value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, str),
        (True, int),
        (-1, int),
        (2**63, int),
        (float("inf"), float),
        (float("nan"), float),
        (10**400, float),
        (1, bool),
        ((1,), list[int]),
        (["a"], list[int]),
        ({"a": "b"}, dict[str, int]),
        (["less"], Literal["less", "more"]),
        ({"name": "a"}, _Entry),
        ({"name": "a", "count": 1, "other": 1}, _Entry),
        ([], _Entry),
        ({"rate": 0.5}, _Figures),
        ({"device": 1, "rate": 0.5, "is_known": True}, _Figures),
        (3, lambda value: value % 2 == 0),
    ],
)
def test_what_does_not_fit(value: object, kind: Any) -> None:
    assert not fits(value, kind)


@dataclass(frozen=True)
class _Run:
    name: Literal["one", "two"]
    parts: tuple[_Figures, ...] = ()


def test_a_dataclass_is_read_with_those_inside_it() -> None:
    data = {"name": "one", "parts": [{"device": 1}, {"device": 2, "rate": 3}]}
    assert read(_Run, data) == _Run("one", (_Figures(1), _Figures(2, 3)))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([], TypeError, "has no fields"),
        ({}, KeyError, "name"),
        ({"name": "three"}, ValueError, "name 'three' is not one of one, two"),
        ({"name": "one", "more": 1}, TypeError, "more"),
        ({"name": "one", "parts": 7}, ValueError, "parts 7 is not of its type"),
        ({"name": "one", "parts": [{"device": -1}]}, ValueError, "device -1 is not a whole number"),
        ({"name": "one", "parts": [{"device": 1, "rate": "a"}]}, ValueError, "rate 'a'"),
    ],
)
def test_what_is_no_such_dataclass(data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(_Run, data)
