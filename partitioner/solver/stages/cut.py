"""The best cut into stages: bisection over the largest load, each step decided exactly.

Only the loads of stages that may be are ever candidates, so the search ends at one of them with
the next lower one refuted. The first candidate comes from a bound: weighted by devices, loads sum
along some path to no more than the largest load times all devices.
"""

from __future__ import annotations

import numpy as np

from partitioner.solver.outcome import relative_gap
from partitioner.solver.stages.labels import fit
from partitioner.solver.stages.model import Cut, Floats, StageProblem, evaluate_cut
from partitioner.solver.stages.paths import ROUNDING, least_of, tail_lengths
from partitioner.solver.stages.runs import Runs, Space, join, lay_out, settle
from partitioner.solver.stages.shortage import refusal
from partitioner.solver.stages.ways import with_ways

#: While no load above the bound is known to be in reach, tries step by these factors.
STEPS = (1.02, 1.1, 1.3, 2.0)
#: Candidates looked at to find one in the middle.
SAMPLE = 10_001


def cut_stages(problem: StageProblem, *, gap: float = 0.0) -> Cut:
    """Cut the positions into stages of the least largest load.

    Args:
        problem: The problem.
        gap: Stop once no cut is better by more than this share of the load; 0 is exact.

    Raises:
        Infeasible: No cut fits; the message says what is short.
    """
    space, runs = lay_out(problem)
    picks, _ = fit(space, settle(space, runs))
    if picks is None:
        raise refusal(problem)
    best = with_ways(problem, space, picks)
    load = max(evaluate_cut(problem, best).load_s)
    known, runs = _split(space, runs.where(runs.load_s < load))
    step = 0
    while len(runs) and relative_gap(load, bound := float(runs.load_s.min())) > gap:
        tried, step = _candidate(runs.load_s, bound, step)
        below = join([known, runs.where(runs.load_s <= tried)])
        settled = settle(space, below)
        picks, bounds = fit(space, settled)
        if picks is None:
            known, runs = settled, runs.where(runs.load_s > tried)
            continue
        best = with_ways(problem, space, picks)
        load = max(evaluate_cut(problem, best).load_s)
        known = bounds.within(space, known)
        runs, step = bounds.within(space, runs.where(runs.load_s < load)), len(STEPS)
    bound = float(runs.load_s.min()) if len(runs) else load
    return Cut(best, load, min(load, bound), "optimal")


def _split(space: Space, runs: Runs) -> tuple[Runs, Runs]:
    """Entries whose load is too low to decide, settled, and the rest."""
    floor = work_bound(space, runs)
    return settle(space, runs.where(runs.load_s < floor)), runs.where(runs.load_s >= floor)


def _candidate(loads: Floats, bound: float, step: int) -> tuple[float, int]:
    """The load to try next: close above the bound at first, then in the middle of all."""
    if step < len(STEPS):
        return float(loads[loads <= bound * STEPS[step]].max()), step + 1
    sample = np.sort(loads[:: 1 + len(loads) // SAMPLE])
    return float(sample[(len(sample) - 1) // 2]), step


def work_bound(space: Space, runs: Runs) -> float:
    """No cut of these entries has a lower largest load: its devices' work over all devices.

    Infinite if there is no cut.
    """
    work = least_of(space, runs, runs.load_s * space.groups.devices[runs.group])
    least = float(tail_lengths(work)[0][0])
    return least / int(space.pools.sum()) * (1 - ROUNDING)
