"""A bound for placement on devices by the configuration LP and column generation.

Of all sets of nodes that fit a device within T (`capacity`) choose fractions x >= 0 such that

    sum of x over the sets that hold node v >= 1 for every node v,
    sum of x over the sets of a class of devices that are alike <= their number.

Every plan of no more than T is such a choice, so T is a lower bound if there is none. Gilmore and
Gomory (1961) bound cutting stock in this way; it has no symmetry of devices, and sees that sets
must be disjoint and indivisible, which the relaxed MILP does not. By LP duality there is none if
values y >= 0 of the nodes exist with

    sum_v y_v  >  sum over classes c of number_c * max { y(S) : S fits c within T }.

The values come from the LP over the sets found so far (`covering`), averaged with the best values
yet (Wentges, 1997), and are rounded to whole numbers: then one sweep (`sweep`) has the maxima for
all T at once, so any values prove the largest T that they refute, without tolerances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.solver.joint.progress import Hunt
from partitioner.solver.placement.capacity import Knapsack, longest_runs
from partitioner.solver.placement.covering import Column, Covering
from partitioner.solver.placement.frontier import Fleet
from partitioner.solver.placement.sweep import Net, Sweep, Swept, lay_out, sweep

Floats = npt.NDArray[np.float64]

#: The name of the bound.
SOURCE = "configuration LP"
#: Larger tables, in entries for one value, are not swept: 0.1 s for 100 values.
MOST_CELLS = 400_000
#: Mean value of what a device holds: values are rounded first coarsely, in the end finely.
COARSE, FINE = 400, 1600
#: Rounds of pricing in all.
ROUNDS = 1000
#: Rounds without a better bound after which there is no more to gain.
PATIENCE = 100
#: The same while another bound is better.
IMPATIENCE = 60
#: The best values' share in the average.
SMOOTH = 0.5
#: Sets that one sweep gives, just within the limit and about the bound.
WITHIN, ABOUT = 8, 4
#: A node is worth at most so many times its share of all work, and of a mean node's.
BOX, LEAST_BOX = 10.0, 0.1
#: The least T tried is below the best plan by this.
LEAST_STEP = 1e-5
#: Relative error that adding up seconds may make.
ROUNDING = 1e-9
#: The LP covers all nodes if it needs no more than all devices, but for rounding.
COVERED = 1e-9


def configure(hunt: Hunt, *, final: bool = True) -> None:
    """Raise the bound of the throughput objective.

    Args:
        hunt: Where devices are groups of their own; others are left alone.
        final: Whether to go on with a lower T once the best plan's cannot be refuted. A better
            plan is likely then, and makes all that follows cheaper.
    """
    if hunt.fleet is None or hunt.best is None or not hunt.left_s:
        return
    sweeps = [laid_out(sack, hunt.fleet.order) for sack in hunt.fleet.sacks]
    kept = [plan for plan in sweeps if plan is not None and plan.cells <= MOST_CELLS]
    if len(kept) == len(sweeps):
        _Search(hunt, hunt.fleet, kept).run(final=final)


@dataclass
class _Search:
    hunt: Hunt
    fleet: Fleet
    sweeps: list[Sweep]
    levels: int = COARSE
    most: float = 0.0

    def __post_init__(self) -> None:
        self.numbers = [len(own) for own in self.fleet.found.classes]
        works = [np.array(sack.work_s) for sack in self.fleet.sacks]
        self.best: Floats = np.min([own / (own.sum() or 1.0) for own in works], axis=0)
        box = BOX * (self.best + LEAST_BOX / len(self.best))
        self.master = Covering(self.numbers, box)
        self._add(self._planned())
        self._add(
            Column(kind, run.inside, run.seconds)
            for kind, sack in enumerate(self.fleet.sacks)
            for run in longest_runs(sack, self.fleet.order, self.hunt.cost * (1 - LEAST_STEP))
        )

    def _planned(self) -> Iterable[Column]:
        """What the best plan puts on each device."""
        assert self.hunt.best is not None
        for kind, own in enumerate(self.fleet.found.classes):
            for group in own:
                picks = zip(self.hunt.best, self.fleet.found.choice[group], strict=True)
                inside = frozenset(node for node, (now, pick) in enumerate(picks) if now == pick)
                yield Column(kind, inside, self.fleet.sacks[kind].seconds(inside))

    def run(self, *, final: bool) -> None:
        """Price in rounds until the gap is met or there is no more to gain."""
        hunt = self.hunt
        limit = hunt.cost * (1 - max(hunt.gap / 2, LEAST_STEP))
        self._round(self.best, limit)
        known, raised = False, 0
        for count in range(ROUNDS):
            leads = self.most >= hunt.bound or hunt.proved_by == SOURCE
            if count > raised + (PATIENCE if leads else IMPATIENCE):
                return
            if hunt.done or not hunt.left_s:
                return
            theta, prices = self.master.solve(limit)
            if theta <= 1 + COVERED:
                if not final:
                    return
                limit = (limit + hunt.bound) / 2
                continue
            before = self.most
            mixed = prices if known else SMOOTH * self.best + (1 - SMOOTH) * prices
            new = self._round(mixed, limit)
            raised = count if self.most > before else raised
            if not new and known:
                self.levels *= 2
            known = not new
            if self.levels > FINE:
                return

    def _round(self, values: Floats, limit: float) -> bool:
        """Sweep every class at these values; whether there is a new set."""
        mean = values.sum() / sum(self.numbers)
        whole = np.rint(values * (self.levels / mean)).astype(np.int64)
        total = int(whole.sum())
        swept = [
            sweep(plan, whole, -(-total // number))
            for plan, number in zip(self.sweeps, self.numbers, strict=True)
        ]
        bound = refuted(swept, self.numbers, total) * (1 - ROUNDING)
        if bound > self.most:
            self.best, self.most = values, bound
            self.hunt.prove(bound, SOURCE)
        return self._add(
            Column(kind, own.inside(value), float(own.seconds[value]))
            for kind, own in enumerate(swept)
            for value in _worth(own, limit, bound)
        )

    def _add(self, columns: Iterable[Column]) -> bool:
        return sum(self.master.add(column) for column in columns) > 0


def laid_out(sack: Knapsack, order: Sequence[int]) -> Sweep | None:
    """The sets of nodes of a device; None if too many nodes wait for one another."""
    nets = [
        Net(star.centre, star.leaves, (0.0, 0.0), (star.come_s, star.leave_s))
        for star in sack.stars
    ]
    return lay_out(order, sack.work_s, [0.0] * len(sack.work_s), nets)


def refuted(swept: list[Swept], numbers: list[int], total: int) -> float:
    """The least T within which the devices' most valuable sets are worth the total."""
    least = [np.minimum.accumulate(own.seconds[::-1])[::-1] for own in swept]
    times = np.unique(np.concatenate(least))
    worth = np.zeros(len(times), dtype=np.int64)
    for own, number in zip(least, numbers, strict=True):
        worth += number * (np.searchsorted(own, times, side="right") - 1)
    return float(times[np.argmax(worth >= total)])


def _worth(swept: Swept, limit: float, bound: float) -> list[int]:
    """Values of sets that are worth a column."""
    values: list[int] = []
    for within, most in ((limit, WITHIN), (min(bound * (1 + 2 * ROUNDING), limit), ABOUT)):
        values += np.flatnonzero(swept.seconds <= within)[::-1][:most].tolist()
    return sorted(set(values))
