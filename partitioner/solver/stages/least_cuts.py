"""The least largest load of a stage, exactly, where what earlier stages used takes few states.

    least[used, j] = min over steps (before, load) to `used`, and positions i, of
                     max(least[before, i], load[i, j])

A state is what the stages so far have used: their number, or devices of each kind. Problems of many
devices, or of memory that depends on the stages behind, are `cut`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.stages.model import Floats, Ints

State = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LeastCuts:
    """The best cuts of the first positions by each state."""

    #: Least largest load up to each position, infinite if there is none; (n + 1,).
    load_s: Mapping[State, Floats]
    #: Start and step of the last stage up to each position; (n + 1,) each.
    last: Mapping[State, tuple[Ints, Ints]]
    steps: Mapping[State, Sequence[tuple[State, int]]]

    def stages(self, state: State) -> tuple[tuple[int, int, int], ...]:
        """Start, stop and load of each stage of a cut of all positions."""
        stages, stop = [], len(self.load_s[state]) - 1
        while stop:
            start, step = (int(of[stop]) for of in self.last[state])
            state, load = self.steps[state][step]
            stages.append((start, stop, load))
            stop = start
        return tuple(reversed(stages))


def least_cuts(
    loads: Sequence[Floats], steps: Mapping[State, Iterable[tuple[State, int]]]
) -> LeastCuts:
    """The best cuts for each state.

    Args:
        loads: [i, j]: seconds of the stage of positions i to j - 1, infinite where there is none.
        steps: For each state, behind all that lead to it, (state before, index of the last stage's
            load); the first state has none. Of equal loads the first step is taken.
    """
    size = len(loads[0])
    none, known = np.full(size, -1), {state: tuple(into) for state, into in steps.items()}
    load_s: dict[State, Floats] = {}
    last: dict[State, tuple[Ints, Ints]] = {}
    for state, into in known.items():
        best, start, taken = np.full(size, np.inf), none.copy(), none.copy()
        if not load_s:
            best[0] = 0.0
        for step, (before, load) in enumerate(into):
            if before not in load_s:
                continue
            worst = np.maximum(load_s[before][:, None], loads[load])
            first = worst.argmin(axis=0)
            least = worst[first, np.arange(size)]
            better = least < best
            best = np.where(better, least, best)
            start, taken = np.where(better, first, start), np.where(better, step, taken)
        load_s[state], last[state] = best, (start, taken)
    return LeastCuts(load_s, last, known)
