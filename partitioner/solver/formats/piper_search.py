"""Plans of piper instances, with a bound on all plans.

A graph of few downsets is cut at any of them, exactly. One of more is cut along several orders;
then the best cut's ends move: to any downset a few nodes away, and along other orders that pass
through them, all at once, until no move helps. Its bound is that of `piper_bound`, on all cuts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from partitioner.solver.formats.piper import Instance
from partitioner.solver.formats.piper_bound import bound_plans
from partitioner.solver.formats.piper_layout import (
    MOST_ENTRIES,
    Downset,
    Layout,
    all_degrees,
    enumerate_downsets,
)
from partitioner.solver.formats.piper_orders import (
    around,
    between,
    first_orders,
    heads,
    random_order,
)
from partitioner.solver.formats.piper_problem import Planner, planner
from partitioner.solver.formats.piper_referee import PlannedStage
from partitioner.solver.formats.piper_ways import StageSeconds, first_ranges
from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.outcome import Infeasible, Status, relative_gap
from partitioner.solver.stages import cut_stages, find_cut
from partitioner.solver.work import Work

#: Stages that are packed between two cuts.
PACKED = 400
#: A graph of so few downsets is cut at them at once; one of more along orders first.
FEW_DOWNSETS = 100
#: Downsets that are tried together at least, however many kinds of stages there are.
LEAST_DOWNSETS = 60
#: Downsets near a cut's ends that are tried together, and rounds without a better cut at the end.
NEAR = 240
PATIENCE = 8
#: Relative difference that rounding may make between two sums of the same plan.
ROUNDING = 1e-9


@dataclass(frozen=True)
class PiperPlan:
    """A plan with its certificate.

    Attributes:
        load_s: Seconds a sample of its slowest stage.
        bound_s: No plan takes less.
        status: `optimal` within the gap asked for.
        solver: Methods that found the plan / proved the bound.
    """

    stages: tuple[PlannedStage, ...]
    load_s: float
    bound_s: float
    status: Status
    solver: str


@dataclass(frozen=True)
class BestCut:
    """The best cut of a layout below some load; that load and no stages if there is none."""

    stages: tuple[PlannedStage, ...]
    load_s: float
    bound_s: float  #: No cut of the layout below that load has a lower one.


def plan_pipeline(
    instance: Instance, work: Work, *, gap: float = 0.0, seed: int = 0, engine: Engine = HIGHS
) -> PiperPlan:
    """Plan an instance, until no plan is better by more than `gap` or the work is done.

    Raises:
        SolverError: No number of devices holds any node.
        Infeasible: No plan fits, or none was found; `proven` tells which.
    """
    downsets = enumerate_downsets(instance)
    if downsets is not None and len(downsets) <= FEW_DOWNSETS:
        return _exact(Layout(instance, downsets), work, gap, BestCut((), math.inf, 0.0))
    if downsets is not None and len(downsets) <= _most_downsets(instance):
        return _exact(Layout(instance, downsets), work, gap, _along_orders(instance, work, gap))
    best = _improved(instance, _along_orders(instance, work, gap), work, gap, seed)
    if not best.stages:
        raise _not_found(instance, work, engine)
    whole = Layout(instance, (frozenset(), frozenset(instance.nodes)))
    alone = best_cut(whole, work, 0.0, best.load_s)
    best = alone if alone.stages else best
    several_s = bound_plans(instance, best.load_s, work, engine)
    best = replace(best, bound_s=min(alone.bound_s, several_s))
    return _certified(best, work, gap, "orders", "relaxation")


def _most_downsets(instance: Instance) -> int:
    """Downsets of whose stages the arrays are small enough."""
    ways = len(first_ranges(instance)) * len(all_degrees(instance))
    return max(LEAST_DOWNSETS, math.isqrt(MOST_ENTRIES // ways))


def _thinned(downsets: tuple[Downset, ...], most: int) -> tuple[Downset, ...]:
    """Thin downsets out to so many at most, spread over all, with the first and the last."""
    if len(downsets) <= most:
        return downsets
    kept = np.linspace(0, len(downsets) - 1, most).astype(np.int64)
    return tuple(downsets[at] for at in kept)


def _exact(layout: Layout, work: Work, gap: float, known: BestCut) -> PiperPlan:
    """The best plan of all, from a layout of all downsets and a plan if one is known."""
    best = best_cut(layout, work, gap, known.load_s)
    if not best.stages and not known.stages:
        raise _refused(layout, work)
    if not best.stages:
        best = replace(known, bound_s=best.bound_s)
    return _certified(best, work, gap, "bisection", "bisection")


def _certified(best: BestCut, work: Work, gap: float, finder: str, prover: str) -> PiperPlan:
    bound_s = min(best.bound_s, best.load_s)
    status: Status = "time_limit" if work.stopped else "feasible"
    if relative_gap(best.load_s, bound_s) <= gap:
        status = "optimal"
    return PiperPlan(best.stages, best.load_s, bound_s, status, f"{finder} / {prover}")


def _refused(layout: Layout, work: Work) -> Infeasible:
    """The verdict on a layout without a cut."""
    counted = planner(layout)
    if counted is None:
        problem = StageSeconds(layout, first_ranges(layout.instance)).smallest()
    else:
        problem = counted.problem
    try:
        cut_stages(problem)
    except Infeasible as error:
        return error
    assert work.stopped, "all stages fit in their smallest ways"
    return Infeasible("no plan was found in time", proven=False)


def _not_found(instance: Instance, work: Work, engine: Engine) -> Infeasible:
    """The verdict on a graph of too many downsets, of whose orders none has a cut."""
    if math.isinf(bound_plans(instance, math.inf, work, engine)):
        return Infeasible("no cut into stages: the memory of all devices together is short")
    return Infeasible("no cut along the orders that were tried fits", proven=False)


def _along_orders(instance: Instance, work: Work, gap: float) -> BestCut:
    """The best cut along one of a few orders."""
    best = BestCut((), math.inf, 0.0)
    for order in first_orders(instance):
        if work.over and best.stages:
            break
        best = _better(instance, heads(order), best, work, gap)
    return best


def _improved(instance: Instance, best: BestCut, work: Work, gap: float, seed: int) -> BestCut:
    """The best cut after its ends have moved, until none of several moves in a row helps."""
    rng, idle = random.Random(seed), 0  # noqa: S311 - no secret
    while idle < PATIENCE and not work.over:
        ends = _ends(best.stages)
        if idle == 0 and ends:
            family = around(instance, ends, NEAR)
        else:
            family = between(ends, random_order(instance, rng))
        moved = _better(instance, family, best, work, gap)
        idle = 0 if moved.load_s < best.load_s * (1 - ROUNDING) else idle + 1
        best = moved
    return best


def _ends(stages: Sequence[PlannedStage]) -> tuple[Downset, ...]:
    """The nodes of the first stages, for each number of them but none and all."""
    ends, head = [], frozenset[int]()
    for stage in stages[:-1]:
        head |= frozenset(stage.configs)
        ends.append(head)
    return tuple(ends)


def _better(
    instance: Instance, downsets: tuple[Downset, ...], best: BestCut, work: Work, gap: float
) -> BestCut:
    """The best cut at some downsets, or the known one if none is better."""
    layout = Layout(instance, _thinned(downsets, _most_downsets(instance)))
    tried = best_cut(layout, work, gap, best.load_s)
    return tried if tried.stages else best


def best_cut(layout: Layout, work: Work, gap: float, below_s: float = math.inf) -> BestCut:
    """The best cut of a layout among those of a lower load than some."""
    counted = planner(layout)
    if counted is not None:
        return _of_counted(counted, gap, below_s)
    return _of_packed(StageSeconds(layout, first_ranges(layout.instance)), work, gap, below_s)


def _of_counted(planned: Planner, gap: float, below_s: float) -> BestCut:
    options = tuple(
        replace(option, load_s=np.where(option.load_s < below_s, option.load_s, np.inf))
        for option in planned.problem.options
    )
    cut = find_cut(replace(planned.problem, options=options), gap=gap)
    if cut is None:
        return BestCut((), below_s, below_s)
    return BestCut(planned.plan(cut), cut.load_s, cut.bound_s)


def _of_packed(table: StageSeconds, work: Work, gap: float, below_s: float) -> BestCut:
    """Cuts at the lower bounds of all stages, of which the stages in doubt are packed."""
    best, bound_s = BestCut((), below_s, 0.0), 0.0
    cut = find_cut(table.problem("upper", below_s)) or find_cut(table.problem("lower", below_s))
    if cut is None:
        return replace(best, bound_s=below_s)
    while cut is not None:
        known = table.precision
        plan = table.plan(cut)
        if plan is not None and plan[1] < best.load_s:
            best = BestCut(*plan, bound_s)
        if math.isfinite(best.load_s):
            if relative_gap(best.load_s, bound_s) <= gap:
                break
            table.refine_between(bound_s, best.load_s, PACKED)
        if (table.precision == known and bound_s > 0) or work.late:
            break  # the stages of the cut are as exact as they can be, or time is up
        cut = find_cut(table.problem("lower", best.load_s))
        bound_s = max(bound_s, best.load_s if cut is None else cut.bound_s)
    return replace(best, bound_s=min(best.load_s, bound_s))
