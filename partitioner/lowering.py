"""From a resolved plan to rank programs: local nodes, local constants, communications in one order.

The schedule says which tasks there are and in which order; this module gives every (value,
placement) a local name on each rank, makes nodes local through their rows, and says which part of
each graph input, constant and output a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

import numpy as np

from partitioner.cost_model.schedule import Key, LocalKey, Schedule, Task
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.ops import LocalOp, LocalView, OpView, row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import (
    Comm,
    Compute,
    Home,
    Output,
    Part,
    ProgramError,
    Programs,
    RankProgram,
)
from partitioner.ir.types import TensorType
from partitioner.no_gc import no_collection


@no_collection()
def lower(
    graph: Graph, plan_schedule: Schedule, ranks: int, *, deliver_all: bool = False
) -> Programs:
    """Rank programs of a schedule, checked to be free of deadlock.

    Args:
        graph: The whole model.
        plan_schedule: Its tasks (`cost_model.schedule`).
        ranks: Number of ranks; those without work get an empty program.
        deliver_all: Every rank delivers the part of each output that it holds; else one holder of
            each part does.
    """
    names = _Names(frozenset(graph.types))
    deliver = _deliveries(plan_schedule, deliver_all=deliver_all)
    homes = {
        value: Home(names.of((value, at)), at)
        for task in plan_schedule.tasks
        if task.placed is not None
        for value, at in task.placed.results()
    }
    shared = _Shared(graph, plan_schedule, names, deliver)
    programs = Programs(
        tuple(shared.program(rank) for rank in range(ranks)),
        {value: graph.types[value] for value in graph.inputs},
        {value: graph.types[value] for value in graph.outputs},
        homes,
    )
    programs.check()
    return programs


@dataclass
class _Names:
    """Local names: the value's own under its first placement, then ``value@1``, ``value@2``."""

    taken: frozenset[str]  # names in the model: never given to anything else
    by_value: dict[str, dict[Placement, str]] = field(default_factory=dict)

    def of(self, key: Key) -> str:
        value, at = key
        known = self.by_value.setdefault(value, {})
        if at not in known:
            known[at] = self.free(f"{value}@{len(known)}") if known else value
        return known[at]

    def free(self, name: str) -> str:
        """The name, with as many ' behind it as make it none of the model's."""
        while name in self.taken:
            name += "'"
        return name


def _deliveries(plan_schedule: Schedule, *, deliver_all: bool) -> Mapping[tuple[int, str], bool]:
    """Which ranks deliver each graph output: one holder of every distinct part, or all."""
    found: dict[tuple[int, str], bool] = {}
    for value, (_, at) in plan_schedule.output_keys.items():
        seen: set[Region] = set()
        for device, pieces in at.parts():
            found[(device, value)] = deliver_all or pieces not in seen
            seen.add(pieces)
    return found


@dataclass(frozen=True)
class _Local:
    """A node made local, or a communication: the same object on all ranks that do the same."""

    steps: tuple[Compute | Comm, ...]
    literals: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]
    reads: frozenset[str]


@dataclass(frozen=True)
class _Run:
    """Tasks that follow each other on all ranks of a group, which have them alike.

    Attributes:
        end: Index of the task behind them.
        local: All of them.
    """

    end: int
    local: _Local

    @classmethod
    def of(cls, end: int, parts: Sequence[_Local]) -> _Run:
        """The tasks, in order, joined."""
        return cls(
            end,
            _Local(
                tuple(step for part in parts for step in part.steps),
                {name: array for part in parts for name, array in part.literals.items()},
                {name: type_ for part in parts for name, type_ in part.types.items()},
                frozenset().union(*(part.reads for part in parts)),
            ),
        )


@dataclass
class _Shared:
    """What ranks have in common: they differ in their coordinates, and mostly in nothing else."""

    graph: Graph
    schedule: Schedule
    names: _Names
    deliver: Mapping[tuple[int, str], bool]
    simple: dict[int, _Local] = field(default_factory=dict)  # tasks that their ranks have alike
    runs: dict[int, _Run] = field(default_factory=dict)  # of several of them, by their first task
    _types: dict[Key, Mapping[int, TensorType]] = field(default_factory=dict)
    _locals: dict[tuple[object, ...], _Local] = field(default_factory=dict)
    _comms: dict[tuple[object, ...], Comm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tasks = self.schedule.tasks
        self.renamed = {new for task in tasks for (_, new), _ in task.aliases}
        self.feeds = _by_device(self.schedule.feeds)
        self.residents = _by_device(self.schedule.residents)
        groups: dict[tuple[int, ...], frozenset[int]] = {}
        self.members = [
            groups.setdefault(devices, frozenset(devices)) for devices in map(_devices, tasks)
        ]
        self.turn = next(
            (
                index
                for index, task in enumerate(tasks)
                if task.placed and task.placed.node.name in self.graph.backward
            ),
            -1,
        )

    def program(self, rank: int) -> RankProgram:
        """A rank's program; what the first rank of a group finds, the others take."""
        known = len(self.simple)
        program = _Rank(self, rank).run()
        self._join(list(islice(self.simple, known, None)))
        return program

    def _join(self, found: Sequence[int]) -> None:
        """Join tasks that all ranks of a group have alike and that follow each other.

        Args:
            found: Tasks that are known to be so since the last rank, ascending.
        """

        def run(entry: tuple[int, int]) -> tuple[object, ...]:
            place, index = entry
            return index - place, self.members[index], index < self.turn

        for _, entries in groupby(enumerate(found), key=run):
            indices = [index for _, index in entries]
            if len(indices) > 1 and len(self.members[indices[0]]) > 1:
                parts = [self.simple[index] for index in indices]
                self.runs[indices[0]] = _Run.of(indices[-1] + 1, parts)

    def type_of(self, key: Key, rank: int) -> TensorType:
        """Type of a rank's part of a value."""
        if key not in self._types:
            value, at = key
            whole = self.graph.types[value]
            points = at.mesh.coords()
            if _is_equal(at):
                part = at.sharding.local_type(whole, at.mesh, points[0][1])
                self._types[key] = dict.fromkeys(at.mesh.devices, part)
            else:
                self._types[key] = {
                    device: at.sharding.local_type(whole, at.mesh, point)
                    for device, point in points
                }
        return self._types[key][rank]

    def comm(self, index: int, comm: Comm, source: str, target: str) -> Comm:
        """A communication under local names."""
        key = index, source, target
        if key not in self._comms:
            self._comms[key] = comm.renamed(source=source, target=target)
        return self._comms[key]

    def simplify_comm(self, index: int, step: Comm, before: Key, after: Key, rank: int) -> None:
        """Note a communication in which all its ranks do the same, under the same names."""
        everybody = self.members[index]
        alike = before not in self.renamed and _is_equal(after[1])
        if alike and step.sources() == step.targets() == everybody:
            types = {step.target: self.type_of(after, rank)}
            self.simple[index] = _Local((step,), {}, types, frozenset((step.source,)))

    def local(self, index: int, task: Task, slots: Sequence[str] | None, rank: int) -> _Local:
        """A node of one rank; all ranks share it unless their parts differ in more than place.

        Args:
            index: Of the task.
            task: The node.
            slots: Local names of the operands; None if they are the same on all ranks.
            rank: The rank.
        """
        assert task.placed is not None
        shared = _is_shared(task.placed)
        key = index, slots, None if shared else rank
        if key not in self._locals:
            point = task.placed.mesh.coord(rank)
            own = slots if slots is not None else _slots(task.placed, self.names.of)
            self._locals[key] = self._made(task.placed, point, own, task.phase)
        if shared and slots is None and all(_is_equal(at) for at in task.placed.outs):
            self._simplify(index, task.placed, self._locals[key], rank)
        return self._locals[key]

    def _simplify(self, index: int, placed: PlacedNode, local: _Local, rank: int) -> None:
        """Note what any other rank has of a node."""
        made = {self.names.of(key): self.type_of(key, rank) for key in placed.results()}
        self.simple[index] = replace(local, types={**made, **local.types})

    def _made(
        self, placed: PlacedNode, point: Mapping[str, int], slots: Sequence[str], phase: int
    ) -> _Local:
        local = self._localised(placed, point)
        own = {*_operands(placed), *placed.node.outputs} & {*local.constants, *local.types}
        if own:
            raise ProgramError(
                f"{placed.node.name!r}: the model's {min(own)!r} bears a reserved name"
            )
        free = self.names.free
        literals = {free(name): array for name, array in local.constants.items()}
        types = {
            name: TensorType.of(array.dtype.name, array.shape) for name, array in literals.items()
        }
        types.update({free(name): type_ for name, type_ in local.types.items()})
        made = {name: free(name) for name in (*local.constants, *local.types)}
        steps = tuple(self._compute(node, placed, slots, made, phase) for node in local.nodes)
        reads = frozenset(value for step in steps for value in step.node.reads)
        return _Local(steps, literals, types, reads)

    def _compute(
        self,
        node: Node,
        placed: PlacedNode,
        slots: Sequence[str],
        made: Mapping[str, str],
        phase: int,
    ) -> Compute:
        """A local node under local names: operands by slot (or by value, if a row moved them)."""
        results = {value: self.names.of((value, at)) for value, at in placed.results()}
        results.update(made)
        operands = _operands(placed)
        by_value = dict(zip(reversed(operands), reversed(slots), strict=True))

        def name(slot: int, value: str) -> str:
            if value in results:
                return results[value]
            if slot < len(operands) and operands[slot] == value:
                return slots[slot]
            return by_value.get(value, value)

        renamed = replace(
            node,
            inputs=tuple(name(slot, value) for slot, value in enumerate(node.inputs)),
            outputs=tuple(results.get(value, value) for value in node.outputs),
            captures=tuple(by_value[value] for value in node.captures),
        )
        renames = tuple(pair for pair in zip(node.captures, renamed.captures, strict=True))
        return Compute(renamed, placed.node.name, phase, renames)

    def _localised(self, placed: PlacedNode, point: Mapping[str, int]) -> LocalOp:
        row = row_of(placed.node)
        if placed.rule is None or row is None or row.localize is None or not placed.layouts:
            return LocalOp((placed.node,))
        view = LocalView(
            placed.rule.local_sizes(placed.layouts, placed.mesh, point),
            _local_shapes(placed.ins, placed, point),
            _local_shapes(placed.outs, placed, point),
            _regions(placed.ins, point) if row.where else (),
            _regions(placed.outs, point) if row.where else (),
        )
        return row.localize(OpView(placed.node, self.graph), view)


@dataclass
class _Rank:
    """Builds one rank's program."""

    shared: _Shared
    rank: int
    types: dict[str, TensorType] = field(default_factory=dict)
    inputs: dict[str, Part] = field(default_factory=dict)
    constants: dict[str, Part] = field(default_factory=dict)
    literals: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[Compute | Comm] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    alias: dict[Key, Key] = field(default_factory=dict)

    def run(self) -> RankProgram:
        for key in self.shared.feeds.get(self.rank, ()):
            self.inputs[self._declare(key)] = Part(key[0], self._region(key))
        backward: int | None = None
        simple, runs, members = self.shared.simple, self.shared.runs, self.shared.members
        tasks, turn = self.shared.schedule.tasks, self.shared.turn
        index = 0
        while index < len(tasks):
            if index == turn:
                backward = len(self.steps)
            end = index + 1
            if self.rank in members[index]:
                if index in runs:
                    end = runs[index].end
                    self._take(runs[index].local)
                elif index in simple:
                    self._take(simple[index])
                else:
                    self._task(index, tasks[index])
            index = end
        outputs = tuple(self._outputs())
        self.used.update(output.value for output in outputs)
        self._constants()
        return RankProgram(
            self.rank,
            {name: part for name, part in self.inputs.items() if name in self.used},
            self.constants,
            self.literals,
            self.types,
            tuple(self.steps),
            outputs,
            backward,
        )

    def _constants(self) -> None:
        schedule = self.shared.schedule
        for key in self.shared.residents.get(self.rank, ()):
            zero = (self.rank, key) in schedule.zeros
            kept = zero or key[0] in self.shared.graph.constants
            if kept and self.shared.names.of(key) in self.used:
                region = None if zero else self._region(key)
                self.constants[self._declare(key)] = Part(key[0], region, zero)

    def _task(self, index: int, task: Task) -> None:
        for (device, new), (_, old) in task.aliases:
            if device == self.rank:
                self.alias[new] = self._root(old)
        if task.placed is not None:
            self._node(index, task, task.placed)
        elif task.comm is not None:
            self._comm(index, task, task.comm)

    def _comm(self, index: int, task: Task, comm: Comm) -> None:
        """The same object on every rank, but for names that a rank has under an alias."""
        after = next((key for _, key, _ in task.writes), None)
        before = next((key for _, key in task.reads), None)
        if before is None or after is None:
            raise AssertionError(f"communication {comm} moves nothing")
        names = self.shared.names
        if self.rank in comm.targets():
            self._declare(after)
        source = names.of(before)
        if self.rank in comm.sources():
            source = self._local(before)
            self.used.add(source)
        step = self.shared.comm(index, comm, source, names.of(after))
        self.steps.append(step)
        self.shared.simplify_comm(index, step, before, after, self.rank)

    def _node(self, index: int, task: Task, placed: PlacedNode) -> None:
        for key in placed.results():
            self._declare(key)
        renamed = not self.shared.renamed.isdisjoint(placed.operands())
        slots = _slots(placed, self._local) if renamed else None
        self._take(self.shared.local(index, task, slots, self.rank))

    def _take(self, local: _Local) -> None:
        if local.literals:
            self.literals.update(local.literals)
        self.types.update(local.types)
        self.used.update(local.reads)
        self.steps.extend(local.steps)

    def _outputs(self) -> Sequence[Output]:
        return [
            Output(self._local(key), value, self._region(key))
            for value, key in self.shared.schedule.output_keys.items()
            if self.shared.deliver.get((self.rank, value))
        ]

    def _root(self, key: Key) -> Key:
        return self.alias.get(key, key)

    def _local(self, key: Key) -> str:
        return self.shared.names.of(self._root(key))

    def _declare(self, key: Key) -> str:
        name = self.shared.names.of(key)
        self.types[name] = self.shared.type_of(key, self.rank)
        return name

    def _region(self, key: Key) -> Region | None:
        at = key[1]
        point = at.mesh.coord(self.rank)
        if all(not dim.axes for dim in at.sharding.dims):
            return None
        return tuple(dim.pieces(at.mesh, point) for dim in at.sharding.dims)


def _by_device(keys: Iterable[LocalKey]) -> Mapping[int, Sequence[Key]]:
    found: dict[int, list[Key]] = {}
    for device, key in keys:
        found.setdefault(device, []).append(key)
    return found


def _is_shared(placed: PlacedNode) -> bool:
    """Whether the node is made local in the same way on all devices of its group."""
    row = row_of(placed.node)
    if row is None or row.localize is None or not placed.layouts:
        return True
    even = all(layout.is_equal for layout in placed.layouts.values())
    return not row.where and even and all(map(_is_equal, (*placed.ins, *placed.outs)))


def _is_equal(at: Placement | None) -> bool:
    """Whether all devices have parts of the same sizes."""
    return at is None or all(dim.is_equal for dim in at.sharding.dims)


def _devices(task: Task) -> tuple[int, ...]:
    """The ranks that a task is about."""
    if task.placed is not None:
        return task.placed.mesh.devices
    return task.comm.ranks if task.comm is not None else tuple(d for (d, _), _ in task.aliases)


def _slots(placed: PlacedNode, name: Callable[[Key], str]) -> tuple[str, ...]:
    """Local names of the operands; "" where absent."""
    found = zip(_operands(placed), placed.ins, strict=True)
    return tuple(name((value, at)) if at else "" for value, at in found)


def _local_shapes(
    placements: Sequence[Placement | None], placed: PlacedNode, point: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        () if at is None else at.sharding.local_shape(placed.mesh, point) for at in placements
    )


def _regions(
    placements: Sequence[Placement | None], point: Mapping[str, int]
) -> tuple[Region, ...]:
    return tuple(
        () if at is None else tuple(dim.pieces(at.mesh, point) for dim in at.sharding.dims)
        for at in placements
    )


def _operands(placed: PlacedNode) -> tuple[str, ...]:
    return (*placed.node.inputs, *placed.node.captures)
