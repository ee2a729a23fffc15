"""Iterations that the devices of an axis send each other inside of a node.

A node of rows and of owners, as a layer of tokens and of experts, may have both cut over the same
axis. Then each device has its rows, and meets those of all devices of the axis that chose what it
owns: they are sent to it, and its results for them are sent back. How many a device gets is known
only at run time; what is expected follows from the loads of the owners, or from equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from partitioner.ir.layout import Interval


@dataclass(frozen=True)
class Dispatch:
    """The loops of a rule that one axis may cut both, and what is sent then."""

    rows: str  #: Factor of the rows, each of which lies on one device of the axis.
    owners: str  #: Factor of what rows choose; each device computes for its part of it.
    chosen: int  #: How many of them a row chooses.
    there_bytes: float  #: Bytes of a row on its way to a device that owns some of its choices.
    back_bytes: float  #: Bytes of its results on their way back.
    #: Operands, and results counted behind them, that each device has for the rows of all devices
    #: of the axis: pending sums over the owners.
    inside: frozenset[int] = frozenset()
    #: By owner, its share of the choices; () if all are chosen equally often.
    loads: tuple[float, ...] = ()

    def load(self, owned: Iterable[Interval], count: int) -> float:
        """Share of the choices that a device is expected to get that owns these of `count`.

        >>> Dispatch("t", "e", 1, 0, 0, loads=(0.5, 0.125, 0.25, 0.125)).load([(0, 1), (3, 1)], 4)
        0.625
        """
        if not self.loads:
            return sum(length for _, length in owned) / count
        return math.fsum(x for start, length in owned for x in self.loads[start : start + length])

    def share(self, owned: Iterable[Interval], count: int) -> float:
        """Share of the rows that a device is expected to be sent that owns these of `count`.

        Each row chooses `chosen` different ones. What a device owns counts as so many equally
        likely ones as have its load; no fewer rows come than choose its most loaded one.

        >>> Dispatch("t", "e", 1, 0, 0).share([(2, 2)], 8)
        0.25
        """
        pieces, chosen = tuple(owned), min(self.chosen, count)
        if not self.loads:
            others = count - sum(length for _, length in pieces)
            return 1 - math.comb(others, chosen) / math.comb(count, chosen)
        like = self.load(pieces, count) * count
        none = math.prod(max(0.0, count - like - i) / (count - i) for i in range(chosen))
        most = max(x for start, length in pieces for x in self.loads[start : start + length])
        return min(1.0, max(1 - none, most * chosen))
