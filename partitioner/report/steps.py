"""The steps of a plan as rows, each operator and communication, and as figures of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from partitioner.cost_model.schedule.readings import LETTERS
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.phases import Part, StepOrder
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import CommKind
from partitioner.ir.types import DTYPE_BITS

if TYPE_CHECKING:
    import networkx as nx


class Step(TypedDict):
    """An operator or a communication of a plan; figures are predictions."""

    step: int  #: Position in the global order, from 0.
    #: Of a plan in stages: "F0", "B0", "W0" are forward, backward and weight gradients of stage 0,
    #: "F0 -> F1" is a message. "" for other plans.
    passes: str
    kind: str  #: "compute", or the communication: "all-reduce", "send", ...
    name: str  #: The node, or the tensor that moves.
    op: str  #: Operator of the node; "" for a communication.
    devices: tuple[int, ...]  #: In the order of the node's mesh; those that take part.
    cuts: str  #: Cut factors of the operator over axes of its mesh, "n/tp"; "" if none is cut.
    seconds: float  #: Of the busiest device, once.
    flops: float  #: Of the whole operator; estimated for one without a rule, 0 of communications.
    #: That cross between devices (a reduction counts its tensor once a device); 0 of operators.
    sent_bytes: int


def steps(graph: Graph, schedule: Schedule) -> list[Step]:
    """The operators and communications of a schedule, one row each."""
    tasks = [task for task in schedule.tasks if task.placed or task.comm]
    return [_step(graph, schedule.order, index, task) for index, task in enumerate(tasks)]


def attributed(graph: Graph, placed: Sequence[PlacedNode], schedule: Schedule) -> nx.DiGraph:
    """Make a `networkx.DiGraph` of a graph with the figures of a plan on its nodes."""
    network = graph.to_networkx()
    for node in placed:
        network.add_node(
            node.node.name,
            devices=node.mesh.devices,
            cuts=node.cut_text,
            stage=node.stage,
            seconds=0.0,
            flops=0.0,
            device_bytes=_device_bytes(graph, node),
            sent_bytes=0,
        )
    for row in steps(graph, schedule):
        name = row["name"]
        if row["kind"] == "compute":
            network.nodes[name].update(seconds=row["seconds"], flops=row["flops"])
        elif name in graph.producers:
            network.nodes[graph.producers[name].name]["sent_bytes"] += row["sent_bytes"]
    return network


def _device_bytes(graph: Graph, placed: PlacedNode) -> int:
    """Add up the bytes of a node's results on the device that holds most of them."""
    held: dict[int, int] = dict.fromkeys(placed.mesh.devices, 0)
    for value, out in zip(placed.node.outputs, placed.outs, strict=True):
        if out is not None:
            for device, size in out.local_bytes(graph.types[value].dtype).items():
                held[device] += size
    return max(held.values())


def _step(graph: Graph, order: StepOrder | None, index: int, task: Task) -> Step:
    placed, comm = task.placed, task.comm
    op, flops, sent = "", 0.0, 0
    if comm is not None:
        kind, devices, name = comm.kind.spelled, tuple(comm.ranks), comm.source
        sent = 0 if comm.kind is CommKind.SLICE else comm_bytes(task)
    else:
        assert placed is not None
        kind, devices, name, op = "compute", placed.mesh.devices, placed.node.name, placed.node.op
        flops = float(placed.rule.flops if placed.rule else estimated_flops(graph, placed.node))
    return Step(
        step=index,
        passes="" if order is None else pass_name(order, task),
        kind=kind,
        name=name,
        op=op,
        devices=devices,
        cuts=placed.cut_text if placed else "",
        seconds=task.longest_s,
        flops=flops,
        sent_bytes=sent,
    )


def pass_name(order: StepOrder, task: Task) -> str:
    """The pass that a task belongs to, or those that a message goes between."""
    names = []
    for phase in dict.fromkeys((task.phase, task.target_phase)):
        part, stage = order.phases.of(phase)
        letter = LETTERS.get(part, str(part))
        of_stage = part in (Part.FORWARD, Part.BACKWARD, Part.WEIGHT)
        names.append(f"{letter}{stage}" if of_stage else letter)
    return " -> ".join(names)


def comm_bytes(task: Task) -> int:
    """Bytes that cross between devices (a reduction counts its tensor once a rank)."""
    comm = task.comm
    assert comm is not None
    if comm.kind is CommKind.ALL_REDUCE:
        return sum(size for _, _, size in task.writes)
    numel = sum(comm.sent_numel().values())
    return (numel * DTYPE_BITS[comm.dtype] + 7) // 8
