"""The best cut into stages: bisection over the largest load, each step decided exactly.

Only the loads of possible stages are ever candidates, so the search ends at one of them with
the next lower one refuted. The first candidate comes from a bound: weighted by devices, loads sum
along some path to no more than the largest load times all devices. Where no cut fits, the refusal
names the resource that is short, and by how much.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np

from partitioner.foundations import units
from partitioner.solver.outcome import Infeasible, relative_gap
from partitioner.solver.stages.entries import join, lay_out, settle
from partitioner.solver.stages.model import Cut, Pool, StageProblem, evaluate_cut
from partitioner.solver.stages.paths import (
    ROUNDING,
    fit,
    head_lengths,
    least_of,
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


#: More than any cut takes of anything.
PLENTY = 2**31
#: Precision of the least memory that suffices: a share of the shortage, and bytes.
CLOSE = 1e-3
BYTE = 1.0


def refusal(problem: StageProblem) -> Infeasible:
    """The verdict on a problem that no cut solves, in one line."""
    free = _least_extra(problem, sys.float_info.max)
    if free is None:
        return Infeasible(f"no cut into stages: {_without_memory(problem)}")
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


def _without_memory(problem: StageProblem) -> str:
    """The shortage of a problem that no cut solves even with unlimited memory."""
    plenty = tuple(Pool(PLENTY, sys.float_info.max) for _ in problem.pools)
    space, entries = lay_out(replace(problem, pools=plenty, most_degrees=None))
    devices = least_of(space, entries, space.groups.devices[entries.group].astype(float))
    reached = int(np.flatnonzero(np.isfinite(head_lengths(devices)))[-1])
    if reached < space.positions:
        return f"no chain of stages leads past position {reached}"
    degree = least_of(space, entries, space.groups.degree[entries.group].astype(float))
    degrees, there = int(tail_lengths(degree)[0][0]), problem.most_degrees
    if there is not None and degrees > there:
        return f"degrees sum to {degrees} at least, {there} are allowed"
    least, most = int(tail_lengths(devices)[0][0]), sum(pool.devices for pool in problem.pools)
    if least > most:
        return f"it takes {least} devices at least, there are {most}"
    names = " + ".join(str(pool.devices) for pool in problem.pools)
    if there is None:
        return f"none is within the {names} devices of the pools, though {least} are enough in all"
    return f"none is within both {names} devices and a sum of degrees of {there}"
