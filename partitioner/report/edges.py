"""The edges of a plan: each value from its producer to each reader, with its communications."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, Task
from partitioner.ir.graph import Graph
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import CommKind

NODE, INPUT, OUTPUT = "node", "input", "output"
Terminal = tuple[str, str]  #: (NODE, its name), or (INPUT or OUTPUT, the value).


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
