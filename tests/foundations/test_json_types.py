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
