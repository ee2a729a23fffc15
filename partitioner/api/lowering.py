"""Lowering of a resolved plan to rank programs: local nodes, local constants, communications.

The schedule has the tasks and their order. Every (value, placement) gets a local name on each rank,
nodes are made local through their op rows, and inputs, constants and outputs are cut into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, LocalKey, Task
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.exchange import Region, listed
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import Copies
from partitioner.ir.nodes.feeds import fed_pairs
from partitioner.ir.nodes.in_place import writes_in_place
from partitioner.ir.nodes.local_node import localized
from partitioner.ir.ops import is_stored, row_of
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import (
    Comm,
    Compute,
    Home,
    Output,
    Part,
    Programs,
    RankProgram,
)
from partitioner.ir.types import TensorType

#: Most ranks of a communication whose transfers are listed.
MOST_LISTED = 256


@no_collection()
def lower(
    graph: Graph,
    plan_schedule: Schedule,
    ranks: int,
    *,
    deliver_all: bool = False,
    plain: frozenset[int | None] = frozenset(),
    copies: Copies | None = None,
) -> Programs:
    """Rank programs of a schedule, checked to be free of deadlock.

    Ranks without work get an empty program. If `deliver_all`, every rank delivers the part of each
    output that it holds; else one holder of each part in each of the `copies`, but for results that
    are inputs of the next call (`ir.nodes.feeds`). `plain` is as of
    `Programs`.
    """
    names = _Names(frozenset(graph.types))
    homes = {
        value: Home(names.of((value, at)), at)
        for task in plan_schedule.tasks
        if task.placed is not None
        for value, at in task.placed.results()
    }
    deliveries = set()  # (rank, graph output): one holder of every distinct part, or all holders
    fed = fed_pairs(graph)
    copy_of = {device: copy for copy in copies.devices for device in copy} if copies else {}
    for value, (_, at) in plan_schedule.output_keys.items():
        every = deliver_all or graph.output_names.get(value, value) in fed
        delivered: set[tuple[object, Region]] = set()
        for device, region in at.parts():
            part = copy_of.get(device), region
            if every or part not in delivered:
                deliveries.add((device, value))
            delivered.add(part)
    shared = _Shared(graph, plan_schedule, names, frozenset(deliveries))
    programs = Programs(
        tuple(_Rank(shared, rank).program() for rank in range(ranks)),
        {value: graph.types[value] for value in graph.inputs},
        {graph.output_names.get(value, value): graph.types[value] for value in graph.outputs},
        homes,
        plan_schedule.order,
        plain,
        frozenset(graph.output_names.get(value, value) for value in graph.bounded),
        copies,
        deliver_all,
        fed,
    )
    programs.check()
    return programs


@dataclass
class _Names:
    """Local names: the value's own under its first placement, then ``value@1``, ``value@2``."""

    taken: frozenset[str]  # names in the model, which no other value gets
    by_value: dict[str, dict[Placement, str]] = field(default_factory=dict)

    def of(self, key: Key) -> str:
        value, at = key
        names = self.by_value.setdefault(value, {})
        if at not in names:
            names[at] = self.free(f"{value}@{len(names)}") if names else value
        return names[at]

    def free(self, name: str) -> str:
        while name in self.taken:
            name += "'"
        return name


@dataclass(frozen=True)
class _Local:
    """Steps of a node made local, or of a communication; one object for ranks that share them."""

    steps: tuple[Compute | Comm, ...]
    literals: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]
    reads: frozenset[str]


@dataclass(frozen=True)
class _Shared:
    """The steps that ranks share: most differ in the coordinates of their ranks only.

    A task is uniform if all its ranks have the same steps under the same names. The first rank of a
    group that lowers a uniform task notes its steps; the other ranks take them from here.
    """

    graph: Graph
    schedule: Schedule
    names: _Names
    deliver: frozenset[tuple[int, str]]
    uniform: dict[int, _Local] = field(default_factory=dict)  # by task
    _types: dict[Key, Mapping[int, TensorType]] = field(default_factory=dict)
    _locals: dict[tuple[object, ...], _Local] = field(default_factory=dict)
    _comms: dict[tuple[object, ...], Comm] = field(default_factory=dict)

    @cached_property
    def in_place(self) -> frozenset[str]:
        return writes_in_place(self.graph)

    @cached_property
    def renamed(self) -> frozenset[Key]:
        return frozenset(new for task in self.schedule.tasks for (_, new), _ in task.aliases)

    @cached_property
    def feeds(self) -> Mapping[int, Sequence[Key]]:
        return _by_device(self.schedule.feeds)

    @cached_property
    def residents(self) -> Mapping[int, Sequence[Key]]:
        return _by_device(self.schedule.residents)

    @cached_property
    def members(self) -> Sequence[frozenset[int]]:
        groups: dict[tuple[int, ...], frozenset[int]] = {}
        members = []
        for task in self.schedule.tasks:
            devices = tuple(device for (device, _), _ in task.aliases)
            if task.placed is not None:
                devices = task.placed.mesh.devices
            elif task.comm is not None:
                devices = task.comm.ranks
            members.append(groups.setdefault(devices, frozenset(devices)))
        return members

    def phases(self, index: int) -> tuple[int, int]:
        """The phase in which a task runs or sends, and that in which it receives."""
        task, order = self.schedule.tasks[index], self.schedule.order
        if order.is_whole and executor_of(self.graph).in_sessions:
            return task.hops, task.target_hops
        if not order.turns or index < self._first_backward:
            return task.phase, task.target_phase
        phase = order.phases.number(StepPart.BACKWARD)
        return phase, phase

    @cached_property
    def _first_backward(self) -> int:
        tasks = self.schedule.tasks
        nodes = (task.placed.node.name if task.placed else "" for task in tasks)
        backward = (i for i, name in enumerate(nodes) if name in self.graph.backward)
        return next(backward, len(tasks))

    def type_of(self, key: Key, rank: int) -> TensorType:
        if key not in self._types:
            value, at = key
            whole, points = self.graph.types[value], at.mesh.coords()
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
        """A communication under local names; one object for all ranks with the same names.

        Transfers that its price did not need are listed, among at most `MOST_LISTED` ranks.
        """
        key = index, source, target
        if key not in self._comms:
            phase, target_phase = self.phases(index)
            if comm.part and len(comm.ranks) <= MOST_LISTED:
                task = self.schedule.tasks[index]
                (_, before), (_, after) = task.reads[0][1], task.writes[0][1]
                comm = replace(comm, transfers=listed(before, after, comm.ranks), part=0)
            self._comms[key] = comm.renamed(
                source=source, target=target, phase=phase, target_phase=target_phase
            )
        return self._comms[key]

    def note_comm(self, index: int, step: Comm, before: Key, after: Key, rank: int) -> None:
        is_uniform = before not in self.renamed and _is_equal(after[1])
        if is_uniform and step.sources() == step.targets() == self.members[index]:
            types = {step.target: self.type_of(after, rank)}
            self.uniform[index] = _Local((step,), {}, types, frozenset((step.source,)))

    def local(
        self, index: int, placed: PlacedNode, slots: Sequence[str] | None, rank: int
    ) -> _Local:
        """A node made local, one object for equal ranks; `slots` are None if all have the same."""
        is_shared = _is_shared(placed)
        key = index, slots, None if is_shared else rank
        if key not in self._locals:
            point = placed.mesh.coord(rank)
            names = slots if slots is not None else _slots(placed, self.names.of)
            self._locals[key] = self._localized(placed, point, names, self.phases(index)[0])
        local = self._locals[key]
        if is_shared and slots is None and all(map(_is_equal, placed.outs)):
            results = {self.names.of(key): self.type_of(key, rank) for key in placed.results()}
            self.uniform[index] = replace(local, types={**results, **local.types})
        return local

    def _localized(
        self, placed: PlacedNode, point: Mapping[str, int], slots: Sequence[str], phase: int
    ) -> _Local:
        results = {value: self.names.of((value, at)) for value, at in placed.results()}
        local = localized(self.graph, placed, point, slots, results, self.names.free)
        types = {
            name: TensorType.of(array.dtype.name, array.shape)
            for name, array in local.constants.items()
        }
        captures = placed.node.captures
        steps = tuple(
            Compute(
                node,
                placed.node.name,
                phase,
                tuple(zip(captures, node.captures, strict=True)) if node.captures else (),
            )
            for node in local.nodes
        )
        reads = frozenset(value for step in steps for value in step.node.reads)
        return _Local(steps, local.constants, {**types, **local.types}, reads)


@dataclass
class _Rank:
    shared: _Shared
    rank: int
    types: dict[str, TensorType] = field(default_factory=dict)
    literals: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[Compute | Comm] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    alias: dict[Key, Key] = field(default_factory=dict)

    def program(self) -> RankProgram:
        rank, shared = self.rank, self.shared
        inputs = {}
        for key in shared.feeds.get(rank, ()):
            inputs[self._declare(key)] = Part(key[0], self._region(key))
        for index, task in enumerate(shared.schedule.tasks):
            if rank in shared.members[index]:
                if index in shared.uniform:
                    self._take(shared.uniform[index])
                else:
                    self._task(index, task)
        outputs = tuple(
            Output(
                self._local_name(key),
                shared.graph.output_names.get(value, value),
                self._region(key),
            )
            for value, key in shared.schedule.output_keys.items()
            if (rank, value) in shared.deliver
        )
        self.used.update(output.value for output in outputs)
        constants = {}
        for key in shared.residents.get(rank, ()):
            is_zero = (rank, key) in shared.schedule.zeros
            if (is_zero or key[0] in shared.graph.constants) and shared.names.of(key) in self.used:
                region = None if is_zero else self._region(key)
                constants[self._declare(key)] = Part(key[0], region, is_zero)
        return RankProgram(
            rank,
            {name: part for name, part in inputs.items() if name in self.used},
            constants,
            self.literals,
            self.types,
            tuple(self.steps),
            outputs,
            frozenset(self._in_place()),
        )

    def _in_place(self) -> Iterator[str]:
        """Results of writes to stored values where these lie: not to a copy that was moved."""
        shared = self.shared
        if not shared.in_place or not shared.schedule.order.is_whole:
            return  # a later micro-batch may read what was stored
        held: set[str] = set()
        for step in self.steps:
            if not isinstance(step, Compute):
                continue
            if is_stored(step.node):
                held.update(step.node.outputs)
            elif step.node.name in shared.in_place and step.node.inputs[0] in held:
                held.update(step.node.outputs)
                yield from step.node.outputs

    def _task(self, index: int, task: Task) -> None:
        for (device, new), (_, old) in task.aliases:
            if device == self.rank:
                self.alias[new] = self.alias.get(old, old)
        if task.placed is not None:
            placed = task.placed
            for key in placed.results():
                self._declare(key)
            has_alias = not self.shared.renamed.isdisjoint(placed.operands())
            slots = _slots(placed, self._local_name) if has_alias else None
            self._take(self.shared.local(index, placed, slots, self.rank))
        elif task.comm is not None:
            self._comm(index, task, task.comm)

    def _comm(self, index: int, task: Task, comm: Comm) -> None:
        """Add a communication, one object for all ranks but those with an alias of the value."""
        assert task.reads, f"{comm} moves nothing"
        assert task.writes, f"{comm} moves nothing"
        before, after = task.reads[0][1], task.writes[0][1]
        names = self.shared.names
        if self.rank in comm.targets():
            self._declare(after)
        source = names.of(before)
        if self.rank in comm.sources():
            source = self._local_name(before)
            self.used.add(source)
        step = self.shared.comm(index, comm, source, names.of(after))
        self.steps.append(step)
        self.shared.note_comm(index, step, before, after, self.rank)

    def _take(self, local: _Local) -> None:
        if local.literals:
            self.literals.update(local.literals)
        self.types.update(local.types)
        self.used.update(local.reads)
        self.steps.extend(local.steps)

    def _local_name(self, key: Key) -> str:
        return self.shared.names.of(self.alias.get(key, key))

    def _declare(self, key: Key) -> str:
        name = self.shared.names.of(key)
        self.types[name] = self.shared.type_of(key, self.rank)
        return name

    def _region(self, key: Key) -> Region | None:
        at = key[1]
        if all(not dim.axes for dim in at.sharding.dims):
            return None
        return at.region(at.mesh.coord(self.rank))


def _by_device(keys: Iterable[LocalKey]) -> Mapping[int, Sequence[Key]]:
    by_device: dict[int, list[Key]] = {}
    for device, key in keys:
        by_device.setdefault(device, []).append(key)
    return by_device


def _is_shared(placed: PlacedNode) -> bool:
    """Tell whether all devices of a node's group have the same local node."""
    row = row_of(placed.node)
    if row.localize is None or not placed.layouts:
        return True
    even = all(layout.is_equal for layout in placed.layouts.values())
    where = row.where or (placed.rule is not None and placed.rule.slides(placed.layouts))
    return not where and even and all(map(_is_equal, (*placed.ins, *placed.outs)))


def _is_equal(at: Placement | None) -> bool:
    return at is None or all(dim.is_equal for dim in at.sharding.dims)


def _slots(placed: PlacedNode, name: Callable[[Key], str]) -> tuple[str, ...]:
    """Local names of the operands; "" where absent."""
    pairs = zip((*placed.node.inputs, *placed.node.captures), placed.ins, strict=True)
    return tuple(name((value, at)) if at else "" for value, at in pairs)
