"""Iterations that the devices of an axis send each other inside of a node.

A node of rows and of owners, as a layer of tokens and of experts, may have both cut over the same
axis. Then each device has its rows, and meets those of all devices of the axis that chose what it
owns: they are sent to it, and its results for them are sent back. How many a device gets is known
only at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Dispatch:
    """The loops of a rule that one axis may cut both, and what is sent then.

    Attributes:
        rows: Factor of the rows, each of which lies on one device of the axis.
        owners: Factor of what rows choose; each device computes for its part of it.
        chosen: How many of them a row chooses.
        there_bytes: Bytes of a row on its way to a device that owns some of its choices.
        back_bytes: Bytes of its results on their way back.
        inside: Operands, and results counted behind them, that each device has for the rows of all
            devices of the axis: pending sums over the owners.
    """

    rows: str
    owners: str
    chosen: int
    there_bytes: float
    back_bytes: float
    inside: frozenset[int] = frozenset()

    def share(self, owned: int, count: int) -> float:
        """Share of the rows that a device that owns `owned` of `count` is expected to be sent.

        Each row chooses `chosen` of them, all choices being equally likely.

        >>> Dispatch("t", "e", 1, 0, 0).share(2, 8)
        0.25
        """
        chosen = min(self.chosen, count)
        return 1 - math.comb(count - owned, chosen) / math.comb(count, chosen)
