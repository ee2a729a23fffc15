"""The best cut into stages: bisection over the largest load, each step decided exactly.

Only the loads of possible stages are ever candidates, so the search ends at one of them with
the next lower one refuted. The first candidate comes from a bound: weighted by devices, loads sum
along some path to no more than the largest load times all devices.
"""

from __future__ import annotations

import numpy as np

from partitioner.solver.outcome import relative_gap
from partitioner.solver.stages.entries import join, lay_out, settle
from partitioner.solver.stages.labels import fit
from partitioner.solver.stages.model import Cut, Floats, StageProblem, evaluate_cut
from partitioner.solver.stages.paths import ROUNDING, least_of, stages_of, tail_lengths
from partitioner.solver.stages.shortage import refusal

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
        tried, step = _candidate(entries.load_s, bound, step)
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


def _candidate(loads: Floats, bound: float, step: int) -> tuple[float, int]:
    """The load to try next: close above the bound at first, then in the middle of all."""
    if step < len(STEPS):
        return float(loads[loads <= bound * STEPS[step]].max()), step + 1
    sample = np.sort(loads[:: 1 + len(loads) // SAMPLE])
    return float(sample[(len(sample) - 1) // 2]), step
