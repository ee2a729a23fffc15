"""Improve a plan by splitting the nodes of two devices anew, again and again (`pairs`).

The busiest device is split again with each other one until no pair is better: then a few pairs
are split at random within the plan's largest load, and all is tried again from there (iterated
local search). A plan is better if its loads, largest first, are lexicographically less.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from partitioner.solver.placement.fleet import Fleet
from partitioner.solver.placement.pairs import Splits, split
from partitioner.solver.placement.sweep import NODE_STEPS
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
