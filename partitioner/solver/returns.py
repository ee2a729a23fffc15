"""The number of times that a plan returns to devices that it left."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def returns(groups: Iterable[frozenset[int]]) -> int:
    """The number of times that a device is used again after other devices alone were.

    Args:
        groups: The devices of each operator, in their order.

    >>> returns(map(frozenset, [{0}, {1}, {1}, {0}, {0, 1}]))
    2
    """
    seen = last = frozenset[int]()
    count = 0
    for group, _ in groupby(groups):
        count += len((group - last) & seen)
        seen, last = seen | group, group
    return count
