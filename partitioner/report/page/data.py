"""The data of a plan's report (`schema`)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.prices.compute import local_flops, local_moved_bytes
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import PhaseError
from partitioner.ir.pieces.folding import Block, block_label, blocks, is_name, paths
from partitioner.ir.plan import place
from partitioner.ir.program import Comm
from partitioner.report.findings.alternatives import not_taken
from partitioner.report.findings.bottleneck import (
    Bottleneck,
    bottleneck,
    limit_sentence,
    tightest,
    turn_of,
    verdict,
)
from partitioner.report.measured import Comparison
from partitioner.report.page.memory import algorithm, crossing_bytes, memory, traffic
from partitioner.report.page.module_blocks import ModuleBlocks
from partitioner.report.page.ribbon import ribbon
from partitioner.report.page.timelines import MAX_EVENTS, measured_run, run_timeline, timelines
from partitioner.report.planned import Lanes, Planned, lanes
from partitioner.report.schema import (
    VERSION,
    BlockMoveRow,
    BlockRow,
    CommRow,
    Delivered,
    DeviceRow,
    EdgeRow,
    GroupRow,
    Head,
    NodeRow,
    Report,
    RunnerUp,
    SpaceRow,
    StepRow,
    TensorRow,
    TerminalRow,
)
from partitioner.report.stages import place_text, stages, step_facts, step_sentence
from partitioner.report.steps import NODE, edges
from partitioner.report.summary import solved_by, status_text, trial_lines
from partitioner.search.neighbourhood import (
    Alternative,
    Neighbourhood,
    best_other,
    block_changes,
)

#: Of a space whose plan costs less than so many times as much, the difference is told.
NEARLY = 1.05
#: Of costs, what may be of rounding.
NONE = 1e-9


def report_data(result: Planned, comparison: Comparison[Planned] | None = None) -> Report:
    """Everything that the page of a plan shows, beside a measured run of it if there was one."""
    graph, own, rows = result.graph, lanes(result), itertools.count()
    refs = _refs(graph, result.schedule, lambda _: next(rows))
    near = Neighbourhood(graph, result.plan, result.cluster)
    names = [node.name for node in graph.nodes]
    outer = blocks(graph, [result.plan.nodes[name].group for name in names])
    terminals = [(name, "input", graph.consumers[name]) for name in graph.inputs]
    terminals += [(name, "output", (graph.producers[name],)) for name in graph.outputs]
    comm_tasks = [task for task in result.schedule.tasks if task.comm is not None]
    delivering = _delivering(result)
    comms, comm_rows = list[CommRow](), dict[Comm, int]()
    for task in (*comm_tasks, *delivering):
        comm = task.comm
        assert comm is not None
        producer = graph.producers.get(comm.source)
        row = CommRow(
            kind=comm.kind.spelled,
            value=comm.source,
            ranks=own.among(comm.ranks),
            times=result.schedule.times(task),
            bytes=crossing_bytes(task),
            seconds=task.longest_s,
            algorithm=algorithm(task, result.cluster),
            producer=graph.order[producer.name] if producer else -1,
            consumer=graph.order.get(comm.why, -1),
        )
        comm_rows[comm.renamed(seq=0)] = len(comms)
        comms.append(row)
    head = headline(result, comparison=comparison)
    shown = timelines(result.schedule, refs, own, turn=head["turn"])
    if delivering:
        run = result.run_schedule
        run_refs = _refs(graph, run, lambda comm: comm_rows[comm.renamed(seq=0)])
        timeline = run_timeline(run, run_refs, own, head["turn"])
        shown += [timeline] if len(timeline["ref"]) <= MAX_EVENTS else []
    return Report(
        version=VERSION,
        kind="plan",
        title=result.name,
        head=head,
        devices=device_rows(result, own),
        groups=[
            GroupRow(devices=own.among(mesh.devices), mesh=str(mesh)) for mesh in result.plan.groups
        ],
        nodes=[_node(result, near, node) for node in graph.nodes],
        edges=list(_edges(result, comm_tasks)),
        terminals=[
            TerminalRow(
                name=name,
                kind=kind,  # type: ignore[typeddict-item]
                shape=list(graph.types[name].shape),
                dtype=graph.types[name].dtype,
                nodes=[graph.order[node.name] for node in nodes],
            )
            for name, kind, nodes in terminals
        ],
        comms=comms,
        blocks=_blocks(result, outer),
        moves=block_moves(result, outer),
        ribbon=ribbon(result, own),
        tasks=refs,
        timelines=shown,
        memory=memory(result, own),
        traffic=traffic(result.schedule, result.cluster, own),
        measured=None if comparison is None else measured_run(comparison, comm_rows),
    )


def headline(
    result: Planned,
    limits: Bottleneck | None = None,
    comparison: Comparison[Planned] | None = None,
) -> Head:
    """The head of the report; `limits` are its bottleneck if that is known already."""
    figures, objective = result.evaluation, result.objective
    cert = result.plan.certificate
    one = result.one_device
    limits = limits or bottleneck(result)
    busy, comm_s = sum(figures.load_s.values()), sum(figures.comm_s.values())
    delivered, delivery = None, result.delivery
    if delivery is not None:
        tasks, times = _delivering(result), result.run_schedule.times
        more_s = sum(times(task) * sum(task.devices.values()) for task in tasks)
        share = (comm_s + more_s) / (busy + more_s) if busy + more_s else 0.0
        delivered = Delivered(
            step_s=delivery.step_s, latency_s=delivery.latency_s, communication=share
        )
    step_measured_s, latency_measured_s = _measured_seconds(result, comparison)
    measured_s = None
    if comparison is None or comparison.measured.is_on(result.cluster):
        measured_s = {"throughput": step_measured_s, "latency": latency_measured_s}.get(objective)
    said = result.verdict(measured_s)
    status = status_text(cert.status, cert.gap) + said.bound_note(cert.bound) if cert else ""
    status = status if figures.fits_exactly else "does not fit"
    facts = step_facts(result.plan, figures)
    step = None
    if facts:
        own = lanes(result)
        step = StepRow(
            sentence=step_sentence(facts),
            schedule=facts["schedule"],
            micro_batches=facts["micro_batches"],
            bubble=facts["bubble_share"],
            stages=[
                {**stage, "devices": own.among(stage["devices"])}
                for stage in stages(result.schedule)
            ],
        )
    return Head(
        cluster=result.cluster.name,
        strategy=cert.strategy if cert else "",
        objective=objective,
        status=status,
        solver=solved_by(cert.solver, cert.status) if cert else "",
        searched=cert.space if cert else "",
        seed=cert.seed if cert else None,
        folded=cert.folded if cert else "",
        cost=cert.cost if cert else figures.cost(objective),
        bound=cert.bound if cert else 0.0,
        gap=cert.gap if cert else 1.0,
        step_s=figures.step_s,
        step_s_one=one.step_s if one.fits else None,
        latency_s=figures.latency_s,
        latency_s_one=one.latency_s if one.fits else None,
        step_measured_s=step_measured_s,
        latency_measured_s=latency_measured_s,
        turn=turn_of(result.graph, staged=bool(facts)),
        step=step,
        speedup=result.speedup,
        gain=said.gain,
        gain_of=said.gain_of,
        communication=comm_s / busy if busy else 0.0,
        balance=limits.balance,
        headroom=tightest(figures)[1],
        devices=len(result.cluster),
        devices_used=figures.devices_used,
        limit=limit_sentence(result, limits),
        instead=f"Instead: {instead}." if (instead := result.verdict().instead) else "",
        delivery=delivery.sentence(objective) if delivery else "",
        delivered=delivered,
        verdict=verdict(result, limits, measured_s),
        spaces=space_rows(result.summary, objective),
        notes=[
            f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"
            for note in (*result.warnings, *result.summary.get("notes", ()))
            for text in [str(note).strip()]
        ],
        trials=trial_lines(cert.trials) if cert else [],
    )


def _measured_seconds(
    result: Planned, comparison: Comparison[Planned] | None
) -> tuple[float | None, float | None]:
    """Measured seconds between requests and of one request; None where they were not measured."""
    one_after_other = result.evaluation.sequential
    if comparison is not None:
        alone_s = comparison.measured.step_s
        stream_s = alone_s if one_after_other else comparison.measured.stream_s
        return stream_s, alone_s
    cert = result.plan.certificate
    trial = next((trial for trial in cert.trials if trial.kept), None) if cert else None
    if trial is None:
        return None, None
    if one_after_other:
        return trial.measured_s, trial.measured_s
    if result.objective == "latency":
        return None, trial.measured_s
    return trial.measured_s, None


def space_rows(summary: Mapping[str, Any], objective: str) -> list[SpaceRow]:
    """The searched spaces of a plan's summary, the best first, those without a plan last."""
    tried = sorted(summary.get("spaces", ()), key=lambda row: row["cost"])
    as_cheap = [row for row in tried if row["cost"] == summary["cost"]]
    chosen = min(as_cheap, key=lambda row: "changes" in row, default=None)
    if chosen is not None:
        tried = [chosen, *(row for row in tried if row is not chosen)]
    rows = [
        SpaceRow(
            space=row["space"],
            cost=row["cost"],
            devices_used=row["devices_used"],
            chosen=row is chosen,
            why="" if chosen is None or row is chosen else _why_not(row, chosen, objective),
            changes=None if row is chosen else row.get("changes"),
            bound=None,
        )
        for row in tried
    ]
    ruled_out = sorted(summary.get("ruled_out", {}).items(), key=lambda row: row[1])
    without = [
        (space, bound, f"none of its plans costs less than {units.cost(objective, bound)}")
        for space, bound in ruled_out
    ]
    without += [(space, None, why) for space, why in summary.get("not_searched", {}).items()]
    return rows + [
        SpaceRow(
            space=space,
            cost=None,
            devices_used=None,
            chosen=False,
            why=why,
            changes=None,
            bound=bound,
        )
        for space, bound, why in without
    ]


def _why_not(row: Mapping[str, Any], chosen: Mapping[str, Any], objective: str) -> str:
    if row["cost"] <= chosen["cost"] * (1 + 1e-9):
        used, best = row["devices_used"], chosen["devices_used"]
        fewer = f", on {used} devices in place of {best}" if used != best else ""
        return f"costs the same{fewer}"
    more = {name: row[name] - chosen[name] for name in ("comm_s", "compute_s")}
    most = max(more, key=more.__getitem__)
    if objective == "throughput" and more[most] > 0:
        what = {"comm_s": "communicates", "compute_s": "computes"}[most]
        return f"device {row['busiest']} {what} {units.seconds(more[most])} more"
    if not chosen["cost"]:
        return "costs more"
    if row["cost"] < NEARLY * chosen["cost"]:
        return f"costs {units.cost(objective, row['cost'] - chosen['cost'])} more"
    return f"costs {units.digits(row['cost'] / chosen['cost'])} times as much"


def _refs(graph: Graph, tasks: Schedule, row: Callable[[Comm], int]) -> list[int]:
    """Ref of each task, by the row of each communication; an alias has that of the task before."""
    refs: list[int] = []
    for task in tasks.tasks:
        if task.placed is not None:
            refs.append(graph.order[task.placed.node.name])
        elif task.comm is not None:
            refs.append(-1 - row(task.comm))
        else:
            refs.append(refs[-1] if refs else 0)
    return refs


def _delivering(result: Planned) -> list[Task]:
    """The communications that bring results to every rank, which the plan's cost leaves out."""
    if result.delivery is None:
        return []
    priced = {task.comm.renamed(seq=0) for task in result.schedule.tasks if task.comm is not None}
    return [
        task
        for task in result.run_schedule.tasks
        if task.comm is not None and task.comm.renamed(seq=0) not in priced
    ]


def _node(result: Planned, near: Neighbourhood, node: Node) -> NodeRow:
    graph = result.graph
    placed, task = near.placed[node.name], result.node_tasks[node.name]
    alone = place(graph, node, DeviceMesh.single(0), {}, placed.rule)
    alternatives = near.alternatives(node) if near.is_priced_soon else ()
    sharded = "sharded" if placed.layouts else "replicated"
    return NodeRow(
        name=node.name,
        op=node.op,
        group=result.plan.nodes[node.name].group,
        stage=placed.stage if result.plan.pipeline else None,
        times=result.schedule.times(task),
        kind="whole" if placed.mesh.size() == 1 else sharded,  # type: ignore[typeddict-item]
        cut=placed.cut_text,
        opaque=near.rules.why_opaque(node),
        flops=local_flops(graph, alone, {}),
        local_flops=max(local_flops(graph, placed, point) for _, point in placed.mesh.coords()),
        bytes=local_moved_bytes(graph, alone, {}),
        seconds=task.longest_s,
        inputs=[_tensor(graph, value, at) for value, at in placed.operands()],
        outputs=[_tensor(graph, value, at) for value, at in placed.results()],
        options=len(alternatives),
        runner_up=_runner_up(result, near, node, alternatives),
    )


def _runner_up(
    result: Planned, near: Neighbourhood, node: Node, alternatives: Sequence[Alternative]
) -> RunnerUp | None:
    best = best_other(alternatives) if alternatives else None
    if best is None:
        return None
    chosen = alternatives[0]
    step_s, chosen_s = best.step_s, chosen.step_s
    work_s, chosen_work_s = best.work_s, chosen.work_s
    if result.plan.pipeline is None:
        fits = near.fits(best)
        if step_s < chosen_s * (1 - NONE):  # what would be taken is so by the referee, too
            changed, chosen_s = near.evaluated(best), result.evaluation.step_s
            step_s, fits = changed.step_s, changed.fits_exactly
    else:  # the step is simulated
        if not near.is_simulated_soon:
            return None
        try:
            changed = near.evaluated(best)
        except PhaseError:
            return None
        step_s, chosen_s = changed.step_s, result.evaluation.step_s
        work_s, chosen_work_s = (
            math.fsum(of.load_s.values()) for of in (changed, result.evaluation)
        )
        fits = changed.fits_exactly
    return RunnerUp(
        group=str(best.placed.mesh),
        cut=best.placed.cut_text,
        step_s=step_s,
        step_change_s=step_s - chosen_s,
        work_change_s=work_s - chosen_work_s,
        why=not_taken(result, [node]) if fits and step_s < chosen_s * (1 - NONE) else "",
        fits=fits,
    )


def _tensor(graph: Graph, value: str, at: Placement) -> TensorRow:
    type_ = graph.types[value]
    sharding = "replicated" if at.sharding.is_replicated else str(at.sharding)
    return TensorRow(
        name=value,
        dtype=type_.dtype,
        shape=list(type_.shape),
        local=[max(dim.sizes()) for dim in at.sharding.dims],
        sharding="whole" if at.mesh.size() == 1 else sharding,
        constant=value in graph.constants,
    )


def _edges(result: Planned, comms: Sequence[Task]) -> Iterator[EdgeRow]:
    """A row for each node and each produced value that it reads, by node."""
    graph = result.graph
    index = {task.comm.seq: i for i, task in enumerate(comms) if task.comm is not None}
    carried: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)
    for edge in edges(graph, result.schedule):
        if edge.source[0] == edge.target[0] == NODE:
            reader = graph.order[edge.target[1]]
            carriers = (index[task.comm.seq] for task in edge.comms if task.comm is not None)
            carried[reader, edge.value].update(dict.fromkeys(carriers))
    for v, value in sorted(carried, key=lambda edge: edge[0]):
        u, nbytes = graph.order[graph.producers[value].name], graph.types[value].nbytes
        yield EdgeRow(u=u, v=v, value=value, bytes=nbytes, comms=list(carried[v, value]))


def _blocks(result: Planned, outer: Sequence[Block]) -> list[BlockRow]:
    """The blocks of the graph: modules of a training, else ranges of its order."""
    graph, names = result.graph, [node.name for node in result.graph.nodes]
    groups = [result.plan.nodes[name].group for name in names]
    found = paths(graph, groups)
    if graph.backward and any(path and is_name(path[0]) for path in found):
        return ModuleBlocks(graph, groups, found).rows()
    rows: list[BlockRow] = []

    def add(level: Iterable[Block], parent: int) -> None:
        for block in level:
            row = BlockRow(
                label=block_label(block, names),
                first=block.first,
                last=block.last,
                nodes=[block.first, block.last],
                part="forward",
                parent=parent,
                kind=block.kind,
                index=block.index,
                count=block.count,
            )
            rows.append(row)
            add(block.inner, len(rows) - 1)

    add(outer, -1)
    return rows


def device_rows(result: Planned, lanes: Lanes) -> list[DeviceRow]:
    """Figures of every lane."""
    figures, devices = result.evaluation, result.cluster.devices
    return [
        DeviceRow(
            name=devices[busiest].name,
            members=list(members),
            limit_bytes=devices[fullest].memory_bytes,
            compute_s=figures.compute_s[busiest],
            comm_s=figures.comm_s[busiest],
            peak_bytes=figures.needed_bytes[fullest],
            weights_bytes=figures.peak[fullest].resident_bytes,
            sent_bytes=max(figures.sent_bytes[device] for device in members),
        )
        for members, busiest, fullest in zip(
            lanes.members, lanes.busiest, lanes.fullest, strict=True
        )
    ]


def block_moves(result: Planned, outer: Sequence[Block]) -> list[BlockMoveRow]:
    """The changes of whole blocks that the plan's rules allow, the cheapest that fits first.

    A block moves to the groups, or stages, that it exchanges values with, or is not cut over an
    axis; all other nodes keep their decisions, and the referee prices the changed plan. A plan in
    blocks has none, for the search takes none of it.
    """
    graph, plan = result.graph, result.plan
    if plan.blocks:
        return []
    names = [node.name for node in graph.nodes]
    moves: list[BlockMoveRow] = []
    for change in block_changes(graph, plan, outer):
        block, nodes, to = change.block, change.nodes, change.to
        changed = change.of(plan)
        try:
            figures = evaluate(graph, changed, result.cluster)
        except IRError:  # the order of stages, an operator without a rule, a part of no elements
            continue
        more = figures.cost(result.objective) - result.cost
        moves.append(
            BlockMoveRow(
                label=block_label(block, names),
                first=block.first,
                last=block.last,
                at=place_text(plan, plan.stages[change.group], plan.groups[change.group]),
                to=f"not cut over {to}"
                if isinstance(to, str)
                else place_text(plan, plan.stages[to], plan.groups[to]),
                change=more,
                fits=figures.fits_exactly,
                reason=why(result.evaluation, figures, more, result.objective)
                if more >= -NONE * result.cost or not figures.fits_exactly
                else not_taken(result, [graph.by_name[name] for name in nodes], result.objective),
            )
        )
    return sorted(moves, key=lambda move: (not move["fits"], move["change"] < 0, move["change"]))


def why(old: Evaluation, new: Evaluation, change: float, objective: str) -> str:
    """The reasons why a changed plan costs more: memory, bytes sent, the busiest device."""
    if not new.fits_exactly:
        over = {d: held - new.limit_bytes[d] for d, held in new.needed_bytes.items()}
        device = max(over, key=over.__getitem__)
        return f"device {device} would be {units.size(over[device])} over its memory"
    sent = sum(new.sent_bytes.values()) - sum(old.sent_bytes.values())
    parts = []
    if change > 0 and objective == "memory":
        held = new.needed_bytes
        parts.append(f"device {max(held, key=held.__getitem__)} holds more")
    elif change > 0:
        first, second = (max(of.load_s, key=of.load_s.__getitem__) for of in (old, new))
        more = {
            "communicates": new.comm_s[second] - old.comm_s[second],
            "computes": new.compute_s[second] - old.compute_s[second],
        }
        verb = max(more, key=more.__getitem__)
        becomes = f"device {second} becomes the bottleneck, "
        where = f"device {second}, the bottleneck, " if first == second else becomes
        if more[verb] > 0:
            parts.append(f"{where}{verb} {units.seconds(more[verb])} more")
    if sent > 0:
        parts.append(f"{units.size(sent)} more are sent")
    return ", ".join(parts) or "costs the same"
