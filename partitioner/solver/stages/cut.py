"""The best cut into stages: bisection over the largest load, each step decided exactly.

Only the loads of possible stages are ever candidates, so the search ends at one of them with
the next lower one refuted. The first candidate comes from a bound: weighted by devices, loads sum
along some path to no more than the largest load times all devices. Where no cut fits, the refusal
says how many bytes a device is short of.

Where what earlier stages used takes few states, their number or devices of each kind, one table has
the answer (`least_cuts`):

    least[used, j] = min over steps (before, load) to `used`, and positions i, of
                     max(least[before, i], load[i, j])
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partitioner.foundations import units
from partitioner.solver.outcome import Infeasible, relative_gap
from partitioner.solver.stages.model import Cut, Floats, Ints, Pool, StageProblem, evaluate_cut
from partitioner.solver.stages.paths import (
    ROUNDING,
    fit,
    join,
    lay_out,
    least_of,
    settle,
    stages_of,
    tail_lengths,
)

#: While no load above the bound is known to be in reach, tries step by these factors.
STEPS = (1.02, 1.1, 1.3, 2.0)
#: Candidates looked at to find one in the middle.
SAMPLE = 10_001


def cut_stages(problem: StageProblem, *, gap: float = 0.0) -> Cut:
    """Cut the positions into stages of the least largest load.

    Stops once no cut is better by more than `gap`, a share of the load; 0 is exact.

    Raises:
        Infeasible: No cut fits; the message says what is short.
    """
    cut = find_cut(problem, gap=gap)
    if cut is None:
        raise refusal(problem)
    return cut


def find_cut(problem: StageProblem, *, gap: float = 0.0) -> Cut | None:
    """`cut_stages`, but None if no cut fits."""
    space, entries = lay_out(problem)
    picks, _ = fit(space, settle(space, entries))
    if picks is None:
        return None
    best = stages_of(problem, space, picks)
    load = max(evaluate_cut(problem, best).load_s)
    entries = entries.where(entries.load_s < load)
    # no cut of these entries has a lower largest load: its devices' work over all devices
    work = least_of(space, entries, entries.load_s * space.groups.devices[entries.group])
    floor = float(tail_lengths(work)[0][0]) / int(space.pools.sum()) * (1 - ROUNDING)
    known = settle(space, entries.where(entries.load_s < floor))
    entries = entries.where(entries.load_s >= floor)
    step = 0
    while len(entries) and relative_gap(load, bound := float(entries.load_s.min())) > gap:
        # close above the bound at first, then in the middle of all
        if step < len(STEPS):
            tried = float(entries.load_s[entries.load_s <= bound * STEPS[step]].max())
            step += 1
        else:
            sample = np.sort(entries.load_s[:: 1 + len(entries) // SAMPLE])
            tried = float(sample[(len(sample) - 1) // 2])
        below = settle(space, join([known, entries.where(entries.load_s <= tried)]))
        picks, bounds = fit(space, below)
        if picks is None:
            known, entries = below, entries.where(entries.load_s > tried)
            continue
        best = stages_of(problem, space, picks)
        load = max(evaluate_cut(problem, best).load_s)
        known = bounds.within(space, known)
        entries = bounds.within(space, entries.where(entries.load_s < load))
        step = len(STEPS)
    bound = float(entries.load_s.min()) if len(entries) else load
    return Cut(best, load, min(load, bound), "optimal")


#: Precision of the least memory that suffices: a share of the shortage, and bytes.
CLOSE = 1e-3
BYTE = 1.0


def refusal(problem: StageProblem) -> Infeasible:
    """The verdict on a problem that no cut solves, in one line."""
    free = _least_extra(problem, sys.float_info.max)
    if free is None:
        return Infeasible("no cut into stages is within the devices, whatever their memory")
    low, high = 0.0, free
    while high - low > max(BYTE, CLOSE * high):
        middle = (low + high) / 2
        excess = _least_extra(problem, middle)
        low, high = (middle, high) if excess is None else (low, excess)
    limit = min(pool.limit_bytes for pool in problem.pools)
    return Infeasible(
        f"no cut into stages fits the memory: the nearest is {math.ceil(high)} bytes a device "
        f"short ({units.size(high)} over a limit of {units.size(limit)})",
        bytes_short=high,
    )


def _least_extra(problem: StageProblem, extra: float) -> float | None:
    """Excess over the limits of a cut that fits with `extra` bytes a device; None if none does."""
    largest = sys.float_info.max  # under which infinite bytes still do not fit
    pools = tuple(Pool(p.devices, min(p.limit_bytes + extra, largest)) for p in problem.pools)
    roomy = replace(problem, pools=pools)
    space, entries = lay_out(roomy)
    picks, _ = fit(space, settle(space, entries))
    if picks is None:
        return None
    stages = stages_of(roomy, space, picks)
    held = evaluate_cut(problem, stages).held_bytes
    limits = [problem.pools[problem.options[s.option].pool].limit_bytes for s in stages]
    return max(size - limit for size, limit in zip(held, limits, strict=True))


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
