"""From a compiled model to the data of its report (`schema`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from partitioner.cost_model.compute import local_flops, local_moved_bytes
from partitioner.cost_model.evaluate import best_single
from partitioner.cost_model.schedule import Task
from partitioner.ir.graph import Node
from partitioner.ir.layout import Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.report.alternatives import Alternative, Context
from partitioner.report.bottleneck import (
    Bottleneck,
    bottleneck,
    limit_sentence,
    tightest,
    turn_of,
    worth_sentence,
)
from partitioner.report.edges import NODE, edges
from partitioner.report.page.blocks import Block, blocks
from partitioner.report.page.memory import memory
from partitioner.report.page.schema import (
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
    TensorRow,
    TerminalRow,
)
from partitioner.report.page.timelines import timelines
from partitioner.report.page.traffic import algorithm, crossing_bytes, traffic
from partitioner.report.planned import Planned


def report_data(result: Planned) -> Report:
    """Everything that the page of a plan shows."""
    return _Data(result).report()


def headline(result: Planned, found: Bottleneck | None = None) -> Head:
    """The verdict on a plan.

    Args:
        result: The compiled model.
        found: Its bottleneck (see `result_bottleneck`), if it is at hand.
    """
    graph, got, cluster = result.graph, result.evaluation, result.cluster
    cert = result.plan.certificate
    objective = result.objective
    single = best_single(graph, cluster, objective)
    one = single[1]
    cost = cert.cost if cert else got.cost(objective)
    found = found or result_bottleneck(result)
    fits = one.fits_exactly
    busy = sum(got.load_s.values())
    return Head(
        cluster=cluster.name,
        strategy=cert.strategy if cert else "",
        objective=objective,
        status="does not fit" if not got.fits_exactly else cert.status if cert else "",
        solver=cert.solver if cert else "",
        searched=cert.space if cert else "",
        seed=cert.seed if cert else None,
        folded=cert.folded if cert else "",
        cost=cost,
        bound=cert.bound if cert else 0.0,
        gap=cert.gap if cert else 1.0,
        step_s=got.step_s,
        step_s_one=one.step_s if fits else None,
        latency_s=got.latency_s,
        latency_s_one=one.latency_s if fits else None,
        speedup=one.step_s / got.step_s if fits and got.step_s else None,
        communication=sum(got.comm_s.values()) / busy if busy else 0.0,
        balance=found.balance,
        headroom=tightest(got)[1],
        devices=len(cluster),
        devices_used=got.devices_used,
        limit=limit_sentence(found, got, objective),
        worth=worth_sentence(got, single, cluster, objective, turn_of(result.graph)),
        notes=[*result.warnings, *map(str, result.summary.get("notes", ()))],
    )


def result_bottleneck(result: Planned) -> Bottleneck:
    """What limits a compiled model's plan by its own objective."""
    return bottleneck(
        result.graph, result.schedule, result.evaluation, result.cluster, result.objective
    )


class _Data:
    def __init__(self, result: Planned) -> None:
        self.result = result
        self.graph = result.graph
        self.plan = result.plan
        self.context = Context(result.graph, result.plan, result.cluster)

    def report(self) -> Report:
        result = self.result
        return Report(
            version=VERSION,
            kind="plan",
            title=result.name,
            head=headline(result),
            devices=device_rows(result),
            groups=[GroupRow(devices=list(m.devices), mesh=str(m)) for m in self.plan.groups],
            nodes=[self._node(node) for node in self.graph.nodes],
            edges=list(self._edges()),
            terminals=list(self._terminals()),
            comms=[self._comm(task) for task in self._comms],
            blocks=self._blocks(),
            tasks=self._refs,
            timelines=timelines(result.schedule, self._refs),
            memory=memory(result),
            traffic=traffic(self._comms, result.cluster),
        )

    @cached_property
    def _comms(self) -> list[Task]:
        return [task for task in self.result.schedule.tasks if task.comm is not None]

    @cached_property
    def _refs(self) -> list[int]:
        """Ref of each task; an alias is told by the communication or node before it."""
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
        placed = self.context.placed[node.name]
        alone = place(self.graph, node, DeviceMesh.single(0), {}, placed.rule)
        points = [point for _, point in placed.mesh.coords()]
        own, *others = self.context.alternatives(node)
        sharded = "sharded" if placed.layouts else "replicated"
        return NodeRow(
            name=node.name,
            op=node.op,
            group=self.plan.nodes[node.name].group,
            kind="whole" if placed.mesh.size() == 1 else sharded,  # type: ignore[typeddict-item]
            cut=placed.cut_text,
            opaque=self.context.rules.why_opaque(node),
            flops=local_flops(alone, {}),
            local_flops=max(local_flops(placed, point) for point in points),
            bytes=local_moved_bytes(self.graph, alone, {}),
            seconds=max(self._seconds[node.name].values(), default=0.0),
            inputs=[self._tensor(v, at) for v, at in placed.operands()],
            outputs=[self._tensor(v, at) for v, at in placed.results()],
            options=1 + len(others),
            runner_up=self._runner_up(own, others),
        )

    def _runner_up(self, own: Alternative, others: list[Alternative]) -> RunnerUp | None:
        best = self.context.best_of(own, others)
        if best is None:
            return None
        return RunnerUp(
            group=str(best.placed.mesh),
            cut=best.placed.cut_text,
            step_s=best.step_s,
            step_change_s=best.step_s - own.step_s,
            work_change_s=best.work_s - own.work_s,
            fits=self.context.fits(best),
        )

    @cached_property
    def _seconds(self) -> Mapping[str, Mapping[int, float]]:
        tasks = self.result.schedule.tasks
        return {task.placed.node.name: task.devices for task in tasks if task.placed is not None}

    def _tensor(self, value: str, at: Placement) -> TensorRow:
        type_ = self.graph.types[value]
        return TensorRow(
            name=value,
            dtype=type_.dtype,
            shape=list(type_.shape),
            local=[max(dim.sizes()) for dim in at.sharding.dims],
            sharding=_sharding(at.sharding, at.mesh),
            constant=value in self.graph.constants,
        )

    def _edges(self) -> Iterable[EdgeRow]:
        """One row for each node and produced value that it reads, by node."""
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

    def _terminals(self) -> Iterable[TerminalRow]:
        order = self.graph.order
        for name in self.graph.inputs:
            readers = [order[node.name] for node in self.graph.consumers[name]]
            yield self._terminal(name, "input", readers)
        for name in self.graph.outputs:
            yield self._terminal(name, "output", [order[self.graph.producers[name].name]])

    def _terminal(self, name: str, kind: Any, nodes: list[int]) -> TerminalRow:
        type_ = self.graph.types[name]
        shape = list(type_.shape)
        return TerminalRow(name=name, kind=kind, shape=shape, dtype=type_.dtype, nodes=nodes)

    def _comm(self, task: Task) -> CommRow:
        comm = task.comm
        assert comm is not None
        producer = self.graph.producers.get(comm.source)
        return CommRow(
            kind=comm.kind.spelled,
            value=comm.source,
            ranks=list(comm.ranks),
            bytes=crossing_bytes(task),
            seconds=max(task.devices.values(), default=0.0),
            algorithm=algorithm(task, self.result.cluster),
            producer=self.graph.order[producer.name] if producer else -1,
            consumer=self.graph.order.get(comm.why, -1),
        )

    def _blocks(self) -> list[BlockRow]:
        groups = [self.plan.nodes[node.name].group for node in self.graph.nodes]
        rows: list[BlockRow] = []

        def add(found: Iterable[Block], parent: int) -> None:
            for block in found:
                rows.append(self._block(block, parent))
                add(block.inner, len(rows) - 1)

        add(blocks(self.graph, groups), -1)
        return rows

    def _block(self, block: Block, parent: int) -> BlockRow:
        return BlockRow(
            label=_label(block, [node.name for node in self._inside(block)]),
            first=block.first,
            last=block.last,
            parent=parent,
            kind=block.kind,
            index=block.index,
            count=block.count,
        )

    def _inside(self, block: Block) -> tuple[Node, ...]:
        return self.graph.nodes[block.first : block.last + 1]


def _label(block: Block, names: list[str]) -> str:
    """What the names of a block's nodes have in common, or its place."""
    first, last = min(names), max(names)  # what these two share, all share
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    common = first[:same]
    scope = common[: max(common.rfind("."), common.rfind("/")) + 1].strip("./")
    if block.count > 1 and any(c.isdigit() for c in scope):
        return scope
    return f"block {block.index + 1}" if block.count > 1 else f"{names[0]} ... {names[-1]}"


def device_rows(result: Planned) -> list[DeviceRow]:
    """Figures of every device of the cluster."""
    got = result.evaluation
    return [
        DeviceRow(
            name=spec.name,
            limit_bytes=spec.memory_bytes,
            compute_s=got.compute_s[device],
            comm_s=got.comm_s[device],
            peak_bytes=got.held_bytes[device],
            weights_bytes=got.peak[device].resident_bytes,
            sent_bytes=got.sent_bytes[device],
        )
        for device, spec in enumerate(result.cluster.devices)
    ]


def _sharding(sharding: Sharding, mesh: DeviceMesh) -> str:
    if mesh.size() == 1:
        return "whole"
    return "replicated" if sharding.is_replicated else str(sharding)
