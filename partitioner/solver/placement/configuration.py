"""A bound for placement on devices by the configuration LP and column generation.

Of all sets of nodes that fit a device within T (`fleet`) choose fractions x >= 0 such that

    (1) sum of x over the sets that hold node v >= 1                              for every node v,
    (2) sum of x over the sets of a class of interchangeable devices <= their number
                                                                                 for every class.

Every plan of no more than T is such a choice, so T is a lower bound if there is none. Gilmore and
Gomory (1961) bound cutting stock in this way; it has no symmetry of devices, and sees that sets
must be disjoint and indivisible, which the relaxed MILP does not. By LP duality there is none if
values y >= 0 of the nodes exist with

    sum_v y_v  >  sum over classes c of number_c * max { y(S) : S fits c within T }.

The values come from the LP over the sets found so far (`Covering`), averaged with the best values
yet (Wentges, 1997), and are rounded to whole numbers: then one sweep (`sweep`) has the maxima for
all T at once, so any values prove the largest T that they refute, without tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from partitioner.solver.milp.highs import new_highs
from partitioner.solver.placement.fleet import Fleet, Knapsack, longest_runs
from partitioner.solver.placement.sweep import StarTerm, Sweep, Swept, lay_out, sweep
from partitioner.solver.progress import Progress
from partitioner.solver.stages.model import Floats

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


def configure(progress: Progress, fleet: Fleet, *, final: bool = True) -> None:
    """Raise the bound of the throughput objective.

    If it is not `final`, it stops once the best plan's T cannot be refuted: a better plan is likely
    then, and makes all that follows cheaper. Otherwise it goes on with a lower T.
    """
    plan = progress.best
    if plan is None or progress.work.over:
        return
    sacks = [fleet.knapsacks[members[0]] for members in fleet.classes]
    layouts = [laid_out(sack, fleet.order) for sack in sacks]
    kept = [layout for layout in layouts if layout is not None and layout.cells <= MOST_CELLS]
    if len(kept) < len(layouts):
        return
    numbers = [len(members) for members in fleet.classes]
    works = [np.array(sack.work_s) for sack in sacks]
    values = np.min([work / (work.sum() or 1.0) for work in works], axis=0)
    master = Covering(numbers, BOX * (values + LEAST_BOX / len(values)))
    # the nodes that the plan puts on each device, then long runs of the order
    for index, members in enumerate(fleet.classes):
        for group in members:
            inside = fleet.held(plan, group)
            master.add(index, inside, fleet.knapsacks[group].seconds(inside))
    for index, sack in enumerate(sacks):
        for run in longest_runs(sack, fleet.order, progress.cost * (1 - LEAST_STEP)):
            master.add(index, *run)

    def price(values: Floats, levels: int, limit: float) -> tuple[float, bool]:
        """Sweep every class at these values: the bound that they prove, whether there is a new set.

        Args:
            values: Of the nodes.
            levels: Mean value of a device after rounding to whole numbers.
            limit: T that is to be refuted: sets just within it are added, and some at the bound.
        """
        mean = values.sum() / sum(numbers)
        whole = np.rint(values * (levels / mean)).astype(np.int64)
        total = int(whole.sum())
        swept = []
        for layout, number in zip(kept, numbers, strict=True):
            most = -(-total // number)
            progress.work.spend(layout.work(most))
            swept.append(sweep(layout, whole, most))
        bound = refuted(swept, numbers, total) * (1 - ROUNDING)
        added = [
            master.add(index, sets.inside(value), float(sets.seconds[value]))
            for index, sets in enumerate(swept)
            for value in _worth(sets, limit, bound)
        ]
        return bound, any(added)

    _generate_columns(progress, master, price, values, final=final)


def _generate_columns(
    progress: Progress,
    master: Covering,
    price: Callable[[Floats, int, float], tuple[float, bool]],
    values: Floats,
    *,
    final: bool,
) -> None:
    """Price in rounds until the gap is met or there is no more to gain."""
    limit = progress.cost * (1 - max(progress.gap / 2, LEAST_STEP))
    best, levels = values, COARSE
    most, _ = price(best, levels, limit)
    progress.prove(most, SOURCE)
    averaged, raised = True, 0
    for count in range(ROUNDS):
        leads = most >= progress.bound or progress.proved_by == SOURCE
        if count > raised + (PATIENCE if leads else IMPATIENCE) or progress.over:
            return
        theta, prices = master.solve(limit)
        if theta <= 1 + COVERED:
            if not final:
                return
            limit = (limit + progress.bound) / 2
            continue
        values = SMOOTH * best + (1 - SMOOTH) * prices if averaged else prices
        bound, new = price(values, levels, limit)
        if bound > most:
            best, most, raised = values, bound, count
            progress.prove(bound, SOURCE)
        if not new and not averaged:
            levels *= 2
        averaged = new
        if levels > FINE:
            return


def laid_out(sack: Knapsack, order: Sequence[int]) -> Sweep | None:
    """The sets of nodes of a device; None if too many nodes wait for one another."""
    stars = [
        StarTerm(star.centre, star.leaves, (0.0, 0.0), (star.come_s, star.leave_s))
        for star in sack.stars
    ]
    return lay_out(order, sack.work_s, [0.0] * len(sack.work_s), stars)


def refuted(swept: list[Swept], numbers: list[int], total: int) -> float:
    """The least T within which the devices' most valuable sets are worth the total."""
    least = [np.minimum.accumulate(sets.seconds[::-1])[::-1] for sets in swept]
    times = np.unique(np.concatenate(least))
    worth = np.zeros(len(times), dtype=np.int64)
    for seconds, number in zip(least, numbers, strict=True):
        worth += number * (np.searchsorted(seconds, times, side="right") - 1)
    return float(times[np.argmax(worth >= total)])


def _worth(swept: Swept, limit: float, bound: float) -> list[int]:
    """Values of sets that are added: the largest within the limit, and within about the bound."""
    values: list[int] = []
    for within, most in ((limit, WITHIN), (min(bound * (1 + 2 * ROUNDING), limit), ABOUT)):
        values += np.flatnonzero(swept.seconds <= within)[::-1][:most].tolist()
    return sorted(set(values))


#: HiGHS's code of the primal simplex method: the basis stays feasible when sets are added.
PRIMAL = 4


class Covering:
    """The least number of devices, in fractions, whose sets so far cover all nodes: a growing LP.

        minimise  theta + sum_v box_v * s_v
        such that (1) sum of x over the sets that hold v, + s_v >= 1          for every node v,
                  (2) sum of x over the sets of class c <= number_c * theta   for every class c,

    x, s, theta >= 0. `add` adds the x of one set. The duals of (1), at most box_v each, are the
    values of the nodes. HiGHS keeps its basis as sets are added, which makes a round cheap.
    """

    def __init__(self, numbers: Sequence[int], box: Floats) -> None:
        self.known: set[tuple[int, frozenset[int]]] = set()
        self.seconds: list[float] = []  # of each set
        self.nodes, self.limit = len(box), math.inf
        self.solver = new_highs()
        for option, value in (("threads", 1), ("presolve", "off"), ("simplex_strategy", PRIMAL)):
            self.solver.setOptionValue(option, value)
        no_columns = (0, np.array([], dtype=np.int32), np.array([]))
        for _ in box:
            self.solver.addRow(1.0, math.inf, *no_columns)
        for _ in numbers:
            self.solver.addRow(-math.inf, 0.0, *no_columns)
        class_rows = range(self.nodes, self.nodes + len(numbers))
        self._column(1.0, class_rows, [-float(n) for n in numbers])
        for node, cost in enumerate(box):
            self._column(float(cost), [node], [1.0])

    def add(self, of_class: int, inside: frozenset[int], seconds: float) -> bool:
        """Let a device of a class hold a set of nodes; whether it is new."""
        if (of_class, inside) in self.known:
            return False
        self.known.add((of_class, inside))
        self.seconds.append(seconds)
        rows = [*sorted(inside), self.nodes + of_class]
        self._column(0.0, rows, [1.0] * len(rows), self._most(seconds))
        return True

    def solve(self, limit: float) -> tuple[float, Floats]:
        """The least value with sets that take at most `limit` seconds, and the nodes' duals."""
        if limit != self.limit:
            self.limit = limit
            for index, seconds in enumerate(self.seconds, start=1 + self.nodes):
                self.solver.changeColBounds(index, 0.0, self._most(seconds))
        self.solver.run()
        duals = np.array(self.solver.getSolution().row_dual[: self.nodes])
        return float(self.solver.getInfo().objective_function_value), np.maximum(0.0, duals)

    def _most(self, seconds: float) -> float:
        return math.inf if seconds <= self.limit else 0.0

    def _column(
        self, cost: float, rows: Sequence[int], values: Sequence[float], upper: float = math.inf
    ) -> None:
        indices = np.array(rows, dtype=np.int32)
        self.solver.addCol(cost, 0.0, upper, len(indices), indices, np.array(values))
