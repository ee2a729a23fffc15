"""The data of a plan's report (`schema`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from partitioner.cost_model.prices.compute import local_flops, local_moved_bytes
from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import PhaseError
from partitioner.ir.plan import place
from partitioner.report.blocks import Block, block_label, blocks
from partitioner.report.findings.alternatives import Alternative, Neighbourhood, best_other
from partitioner.report.findings.bottleneck import (
    Bottleneck,
    bottleneck,
    limit_sentence,
    tightest,
    turn_of,
    verdict,
    worth_sentence,
)
from partitioner.report.measured import Comparison
from partitioner.report.page.block_moves import block_moves
from partitioner.report.page.memory import algorithm, crossing_bytes, memory, traffic
from partitioner.report.page.ribbon import ribbon
from partitioner.report.page.timelines import measured_run, timelines
from partitioner.report.planned import Lanes, Planned, lanes
from partitioner.report.schema import (
    VERSION,
    BlockRow,
    CommRow,
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
from partitioner.report.stages import stages, step_facts, step_sentence
from partitioner.report.steps import NODE, edges
from partitioner.report.summary import solved_by, status_text, trial_lines

#: Tasks of a step times nodes, above which the other strategies of nodes in stages are not priced:
#: the step is simulated once for each node.
MAX_SIMULATED = 2_000_000
#: Nodes times devices above which the other strategies of nodes are not priced.
MAX_PRICED = 320_000


def report_data(result: Planned, comparison: Comparison[Planned] | None = None) -> Report:
    """Everything that the page of a plan shows, beside a measured run of it if there was one."""
    return _Builder(result, comparison).report()


def headline(
    result: Planned,
    limits: Bottleneck | None = None,
    comparison: Comparison[Planned] | None = None,
) -> Head:
    """The head of the report; `limits` are its bottleneck if that is known already."""
    figures, cluster, objective = result.evaluation, result.cluster, result.objective
    cert = result.plan.certificate
    one = result.one_device
    limits = limits or result_bottleneck(result)
    busy = sum(figures.load_s.values())
    status = status_text(cert.status, cert.gap) if cert else ""
    status = status if figures.fits_exactly else "does not fit"
    step_measured_s, latency_measured_s = _measured_seconds(result, comparison)
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
        cluster=cluster.name,
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
        communication=sum(figures.comm_s.values()) / busy if busy else 0.0,
        balance=limits.balance,
        headroom=tightest(figures)[1],
        devices=len(cluster),
        devices_used=figures.devices_used,
        limit=limit_sentence(limits, figures, objective),
        worth=worth_sentence(figures, one, cluster, objective, limits.turn),
        copies=one.copies_sentence(
            units.finite(figures.throughput_per_s), objective, cert.bound if cert else 0.0
        ),
        verdict=verdict(limits, figures, one, cluster, objective),
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
        )
        for row in tried
    ]
    failed = summary.get("not_searched", {}).items()
    return rows + [
        SpaceRow(space=space, cost=None, devices_used=None, chosen=False, why=why, changes=None)
        for space, why in failed
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
    return f"costs {units.digits(row['cost'] / chosen['cost'])} times as much"


def result_bottleneck(result: Planned) -> Bottleneck:
    """The bottleneck of a plan by the objective of its search."""
    return bottleneck(
        result.graph, result.schedule, result.evaluation, result.cluster, result.objective
    )


@dataclass(frozen=True)
class _Builder:
    result: Planned
    comparison: Comparison[Planned] | None

    @property
    def graph(self) -> Graph:
        return self.result.graph

    @cached_property
    def lanes(self) -> Lanes:
        return lanes(self.result)

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self.graph, self.result.plan, self.result.cluster)

    def report(self) -> Report:
        result, graph = self.result, self.graph
        terminals = [(name, "input", graph.consumers[name]) for name in graph.inputs]
        terminals += [(name, "output", (graph.producers[name],)) for name in graph.outputs]
        comms = []
        for task in self._comms:
            comm = task.comm
            assert comm is not None
            producer = graph.producers.get(comm.source)
            row = CommRow(
                kind=comm.kind.spelled,
                value=comm.source,
                ranks=self.lanes.among(comm.ranks),
                times=result.schedule.times(task),
                bytes=crossing_bytes(task),
                seconds=task.longest_s,
                algorithm=algorithm(task, result.cluster),
                producer=graph.order[producer.name] if producer else -1,
                consumer=graph.order.get(comm.why, -1),
            )
            comms.append(row)
        return Report(
            version=VERSION,
            kind="plan",
            title=result.name,
            head=headline(result, comparison=self.comparison),
            devices=device_rows(result, self.lanes),
            groups=[
                GroupRow(devices=self.lanes.among(mesh.devices), mesh=str(mesh))
                for mesh in result.plan.groups
            ],
            nodes=[self._node(node) for node in self.graph.nodes],
            edges=list(self._edges()),
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
            blocks=self._blocks(),
            moves=block_moves(self.result, self._outer_blocks),
            ribbon=ribbon(result, self.lanes),
            tasks=self._refs,
            timelines=timelines(result.schedule, self._refs, self.lanes),
            memory=memory(result, self.lanes),
            traffic=traffic(result.schedule, result.cluster, self.lanes),
            measured=None if self.comparison is None else measured_run(self.comparison, self._refs),
        )

    @cached_property
    def _comms(self) -> list[Task]:
        return [task for task in self.result.schedule.tasks if task.comm is not None]

    @cached_property
    def _refs(self) -> list[int]:
        """Ref of each task; an alias has that of the communication or node before it."""
        refs: list[int] = []
        comms = 0
        for task in self.result.schedule.tasks:
            if task.placed is not None:
                refs.append(self.graph.order[task.placed.node.name])
            elif task.comm is not None:
                refs.append(-1 - comms)
                comms += 1
            else:
                refs.append(refs[-1] if refs else 0)
        return refs

    def _node(self, node: Node) -> NodeRow:
        placed, task = self.neighbourhood.placed[node.name], self.result.node_tasks[node.name]
        alone = place(self.graph, node, DeviceMesh.single(0), {}, placed.rule)
        priced = len(self.graph.nodes) * len(self.result.cluster) <= MAX_PRICED
        alternatives = self.neighbourhood.alternatives(node) if priced else ()
        sharded = "sharded" if placed.layouts else "replicated"
        return NodeRow(
            name=node.name,
            op=node.op,
            group=self.result.plan.nodes[node.name].group,
            stage=placed.stage if self.result.plan.pipeline else None,
            times=self.result.schedule.times(task),
            kind="whole" if placed.mesh.size() == 1 else sharded,  # type: ignore[typeddict-item]
            cut=placed.cut_text,
            opaque=self.neighbourhood.rules.why_opaque(node),
            flops=local_flops(self.graph, alone, {}),
            local_flops=max(
                local_flops(self.graph, placed, point) for _, point in placed.mesh.coords()
            ),
            bytes=local_moved_bytes(self.graph, alone, {}),
            seconds=task.longest_s,
            inputs=[self._tensor(v, at) for v, at in placed.operands()],
            outputs=[self._tensor(v, at) for v, at in placed.results()],
            options=len(alternatives),
            runner_up=self._runner_up(alternatives),
        )

    def _runner_up(self, alternatives: Sequence[Alternative]) -> RunnerUp | None:
        best = best_other(alternatives) if alternatives else None
        if best is None:
            return None
        chosen, neighbourhood = alternatives[0], self.neighbourhood
        step_s, chosen_s = best.step_s, chosen.step_s
        work_s, chosen_work_s = best.work_s, chosen.work_s
        if self.result.plan.pipeline is None:
            fits = neighbourhood.fits(best)
        else:  # the step is simulated
            schedule, figures = self.result.schedule, self.result.evaluation
            if sum(map(schedule.times, schedule.tasks)) * len(self.graph.nodes) > MAX_SIMULATED:
                return None
            try:
                changed = neighbourhood.evaluated(best)
            except PhaseError:
                return None
            step_s, chosen_s = changed.step_s, figures.step_s
            work_s, chosen_work_s = (math.fsum(of.load_s.values()) for of in (changed, figures))
            fits = changed.fits_exactly
        return RunnerUp(
            group=str(best.placed.mesh),
            cut=best.placed.cut_text,
            step_s=step_s,
            step_change_s=step_s - chosen_s,
            work_change_s=work_s - chosen_work_s,
            fits=fits,
        )

    def _tensor(self, value: str, at: Placement) -> TensorRow:
        type_ = self.graph.types[value]
        sharding = "replicated" if at.sharding.is_replicated else str(at.sharding)
        return TensorRow(
            name=value,
            dtype=type_.dtype,
            shape=list(type_.shape),
            local=[max(dim.sizes()) for dim in at.sharding.dims],
            sharding="whole" if at.mesh.size() == 1 else sharding,
            constant=value in self.graph.constants,
        )

    def _edges(self) -> Iterable[EdgeRow]:
        """A row for each node and each produced value that it reads, by node."""
        index = {task.comm.seq: i for i, task in enumerate(self._comms) if task.comm is not None}
        comms: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)
        for edge in edges(self.graph, self.result.schedule):
            if edge.source[0] == edge.target[0] == NODE:
                reader = self.graph.order[edge.target[1]]
                carriers = (index[task.comm.seq] for task in edge.comms if task.comm is not None)
                comms[reader, edge.value].update(dict.fromkeys(carriers))
        for v, value in sorted(comms, key=lambda edge: edge[0]):
            u = self.graph.order[self.graph.producers[value].name]
            nbytes = self.graph.types[value].nbytes
            yield EdgeRow(u=u, v=v, value=value, bytes=nbytes, comms=list(comms[v, value]))

    @cached_property
    def _outer_blocks(self) -> list[Block]:
        groups = [self.result.plan.nodes[node.name].group for node in self.graph.nodes]
        return blocks(self.graph, groups)

    def _blocks(self) -> list[BlockRow]:
        names = [node.name for node in self.graph.nodes]
        rows: list[BlockRow] = []

        def add(level: Iterable[Block], parent: int) -> None:
            for block in level:
                row = BlockRow(
                    label=block_label(block, names),
                    first=block.first,
                    last=block.last,
                    parent=parent,
                    kind=block.kind,
                    index=block.index,
                    count=block.count,
                )
                rows.append(row)
                add(block.inner, len(rows) - 1)

        add(self._outer_blocks, -1)
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
