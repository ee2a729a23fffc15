"""Local search over plans: single nodes, runs of nodes, and kicks out of local optima.

All randomness is seeded, and effort is counted in moves tried, not seconds, so that the same
input gives the same plan; the clock is only a guard.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from partitioner.solver.joint.state import State, tables
from partitioner.solver.problem import Problem
from partitioner.solver.work import Work

Score = tuple[float, float]  #: Bytes over the limits, then the smoothed goal.
Goal = Callable[[State], Sequence[float]]  #: Values whose largest is to be small.
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

    Args:
        problem: The problem.
        chosen: The plan.
        goal: Values whose largest is to be small.
        effort: Moves to try at most.
        work: Pays for the moves, and ends the search; None for no other end than `effort`.
        move_steps: Steps of a move with this goal, of which bytes double those.
        seed: Of all random choices.
    """
    bytes_matter = goal is peaks or problem.limited
    state = State(tables(problem), chosen, bytes_matter=bytes_matter)
    move_steps *= 2 if bytes_matter else 1
    rng = random.Random(seed)  # noqa: S311 - no secret
    return _LocalSearch(state, goal, effort, work or Work(), move_steps, rng).run()


@dataclass
class _LocalSearch:
    """A search from the plan of a state."""

    state: State
    values: Goal
    effort: int  #: Moves that may still be tried.
    work: Work
    move_steps: float
    rng: random.Random
    exponent: float = SMOOTH[0]
    #: Choices of groups like others, by (node, choice, group).
    alike: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def run(self) -> tuple[int, ...]:
        """The best plan found; never a worse one than the first."""
        best, best_key = tuple(self.state.chosen), self._key()
        self._descend(range(len(best)))
        turn = 0
        while True:
            key = self._key()
            if key < best_key:
                best, best_key = tuple(self.state.chosen), key
            elif turn:
                self._return_to(best)
            if self._spent():
                return best
            turn += 1
            self.effort -= 1  # a problem may have no moves at all
            self.exponent = SMOOTH[turn % len(SMOOTH)]
            self._descend(self._kick())

    def _spent(self) -> bool:
        return self.effort <= 0 or self.work.over

    def _key(self) -> tuple[float, float]:
        """The rank of a plan in the end: bytes over the limits, then the goal and total load."""
        goal = max(self.values(self.state), default=0.0)
        return self.state.excess_bytes(), goal + TOTAL_WEIGHT * sum(self.state.load)

    def _smooth_goal(self) -> float:
        goal = _norm(self.values(self.state), self.exponent)
        return goal + TOTAL_WEIGHT * sum(self.state.load)

    def _descend(self, nodes: Iterable[int]) -> None:
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
            if _lower(new, score):
                return new
        self._apply(old)
        return None

    def _apply(self, move: Iterable[tuple[int, int]]) -> None:
        for node, choice in reversed(tuple(move)):
            self.state.move(node, choice)

    def _return_to(self, chosen: Sequence[int]) -> None:
        for node, choice in enumerate(chosen):
            if self.state.chosen[node] != choice:
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
        for loaded, _ in self.state.data.load[node][self.state.chosen[node]]:
            if loaded == device:
                return True
        return False


def _norm(values: Sequence[float], exponent: float) -> float:
    top = max(values)
    if top <= 0 or len(values) == 1:
        return top
    power = math.fsum((value / top) ** exponent for value in values if value > 0)
    return top * math.pow(power, 1 / exponent)


def _lower(new: Score, old: Score) -> bool:
    if new[0] != old[0]:
        return new[0] < old[0] - EPSILON * abs(old[0])
    return new[1] < old[1] * (1 - EPSILON)
