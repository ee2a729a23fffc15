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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from partitioner.solver.milp.engines import Engine, solve_milp
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.placement.subproblem import Free, set_free
from partitioner.solver.problem import Problem
from partitioner.solver.progress import Progress, lower_loads
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.symmetry import group_devices
from partitioner.solver.work import Work

#: Free nodes times their choices: larger neighbourhoods are cut down to those near the border.
#: 207 nodes on two devices take HiGHS 0.1 to 1.2 s.
MOST_CHOICES = 500
#: The same of a part of the graph that all groups share.
REGION_CHOICES = 150
#: Branch-and-bound nodes of one neighbourhood.
BRANCHES = 100
#: Sets of three groups, and parts of the graph, that are tried without success before giving up.
TRIPLES = 4
REGIONS = 10
#: Neighbourhoods tried in all.
MOST_TRIED = 150
#: The search may take one such part of the steps left; the rest is for the bound.
PART = 1 / 0.6
#: Relative gap of a neighbourhood's MILP.
GAP = 1e-4
#: With limits, larger problems are left alone: rows over all positions cost more than they gain.
MOST_LIMITED = 2000

Key = tuple[frozenset[int], tuple[int, ...]]  #: Free nodes and what they choose.


def share_anew(progress: Progress) -> None:
    """Improve the best plan of the throughput objective until no neighbourhood does."""
    problem, plan = progress.problem, progress.best
    if plan is None or len(problem.groups) < 2:
        return
    if problem.limited and len(problem.nodes) > MOST_LIMITED:
        return
    work = progress.work.share(PART)
    rng = random.Random(progress.seed)  # noqa: S311 - no secret
    devices = {group: group_devices(problem, group) for group in problem.groups}
    loads = evaluate_choices(problem, plan).load_s
    start = _Start(problem, devices, _neighbours(problem), plan, loads)
    tried: set[Key] = set()
    while True:
        for free in _neighbourhoods(start, rng):
            if progress.done or work.over or len(tried) == MOST_TRIED:
                return
            key = frozenset(free), tuple(start.plan[node] for node in sorted(free))
            if not free or key in tried:
                continue
            tried.add(key)
            plan = _solve(start, free, work, progress.engine)
            if plan is None:
                continue
            outcome = evaluate_choices(problem, plan)
            if outcome.excess_bytes <= 0 and lower_loads(outcome.load_s, start.loads):
                progress.offer(plan, "large neighbourhoods (integer program)")
                start = replace(start, plan=plan, loads=outcome.load_s)
                break
        else:
            return


@dataclass(frozen=True)
class _Start:
    """A plan whose neighbourhoods are searched."""

    problem: Problem
    devices: Mapping[int, frozenset[int]]  #: Of each group.
    near: Sequence[Sequence[int]]  #: The neighbours of each node.
    plan: tuple[int, ...]
    loads: tuple[float, ...]  #: Seconds on each device.

    def group(self, node: int) -> int:
        """The group that runs a node."""
        return self.problem.nodes[node][self.plan[node]].group


def _neighbourhoods(start: _Start, rng: random.Random) -> Iterator[Free]:
    loads, devices = start.loads, start.devices
    busiest = _busiest(start)
    others = sorted(
        (g for g in devices if g != busiest),
        key=lambda group: max((loads[d] for d in devices[group]), default=0.0),
    )
    for other in others:
        yield _shared(start, (busiest, other))
    for _ in range(REGIONS):
        yield _region(start, rng.choice(_nodes_on(start, (busiest,))))
    for pair in list(combinations(others, 2))[:TRIPLES]:
        yield _shared(start, (busiest, *pair))


def _busiest(start: _Start) -> int:
    """The group that loads the busiest device most."""
    device = max(range(len(start.loads)), key=start.loads.__getitem__)
    share = dict.fromkeys(start.devices, 0.0)
    for choices, pick in zip(start.problem.nodes, start.plan, strict=True):
        share[choices[pick].group] += choices[pick].load_s[device]
    return max(share, key=share.__getitem__)


def _nodes_on(start: _Start, groups: Sequence[int]) -> list[int]:
    return [node for node in range(len(start.plan)) if start.group(node) in groups]


def _shared(start: _Start, groups: Sequence[int]) -> Free:
    """The nodes of these groups, nearest to a border between them first if they are many."""
    within = _nodes_on(start, groups)
    border = [n for n in within if any(start.group(m) != start.group(n) for m in start.near[n])]
    order = _breadth_first(start.near, border or within, set(within))
    return _free(start.problem, order, groups, MOST_CHOICES)


def _region(start: _Start, node: int) -> Free:
    """Nodes near this one, which may go to any group."""
    order = _breadth_first(start.near, [node], set(range(len(start.plan))))
    return _free(start.problem, order, tuple(start.devices), REGION_CHOICES)


def _breadth_first(
    near: Sequence[Sequence[int]], starts: Sequence[int], within: set[int]
) -> Iterator[int]:
    seen, queue = set(starts), deque(starts)
    while queue:
        node = queue.popleft()
        yield node
        for other in near[node]:
            if other in within and other not in seen:
                seen.add(other)
                queue.append(other)
    yield from sorted(within - seen)


def _free(problem: Problem, nodes: Iterable[int], groups: Sequence[int], most: int) -> Free:
    """The first of these nodes that have a choice among the groups, up to `most` choices."""
    free: dict[int, Sequence[int]] = {}
    total = 0
    for node in nodes:
        options = [p for p, c in enumerate(problem.nodes[node]) if c.group in groups]
        if len(options) < 2:
            continue
        total += len(options)
        if total > most:
            break
        free[node] = options
    return free


def _solve(start: _Start, free: Free, work: Work, engine: Engine) -> tuple[int, ...] | None:
    small = set_free(start.problem, start.plan, free)
    if not all(small.kept):
        return None
    groups = {start.problem.nodes[node][p].group for node, options in free.items() for p in options}
    moving = frozenset().union(*(start.devices[group] for group in groups))
    top, limit = max(start.loads[d] for d in moving), max(start.loads)
    caps = {d: limit for d in range(len(start.loads)) if d not in moving}
    form = formulate(small.problem, "throughput", top, caps)
    if form is None:
        return None
    result = solve_milp(form.milp, work, GAP, form.start(small.start), BRANCHES, engine)
    return small.restore(form.decode(result.values)) if result.values else None


def _neighbours(problem: Problem) -> list[list[int]]:
    near: list[list[int]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.u].append(edge.v)
        near[edge.v].append(edge.u)
    return near
