"""From a resolved plan to rank programs: local nodes, local constants, communications in one order.

The schedule says which tasks there are and in which order; this module gives every (value,
placement) a local name on each rank, makes nodes local through their rows, and says which part of
each graph input, constant and output a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partitioner.cost_model.schedule import Key, Schedule, Task
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
    programs = Programs(
        tuple(_Rank(graph, plan_schedule, rank, names, deliver).run() for rank in range(ranks)),
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


@dataclass
class _Rank:
    """Builds one rank's program."""

    graph: Graph
    schedule: Schedule
    rank: int
    names: _Names
    deliver: Mapping[tuple[int, str], bool]
    types: dict[str, TensorType] = field(default_factory=dict)
    inputs: dict[str, Part] = field(default_factory=dict)
    constants: dict[str, Part] = field(default_factory=dict)
    literals: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[Compute | Comm] = field(default_factory=list)
    alias: dict[Key, Key] = field(default_factory=dict)

    def run(self) -> RankProgram:
        for device, key in self.schedule.feeds:
            if device == self.rank:
                self.inputs[self._declare(key)] = Part(key[0], self._region(key))
        used: set[str] = set()
        backward: int | None = None
        for task in self.schedule.tasks:
            if backward is None and task.placed and task.placed.node.name in self.graph.backward:
                backward = len(self.steps)
            self._task(task)
        outputs = tuple(self._outputs())
        for step in self.steps:
            used.update(_reads(step, self.rank))
        used.update(output.value for output in outputs)
        for device, key in self.schedule.residents:
            name = self.names.of(key)
            kept = key[0] in self.graph.constants or (device, key) in self.schedule.zeros
            if device == self.rank and kept and name in used:
                zero = (device, key) in self.schedule.zeros
                self.constants[self._declare(key)] = Part(
                    key[0], None if zero else self._region(key), zero
                )
        return RankProgram(
            self.rank,
            {name: part for name, part in self.inputs.items() if name in used},
            self.constants,
            self.literals,
            self.types,
            tuple(self.steps),
            outputs,
            backward,
        )

    def _task(self, task: Task) -> None:
        for (device, new), (_, old) in task.aliases:
            if device == self.rank:
                self.alias[new] = self._root(old)
        if task.placed is not None and self.rank in task.placed.mesh.devices:
            self._node(task, task.placed)
        elif task.comm is not None and self.rank in task.comm.ranks:
            self._comm(task, task.comm)

    def _comm(self, task: Task, comm: Comm) -> None:
        """The same object on every rank, but for names that a rank has under an alias."""
        after = next((key for _, key, _ in task.writes), None)
        before = next((key for _, key in task.reads), None)
        if before is None or after is None:
            raise AssertionError(f"communication {comm} moves nothing")
        if self.rank in comm.targets():
            self._declare(after)
        source = self._local(before) if self.rank in comm.sources() else self.names.of(before)
        self.steps.append(replace(comm, source=source, target=self.names.of(after)))

    def _node(self, task: Task, placed: PlacedNode) -> None:
        point = placed.mesh.coord(self.rank)
        for key in placed.results():
            self._declare(key)
        local = self._localised(placed, point)
        own = {*_operands(placed), *placed.node.outputs} & {*local.constants, *local.types}
        if own:
            raise ProgramError(
                f"{placed.node.name!r}: the model's {min(own)!r} bears a reserved name"
            )
        for name, array in local.constants.items():
            self.literals[self.names.free(name)] = array
            self.types[self.names.free(name)] = TensorType.of(array.dtype.name, array.shape)
        self.types.update({self.names.free(name): type_ for name, type_ in local.types.items()})
        made = {name: self.names.free(name) for name in (*local.constants, *local.types)}
        slots = [
            self._local((v, at)) if at else ""
            for v, at in zip(_operands(placed), placed.ins, strict=True)
        ]
        for node in local.nodes:
            self.steps.append(self._compute(node, placed, slots, made, task.phase))

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
        shapes = _local_shapes(placed.ins, placed, point)
        outs = _local_shapes(placed.outs, placed, point)
        sizes = placed.rule.local_sizes(placed.layouts, placed.mesh, point)
        view = LocalView(
            sizes, shapes, outs, _regions(placed.ins, point), _regions(placed.outs, point)
        )
        return row.localize(OpView(placed.node, self.graph), view)

    def _outputs(self) -> Sequence[Output]:
        return [
            Output(self._local(key), value, self._region(key))
            for value, key in self.schedule.output_keys.items()
            if self.deliver.get((self.rank, value))
        ]

    def _root(self, key: Key) -> Key:
        return self.alias.get(key, key)

    def _local(self, key: Key) -> str:
        return self.names.of(self._root(key))

    def _declare(self, key: Key) -> str:
        value, at = key
        name = self.names.of(key)
        point = at.mesh.coord(self.rank)
        self.types[name] = at.sharding.local_type(self.graph.types[value], at.mesh, point)
        return name

    def _region(self, key: Key) -> Region | None:
        at = key[1]
        point = at.mesh.coord(self.rank)
        if all(not dim.axes for dim in at.sharding.dims):
            return None
        return tuple(dim.pieces(at.mesh, point) for dim in at.sharding.dims)


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


def _reads(step: Compute | Comm, rank: int) -> Sequence[str]:
    if isinstance(step, Compute):
        return step.node.reads
    return (step.source,) if rank in step.sources() else ()
