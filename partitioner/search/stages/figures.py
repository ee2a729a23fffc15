"""Figures of a graph that is cut into stages: seconds and bytes of every stretch of its order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.equal_devices.classes import representatives
from partitioner.cost_model.evaluate import observed_schedule
from partitioner.cost_model.memory.lifetimes import HEADROOM_PERCENT, with_headroom
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import is_stored
from partitioner.ir.phases import fixed_nodes, weight_nodes
from partitioner.ir.pipeline.actions import PipelineSchedule
from partitioner.ir.plan import NodePlan, Pipeline, PlacedNode, Plan, resolve
from partitioner.ir.program import CommKind
from partitioner.rewrites.staging import changing_nodes, stages_of_all
from partitioner.search.stages.stage_lives import Floats, LaneRuns, StageLives
from partitioner.solver.stages.cut import State, least_cuts

Ints = npt.NDArray[np.int64]

#: Positions between which stages are cut at most, before their ends are moved.
MAX_POSITIONS = 160
#: Relative gap at which the search of the bound ends, and the error that its sums may have.
BOUND_GAP, ROUNDING = 1e-6, 1e-12
FORWARD, INPUT, WEIGHT, ONCE = range(4)  #: Parts of a stage's work.


@dataclass(frozen=True)
class Sharding:
    """A plan of the whole graph on one mesh."""

    graph: Graph  #: The graph of a micro-batch, without offers.
    plan: Plan  #: A plan on the first devices of the cluster.

    @classmethod
    def on_one(cls, graph: Graph, cluster: Cluster) -> Sharding:
        """All nodes of a graph on the first device."""
        nodes = {node.name: NodePlan(0) for node in graph.nodes}
        groups = (DeviceMesh.single(0),)
        return cls(graph, Plan(graph.digest, cluster.first(1).to_data(), groups, nodes))

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return max(mesh.size() for mesh in self.plan.groups)


@dataclass(frozen=True, eq=False)
class StageFigures:
    """Seconds and bytes of a sharding, by its units: the nodes that are cut, in order."""

    sharding: Sharding
    cluster: Cluster  #: All devices.
    micro_batches: int = 1  #: Micro-batches of a step.
    #: The devices of each stage, if they are pinned: they are the lanes of the bound then.
    groups: tuple[tuple[int, ...], ...] = ()
    #: The devices whose seconds are counted, of one lane; None for the first ones of the cluster.
    specs: tuple[DeviceSpec, ...] | None = None
    #: Remembers reshards on these devices; None if it is of no other figures.
    resharder: Resharder | None = field(default=None, repr=False)
    _known_lives: dict[bool, StageLives] = field(default_factory=dict, init=False, repr=False)
    _of_specs: dict[tuple[DeviceSpec, ...], StageFigures] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def lanes(self) -> int:
        """Number of groups of devices."""
        return len(self.cluster) // self.sharding.size

    @property
    def lane_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group."""
        size = self.sharding.size
        return tuple(
            tuple(range(first, first + size)) for first in range(0, self.lanes * size, size)
        )

    def on(self, devices: Sequence[int]) -> StageFigures:
        """The figures with the seconds of these devices, as many as those of the mesh, in order.

        They talk over the links of the first ones.
        """
        specs = tuple(self.cluster.devices[device] for device in devices)
        if specs == self._cluster.devices:
            return self
        if specs not in self._of_specs:
            self._of_specs[specs] = replace(self, specs=specs, resharder=None)
        return self._of_specs[specs]

    @cached_property
    def of_lanes(self) -> tuple[StageFigures, ...]:
        """The figures with the seconds of each lane: one object for lanes of equal devices."""
        return tuple(map(self.on, self.groups or self.lane_devices))

    @cached_property
    def paces(self) -> Floats:
        """Seconds that the nodes take on each lane, as parts of those that they take here."""
        own_s = float(self.loads.sum())
        if not own_s:
            return np.ones(self.lanes)
        return np.array([float(lane.loads.sum()) / own_s for lane in self.of_lanes])

    @cached_property
    def _cluster(self) -> Cluster:
        """The devices whose seconds are counted."""
        first = self.cluster.first(self.sharding.size)
        return first if self.specs is None else replace(first, devices=self.specs)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Names of the nodes that are cut, in order."""
        return tuple(node.name for node in changing_nodes(self.sharding.graph))

    @cached_property
    def unit_of(self) -> Mapping[str, int]:
        """The unit that each node goes with."""
        numbers = {name: unit for unit, name in enumerate(self.units)}
        return stages_of_all(self.sharding.graph, numbers)

    def least_s(self, table: PipelineSchedule | None = None) -> float:
        """No cut of this sharding takes fewer seconds a step, in the order of a schedule if given.

        The nodes that every micro-batch runs are on the devices, evenly at best, and each
        micro-batch takes the longest path of them. If each lane has one stage, a stage waits for
        the first micro-batch to come to it and, behind its last backward pass, the stages below
        have theirs to run. Communications are not counted.
        """
        done = self._done_s(self.sharding.graph.nodes)
        least_s = max(least_of_nodes(self.of_lanes), *done.values(), 0.0)
        if table is None or len(table.lane_of) != self.lanes or len({*table.lane_of}) != self.lanes:
            return least_s
        # A stage from position a to b waits head(a) seconds at first, is busy for those of all
        # micro-batches between a and b, and tail(a) pass behind its last backward pass. In split
        # schedules the weight gradients may fill the tail.
        head, tail = self._waits
        forward, inputs, weights = self._unit_s
        sums = np.concatenate(([0.0], np.cumsum(forward + inputs + weights)))
        if table.splits_backward:
            least_s = max(least_s, self._least_step(sums, head))
            sums = np.concatenate(([0.0], np.cumsum(forward + inputs)))
        return max(least_s, self._least_step(sums, head + tail))

    def device_seconds(self, weight: Mapping[DeviceSpec, float]) -> Mapping[str, float]:
        """Weighed seconds of all devices of each node that every micro-batch runs, by name."""
        equals, specs = Counter(self._observed[1].values()), self._cluster.devices
        weights = {device: equals[device] * weight[specs[device]] for device in equals}
        return {
            name: sum(seconds * weights[device] for device, seconds in own.items())
            for name, own in self.node_s.items()
        }

    @cached_property
    def busy_s(self) -> Mapping[DeviceSpec, float]:
        """Seconds of the nodes that every micro-batch runs, of the busiest device of each kind."""
        busy: Counter[int] = Counter()
        for own in self.node_s.values():
            busy.update(own)
        kinds: dict[DeviceSpec, float] = {}
        for device, seconds in busy.items():
            spec = self._cluster.devices[device]
            kinds[spec] = max(seconds, kinds.get(spec, 0.0))
        return kinds

    def _least_step(self, sums: Floats, waits: Floats) -> float:
        """The least T with a cut whose stages a to b all have waits(a) + load(a, b) <= T.

        After so many stages all positions up to the farthest one count as reached.
        """
        ahead = np.maximum.accumulate(sums[:-1] - waits / self.micro_batches)

        def reaches(step_s: float) -> bool:
            end = 0
            for _ in range(self.lanes):
                farthest = step_s / self.micro_batches + ahead[min(end, len(ahead) - 1)]
                end = int(np.searchsorted(sums, farthest * (1 + ROUNDING), side="right")) - 1
            return end >= len(sums) - 1

        low, high = 0.0, float(self.micro_batches * sums[-1] + waits.max(initial=0.0))
        while high - low > BOUND_GAP * high:
            middle = (low + high) / 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return low

    @cached_property
    def _unit_s(self) -> Floats:
        """Least seconds of the nodes of each unit that all devices run: forward, input, weight."""
        graph, weights = self.sharding.graph, self._weights
        seconds = np.zeros((3, len(self.units)))
        for name in self._everywhere & self._least_node_s.keys():
            part = FORWARD if name not in graph.backward else WEIGHT if name in weights else INPUT
            seconds[part, self.unit_of[name]] += self._least_node_s[name]
        return seconds

    @cached_property
    def _everywhere(self) -> frozenset[str]:
        """The nodes that all devices run: each waits for its part of what other stages send."""
        groups = self.sharding.plan.groups
        sizes = ((name, groups[at.group].size()) for name, at in self.sharding.plan.nodes.items())
        return frozenset(name for name, size in sizes if size == self.sharding.size)

    @cached_property
    def _waits(self) -> tuple[Floats, Floats]:
        """Seconds before a unit's forward pass, and behind its backward pass, in lower units.

        Both are the longest paths of nodes. Shape (units,).
        """
        graph, unit_of, count = self.sharding.graph, self.unit_of, len(self.units)
        nodes = [node for node in graph.nodes if node.name not in graph.backward]
        done, head, tail = self._done_s(nodes), np.zeros(count), np.zeros(count)
        for node in nodes:
            if node.name not in self._everywhere:
                continue
            unit = unit_of[node.name]
            for value in node.reads:
                made = graph.producers.get(value)
                if made is not None and unit_of[made.name] < unit:
                    head[unit] = max(head[unit], done[value])
        left: dict[str, float] = {}  # by backward node, itself included
        for node in reversed(graph.nodes):
            if node.name not in graph.backward:
                continue
            unit = unit_of[node.name]
            readers = {r.name: unit_of[r.name] for v in node.writes for r in graph.consumers[v]}
            longest = max((left[name] for name in readers), default=0.0)
            left[node.name] = longest + self._least_node_s.get(node.name, 0.0)
            lower = (name for name, at in readers.items() if at < unit)
            seconds = (left[name] for name in lower if name in self._everywhere)
            tail[unit] = max(tail[unit], *seconds, 0.0)
        return head, tail

    def _done_s(self, nodes: Iterable[Node]) -> Mapping[str, float]:
        """Seconds of the longest path to each value, of nodes that every micro-batch runs."""
        done: dict[str, float] = {}
        for node in nodes:
            begin = max((done.get(value, 0.0) for value in node.reads), default=0.0)
            end = begin + self._least_node_s.get(node.name, 0.0)
            done.update(dict.fromkeys(node.writes, end))
        return done

    @property
    def tasks(self) -> Schedule:
        """The tasks of a step of micro-batches on one mesh: of one device of each class."""
        return self._observed[0]

    @cached_property
    def _observed(self) -> tuple[Schedule, Mapping[int, int]]:
        return self._observe("1f1b" if self.sharding.graph.backward else "forward")

    def _observe(
        self, name: str, units: Mapping[str, int] | None = None
    ) -> tuple[Schedule, Mapping[int, int]]:
        resharder, pipeline = self._resharder, Pipeline(name, self.micro_batches)
        graph, nodes, first = self.sharding.graph, self._placed, self._representatives
        return observed_schedule(
            graph, nodes, resharder.cluster, pipeline, resharder=resharder, units=units, first=first
        )

    @cached_property
    def _placed(self) -> tuple[PlacedNode, ...]:
        return resolve(self.sharding.graph, self.sharding.plan)

    @cached_property
    def _resharder(self) -> Resharder:
        """The reshards on the devices whose seconds are counted."""
        known, size = self.resharder, self.sharding.size
        if known is not None and len(known.cluster) == size:
            return known
        return Resharder(self._cluster)

    @cached_property
    def _representatives(self) -> Mapping[int, int]:
        graph, resharder = self.sharding.graph, self._resharder
        return representatives(graph, self._placed, resharder.cluster, resharder)

    @cached_property
    def loads(self) -> Floats:
        """Seconds of each unit's forward pass, input gradients, weight gradients and once a step.

        The first three are of one micro-batch; all are of the busiest device. Shape (4, units).
        """
        graph, order = self.sharding.graph, self.tasks.order
        row = {device: index for index, device in enumerate(self.tasks.devices)}
        loads, weights = np.zeros((len(row), 4, len(self.units))), self._weights
        for task in self.tasks.tasks:
            if (name := task.of_node) not in self.unit_of:
                continue
            part = FORWARD if name not in graph.backward else WEIGHT if name in weights else INPUT
            part = ONCE if order.phases.is_once(task.phase) else part
            for device, seconds in task.devices.items():
                loads[row[device], part, self.unit_of[name]] += seconds
        return np.asarray(loads.max(axis=0))

    @cached_property
    def _weights(self) -> frozenset[str]:
        """Backward nodes that no other unit waits for."""
        graph = self.sharding.graph
        return weight_nodes(graph, graph.backward, self.unit_of)

    @cached_property
    def node_s(self) -> Mapping[str, Mapping[int, float]]:
        """Seconds of the nodes that every micro-batch runs, on one device of each class."""
        fixed, order = fixed_nodes(self.sharding.graph), self.tasks.order
        once = (name for name, phase in order.numbers.items() if order.phases.is_once(phase))
        left_out = {*fixed, *once}
        return {
            task.placed.node.name: task.devices
            for task in self.tasks.tasks
            if task.placed is not None and task.devices and task.placed.node.name not in left_out
        }

    @cached_property
    def _least_node_s(self) -> Mapping[str, float]:
        """Seconds of these nodes on the device that is fastest at each, of all lanes."""
        least: dict[str, float] = {}
        for lane in dict.fromkeys(self.of_lanes):
            for name, own in lane.node_s.items():
                least[name] = min(least.get(name, math.inf), *own.values())
        return least

    # Sums up to each position ----------------------------------------------------------------

    @cached_property
    def load_sums(self) -> Floats:
        """Seconds by part before each position; shape (4, units + 1)."""
        return np.concatenate((np.zeros((4, 1)), np.cumsum(self.loads, axis=1)), axis=1)

    def lives(self, *, splits: bool) -> StageLives:
        """The tensors of a step; those of one whose backward passes are split are other ones.

        There each unit's backward pass is split: a stage of several is split at its lowest.
        """
        if splits not in self._known_lives:
            tasks = self._observe("zb1", self.unit_of)[0] if splits else self.tasks
            # Collectives of several lanes do not travel together.
            tasks = replace(tasks, buckets=()) if self.lanes > 1 else tasks
            lives = StageLives.of(self.sharding.graph, self.unit_of, tasks)
            self._known_lives[splits] = lives
        return self._known_lives[splits]

    @cached_property
    def made_bytes(self) -> Mapping[str, int]:
        """Bytes of each value as its node makes it, on the device that makes most."""
        most: dict[str, int] = {}
        for task in self.tasks.tasks:
            for _, (value, _), nbytes in task.writes if task.placed is not None else ():
                most[value] = max(nbytes, most.get(value, 0))
        return most

    @cached_property
    def crossing(self) -> Floats:
        """Bytes that a device sends over each position in the forward pass, as values lie."""
        graph, count, made_bytes = self.sharding.graph, len(self.units), self.made_bytes
        changes = np.zeros(count + 2)
        for value, node in graph.producers.items():
            if node.name in graph.backward or is_stored(node):
                continue
            made = self.unit_of[node.name]
            readers = (r.name for r in graph.consumers[value] if r.name not in graph.backward)
            last = max((self.unit_of[name] for name in readers), default=made)
            if last > made:
                nbytes = made_bytes.get(value, 0)
                changes[made + 1] += nbytes
                changes[last + 1] -= nbytes
        return np.cumsum(changes)[: count + 1]

    @cached_property
    def messages(self) -> Floats:
        """Seconds of the messages at each position, and those that compute does not hide."""
        if self.lanes == 1:
            return np.zeros((2, len(self.units) + 1))
        level = self.cluster.level((0, len(self.cluster) - 1))
        whole = np.array([level.message_s + level.transfer_s(float(n)) for n in self.crossing])
        return np.stack((whole, (1 - level.hidden_share(CommKind.SEND, 2)) * whole))

    @cached_property
    def open(self) -> npt.NDArray[np.bool_]:
        """Tell whether a stage may end at each position.

        None may between the first node that reads a stored value which every micro-batch writes and
        the node that makes its next contents: the next micro-batch reads them.
        """
        graph, is_open = self.sharding.graph, np.ones(len(self.units) + 1, np.bool_)
        for node in graph.nodes:
            if node.attrs.get("role") != "next":
                continue
            readers = (reader.name for reader in graph.consumers[node.inputs[1]])
            first = min(self.unit_of[name] for name in readers if name not in graph.backward)
            made = graph.producers.get(node.inputs[0])
            if made is not None:
                is_open[first + 1 : self.unit_of[made.name] + 1] = False
        return is_open

    @cached_property
    def positions(self) -> Ints:
        """Positions where stages may end: of each window, where the fewest bytes cross."""
        count = len(self.units)
        windows = max(1, min(count, MAX_POSITIONS))
        edges = [1 + round(index * (count - 1) / windows) for index in range(windows + 1)]
        crossing = np.where(self.open, self.crossing, math.inf)
        inner = {
            first + int(np.argmin(crossing[first:last]))
            for first, last in pairwise(edges)
            if last > first
        }
        inner = {position for position in inner if self.open[position]}
        return np.array(sorted({0, *inner, count}), np.int64)

    # Cuts ------------------------------------------------------------------------------------

    def between(self, at: Ints, lane: StageFigures | None = None) -> Floats:
        """Seconds of a stage from each position to each, infinite if it has no node.

        A message takes as long on any lane.
        """
        sums = (lane or self).load_sums[:ONCE].sum(0)[at]
        sent = 2 * self.messages[1][at]
        sent[0] = sent[-1] = 0.0
        loads = sums[None, :] - sums[:, None] + sent[:, None] + sent[None, :]
        loads[np.tril_indices(len(at))] = math.inf
        return np.asarray(loads)

    def balanced(
        self,
        held: Sequence[int],
        lane_of: Sequence[int],
        lost_s: Callable[[Ints, Floats], Floats] | None = None,
    ) -> tuple[int, ...] | None:
        """Ends of stages, exclusive, of the least largest load; None if none is within memory.

        A lane of several stages has its memory divided by what they hold, as if all lanes stored
        equally much.

        Args:
            held: Micro-batches in flight at each stage; 0 where memory does not count.
            lost_s: Gives the seconds that stretches between positions lose to keep so many bytes
                less of a micro-batch; None if they keep all.
        """
        at = self.positions
        count = len(at) - 1
        resident, saved = (sums[at] for sums in self.lives(splits=False).sums)
        rest = resident[None, :] - resident[:, None]
        flying = with_headroom(np.maximum(saved[None, :] - saved[:, None], 0).astype(np.int64))
        known: dict[tuple[tuple[DeviceSpec, ...], int, int, int], int] = {}
        by_stage: list[Floats] = []
        steps: dict[State, list[tuple[State, int]]] = {(0,): []}
        for stage, flight in enumerate(held):
            number = lane_of[stage]
            lane = [other for other, of in enumerate(lane_of) if of == number]
            specs = tuple(self.cluster.devices[device] for device in self.lane_devices[number])
            key = specs, flight, len(lane), sum(held[other] for other in lane)
            if key not in known:
                known[key] = len(by_stage)
                limit = min(device.memory_bytes for device in specs)
                between = self.between(at, self.of_lanes[number])
                if len(lane) == 1:
                    over = rest + flight * flying - limit
                else:
                    room = limit - resident[-1] / self.lanes
                    over = flight * flying - room * flight / max(key[3], 1)
                lost = np.zeros_like(between)
                if flight and lost_s is not None:
                    lost = lost_s(at, over / flight * 100 / HEADROOM_PERCENT)
                    lost = lost * np.where(np.isinf(lost), 1.0, self.paces[number])
                elif flight:
                    lost = np.where(over > 0, math.inf, 0.0)
                by_stage.append(between + lost)
            steps[(stage + 1,)] = [((stage,), known[key])]
        cuts = least_cuts(by_stage, steps)
        if math.isinf(cuts.load_s[(len(held),)][count]):
            return None
        return tuple(int(at[stop]) for _, stop, _ in cuts.stages((len(held),)))

    def over_bytes(
        self, ends: Sequence[int], lanes: Sequence[LaneRuns], limits: Sequence[float]
    ) -> float:
        """Bytes by which lanes are above their limits, in all."""
        bounds, lives = tuple(pairwise((0, *ends))), self.lives(splits=lanes[0].phases.splits)
        most = (float(lives.lane(runs, bounds).at(runs).max()) for runs in lanes)
        return sum(max(0.0, held - limit) for held, limit in zip(most, limits, strict=True))


def least_of_nodes(lanes: Iterable[StageFigures]) -> float:
    """No step in which each node runs as in one of these figures of one graph takes less.

    No device is busy for longer than the step. So the sum of what all are, of each kind weighed by
    its speed, is at most that of the weights times the step; and each node is where that takes
    least.
    """
    each = [*dict.fromkeys(lanes)]
    cluster, busy_s = each[0].cluster, dict[DeviceSpec, float]()
    for figures in each:
        for spec, seconds in figures.busy_s.items():
            busy_s[spec] = max(seconds, busy_s.get(spec, 0.0))
    known = [seconds for seconds in busy_s.values() if seconds]
    if not known:
        return 0.0
    weight = {
        spec: known[0] / busy_s[spec] if busy_s.get(spec) else 1.0 for spec in cluster.devices
    }
    of_nodes = [figures.device_seconds(weight) for figures in each]
    names = set.intersection(*map(set, of_nodes))
    least = (min(own[name] for own in of_nodes) for name in sorted(names))
    return each[0].micro_batches * sum(least) / sum(weight[spec] for spec in cluster.devices)
