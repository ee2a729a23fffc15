"""The steps of a plan as rows and figures of the graph, and its edges with their communications."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from partitioner.cost_model.schedule.readings import LETTERS
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.phases import Part, StepOrder
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import CommKind
from partitioner.ir.types import DTYPE_BITS

if TYPE_CHECKING:
    import networkx as nx

NODE, INPUT, OUTPUT = "node", "input", "output"
Terminal = tuple[str, str]  #: (NODE, its name), or (INPUT or OUTPUT, the value).


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
    cuts: str  #: Cut factors of the operator over axes of its mesh, "n/x"; "" if none is cut.
    seconds: float  #: Of the busiest device, once.
    flops: float  #: Of the whole operator; estimated for one without a rule, 0 of communications.
    #: That cross between devices (a reduction counts its tensor once a device); 0 of operators.
    sent_bytes: int


def steps(graph: Graph, schedule: Schedule) -> list[Step]:
    """The operators and communications of a schedule, one row each."""
    rows: list[Step] = []
    for task in schedule.tasks:
        placed, comm = task.placed, task.comm
        op, flops, sent = "", 0.0, 0
        if comm is not None:
            kind, devices, name = comm.kind.spelled, tuple(comm.ranks), comm.source
            sent = 0 if comm.kind is CommKind.SLICE else comm_bytes(task)
        elif placed is not None:
            kind, devices = "compute", placed.mesh.devices
            name, op = placed.node.name, placed.node.op
            flops = float(placed.rule.flops if placed.rule else estimated_flops(graph, placed.node))
        else:
            continue
        row = Step(
            step=len(rows),
            passes=pass_name(schedule.order, task),
            kind=kind,
            name=name,
            op=op,
            devices=devices,
            cuts=placed.cut_text if placed else "",
            seconds=task.longest_s,
            flops=flops,
            sent_bytes=sent,
        )
        rows.append(row)
    return rows


def attributed(graph: Graph, placed: Sequence[PlacedNode], schedule: Schedule) -> nx.DiGraph:
    """Make a `networkx.DiGraph` of a graph with the figures of a plan on its nodes."""
    network = graph.to_networkx()
    for node in placed:
        held = dict.fromkeys(node.mesh.devices, 0)
        for value, out in node.results():
            for device, size in out.local_bytes(graph.types[value].dtype).items():
                held[device] += size
        network.add_node(
            node.node.name,
            devices=node.mesh.devices,
            cuts=node.cut_text,
            stage=node.stage,
            seconds=0.0,
            flops=0.0,
            device_bytes=max(held.values()),
            sent_bytes=0,
        )
    for row in steps(graph, schedule):
        name = row["name"]
        if row["kind"] == "compute":
            network.nodes[name].update(seconds=row["seconds"], flops=row["flops"])
        elif name in graph.producers:
            network.nodes[graph.producers[name].name]["sent_bytes"] += row["sent_bytes"]
    return network


def pass_name(order: StepOrder, task: Task) -> str:
    """The pass of a task, or those that a message goes between; "" of a whole batch."""
    if order.is_whole:
        return ""
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


@dataclass(frozen=True)
class Edge:
    """A value from its producer to one reader."""

    source: Terminal
    target: Terminal
    value: str
    comms: tuple[Task, ...]  #: Communications that carry it, in order, local slices among them.
    new: tuple[Task, ...]  #: Those between devices that carry no earlier edge.

    @property
    def crosses(self) -> bool:
        """Tell whether a communication between devices carries the edge."""
        return any(map(_between_devices, self.comms))


def placed_nodes(schedule: Schedule) -> tuple[PlacedNode, ...]:
    """All nodes with their decisions, in the plan's order."""
    return tuple(task.placed for task in schedule.tasks if task.placed is not None)


def edges(graph: Graph, schedule: Schedule) -> Iterator[Edge]:
    """The edges between nodes, from inputs and to outputs, by reader; constants have none."""
    before: dict[Key, Key] = {}
    comms: dict[Key, list[Task]] = defaultdict(list)
    # A phase of a plan in stages may fetch a value again that its devices had: that is no new way.
    known = {key for task in schedule.tasks if task.placed for _, key, _ in task.writes}
    for task in schedule.tasks:
        if task.placed is None:
            steps = [(task.writes[0][1], task.reads[0][1])] if task.writes and task.reads else []
            for after, start in [*steps, *((new[1], old[1]) for new, old in task.aliases)]:
                known.add(start)
                if after not in known:
                    before[after] = start
                    known.add(after)
                if task.comm is not None and before.get(after) == start:
                    comms[after].append(task)
    carried: set[int] = set()  # communications of earlier edges, by identity
    placed = placed_nodes(schedule)
    reads = [((NODE, one.node.name), key) for one in placed for key in one.operands()]
    reads += [((OUTPUT, value), key) for value, key in schedule.output_keys.items()]
    for reader, key in dict.fromkeys(reads):
        value, way = key[0], key
        if value in graph.constants:
            continue
        path: list[Task] = []
        while way in before:  # a way may begin at another name of the value
            path[:0] = comms[way]
            way = before[way]
        new = tuple(task for task in path if _between_devices(task) and id(task) not in carried)
        carried.update(map(id, new))
        producer = graph.producers.get(value)
        source = (NODE, producer.name) if producer else (INPUT, value)
        yield Edge(source, reader, value, tuple(path), new)


def _between_devices(task: Task) -> bool:
    return task.comm is not None and task.comm.kind is not CommKind.SLICE
