"""Phases of a plan in stages: the pieces of a rank's program that a schedule orders.

A stage is a set of nodes of the forward pass with the backward nodes that belong to them, on one
set of devices, its lane. One micro-batch runs a stage forward as one phase and backward as one, or
as two: what other stages wait for (input gradients), and the rest (weight gradients). Once a step,
before all micro-batches, runs what does not depend on them; once a step, behind them, what brings
the results to all devices (for each micro-batch) and what reduces the gradients that the
micro-batches added up. A plan without a schedule is one stage with one micro-batch, whose forward
pass has all that comes before the gradient of the loss, and whose backward pass all the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node, once_a_graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import numbers
from partitioner.ir.ops import row_of
from partitioner.ir.pipeline.actions import Action, ActionKind, PipelineSchedule
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.pipeline.text import from_csv
from partitioner.ir.pipeline.timeline import check
from partitioner.ir.plan import Pipeline, PlacedNode


class PhaseError(IRError):
    """Stages of a plan that cannot run in micro-batches."""


class Part(StrEnum):
    """The part of a step that a phase does."""

    SETUP = "setup"  #: Once a step: what no micro-batch changes.
    FORWARD = "forward"
    BACKWARD = "backward"  #: All of it or, in split schedules, what other stages wait for.
    WEIGHT = "weight"  #: The rest of a split backward pass.
    DELIVER = "deliver"  #: Once a micro-batch, behind all others: results to every device.
    REDUCE = "reduce"  #: Once a step, behind all others: of gradients that were added up.


@dataclass(frozen=True)
class Phases:
    """The numbers of the phases, ascending in an order in which one micro-batch could run."""

    stages: int  #: Number of stages.
    splits: bool = False  #: Whether backward passes are split.

    def number(self, part: Part, stage: int = 0) -> int:
        """The phase of a part of a stage."""
        stages = self.stages
        if part is Part.FORWARD:
            return 1 + stage
        if part is Part.BACKWARD:
            return 2 * stages - stage
        if part is Part.WEIGHT:
            return 3 * stages - stage
        return 0 if part is Part.SETUP else 1 + 3 * stages + (part is Part.REDUCE)

    def of(self, phase: int) -> tuple[Part, int]:
        """The part and the stage of a phase; stage 0 for those of no stage."""
        if phase == 0:
            return Part.SETUP, 0
        turn, at = divmod(phase - 1, self.stages)
        if turn == 0:
            return Part.FORWARD, at
        if turn in (1, 2):
            return (Part.BACKWARD, Part.WEIGHT)[turn - 1], self.stages - 1 - at
        return (Part.DELIVER if phase == self.number(Part.DELIVER) else Part.REDUCE), 0

    def run_by(self, action: Action) -> tuple[int, ...]:
        """The phases that an action runs, in order."""
        parts = {
            ActionKind.FORWARD: (Part.FORWARD,),
            ActionKind.FULL_BACKWARD: (Part.BACKWARD, *((Part.WEIGHT,) if self.splits else ())),
            ActionKind.BACKWARD_INPUT: (Part.BACKWARD,),
            ActionKind.BACKWARD_WEIGHT: (Part.WEIGHT,),
        }[action.kind]
        return tuple(self.number(part, action.stage) for part in parts)

    def is_once(self, phase: int) -> bool:
        """Tell whether a phase runs once a step, not once a micro-batch."""
        return self.of(phase)[0] in (Part.SETUP, Part.REDUCE)


@dataclass(frozen=True)
class RunOrder:
    """The order in which ranks run the phases of a step, each with its micro-batch."""

    table: PipelineSchedule  #: The schedule of the stages.
    lanes: tuple[tuple[int, ...], ...]  #: Devices of each lane of the schedule, ascending.
    is_whole: bool = False  #: Whether it is that of a plan without a schedule.

    @cached_property
    def phases(self) -> Phases:
        """The numbers of the phases."""
        return Phases(len(self.table.lane_of), self.table.splits_backward)

    def runs(self, device: int) -> tuple[tuple[int, int], ...]:
        """(phase, micro-batch) of all that a device runs in a step, in order."""
        return self._by_lane.get(self._lane_of.get(device), self._by_lane[None])

    @property
    def delivery(self) -> int:
        """The phase in which results are brought to all devices: of a whole batch its own."""
        return self.phases.number(Part.FORWARD if self.is_whole else Part.DELIVER)

    @property
    def turns(self) -> bool:
        """Tell whether the step stops before its backward passes, for the caller's gradient."""
        return self.is_whole and self.table.trains

    def is_late(self, phase: int) -> bool:
        """Tell whether a phase runs behind the place where the step turns."""
        return self.turns and self.phases.of(phase)[0] is Part.BACKWARD

    def own(self, device: int) -> frozenset[int]:
        """The phases that a device runs."""
        return self._own.get(self._lane_of.get(device), self._own[None])

    def places(self, device: int) -> Mapping[int, float] | None:
        """The mean turn of each phase of a device with several stages; None for one with one."""
        return self._places.get(self._lane_of.get(device))

    @cached_property
    def _places(self) -> Mapping[int | None, Mapping[int, float]]:
        several = {lane for lane in self.table.lane_of if self.table.lane_of.count(lane) > 1}
        places: dict[int | None, dict[int, float]] = {}
        for lane in several:
            turns: dict[int, list[int]] = {}
            for turn, (phase, _) in enumerate(self._by_lane[lane]):
                turns.setdefault(phase, []).append(turn)
            places[lane] = {phase: sum(at) / len(at) for phase, at in turns.items()}
        return places

    @cached_property
    def _own(self) -> Mapping[int | None, frozenset[int]]:
        return {lane: frozenset(p for p, _ in runs) for lane, runs in self._by_lane.items()}

    @cached_property
    def _lane_of(self) -> Mapping[int, int]:
        return {device: lane for lane, devices in enumerate(self.lanes) for device in devices}

    @cached_property
    def _by_lane(self) -> Mapping[int | None, tuple[tuple[int, int], ...]]:
        number, micro_batches = self.phases.number, range(self.table.micro_batches)
        end = [(number(Part.DELIVER), micro_batch) for micro_batch in micro_batches]
        runs: dict[int | None, tuple[tuple[int, int], ...]] = {}
        for lane in (None, *range(len(self.lanes))):
            actions = () if lane is None else self.table.lanes[lane]
            middle = [(p, a.micro_batch) for a in actions for p in self.phases.run_by(a)]
            runs[lane] = (number(Part.SETUP), 0), *middle, *end, (number(Part.REDUCE), 0)
        return runs


@dataclass(frozen=True)
class StepOrder(RunOrder):
    """The order of a step with the phases of its nodes."""

    numbers: Mapping[str, int] = field(default_factory=dict)  #: Phase of each node, by name.
    #: The phases that run before each phase, of the same micro-batch, in every order that the data
    #: allow.
    before: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def is_before(self, phase: int, later: int, device: int) -> bool:
        """Tell whether a phase is before another of a micro-batch, by the data or on the device."""
        if phase in self.before[later]:
            return True
        place = {run: index for index, run in enumerate(self.runs(device))}
        return all(
            place.get((phase, micro_batch), len(place)) < place.get((later, micro_batch), -1)
            for micro_batch in range(self.table.micro_batches)
        )


def whole_batch_order(
    devices: int, *, trains: bool = False, nodes: Iterable[str] = ()
) -> StepOrder:
    """The order of a plan without a schedule: all devices run one stage, for the whole batch.

    Its tasks are of one phase, where results come before the backward pass; the programs of ranks
    have that pass as a phase of its own.
    """
    kinds = (ActionKind.FORWARD, *((ActionKind.FULL_BACKWARD,) if trains else ()))
    actions = tuple(Action(0, kind, 0) for kind in kinds)
    table = PipelineSchedule("whole batch", (0,), 1, (actions,))
    numbers = dict.fromkeys(nodes, Phases(1).number(Part.FORWARD))
    return StepOrder(table, (tuple(range(devices)),), is_whole=True, numbers=numbers)


def step_order(
    graph: Graph,
    placed: Sequence[PlacedNode],
    pipeline: Pipeline | None,
    units: Mapping[str, int] | None = None,
    devices: int = 1,
) -> StepOrder:
    """The order of a step; without a pipeline that of a whole batch on so many devices.

    With `units`, backward passes are split as if each unit (its number, by node) were a stage.

    Raises:
        PhaseError: The stages cannot run in micro-batches: they share some devices and not all, or
            one would have to run before its operands are made.
        PipelineScheduleError: The schedule does not serve these stages.
    """
    if pipeline is None:
        names = (p.node.name for p in placed)
        return whole_batch_order(devices, trains=bool(graph.backward), nodes=names)
    groups = _stage_devices(placed)
    lanes = tuple(dict.fromkeys(groups))
    lane_of = tuple(map(lanes.index, groups))
    for one, other in itertools.combinations(lanes, 2):
        if shared := set(one) & set(other):
            stages = groups.index(one), groups.index(other)
            raise PhaseError(
                f"stages {stages[0]} and {stages[1]} are on devices {numbers(one)} and "
                f"{numbers(other)}, which share device {min(shared)}: stages have the same "
                "devices, or none in common"
            )
    parts = _parts(graph, placed)
    edges = _edges(graph, placed, parts)
    table = _table(pipeline.schedule, pipeline.micro_batches, lane_of, edges)
    phases = Phases(len(groups), table.splits_backward)
    before = _phases_before(phases, edges)
    stage_of = {p.node.name: p.stage for p in placed}
    phase_of = {name: phases.number(parts[name], stage) for name, stage in stage_of.items()}
    if phases.splits:
        backward = {n for n, number in phase_of.items() if phases.of(number)[0] is Part.BACKWARD}
        weights = weight_nodes(graph, backward, units or stage_of)
        phase_of |= {name: phases.number(Part.WEIGHT, stage_of[name]) for name in weights}
    for node in (p.node for p in placed):
        now = phase_of[node.name]
        for producer in _producers(graph, node):
            made = phase_of[producer.name]
            if made != now and made not in before[now]:
                part, stage = phases.of(made)
                raise PhaseError(
                    f"{node.name!r} of stage {stage_of[node.name]} reads {producer.name!r}, "
                    f"which is in the {part} pass of stage {stage}: neither waits for the other"
                )
    return StepOrder(table, lanes, numbers=phase_of, before=before)


def _stage_devices(placed: Sequence[PlacedNode]) -> tuple[tuple[int, ...], ...]:
    devices: dict[int, set[int]] = {}
    for p in placed:
        devices.setdefault(p.stage, set()).update(p.mesh.devices)
    missing = sorted(set(range(max(devices) + 1)) - devices.keys())
    if missing:
        raise PhaseError(f"no node is of stage {missing[0]}, but of stage {max(devices)}")
    return tuple(tuple(sorted(devices[stage])) for stage in range(len(devices)))


@lru_cache(maxsize=64)
def _table(
    schedule: str | tuple[str, ...],
    micro_batches: int,
    lane_of: tuple[int, ...],
    edges: tuple[tuple[int, int], ...],
) -> PipelineSchedule:
    if isinstance(schedule, str):
        table = pipeline_schedule(schedule, lane_of, micro_batches, edges)
    else:
        table = from_csv("\n".join(schedule) + "\n")
    if table.lane_of != lane_of or table.micro_batches != micro_batches:
        raise PhaseError(
            f"the schedule's table has {table.micro_batches} micro-batches and stages on lanes "
            f"{', '.join(map(str, table.lane_of))}; the plan has {micro_batches}, and "
            f"lanes {', '.join(map(str, lane_of))}"
        )
    check(table, edges)
    return table


def _edges(
    graph: Graph, placed: Sequence[PlacedNode], parts: Mapping[str, Part]
) -> tuple[tuple[int, int], ...]:
    """Pairs of stages between which values pass, forward or backward, ascending."""
    stage = {p.node.name: p.stage for p in placed}
    edges = set()
    for node in (p.node for p in placed):
        for producer in _producers(graph, node):
            pair = stage[producer.name], stage[node.name]
            if parts[producer.name] is not parts[node.name] or pair[0] == pair[1]:
                continue
            if parts[node.name] in (Part.FORWARD, Part.BACKWARD):
                edge = pair if parts[node.name] is Part.FORWARD else pair[::-1]
                if edge[0] > edge[1] and node.attrs.get("role") == "next":
                    raise PhaseError(
                        f"{node.inputs[1]!r} is stored in stage {stage[node.name]} and its next "
                        f"contents are made in stage {stage[producer.name]}, which the next "
                        "micro-batch would wait for: keep them in one stage"
                    )
                if edge[0] > edge[1]:
                    ways = "lower", "higher"
                    ways = ways if parts[node.name] is Part.FORWARD else ways[::-1]
                    raise PhaseError(
                        f"{node.name!r} of stage {stage[node.name]} reads a value of "
                        f"{producer.name!r} of stage {stage[producer.name]}: values of the "
                        f"{parts[node.name]} pass go from {' stages to '.join(ways)} ones"
                    )
                edges.add(edge)
    return tuple(sorted(edges))


@once_a_graph
def fixed_nodes(graph: Graph) -> frozenset[str]:
    """Names of nodes that read no graph input and no stored value that micro-batches write."""
    changing = set(graph.inputs) | {
        node.inputs[1] for node in graph.nodes if node.attrs.get("role") == "next"
    }
    fixed = []
    for node in graph.nodes:
        if changing.isdisjoint(node.reads) and changing.isdisjoint(node.writes):
            fixed.append(node.name)
        else:
            changing.update(node.writes)
    return frozenset(fixed)


def have_equal_fixed_nodes(graph: Graph, other: Graph) -> bool:
    """Test whether the `fixed_nodes` of two graphs of one model give equal results.

    Those of graphs for micro-batches of other sizes may differ: a tensor of zeros as long as the
    micro-batch, or the reciprocal of its size.
    """
    fixed, others = fixed_nodes(graph), other.by_name

    def is_equal_constant(value: str) -> bool:
        one, another = graph.constants.get(value), other.constants.get(value)
        if one is None or another is None:
            return one is another
        return one == another and (one.weight or np.array_equal(one.load(), another.load()))

    return fixed == fixed_nodes(other) and all(
        _is_equal_node(node, others[node.name])
        and all(graph.types[value] == other.types[value] for value in node.writes)
        and all(map(is_equal_constant, node.reads))
        for node in graph.nodes
        if node.name in fixed
    )


def _is_equal_node(node: Node, other: Node) -> bool:
    """Test whether two nodes compute the same; those with subgraphs are not compared."""
    return (
        replace(node, attrs={}) == replace(other, attrs={})
        and node.attrs.keys() == other.attrs.keys()
        and all(
            not isinstance(attr, Graph)
            and type(attr) is type(other.attrs[name])
            and np.array_equal(attr, other.attrs[name])  # type: ignore[arg-type]
            for name, attr in node.attrs.items()
        )
    )


def _parts(graph: Graph, placed: Sequence[PlacedNode]) -> dict[str, Part]:
    """The part of a step in which each node runs, by name; split backward passes as one."""
    fixed, stage_of = fixed_nodes(graph), {p.node.name: p.stage for p in placed}
    home: dict[str, tuple[Placement, Part, int]] = {}
    parts: dict[str, Part] = {}
    for p in placed:
        part = parts[p.node.name] = _part(graph, p, fixed, home, stage_of)
        home.update((value, (at, part, p.stage)) for value, at in p.results())
    return parts


def _part(
    graph: Graph,
    p: PlacedNode,
    fixed: frozenset[str],
    home: Mapping[str, tuple[Placement, Part, int]],
    stage_of: Mapping[str, int],
) -> Part:
    """The part of a node.

    Another name of a value runs with the value if it is where the value is, or if stages above read
    it, whose backward passes run before that of its own.
    """
    node, row = p.node, row_of(p.node)
    role = node.attrs.get("role")
    if role == "gradient" and p.ins[0] is not None and node.inputs[0] not in graph.inputs:
        stored, made_by = p.ins[0].sharding, home.get(node.inputs[0])
        is_as_large = not stored.axes or (
            made_by is not None
            and bool(made_by[0].sharding.partial)
            and made_by[0].sharding.dims == stored.dims
        )
        # Else it comes with each micro-batch, as the gradient of the loss itself does, its sum
        # would be larger than what is stored, or no communication is saved.
        if is_as_large and (made_by is None or made_by[2] == p.stage):
            return Part.REDUCE
    made = [(at, *home[value]) for value, at in p.operands() if value in home]
    if any(part is Part.REDUCE for _, _, part, _ in made):
        return Part.REDUCE  # the optimizer's step, for which gradients were added up
    if node.name in fixed and all(
        part is Part.SETUP and (before == at or set(before.mesh.devices) != set(at.mesh.devices))
        for at, before, part, _ in made
    ):
        return Part.SETUP
    if row.again and len(made) == 1:
        at, before, part, stage = made[0]
        readers = {stage_of[r.name] for value in node.writes for r in graph.consumers[value]}
        if stage == p.stage and (at == before or readers - {stage}):
            return part
    return Part.BACKWARD if node.name in graph.backward else Part.FORWARD


def _producers(graph: Graph, node: Node) -> Iterator[Node]:
    return (graph.producers[value] for value in node.reads if value in graph.producers)


def weight_nodes(
    graph: Graph, backward: Collection[str], units: Mapping[str, int]
) -> frozenset[str]:
    """The backward nodes that no other unit waits for, whose gradients are of weights."""
    awaited: set[str] = set()
    weights = set()
    for node in reversed(graph.nodes):
        if node.name not in backward:
            continue
        readers = [reader for value in node.writes for reader in graph.consumers[value]]
        is_awaited = node.name in awaited or any(
            reader.name in backward and units[reader.name] != units[node.name] for reader in readers
        )
        if is_awaited:
            awaited.update(producer.name for producer in _producers(graph, node))
        else:
            weights.add(node.name)
    return frozenset(weights)


def _phases_before(
    phases: Phases, edges: Sequence[tuple[int, int]]
) -> Mapping[int, frozenset[int]]:
    """The phases that every schedule runs before each phase, of the same micro-batch."""
    direct: dict[int, set[int]] = {}
    number = phases.number
    for stage in range(phases.stages):
        forward, backward = number(Part.FORWARD, stage), number(Part.BACKWARD, stage)
        direct[forward] = {number(Part.SETUP)}
        direct[backward] = {forward}
        direct[number(Part.WEIGHT, stage)] = {backward}
    for source, target in edges:
        direct[number(Part.FORWARD, target)].add(number(Part.FORWARD, source))
        direct[number(Part.BACKWARD, source)].add(number(Part.BACKWARD, target))
    direct[number(Part.DELIVER)] = set(direct)
    direct[number(Part.REDUCE)] = set(direct)
    closed: dict[int, frozenset[int]] = {number(Part.SETUP): frozenset()}
    for phase in sorted(direct):
        closed[phase] = frozenset(direct[phase]).union(
            *(closed[earlier] for earlier in direct[phase])
        )
    return closed
