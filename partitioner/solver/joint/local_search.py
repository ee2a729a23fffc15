"""Local search over plans: single nodes, runs of nodes, and kicks out of local optima.

All randomness is seeded, and effort is counted in moves tried, not seconds, so that the same
input gives the same plan; the clock is only a guard. A `State` counts how many sites trigger each
item, so that a move costs as much as the node has edges, whatever the size of the graph.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from partitioner.solver.problem import Item, Problem, Sparse, clique_positions
from partitioner.solver.work import Work

#: (first device, after the last, first position, after the last, bytes); positions are cliques.
Block = tuple[int, int, int, int, float]
#: Items of an edge by the choice of a node and that of the other node; None is forbidden.
Table = tuple[tuple[tuple[int, ...] | None, ...], ...]
Score = tuple[float, float]  #: Bytes over the limits, then the smoothed goal.
Goal = Callable[["State"], Sequence[float]]  #: Values whose largest is to be small.
Move = tuple[tuple[int, int], ...]  #: (node, new choice) that change together.

#: Exponents of the norms that stand for the maximum, in turn: low ones see all busy devices.
SMOOTH = (8.0, 32.0)
#: The total load's weight beside the maximum: it breaks ties.
TOTAL_WEIGHT = 1e-5
#: A score counts as lower from this relative difference on: rounding must not make cycles.
EPSILON = 1e-10
#: Lengths of the runs of nodes that change group together.
RUNS = (2, 3, 5, 8, 13, 21)
#: Moves that a search may try.
EFFORT = 20_000
#: Steps of a move whose goal is the loads or the peaks.
MOVE_STEPS = 50


@dataclass(frozen=True)
class Tables:
    """A problem laid out for moves."""

    problem: Problem
    load: tuple[tuple[Sparse, ...], ...]  #: Of each choice of each node.
    near: tuple[tuple[tuple[int, Table], ...], ...]  #: For each node its edges: other node, items.
    hold_items: tuple[tuple[tuple[int, ...], ...], ...]  #: Of each choice of each node.
    item_load: tuple[Sparse, ...]
    blocks: tuple[tuple[Block, ...], ...]  #: The bytes of each item.
    positions: int  #: Positions of the order that count: the maximal cliques of the intervals.


def tables(problem: Problem) -> Tables:
    """Lay a problem out."""
    near: list[list[tuple[int, Table]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        table = tuple(
            tuple(
                None if (o, i) in edge.forbidden else edge.items.get((o, i), ())
                for i in edge.in_class
            )
            for o in edge.out_class
        )
        near[edge.u].append((edge.v, table))
        near[edge.v].append((edge.u, tuple(zip(*table, strict=True))))
    spans = ((item.first, item.last) for item in problem.items if any(item.bytes))
    cliques = clique_positions(spans).tolist()
    hold_items: list[list[tuple[int, ...]]] = [[()] * len(choices) for choices in problem.nodes]
    for hold in problem.holds:
        both = zip(hold_items[hold.node], hold.items, strict=True)
        hold_items[hold.node] = [a + b for a, b in both]
    return Tables(
        problem,
        problem.busy_s,
        tuple(map(tuple, near)),
        tuple(map(tuple, hold_items)),
        problem.items_busy_s,
        tuple(_blocks(item, cliques) for item in problem.items),
        len(cliques),
    )


def _blocks(item: Item, cliques: Sequence[int]) -> tuple[Block, ...]:
    start, stop = bisect_left(cliques, item.first), bisect_right(cliques, item.last)
    blocks = []
    device = 0
    for size, devices in groupby(item.bytes):
        count = len(list(devices))
        if size:
            blocks.append((device, device + count, start, stop, size))
        device += count
    return tuple(blocks)


class State:
    """A plan with its loads and, if they matter, its bytes."""

    def __init__(self, data: Tables, chosen: Sequence[int], *, bytes_matter: bool) -> None:
        problem = data.problem
        self.data = data
        self.chosen = list(chosen)
        self.load = [0.0] * problem.devices
        self.count = [0] * len(problem.items)
        self.live_bytes = np.zeros((problem.devices, data.positions)) if bytes_matter else None
        for node, choice in enumerate(chosen):
            self._load(data.load[node][choice], 1)
            self._trigger(data.hold_items[node][choice])
            for other, table in data.near[node]:
                if other > node:
                    self._trigger(table[choice][chosen[other]] or ())

    def allowed(self, node: int, choice: int) -> bool:
        """Test whether no edge forbids the choice beside the others'."""
        chosen = self.chosen
        for other, table in self.data.near[node]:
            if table[choice][chosen[other]] is None:
                return False
        return True

    def move(self, node: int, choice: int) -> None:
        """Let a node take another choice."""
        old = self.chosen[node]
        data = self.data
        self._load(data.load[node][old], -1)
        self._load(data.load[node][choice], 1)
        for other, table in data.near[node]:
            at = self.chosen[other]
            before, after = table[old][at], table[choice][at]
            if before != after:
                self._trigger(after or ())
                self._release(before or ())
        if data.hold_items[node][old] != data.hold_items[node][choice]:
            self._trigger(data.hold_items[node][choice])
            self._release(data.hold_items[node][old])
        self.chosen[node] = choice

    def _load(self, load: Sparse, sign: int) -> None:
        for device, seconds in load:
            self.load[device] += sign * seconds

    def _trigger(self, items: Sequence[int]) -> None:
        for item in items:
            if not self.count[item]:
                self._load(self.data.item_load[item], 1)
                self._hold(item, 1)
            self.count[item] += 1

    def _release(self, items: Sequence[int]) -> None:
        for item in items:
            self.count[item] -= 1
            if not self.count[item]:
                self._load(self.data.item_load[item], -1)
                self._hold(item, -1)

    def _hold(self, index: int, sign: int) -> None:
        if self.live_bytes is not None:
            for first, last, start, stop, size in self.data.blocks[index]:
                self.live_bytes[first:last, start:stop] += sign * size

    def excess_bytes(self) -> float:
        """Count by how much the worst device is over its limit; 0 if bytes do not matter."""
        if self.live_bytes is None:
            return 0.0
        over = [p - top for p, top in zip(self.peaks(), self.data.problem.limit_bytes, strict=True)]
        return max(0.0, *over)

    def peaks(self) -> list[float]:
        """The most bytes on each device; 0 if bytes do not matter."""
        if self.live_bytes is None:
            return [0.0] * len(self.load)
        peaks: list[float] = self.live_bytes.max(axis=1, initial=0.0).tolist()
        return peaks


def loads(state: State) -> Sequence[float]:
    """The goal of throughput: load of each device."""
    return state.load


def peaks(state: State) -> Sequence[float]:
    """The goal of memory: peak bytes of each device."""
    return state.peaks()


def local_search(
    problem: Problem,
    chosen: Sequence[int],
    *,
    goal: Goal = loads,
    effort: int = EFFORT,
    work: Work | None = None,
    move_steps: float = MOVE_STEPS,
    seed: int = 0,
) -> tuple[int, ...]:
    """Improve a plan that takes no forbidden pair: least excess, then the goal, then total load.

    It ends after so many moves as `effort`, or with the work, which pays `move_steps` for each and
    twice as many where bytes matter.
    """
    bytes_matter = goal is peaks or problem.limited
    state = State(tables(problem), chosen, bytes_matter=bytes_matter)
    move_steps *= 2 if bytes_matter else 1
    rng = random.Random(seed)  # noqa: S311 - no secret
    return _LocalSearch(state, goal, effort, work or Work(), move_steps, rng).run()


def descend(
    state: State,
    goal: Goal,
    accepts: Callable[[State], bool],
    work: Work,
    move_steps: float = MOVE_STEPS,
) -> None:
    """Take moves that lower the largest value of a goal, until none does, is allowed and accepted.

    Args:
        state: The plan, which changes. Bytes over the limits never grow.
        goal: Gives the values.
        accepts: Tells whether the plan after a move is wanted; called where it is better.
        work: Pays `move_steps` for each move, and ends the search.
        move_steps: The steps of a move.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    search = _LocalSearch(
        state, goal, sys.maxsize, work, move_steps, rng, exponent=math.inf, accepts=accepts
    )
    search.descend(range(len(state.chosen)))


@dataclass
class _LocalSearch:
    state: State
    values: Goal
    effort: int  #: Moves that may still be tried.
    work: Work
    move_steps: float
    rng: random.Random
    exponent: float = SMOOTH[0]
    #: Tells whether the plan after a move that lowers the score is wanted.
    accepts: Callable[[State], bool] = lambda _state: True
    #: Choices of groups like others, by (node, choice, group).
    alike: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def run(self) -> tuple[int, ...]:
        """The best plan found; never a worse one than the first."""
        best, best_key = tuple(self.state.chosen), self._key()
        self.descend(range(len(best)))
        turn = 0
        while True:
            key = self._key()
            if key < best_key:
                best, best_key = tuple(self.state.chosen), key
            elif turn:
                for node, choice in enumerate(best):
                    if self.state.chosen[node] != choice:
                        self.state.move(node, choice)
            if self._spent():
                return best
            turn += 1
            self.effort -= 1  # a problem may have no moves at all
            self.exponent = SMOOTH[turn % len(SMOOTH)]
            self.descend(self._kick())

    def _spent(self) -> bool:
        return self.effort <= 0 or self.work.over

    def _key(self) -> tuple[float, float]:
        """The rank of a plan in the end: bytes over the limits, then the goal and total load."""
        goal = max(self.values(self.state), default=0.0)
        return self.state.excess_bytes(), goal + TOTAL_WEIGHT * sum(self.state.load)

    def _smooth_goal(self) -> float:
        values = self.values(self.state)
        goal = top = max(values)
        if top > 0 and len(values) > 1:
            power = math.fsum((value / top) ** self.exponent for value in values if value > 0)
            goal = top * math.pow(power, 1 / self.exponent)
        return goal + TOTAL_WEIGHT * sum(self.state.load)

    def descend(self, nodes: Iterable[int]) -> None:
        """Take improving moves of these nodes, then of their neighbours, until there is none."""
        score = self.state.excess_bytes(), self._smooth_goal()
        todo = list(dict.fromkeys(nodes))
        while todo and not self._spent():
            changed: list[int] = []
            for move in self._moves(todo):
                if self._spent():
                    break
                if (new := self._try(move, score)) is not None:
                    score = new
                    changed += [node for node, _ in move]
            near = [other for node in changed for other, _ in self.state.data.near[node]]
            todo = list(dict.fromkeys([*changed, *near]))

    def _moves(self, nodes: Sequence[int]) -> Iterable[Move]:
        for node in nodes:
            for choice in range(len(self.state.data.load[node])):
                if choice != self.state.chosen[node]:
                    yield ((node, choice),)
        for node in nodes:
            yield from self._run_moves(node)

    def _run_moves(self, node: int) -> Iterable[Move]:
        """A run that ends at a change of group in the order moves over to the other group."""
        for step in (1, -1):
            before = node - step
            if not 0 <= before < len(self.state.chosen):
                continue
            target = self._group(before)
            if target == self._group(node):
                continue
            for length in RUNS:
                stop = node + step * length
                if not -1 <= stop <= len(self.state.chosen):
                    break
                run = range(node, stop, step)
                move = tuple((n, self._in_group(n, target)) for n in run)
                yield tuple((n, c) for n, c in move if c != self.state.chosen[n])

    def _group(self, node: int) -> int:
        return self.state.data.problem.nodes[node][self.state.chosen[node]].group

    def _in_group(self, node: int, group: int) -> int:
        """The choice of the group that is most like the present one: of the same rank in it."""
        now = self.state.chosen[node]
        key = node, now, group
        if key not in self.alike:
            choices = self.state.data.problem.nodes[node]
            here = [p for p, choice in enumerate(choices) if choice.group == choices[now].group]
            there = [p for p, choice in enumerate(choices) if choice.group == group]
            self.alike[key] = there[min(here.index(now), len(there) - 1)] if there else now
        return self.alike[key]

    def _try(self, move: Move, score: Score) -> Score | None:
        """Make the move if it lowers the score, and return the new score."""
        self.effort -= 1
        self.work.spend(self.move_steps)
        old = tuple((node, self.state.chosen[node]) for node, _ in move)
        for done, (node, choice) in enumerate(move):
            if not self.state.allowed(node, choice):
                self._apply(old[:done])
                return None
            self.state.move(node, choice)
        excess = self.state.excess_bytes()
        if excess <= score[0]:  # the goal takes longer to count
            new = excess, self._smooth_goal()
            if _lower(new, score) and self.accepts(self.state):
                return new
        self._apply(old)
        return None

    def _apply(self, move: Iterable[tuple[int, int]]) -> None:
        for node, choice in reversed(tuple(move)):
            self.state.move(node, choice)

    def _kick(self) -> list[int]:
        """Change a few random nodes, near each other in the order; return nodes to look at."""
        count = len(self.state.chosen)
        start = self.rng.randrange(count)
        width = self.rng.choice((1, 2, 3, 5, 8))
        target = self.rng.choice(self.state.data.problem.nodes[start]).group
        touched = []
        for node in range(start, min(count, start + width)):
            choice = self._in_group(node, target)
            if width == 1:
                choice = self.rng.randrange(len(self.state.data.load[node]))
            if choice != self.state.chosen[node] and self.state.allowed(node, choice):
                self.state.move(node, choice)
                touched.append(node)
        near = [other for node in touched for other, _ in self.state.data.near[node]]
        busy = max(range(len(self.state.load)), key=self.state.load.__getitem__)
        crowd = [n for n in range(count) if self._loads(n, busy) and n not in touched]
        return [*near, *self.rng.sample(crowd, min(len(crowd), 12)), *touched]

    def _loads(self, node: int, device: int) -> bool:
        load = self.state.data.load[node][self.state.chosen[node]]
        return any(loaded == device for loaded, _ in load)


def _lower(new: Score, old: Score) -> bool:
    if new[0] != old[0]:
        return new[0] < old[0] - EPSILON * abs(old[0])
    return new[1] < old[1] * (1 - EPSILON)
