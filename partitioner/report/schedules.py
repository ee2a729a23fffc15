"""The step of a plan in stages under another schedule, or with other micro-batches.

All stages, shardings and the order of nodes stay. Another schedule, and more micro-batches of the
same size, are simulated exactly. Micro-batches of half the size are another graph, which is not
traced here: their figures are an estimate at best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.memory.lives import peak_bytes
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.cost_model.schedule.tasks import LocalKey, Task
from partitioner.ir.errors import IRError
from partitioner.ir.pipeline import SCHEDULES
from partitioner.ir.plan import Pipeline
from partitioner.report.planned import Planned
from partitioner.report.stages import schedule_name

_INFERENCE = "forward"  #: The schedule without backward passes.


@dataclass(frozen=True)
class Variation:
    """The plan's stages under another schedule or with other micro-batches."""

    name: str
    micro_batches: int
    batch: float = 1.0  #: Size of a step's batch as a multiple of the plan's.
    #: Simulated seconds of a step; None if the schedule does not serve the stages.
    step_s: float | None = None
    peak_bytes: int = 0  #: Of the fullest device.
    fits: bool = True  #: Whether every device is within its memory.
    estimate: bool = False
    why_not: str = ""  #: Why the schedule does not serve the stages; "" if it does.


def variations(result: Planned) -> tuple[Variation, ...]:
    """The plan's own step first, then other schedules, then other micro-batches."""
    pipeline = result.plan.pipeline
    if pipeline is None:
        return ()
    count, name = pipeline.micro_batches, schedule_name(pipeline)
    own = replace(_simulated(result, pipeline, name), name=f"{name} (the plan's)")
    trains = bool(result.graph.backward)
    names = [s for s in SCHEDULES if s != name and (s != _INFERENCE) == trains]
    others = [_simulated(result, replace(pipeline, schedule=s), s) for s in names]
    if not isinstance(pipeline.schedule, str):
        return (own, *others)  # a table has its micro-batches in it
    more = replace(pipeline, micro_batches=count + 1)
    twice = replace(pipeline, micro_batches=2 * count)
    return (
        own,
        *others,
        _simulated(result, more, f"{name}, one micro-batch more", (count + 1) / count),
        _simulated(result, twice, f"{name}, twice the micro-batches", 2.0),
        _halved(result, twice, f"{name}, twice the micro-batches of half the size"),
    )


def _simulated(result: Planned, pipeline: Pipeline, name: str, batch: float = 1.0) -> Variation:
    changed = replace(result.plan, pipeline=pipeline, certificate=None)
    try:
        figures = evaluate(result.graph, changed, result.cluster)
    except IRError as error:
        why = str(error).removeprefix(f"{pipeline.schedule}: ")
        return Variation(name, pipeline.micro_batches, batch, why_not=why)
    most = max(figures.needed_bytes.values())
    fits = figures.fits_exactly
    return Variation(name, pipeline.micro_batches, batch, figures.step_s, most, fits)


def _halved(result: Planned, pipeline: Pipeline, name: str) -> Variation:
    try:
        tasks = schedule(result.graph, result.placed, result.cluster, pipeline=pipeline)
    except IRError as error:
        why = str(error).removeprefix(f"{pipeline.schedule}: ")
        return Variation(name, pipeline.micro_batches, why_not=why)
    halves = halved(tasks)
    peaks = {device: peak.bytes for device, peak in peak_bytes(halves).items()}
    limits = result.cluster.devices
    fits = all(nbytes <= limits[device].memory_bytes for device, nbytes in peaks.items())
    figures = simulate(halves).makespan_s, max(peaks.values(), default=0), fits
    return Variation(name, pipeline.micro_batches, 1.0, *figures, estimate=True)


def halved(tasks: Schedule) -> Schedule:
    """A schedule whose micro-batches take half the seconds and bytes.

    What runs once a step keeps its seconds, and what it reads (sums of gradients) its bytes.
    """
    order = tasks.order
    assert order is not None
    whole = {key for task in tasks.tasks if order.phases.is_once(task.phase) for key in task.reads}

    def half(task: Task) -> Task:
        if order.phases.is_once(task.phase):
            return task
        return replace(
            task,
            devices={device: seconds / 2 for device, seconds in task.devices.items()},
            hidden={device: seconds / 2 for device, seconds in task.hidden.items()},
            writes=tuple((d, k, n if (d, k) in whole else n // 2) for d, k, n in task.writes),
        )

    feeds: Mapping[LocalKey, int] = {key: nbytes // 2 for key, nbytes in tasks.feeds.items()}
    return replace(tasks, tasks=tuple(map(half, tasks.tasks)), feeds=feeds)
