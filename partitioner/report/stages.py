"""The stages of a plan: their devices, seconds, memory and messages, and the step they make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.memory.lifetimes import safe_lifetimes, with_headroom
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey
from partitioner.cost_model.schedule.traffic import moves
from partitioner.foundations import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import Part, StepOrder
from partitioner.ir.pipeline.timeline import in_flight
from partitioner.ir.plan import Pipeline, Plan
from partitioner.report.schema import StageRow

_BACKWARD = (Part.BACKWARD, Part.WEIGHT)


def bubble_share(evaluation: Evaluation, plan: Plan) -> float:
    """The share of the devices' time in a step in which they neither compute nor communicate."""
    devices = {device for mesh in plan.groups for device in mesh.devices}
    if not evaluation.latency_s:
        return 0.0
    busy_s = sum(evaluation.load_s[device] for device in devices)
    return max(0.0, 1 - busy_s / (len(devices) * evaluation.latency_s))


def schedule_name(pipeline: Pipeline) -> str:
    """The name of the schedule; "table" for one that the plan holds as rows."""
    return pipeline.schedule if isinstance(pipeline.schedule, str) else "table"


def step_facts(plan: Plan, evaluation: Evaluation) -> dict[str, Any]:
    """The step of a plan in stages, as facts of its summary; nothing for other plans."""
    pipeline = plan.pipeline
    if pipeline is None:
        return {}
    return {
        "stages": 1 + max(plan.stages),
        "micro_batches": pipeline.micro_batches,
        "schedule": schedule_name(pipeline),
        "bubble_share": bubble_share(evaluation, plan),
    }


def step_sentence(facts: Mapping[str, Any]) -> str:
    """``"4 stages, 8 micro-batches, 1f1b, bubble 23 %"``; "" of a summary without stages."""
    if "micro_batches" not in facts:
        return ""
    stages, micro_batches = facts["stages"], facts["micro_batches"]
    return (
        f"{stages} stage{'' if stages == 1 else 's'}, "
        f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}, "
        f"{facts['schedule']}, bubble {units.share(facts['bubble_share'])}"
    )


def place_text(plan: Plan, stage: int, mesh: DeviceMesh) -> str:
    """The devices that run something, after the stage that they do in a plan with several."""
    return ", ".join(filter(None, (stage_text(plan, stage), str(mesh))))


def stage_text(plan: Plan, stage: int) -> str:
    """The name of a stage; "" in a plan that has one, which is all of it."""
    return f"stage {stage}" if any(plan.stages) else ""


def stages(schedule: Schedule) -> list[StageRow]:
    """The stages in order, with numbers of devices for lanes."""
    order, of = schedule.order, schedule.order.phases.of
    nodes, devices = Counter[int](), defaultdict[int, set[int]](set)
    owner: dict[LocalKey, int] = {}  # the stage of the first node that touches a value
    # Busy seconds of a micro-batch on each device, by stage and part; W counts as B.
    seconds: dict[tuple[int, Part], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    sends: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for task in schedule.tasks:
        moved = task.phase != task.target_phase
        if task.placed is not None:
            stage = task.placed.stage
            nodes[stage] += 1
            devices[stage].update(task.placed.mesh.devices)
            written = ((device, key) for device, key, _ in task.writes)
            for local in (*written, *task.reads):
                owner.setdefault(local, stage)
        targets = task.comm.targets() if moved and task.comm else ()
        for device, spent_s in task.devices.items():
            part, stage = of(task.target_phase if device in targets else task.phase)
            seconds[stage, Part.BACKWARD if part is Part.WEIGHT else part][device] += spent_s
        if moved:
            source, target = (of(at)[1] for at in (task.phase, task.target_phase))
            sends[source][target] += sum(nbytes for _, _, nbytes in moves(task))
    weights: dict[int, Counter[int]] = defaultdict(Counter)
    for local, nbytes in schedule.residents.items():
        if local in owner:
            weights[owner[local]][local[0]] += nbytes
    kept, held = _kept(schedule, order), in_flight(order.table)
    return [
        StageRow(
            devices=sorted(devices[stage]),
            nodes=nodes[stage],
            forward_s=max(seconds[stage, Part.FORWARD].values(), default=0.0),
            backward_s=max(seconds[stage, Part.BACKWARD].values(), default=0.0),
            weights_bytes=max(weights[stage].values(), default=0),
            in_flight=held[stage],
            kept_bytes=with_headroom(max(kept[stage].values(), default=0)),
            sends_to=sorted(sends[stage]),
            sends_bytes=[round(nbytes) for _, nbytes in sorted(sends[stage].items())],
        )
        for stage in range(order.phases.stages)
    ]


def _kept(schedule: Schedule, order: StepOrder) -> Mapping[int, Counter[int]]:
    """Bytes on each device of what a stage's forward pass leaves for its backward passes."""
    kept: dict[int, Counter[int]] = defaultdict(Counter)
    lives = StepLives.of(schedule, safe_lifetimes(schedule))
    for row in np.flatnonzero(lives.kept).tolist():
        life, of = lives.tensors[row], order.phases.of
        (part, stage), (then, other) = of(int(lives.made[row])), of(int(lives.read[row]))
        if part is Part.FORWARD and then in _BACKWARD and stage == other:
            kept[stage][life.device] += life.nbytes
    return kept
