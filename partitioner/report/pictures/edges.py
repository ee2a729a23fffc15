"""What is drawn of a plan: its nodes with their group and cut, and the edges between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partitioner import units
from partitioner.cost_model.schedule import Key, Task
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import CommKind
from partitioner.report.planned import Planned
from partitioner.report.text.show import comm_bytes

INPUT, OUTPUT = "input", "output"
Terminal = tuple[str, str]  #: (kind, name): ("node", its name), (INPUT, value), (OUTPUT, value).


@dataclass(frozen=True)
class Edge:
    """A value on its way from where it is made to one reader.

    Attributes:
        source: Its producer.
        target: Its reader.
        value: Its name.
        comms: Communications between devices that carry it, in order (slices are local).
        new: Those of them that carry no earlier edge.
    """

    source: Terminal
    target: Terminal
    value: str
    comms: tuple[Task, ...]
    new: tuple[Task, ...]


def placed_nodes(result: Planned) -> tuple[PlacedNode, ...]:
    """All nodes with their decisions, in the plan's order."""
    return tuple(task.placed for task in result.schedule.tasks if task.placed is not None)


def group_indices(result: Planned) -> dict[DeviceMesh, int]:
    """Number of each device group."""
    return {mesh: index for index, mesh in enumerate(result.plan.groups)}


def how_cut(placed: PlacedNode) -> str:
    """Like "m/tp n/dp"; "replicated" on several devices, "" for a whole node on one."""
    return placed.cut_text or ("replicated" if placed.mesh.size() > 1 else "")


def edges(result: Planned) -> tuple[Edge, ...]:
    """Edges between nodes, from inputs and to outputs; constants have none."""
    return tuple(_Edges(result).run())


class _Edges:
    def __init__(self, result: Planned) -> None:
        self.result = result
        self.before: dict[Key, Key] = {}
        self.comms: dict[Key, list[Task]] = defaultdict(list)
        self.told: set[int] = set()  # places in the global order
        for task in result.schedule.tasks:
            if task.placed is None:
                self._hop(task)

    def _hop(self, task: Task) -> None:
        """A step of a value from one placement to the next."""
        pairs = [(task.writes[0][1], task.reads[0][1])] if task.writes and task.reads else []
        for after, before in [*pairs, *((new[1], old[1]) for new, old in task.aliases)]:
            self.before[after] = before
            if task.comm is not None and task.comm.kind is not CommKind.SLICE:
                self.comms[after].append(task)

    def run(self) -> Iterator[Edge]:
        seen: set[tuple[Terminal, Key]] = set()
        for reader, key in self._reads():
            if key[0] not in self.result.graph.constants and (reader, key) not in seen:
                seen.add((reader, key))
                yield self._edge(reader, key)

    def _reads(self) -> Iterator[tuple[Terminal, Key]]:
        for placed in placed_nodes(self.result):
            yield from ((("node", placed.node.name), key) for key in placed.operands())
        for value, key in self.result.schedule.output_keys.items():
            yield (OUTPUT, value), key

    def _edge(self, reader: Terminal, key: Key) -> Edge:
        value = key[0]
        made = self.result.graph.producers.get(value)
        comms = tuple(self._carriers(key))
        new = tuple(t for t in comms if t.comm is not None and t.comm.seq not in self.told)
        self.told |= {task.comm.seq for task in new if task.comm is not None}
        return Edge(("node", made.name) if made else (INPUT, value), reader, value, comms, new)

    def _carriers(self, key: Key) -> Sequence[Task]:
        found: list[Task] = []
        while key in self.before:
            found[:0] = self.comms[key]
            key = self.before[key]
        return found


def comm_lines(comms: Iterable[Task]) -> Iterator[str]:
    """One line a kind of communication: kind, bytes between devices, seconds."""
    kinds: dict[str, list[Task]] = defaultdict(list)
    for task in comms:
        assert task.comm is not None
        kinds[str(task.comm.kind)].append(task)
    for kind, tasks in kinds.items():
        times = f"{len(tasks)}x " if len(tasks) > 1 else ""
        sent = sum(map(comm_bytes, tasks))
        seconds = sum(max(task.devices.values(), default=0.0) for task in tasks)
        yield f"{times}{kind} {units.size(sent)} {units.seconds(seconds)}"
