"""Two devices share their nodes anew, by an exact dynamic programme over one device's seconds.

    least(u) = min { seconds of device b : device a spends u quanta },   u = 0, 1, ...

over all ways to part the nodes that the two hold (`sweep`). The best split is at the u where the
larger of the two is least. Seconds of a are rounded to quanta, so the few best are looked at
again exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.placement.fleet import Knapsack
from partitioner.solver.placement.sweep import StarTerm, Sweep, Swept, lay_out, sweep

#: Quanta up to the limit: rounding 30 nodes moves their sum by 2 quanta or so.
FEWEST, MOST = 600, 4000
#: Entries of tables, all quanta together, up to which there are more than the fewest: 10 ms.
FEW_ENTRIES = 2_000_000
#: Entries that one split may fill: 0.1 s.
MOST_ENTRIES = 20_000_000


@dataclass(frozen=True)
class Splits:
    """The ways to part some nodes between devices a and b."""

    swept: Swept  #: The least seconds of b for every number of quanta of a; inside is on a.
    quantum_s: float  #: Seconds.
    work: float  #: Steps of the search that they took.
    unit: Mapping[int, int]  #: The node that others go with, of each of these.

    def within(self, limit_s: float) -> list[int]:
        """Quanta of a at which neither device takes more than about the limit, best first."""
        seconds = self.swept.seconds[:-1]
        larger = np.maximum(seconds, np.arange(len(seconds)) * self.quantum_s)
        order = np.argsort(larger, kind="stable")
        return [int(u) for u in order[: np.searchsorted(larger[order], limit_s, side="right")]]

    def on_first(self, quanta: int) -> frozenset[int]:
        """The nodes on a."""
        inside = self.swept.inside(quanta)
        return inside.union(node for node, of in self.unit.items() if of in inside)


def split(
    first: Knapsack,
    second: Knapsack,
    order: Sequence[int],
    limit_s: float,
    together: Iterable[Collection[int]] = (),
) -> Splits | None:
    """All splits of some nodes between two devices that may stay within the limit.

    Args:
        first: Of device a.
        second: Of device b.
        order: Nodes that the two hold, in an order in which few wait for one another.
        limit_s: No split above it is of use.
        together: The other nodes that they hold, in sets that stay whole.

    Returns:
        None if the tables would be too large.
    """
    unit = {node: min(nodes) for nodes in together for node in nodes}
    if unit:
        order = [*sorted({*unit.values()}), *order]
        first, second = first.merged(unit), second.merged(unit)
    # how many quanta are cheap depends on the size of the tables, and that on the nodes alone
    levels = FEWEST
    layout = _layout(first, second, order, limit_s / levels)
    if layout is None or layout.cells * levels > MOST_ENTRIES:
        return None
    levels = max(FEWEST, min(MOST, FEW_ENTRIES // layout.cells))
    quantum = limit_s / levels
    if levels > FEWEST:
        layout = _layout(first, second, order, quantum) or layout
    values = np.rint(np.array(first.work_s) / quantum).astype(np.int64)
    return Splits(sweep(layout, values, levels + 1), quantum, layout.work(levels + 1), unit)


def _layout(
    first: Knapsack, second: Knapsack, order: Sequence[int], quantum: float
) -> Sweep | None:
    terms = list(_terms(first, second, frozenset(order), quantum))
    return lay_out(order, [0.0] * len(first.work_s), second.work_s, terms)


def _terms(
    first: Knapsack, second: Knapsack, free: Collection[int], quantum: float
) -> Iterator[StarTerm]:
    # seconds of each star by [b, a][whole, cut][centre on b, on a]
    sums: dict[tuple[int, tuple[int, ...]], list[list[list[float]]]] = {}
    for device, sack in ((1, first), (0, second)):
        for star in sack.stars:
            leaves = tuple(leaf for leaf in star.leaves if leaf in free)
            if star.centre not in free and not leaves:
                continue
            # the first free leaf stands for a centre that stays elsewhere
            key = (star.centre, leaves) if star.centre in free else (leaves[0], leaves[1:])
            paid = sums.setdefault(key, [[[0.0, 0.0], [0.0, 0.0]] for _ in range(2)])
            whole, cut = paid[device]
            if star.centre not in free:
                whole[device] += star.come_s
                cut[0] += star.come_s
                cut[1] += star.come_s
                continue
            whole[device] += star.leave_s if len(leaves) < len(star.leaves) else 0.0
            cut[device] += star.leave_s
            cut[1 - device] += star.come_s
    for (centre, leaves), (on_b, on_a) in sums.items():
        whole_s, cut_s = ((outside, inside) for outside, inside in on_b)
        values = ((round(outside / quantum), round(inside / quantum)) for outside, inside in on_a)
        yield StarTerm(centre, leaves, whole_s, cut_s, *values)
