"""Improve a plan by splitting the nodes of two devices anew, again and again.

A split is the best by an exact dynamic programme over one device's seconds,

    least(u) = min { seconds of device b : device a spends u quanta },   u = 0, 1, ...

over all ways to part the nodes that the two hold (`sweep`). It is at the u where the larger of the
two is least. Seconds of a are rounded to quanta, so the few best are looked at again exactly.

The busiest device is split again with each other one until no pair is better: then a few pairs
are split at random within the plan's largest load, and all is tried again from there (iterated
local search). A plan is better if its loads, largest first, are lexicographically less.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.placement.fleet import Fleet, Knapsack
from partitioner.solver.placement.sweep import NODE_STEPS, StarTerm, Sweep, Swept, lay_out, sweep
from partitioner.solver.progress import Progress, lower_loads

#: Best splits, by rounded seconds, of which the best by exact seconds is taken.
LOOKED_AT = 10
#: Nodes of a run that is not halved again.
LEAST_PART = 8
#: Random splits of one kick, and by how much they may be above the plan's largest load.
KICK_PAIRS = (1, 2, 3)
KICK_ABOVE = (1.0, 1.005, 1.02)


def exchange(progress: Progress, fleet: Fleet, kicks: int) -> None:
    """Improve the best plan of the throughput objective, starting again nearby after each kick."""
    if progress.best is None:
        return
    rng = random.Random(f"{progress.seed} {kicks}")  # noqa: S311 - no secret
    search = _Exchange(progress, fleet, rng)
    best = search.price(progress.best)
    if best is None:
        return
    best = search.descend(best)
    for _ in range(kicks):
        if progress.over:
            return
        plan = search.descend(search.kick(best))
        if not lower_loads(best.loads, plan.loads):
            best = plan


@dataclass(frozen=True)
class _Plan:
    chosen: tuple[int, ...]
    loads: tuple[float, ...]


@dataclass(frozen=True)
class _Exchange:
    progress: Progress
    fleet: Fleet
    rng: random.Random

    def price(self, chosen: tuple[int, ...]) -> _Plan | None:
        """The plan with its loads, offered to the progress; None if it does not fit."""
        outcome = self.progress.offer(chosen, "pair splits")
        if outcome is None or outcome.excess_bytes > 0:
            return None
        return _Plan(chosen, outcome.load_s)

    def descend(self, plan: _Plan) -> _Plan:
        """Split the busiest device with others until no split is better."""
        tried: set[tuple[frozenset[int], frozenset[int]]] = set()
        groups = sorted(self.fleet.device)
        while True:
            busiest, *others = sorted(groups, key=lambda group: -self._load(plan, group))
            for other in reversed(others):
                nodes = self.fleet.held(plan.chosen, busiest), self.fleet.held(plan.chosen, other)
                if nodes in tried or self.progress.over:
                    continue
                tried.add(nodes)
                better = self._best_split(plan, busiest, other)
                if better is not None and lower_loads(better.loads, plan.loads):
                    plan = better
                    break
            else:
                return plan

    def kick(self, plan: _Plan) -> _Plan:
        """Split a few pairs at random, no load much above the plan's largest."""
        groups = sorted(self.fleet.device)
        for _ in range(self.rng.choice(KICK_PAIRS)):
            first, second = self.rng.sample(groups, 2)
            limit = max(plan.loads) * self.rng.choice(KICK_ABOVE)
            splits = next(self._splits(plan, first, second, limit), None)
            quanta = splits.within(limit) if splits is not None else []
            if splits is None or not quanta:
                continue
            inside = splits.on_first(self.rng.choice(quanta))
            plan = self.price(self._moved(plan, first, second, inside)) or plan
        return plan

    def _best_split(self, plan: _Plan, first: int, second: int) -> _Plan | None:
        limit = self._load(plan, first)
        both = self.fleet.held(plan.chosen, first) | self.fleet.held(plan.chosen, second)
        sacks = self.fleet.knapsacks
        least, best = (limit, limit), None
        for splits in self._splits(plan, first, second, limit):
            for quanta in splits.within(limit)[:LOOKED_AT]:
                inside = splits.on_first(quanta)
                seconds = sacks[first].seconds(inside), sacks[second].seconds(both - inside)
                ranked = max(seconds), min(seconds)
                if ranked < least:
                    least, best = ranked, inside
            if best is not None:
                break
        return None if best is None else self.price(self._moved(plan, first, second, best))

    def _splits(self, plan: _Plan, first: int, second: int, limit: float) -> Iterator[Splits]:
        """All splits of the two devices or, where the tables would be too large, of parts.

        A part is a run of the order that is free; of the other nodes of the two each device's stay
        together.
        """
        held = self.fleet.held(plan.chosen, first), self.fleet.held(plan.chosen, second)
        order = [node for node in self.fleet.order if node in held[0] or node in held[1]]
        sacks = self.fleet.knapsacks
        parts = [order] if order else []
        while parts and not self.progress.over:
            part = parts.pop()
            rest = [nodes.difference(part) for nodes in held]
            splits = split(sacks[first], sacks[second], part, limit, filter(None, rest))
            laid_out = NODE_STEPS * len(order)
            self.progress.work.spend(laid_out + (splits.work if splits is not None else 0.0))
            if splits is not None:
                yield splits
            elif len(part) > LEAST_PART:
                half, quarter = len(part) // 2, len(part) // 4
                halves = [part[:half], part[quarter : quarter + half], part[half:]]
                self.rng.shuffle(halves)
                parts += halves

    def _moved(
        self, plan: _Plan, first: int, second: int, inside: frozenset[int]
    ) -> tuple[int, ...]:
        """The plan with these nodes on the first device, the others of the two on the second."""
        pair = (self.fleet.choice[first], self.fleet.choice[second])
        return tuple(
            pair[node not in inside][node] if pick in (pair[0][node], pair[1][node]) else pick
            for node, pick in enumerate(plan.chosen)
        )

    def _load(self, plan: _Plan, group: int) -> float:
        return plan.loads[self.fleet.device[group]]


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
    """All splits of some nodes between two devices, none of use above the limit; None: too large.

    In `order` few nodes wait for one another; all others that the two hold stay `together` in sets.
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
