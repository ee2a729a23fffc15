"""Large neighbourhood search: a few device groups share their nodes anew, by an exact MILP.

(Shaw, CP 1998; Pisinger and Ropke, Handbook of Metaheuristics, 2010.) The group of the busiest
device is split again with one other group, then together with all groups in a part of the graph
drawn at random, then with two others. The MILP minimises the largest load of the devices set
free; the others may rise to the largest load of the plan, not above. A plan is better if its
loads, largest first, are lexicographically less.

Single moves do not find such exchanges: of BERT-24 for training on 6 accelerators, local search
of 30,000 moves leaves 40.02, eight pairs of groups take 0.2 CPU s and reach the optimum 39.79.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from partitioner.solver.joint.formulation import formulate
from partitioner.solver.joint.milp import solve_milp
from partitioner.solver.joint.progress import Hunt
from partitioner.solver.placement.intervals import group_devices
from partitioner.solver.placement.subproblem import Free, set_free
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices

#: Free nodes times their choices: larger neighbourhoods are cut down to those near the border.
#: 207 nodes on two devices take HiGHS 0.1 to 1.2 s.
MOST_CHOICES = 500
#: The same of a part of the graph that all groups share.
REGION_CHOICES = 150
#: Branch-and-bound nodes of one neighbourhood, and the seconds that guard it.
BRANCHES = 100
GUARD_S = 20.0
#: Sets of three groups, and parts of the graph, that are tried without success before giving up.
TRIPLES = 4
REGIONS = 10
#: Neighbourhoods tried in all.
MOST_TRIED = 150
#: Share of the time left that the search may take; the rest is for the bound.
TIME_SHARE = 0.6
#: Relative gap of a neighbourhood's MILP.
GAP = 1e-4
#: Loads are lower from this relative difference on.
EPSILON = 1e-7
#: With limits, larger problems are left alone: rows over all positions cost more than they gain.
MOST_LIMITED = 2000

Key = tuple[frozenset[int], tuple[int, ...]]  #: Free nodes and what they choose.


def share_anew(hunt: Hunt) -> None:
    """Improve the best plan of the throughput objective until no neighbourhood does."""
    problem = hunt.problem
    groups = {choice.group for choices in problem.nodes for choice in choices}
    if hunt.best is None or len(groups) < 2:
        return
    if problem.limited and len(problem.nodes) > MOST_LIMITED:
        return
    _Search(hunt, hunt.best).run()


@dataclass
class _Search:
    hunt: Hunt
    plan: tuple[int, ...]
    tried: set[Key] = field(default_factory=set)

    def run(self) -> None:
        self.deadline = time.monotonic() + TIME_SHARE * self.hunt.left_s
        self.problem = self.hunt.problem
        self.rng = random.Random(self.hunt.seed)  # noqa: S311 - no secret
        self.near = _neighbours(self.problem)
        groups = sorted({c.group for choices in self.problem.nodes for c in choices})
        self.devices = {group: group_devices(self.problem, group) for group in groups}
        self.loads = evaluate_choices(self.problem, self.plan).load_s
        while any(self._improve(free) for free in self._neighbourhoods()):
            pass

    def _neighbourhoods(self) -> Iterator[Free]:
        """From the present plan; the caller begins anew once one has improved it."""
        busiest = self._busiest()
        others = sorted((g for g in self.devices if g != busiest), key=self._load)
        for other in others:
            yield self._shared((busiest, other))
        for _ in range(REGIONS):
            yield self._region(busiest)
        for pair in list(combinations(others, 2))[:TRIPLES]:
            yield self._shared((busiest, *pair))

    def _busiest(self) -> int:
        """The group that loads the busiest device most."""
        device = max(range(len(self.loads)), key=self.loads.__getitem__)
        share = dict.fromkeys(self.devices, 0.0)
        for choices, pick in zip(self.problem.nodes, self.plan, strict=True):
            share[choices[pick].group] += choices[pick].load_s[device]
        return max(share, key=share.__getitem__)

    def _load(self, group: int) -> float:
        return max((self.loads[d] for d in self.devices[group]), default=0.0)

    def _group(self, node: int) -> int:
        return self.problem.nodes[node][self.plan[node]].group

    def _shared(self, groups: Sequence[int]) -> Free:
        """The nodes of these groups, nearest to a border between them first if they are many."""
        within = [n for n in range(len(self.plan)) if self._group(n) in groups]
        border = [n for n in within if any(self._group(m) != self._group(n) for m in self.near[n])]
        return self._take(self._breadth_first(border or within, set(within)), groups, MOST_CHOICES)

    def _region(self, busiest: int) -> Free:
        """Nodes near one of the busiest group's, which may go to any group."""
        start = self.rng.choice([n for n in range(len(self.plan)) if self._group(n) == busiest])
        everywhere = set(range(len(self.plan)))
        order = self._breadth_first([start], everywhere)
        return self._take(order, tuple(self.devices), REGION_CHOICES)

    def _breadth_first(self, starts: Sequence[int], within: set[int]) -> Iterator[int]:
        seen, queue = set(starts), deque(starts)
        while queue:
            node = queue.popleft()
            yield node
            for other in self.near[node]:
                if other in within and other not in seen:
                    seen.add(other)
                    queue.append(other)
        yield from sorted(within - seen)

    def _take(self, nodes: Iterator[int], groups: Sequence[int], most: int) -> Free:
        free: dict[int, Sequence[int]] = {}
        total = 0
        for node in nodes:
            options = [p for p, c in enumerate(self.problem.nodes[node]) if c.group in groups]
            if len(options) < 2:
                continue
            total += len(options)
            if total > most:
                break
            free[node] = options
        return free

    def _improve(self, free: Free) -> bool:
        """Solve one neighbourhood; whether the plan is better now. Ends the search in time."""
        if self.hunt.done or time.monotonic() > self.deadline or len(self.tried) == MOST_TRIED:
            return False
        key = frozenset(free), tuple(self.plan[node] for node in sorted(free))
        if not free or key in self.tried:
            return False
        self.tried.add(key)
        found = self._solve(free)
        if found is None:
            return False
        outcome = evaluate_choices(self.problem, found)
        if outcome.excess_bytes > 0 or not _less(outcome.load_s, self.loads):
            return False
        self.plan, self.loads = found, outcome.load_s
        self.hunt.offer(found, "LNS")
        return True

    def _solve(self, free: Free) -> tuple[int, ...] | None:
        small = set_free(self.problem, self.plan, free)
        if not all(small.kept):
            return None
        groups = {self.problem.nodes[node][p].group for node, own in free.items() for p in own}
        moving = frozenset().union(*(self.devices[group] for group in groups))
        top, limit = max(self.loads[d] for d in moving), max(self.loads)
        caps = {d: limit for d in range(len(self.loads)) if d not in moving}
        form = formulate(small.problem, "throughput", top, caps)
        seconds = min(self.deadline - time.monotonic(), GUARD_S)
        start, engine = form.start(small.start), self.hunt.engine
        result = solve_milp(form.milp, seconds, GAP, start, BRANCHES, engine)
        return small.restore(form.decode(result.values)) if result.values else None


def _neighbours(problem: Problem) -> list[list[int]]:
    near: list[list[int]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.u].append(edge.v)
        near[edge.v].append(edge.u)
    return near


def _less(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether loads, largest first, are lexicographically less by more than rounding."""
    for a, b in zip(sorted(new, reverse=True), sorted(old, reverse=True), strict=True):
        if abs(a - b) > EPSILON * max(old):
            return a < b
    return False
