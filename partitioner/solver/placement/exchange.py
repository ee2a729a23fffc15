"""Improve a plan by splitting the nodes of two devices anew, again and again (`pairs`).

The busiest device is split again with each other one until no pair is better: then a few pairs
are split at random within what the plan takes, and all is tried again from there (iterated local
search). A plan is better if its loads, largest first, are lexicographically less.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.solver.joint.progress import Hunt
from partitioner.solver.placement.frontier import Fleet
from partitioner.solver.placement.pairs import Splits, split

#: Best splits, by rounded seconds, of which the best by exact seconds is taken.
LOOKED_AT = 10
#: Random splits of one kick, and by how much they may be above the plan's largest load.
KICK_PAIRS = (1, 2, 3)
KICK_ABOVE = (1.0, 1.005, 1.02)
#: Loads are lower from this relative difference on.
EPSILON = 1e-7


def exchange(hunt: Hunt, kicks: int) -> None:
    """Improve the best plan of the throughput objective.

    Args:
        hunt: Where devices are groups of their own; others are left alone.
        kicks: How often to start again from a plan nearby.
    """
    if hunt.fleet is None or hunt.best is None:
        return
    _Exchange(hunt, hunt.fleet, kicks).run()


@dataclass(frozen=True)
class _Plan:
    chosen: tuple[int, ...]
    loads: tuple[float, ...]


class _Exchange:
    def __init__(self, hunt: Hunt, fleet: Fleet, kicks: int) -> None:
        self.hunt, self.fleet, self.kicks = hunt, fleet, kicks
        self.rng = random.Random(f"{hunt.seed} {kicks}")  # noqa: S311 - no secret
        self.groups = sorted(fleet.found.device)
        self.sack = {
            group: sack
            for sack, own in zip(fleet.sacks, fleet.found.classes, strict=True)
            for group in own
        }

    def run(self) -> None:
        assert self.hunt.best is not None
        best = self._priced(self.hunt.best)
        if best is None:
            return
        best = self._descend(best)
        for _ in range(self.kicks):
            if self._over:
                return
            found = self._descend(self._kicked(best))
            if not _less(best.loads, found.loads):
                best = found

    @property
    def _over(self) -> bool:
        return self.hunt.done or not self.hunt.left_s

    def _priced(self, chosen: tuple[int, ...]) -> _Plan | None:
        """The plan with its loads; None if it does not fit. The hunt learns of it."""
        outcome = self.hunt.offer(chosen, "pair splits")
        if outcome is None or outcome.excess_bytes > 0:
            return None
        return _Plan(chosen, outcome.load_s)

    def _descend(self, plan: _Plan) -> _Plan:
        """Split the busiest device with others until no split is better."""
        tried: set[tuple[frozenset[int], frozenset[int]]] = set()
        while True:
            busiest, *others = sorted(self.groups, key=lambda group: -self._load(plan, group))
            for other in reversed(others):
                held = self._held(plan, busiest), self._held(plan, other)
                if held in tried or self._over:
                    continue
                tried.add(held)
                better = self._best_split(plan, busiest, other)
                if better is not None and _less(better.loads, plan.loads):
                    plan = better
                    break
            else:
                return plan

    def _kicked(self, plan: _Plan) -> _Plan:
        """Split a few pairs at random, no load much above the plan's largest."""
        for _ in range(self.rng.choice(KICK_PAIRS)):
            first, second = self.rng.sample(self.groups, 2)
            limit = max(plan.loads) * self.rng.choice(KICK_ABOVE)
            found = self._splits(plan, first, second, limit)
            quanta = found.within(limit) if found is not None else []
            if found is None or not quanta:
                continue
            inside = found.on_first(self.rng.choice(quanta))
            plan = self._priced(self._moved(plan, first, second, inside)) or plan
        return plan

    def _best_split(self, plan: _Plan, first: int, second: int) -> _Plan | None:
        limit = self._load(plan, first)
        found = self._splits(plan, first, second, limit)
        if found is None:
            return None
        both = self._held(plan, first) | self._held(plan, second)
        least, best = (limit, limit), None
        for quanta in found.within(limit)[:LOOKED_AT]:
            inside = found.on_first(quanta)
            seconds = self.sack[first].seconds(inside), self.sack[second].seconds(both - inside)
            ranked = max(seconds), min(seconds)
            if ranked < least:
                least, best = ranked, inside
        if best is None:
            return None
        return self._priced(self._moved(plan, first, second, best))

    def _splits(self, plan: _Plan, first: int, second: int, limit: float) -> Splits | None:
        both = self._held(plan, first) | self._held(plan, second)
        order = [node for node in self.fleet.order if node in both]
        if not order:
            return None
        return split(self.sack[first], self.sack[second], order, limit)

    def _moved(
        self, plan: _Plan, first: int, second: int, inside: frozenset[int]
    ) -> tuple[int, ...]:
        """The plan with these nodes on the first device, the others of the two on the second."""
        choice = self.fleet.found.choice
        pair = (choice[first], choice[second])
        return tuple(
            pair[node not in inside][node] if pick in (pair[0][node], pair[1][node]) else pick
            for node, pick in enumerate(plan.chosen)
        )

    def _held(self, plan: _Plan, group: int) -> frozenset[int]:
        own = self.fleet.found.choice[group]
        return frozenset(node for node, pick in enumerate(plan.chosen) if pick == own[node])

    def _load(self, plan: _Plan, group: int) -> float:
        return plan.loads[self.fleet.found.device[group]]


def _less(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether loads, largest first, are lexicographically less by more than rounding."""
    for a, b in zip(sorted(new, reverse=True), sorted(old, reverse=True), strict=True):
        if abs(a - b) > EPSILON * max(old):
            return a < b
    return False
