"""Values of JSON against types."""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest

from partitioner.foundations.json_types import fits


class _More(TypedDict, total=False):
    more: list[float]


class _Entry(_More):
    name: str
    count: int | None


@dataclass(frozen=True)
class _Record:
    device: int
    rate_per_s: float | None


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
        ({"device": 0, "rate_per_s": None}, _Record),
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
        ({"device": 0}, _Record),
        ({"device": 0, "rate_per_s": 1.5, "other": 1}, _Record),
        ({"device": -1, "rate_per_s": 1.5}, _Record),
        (3, lambda value: value % 2 == 0),
    ],
)
def test_what_does_not_fit(value: object, kind: Any) -> None:
    assert not fits(value, kind)
