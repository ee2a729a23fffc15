"""Ascending whole numbers as the first and last of each run, which is short as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ranges(numbers: Iterable[int]) -> list[int]:
    """First and last of each run: ``[3, 4, 5, 9] -> [3, 5, 9, 9]``."""
    ends: list[int] = []
    for number in numbers:
        if ends and ends[-1] == number - 1:
            ends[-1] = number
        else:
            ends += [number, number]
    return ends


def contains(ends: Sequence[int], number: int) -> bool:
    """Test whether a number is in the runs that `ranges` gave."""
    return any(first <= number <= last for first, last in zip(ends[::2], ends[1::2], strict=True))
