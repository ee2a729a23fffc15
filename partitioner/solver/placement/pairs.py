"""Two devices share their nodes anew, by an exact dynamic programme over one device's seconds.

    least(u) = min { seconds of device b : device a spends u quanta },   u = 0, 1, ...

over all ways to part the nodes that the two hold (`sweep`). The best split is at the u where the
larger of the two is least. Seconds of a are rounded to quanta, so the few best are looked at
again exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from partitioner.solver.placement.capacity import Knapsack, Star
from partitioner.solver.placement.sweep import Net, Sweep, Swept, lay_out, sweep

#: Quanta up to the limit: rounding 30 nodes moves their sum by 2 quanta or so.
FEWEST, MOST = 600, 4000
#: Entries of tables, all quanta together, up to which there are more than the fewest: 10 ms.
FEW_ENTRIES = 2_000_000
#: Entries that one split may fill: 0.1 s.
MOST_ENTRIES = 20_000_000


@dataclass(frozen=True)
class Splits:
    """The ways to part some nodes between devices a and b.

    Attributes:
        swept: The least seconds of b for every number of quanta of a; inside is on a.
        quantum_s: Seconds.
    """

    swept: Swept
    quantum_s: float

    def within(self, limit_s: float) -> list[int]:
        """Quanta of a at which neither device takes more than about the limit, best first."""
        seconds = self.swept.seconds[:-1]
        larger = np.maximum(seconds, np.arange(len(seconds)) * self.quantum_s)
        order = np.argsort(larger, kind="stable")
        return [int(u) for u in order[: np.searchsorted(larger[order], limit_s, side="right")]]

    def on_first(self, quanta: int) -> frozenset[int]:
        """The nodes on a."""
        return self.swept.inside(quanta)


def split(first: Knapsack, second: Knapsack, order: Sequence[int], limit_s: float) -> Splits | None:
    """All splits of some nodes between two devices that may stay within the limit.

    Args:
        first: Of device a.
        second: Of device b.
        order: The nodes that the two hold, in an order in which few wait for one another.
        limit_s: Seconds that interest.
    """
    # how many quanta are cheap depends on the size of the tables, and that on the nodes alone
    levels = FEWEST
    plan = _plan(first, second, order, limit_s / levels)
    if plan is None or plan.cells * levels > MOST_ENTRIES:
        return None
    levels = max(FEWEST, min(MOST, FEW_ENTRIES // plan.cells))
    quantum = limit_s / levels
    if levels > FEWEST:
        plan = _plan(first, second, order, quantum) or plan
    values = np.rint(np.array(first.work_s) / quantum).astype(np.int64)
    return Splits(sweep(plan, values, levels + 1), quantum)


def _plan(first: Knapsack, second: Knapsack, order: Sequence[int], quantum: float) -> Sweep | None:
    nets = list(_nets(first, second, frozenset(order), quantum))
    return lay_out(order, [0.0] * len(first.work_s), second.work_s, nets)


@dataclass
class _Sum:
    """What a net adds on both devices: [whole, cut][centre on b, on a]."""

    first: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0], [0.0, 0.0]])
    second: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0], [0.0, 0.0]])


def _nets(
    first: Knapsack, second: Knapsack, free: Collection[int], quantum: float
) -> Iterator[Net]:
    sums: dict[tuple[int, tuple[int, ...]], _Sum] = {}
    for side, sack in ((1, first), (0, second)):
        for star in sack.stars:
            leaves = tuple(leaf for leaf in star.leaves if leaf in free)
            if star.centre in free:
                key = star.centre, leaves
            elif leaves:
                key = leaves[0], leaves[1:]
            else:
                continue
            total = sums.setdefault(key, _Sum())
            _pay(star, free, side, total.first if side else total.second)
    for (centre, leaves), total in sums.items():
        whole, cut = ((round(own[0] / quantum), round(own[1] / quantum)) for own in total.first)
        yield Net(
            centre,
            leaves,
            (total.second[0][0], total.second[0][1]),
            (total.second[1][0], total.second[1][1]),
            (whole[0], whole[1]),
            (cut[0], cut[1]),
        )


def _pay(star: Star, free: Collection[int], side: int, paid: list[list[float]]) -> None:
    """Add what a device pays; its side is 1 for a, 0 for b."""
    whole, cut = paid
    if star.centre not in free:  # its first free leaf stands for it
        whole[side] += star.come_s
        cut[0] += star.come_s
        cut[1] += star.come_s
        return
    away = any(leaf not in free for leaf in star.leaves)
    whole[side] += star.leave_s if away else 0.0
    cut[side] += star.leave_s
    cut[1 - side] += star.come_s
