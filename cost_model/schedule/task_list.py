"""A resolved plan as tasks in one global order: nodes, and the communications between them.

The search prices with the same reshards, the referee sums these tasks, the simulator times
them and the lowering turns them into rank programs, so all four describe the same execution.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import adding_seconds, node_estimates, stored_bytes
from partitioner.cost_model.prices.reshard import Hop, Reshard, Resharder, beside_compute
from partitioner.cost_model.profiles.forms import stores_parts
from partitioner.cost_model.schedule.buckets import (
    Bucket,
    as_they_travel,
    in_buckets,
    in_messages,
    unlike_parts,
)
from partitioner.cost_model.schedule.tasks import Key, LocalKey, NeededPart, Task
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh, copies_on
from partitioner.ir.ops import is_stored, row_of
from partitioner.ir.phases import Part, StepOrder, step_order, whole_batch_order
from partitioner.ir.plan import Pipeline, PlacedNode, devices_of
from partitioner.ir.types import dense_bytes

#: Bytes that a block loads from the file of its constants in a second, packing them for kernels:
#: 0.8 to 0.9e9 at best for blocks of 25 MB, measured on a busy CPU (docs/concepts/blocks.md).
LOAD_BYTES_PER_S = 8e8


@dataclass(frozen=True)
class Schedule:
    """All tasks in the global order."""

    tasks: tuple[Task, ...]  #: In the order in which every device runs its share.
    feeds: Mapping[LocalKey, int]  #: Bytes of each local part of a graph input.
    #: Bytes of each local part of a constant, and of each block of zeros.
    residents: Mapping[LocalKey, int]
    output_keys: Mapping[str, Key]  #: Placement of each graph output.
    #: The residents that are zeros instead of a part of their value.
    zeros: frozenset[LocalKey] = frozenset()
    #: The residents that are held for some blocks alone (`Graph.blocks`), and these blocks.
    loads: Mapping[LocalKey, frozenset[int]] = field(default_factory=dict)
    #: Positions of the first and the last task of each block on each device, by (device, block).
    blocks: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    #: The order of phases and micro-batches. The tasks are of one micro-batch, and the global order
    #: is that of the tasks of each phase.
    order: StepOrder = field(default_factory=partial(whole_batch_order, 1))
    #: Collectives that travel together, by `Comm.bucket`; their members are positions of tasks.
    buckets: tuple[Bucket, ...] = ()

    @cached_property
    def outputs(self) -> frozenset[LocalKey]:
        """Local tensors of the graph outputs, held to the end."""
        keys = self.output_keys.values()
        return frozenset((device, key) for key in keys for device in key[1].mesh.devices)

    def times(self, task: Task) -> int:
        """The number of times that a task runs in a request or step."""
        return 1 if self.order.phases.is_once(task.phase) else self.order.table.micro_batches

    def runs(self, device: int) -> Sequence[int]:
        """The phases that a device runs, in order."""
        return [phase for phase, _ in self.order.runs(device)]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that a task occupies, ascending."""
        return tuple(sorted({device for task in self.tasks for device in task.devices}))


class UnequalWorkError(Exception):
    """Devices of one class do not run the same tasks in the same order."""


def schedule(
    graph: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    resharder: Resharder | None = None,
    everywhere: frozenset[str] = frozenset(),
    observed: frozenset[int] | None = None,
    pipeline: Pipeline | None = None,
    units: Mapping[str, int] | None = None,
) -> Schedule:
    """Insert the communications that a resolved plan needs and price every task.

    Every device gets the outputs in `everywhere` whole, at the end of the forward pass; the cost of
    a plan does not include that. The tasks are those of the `observed` devices (see
    `classes.representatives`), of all if None. `units` are as of `step_order`.

    Raises:
        UnequalWorkError: Tasks of other devices would change the order of those of `observed`.
        PhaseError, PipelineScheduleError: The plan's stages cannot run in micro-batches.
    """
    resharder, beside = resharder or Resharder(cluster), beside_compute(graph)
    cluster = cluster.beside(devices_of(placed))
    order, in_parts = step_order(graph, placed, pipeline, units, len(cluster)), stores_parts(placed)
    placed = sorted(placed, key=lambda node: order.numbers[node.node.name])
    needed = dict[Key, NeededPart]()
    while True:
        due = {key: by.phase for key, by in needed.items()}
        builder = _Builder(
            graph, cluster, resharder, everywhere, observed, beside, order, in_parts, due
        )
        tasks = builder.run(placed)
        if not builder.early:
            return tasks
        for key, by in builder.early.items():  # each has a phase that was not known to read it
            needed[key] = by if key not in needed else needed[key].and_by(by)


class _Made(NamedTuple):
    """Where a value comes to be at a placement."""

    anchor: int
    phase: int
    hops: int  #: See `Task.hops`.


@dataclass
class _Builder:
    """Grows a schedule node by node.

    A task is anchored behind a node: a communication goes as early as the receiving devices are
    free.
    """

    graph: Graph
    cluster: Cluster
    resharder: Resharder
    everywhere: frozenset[str]
    observed: frozenset[int] | None
    beside: frozenset[str]
    order: StepOrder
    in_parts: bool
    #: The phases in which parts are fetched that a later phase than the first reader's is to have
    #: earlier.
    due: Mapping[Key, int] = field(default_factory=dict)
    early: dict[Key, NeededPart] = field(default_factory=dict)  # read before they are fetched
    tasks: list[tuple[int, int, Task]] = field(default_factory=list)  # (anchor, 0 for a node, _)
    feeds: dict[LocalKey, int] = field(default_factory=dict)
    residents: dict[LocalKey, int] = field(default_factory=dict)
    zeros: set[LocalKey] = field(default_factory=set)
    home: dict[str, Placement] = field(default_factory=dict)
    origin: dict[Key, _Made] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)  # device -> anchor of its last task
    readers: dict[LocalKey, set[int | None]] = field(default_factory=dict)  # blocks, of constants
    meshes: dict[DeviceMesh, tuple[int, ...]] = field(default_factory=dict)  # observed devices
    steps: dict[Reshard, Sequence[Hop]] = field(default_factory=dict)  # of observed devices
    sizes: dict[tuple[Placement, str], Mapping[int, int]] = field(default_factory=dict)

    def run(self, placed: Sequence[PlacedNode]) -> Schedule:
        delivered: dict[str, Key] = {}
        end = len(placed)
        backward = self.graph.backward if self.order.turns else frozenset()
        numbers = self.order.numbers
        turn = next(  # before it, results are delivered
            (
                index
                for index, p in enumerate(placed)
                if p.node.name in backward or numbers[p.node.name] > self.order.delivery
            ),
            end,
        )
        for index, node in enumerate(placed):
            if index == turn:
                delivered.update(self._deliver(index))
            self._node(index, node)
        if turn == end:
            delivered.update(self._deliver(end))
        for value in self.graph.outputs:
            if value not in delivered:
                at = self.home[value].without_partial()
                phase = self.origin[(value, self.home[value])].phase
                delivered[value] = self._fetch(value, at, end, value, phase)
        tasks = [task for _, _, task in sorted(self.tasks, key=lambda entry: entry[:2])]
        # A communication of a later phase comes early by its anchor: what it writes is not held
        # while earlier phases run.
        tasks = in_messages(sorted(tasks, key=lambda task: task.phase), self.cluster)
        loads = {  # the blocks that hold each constant that only blocks read
            key: frozenset(block for block in blocks if block is not None)
            for key, blocks in self.readers.items()
            if None not in blocks
        }
        tasks, blocks = self._in_blocks(tasks, loads)
        buckets: tuple[Bucket, ...] = ()
        is_of_one_mesh = len({node.mesh.devices for node in placed}) == 1
        if is_of_one_mesh and executor_of(self.graph).joins:
            tasks, buckets = in_buckets(tasks, unlike_parts(tasks), self.graph.backward)
        return Schedule(
            self._numbered(as_they_travel(tasks, buckets, self.cluster)),
            self.feeds,
            self.residents,
            {value: delivered[value] for value in self.graph.outputs},
            frozenset(self.zeros),
            loads,
            blocks,
            self.order,
            buckets,
        )

    @staticmethod
    def _numbered(tasks: Iterable[Task]) -> tuple[Task, ...]:
        """The tasks, whose communications get their places among those that ranks run."""
        seq, numbered = itertools.count(), list[Task]()
        for task in tasks:
            place = -1 if task.returns else next(seq)
            comm = None if task.comm is None else task.comm.renamed(seq=place)
            numbered.append(task if comm is None else replace(task, comm=comm))
        return tuple(numbered)

    def _in_blocks(
        self, tasks: Sequence[Task], loads: Mapping[LocalKey, frozenset[int]]
    ) -> tuple[list[Task], Mapping[tuple[int, int], tuple[int, int]]]:
        """The tasks, and positions of the first and the last of each block on each device.

        The first of a block on a device has the seconds of loading the block's constants.
        """
        blocks: dict[tuple[int, int], tuple[int, int]] = {}
        for position, task in enumerate(tasks) if self.graph.blocks else ():
            block = None if task.placed is None else self.graph.blocks.get(task.name)
            if block is not None:
                for device in task.devices:
                    first, _ = blocks.get((device, block), (position, position))
                    blocks[device, block] = first, position
        loading: dict[tuple[int, int], float] = defaultdict(float)
        for key, of in loads.items():
            for block in of:
                loading[blocks[key[0], block][0], key[0]] += self.residents[key] / LOAD_BYTES_PER_S
        timed = list(tasks)
        for (position, device), more in loading.items():
            devices = dict(timed[position].devices)
            devices[device] = devices.get(device, 0.0) + more
            timed[position] = replace(timed[position], devices=devices)
        return timed, blocks

    def _deliver(self, index: int) -> Iterator[tuple[str, Key]]:
        delivered: list[Key] = []
        copies = copies_on(at.mesh for at in self.home.values())
        for value in self.graph.outputs:
            if value in self.everywhere:
                at = self.home[value].without_partial()
                self._fetch(value, at, index, value, self.order.delivery)
                self.home[value] = at
                whole = at.delivered(len(self.cluster), copies)
                delivered.append(self._fetch(value, whole, index, value, self.order.delivery))
                yield value, delivered[-1]
        phase = self.order.delivery
        for key in delivered:  # behind all that the pass computes, in turn
            reads = tuple((device, key) for device in self._observed_of(key[1].mesh))
            moment = Task(f"return {key[0]}", {}, reads, (), phase=phase, target_phase=phase)
            self._insert(index - 1, moment)

    def _node(self, index: int, placed: PlacedNode) -> None:
        name = placed.node.name
        phase = self.order.numbers[name]
        operands = placed.operands()
        keys = dict.fromkeys(self._fetch(value, at, index, name, phase) for value, at in operands)
        hops = max((self.origin[key].hops for key in keys if key in self.origin), default=0)
        writes = []
        stored = is_stored(placed.node)
        for value, at in placed.results():
            key = (value, at)
            self.home[value] = at
            self.origin[key] = _Made(index, phase, hops)
            for device, size in self._sizes(key).items():
                if stored:
                    dtype = self.graph.types[value].dtype
                    self.residents[(device, key)] = stored_bytes(
                        placed.node, dtype, size, at.sharding
                    )
                writes.append((device, key, 0 if stored else size))
        devices = self._observed_of(placed.mesh)
        estimates = node_estimates(
            self.graph, placed, self.cluster, devices, in_parts=self.in_parts
        )
        plain = {device: estimate.seconds for device, estimate in estimates.items()}
        seconds = self._with_sums(placed, phase, plain)
        reads = tuple((device, key) for device in devices for key in keys)
        task = Task(name, seconds, reads, tuple(writes), placed, None, phase, phase, hops, hops)
        self.tasks.append((index, 0, task))
        for device in devices:
            self.busy[device] = index

    def _with_sums(
        self, placed: PlacedNode, phase: int, seconds: Mapping[int, float]
    ) -> Mapping[int, float]:
        """Seconds in a step of micro-batches: each adds its gradients to those of the others.

        An update of a part of each micro-batch's sum has the step's seconds spread over micro-
        batches.
        """
        count = self.order.table.micro_batches
        if count == 1:
            return seconds
        is_update = placed.node.attrs.get("role") == "gradient"
        if is_update and not self.order.phases.is_once(phase):
            spread = {device: s / count for device, s in seconds.items()}
            return self._adding(placed.operands()[0], spread)
        for value, at in placed.results():
            if value in self._summed:
                seconds = self._adding((value, at), seconds)
        return seconds

    def _adding(self, key: Key, seconds: Mapping[int, float]) -> Mapping[int, float]:
        value, at = key
        sizes = at.local_bytes(self.graph.types[value].dtype)
        count, devices = self.order.table.micro_batches, self.cluster.devices
        return {
            device: s + adding_seconds(self.graph, value, sizes[device], devices[device], count)
            for device, s in seconds.items()
        }

    @cached_property
    def _summed(self) -> frozenset[str]:
        """The gradients that are summed over micro-batches before the step's last phase."""
        numbers, phases = self.order.numbers, self.order.phases
        return frozenset(
            node.inputs[0]
            for node in self.graph.nodes
            if node.attrs.get("role") == "gradient" and phases.is_once(numbers[node.name])
        )

    def _fetch(self, value: str, at: Placement, index: int, why: str, phase: int) -> Key:
        """The key of the value at a placement that a node of a phase reads; reshards it."""
        key, dtype = (value, at), self.graph.types[value].dtype
        if value in self.graph.constants:
            loads_blocks = executor_of(self.graph).loads_blocks
            self._reside(key, self.graph.blocks.get(why) if loads_blocks else None)
        elif value in self.home:
            before = (value, self.home[value])
            # the search prices whole batches by the name that is read
            is_original = key not in self.origin and not self.order.is_whole
            if is_original and before[1].mesh.members != at.mesh.members:
                before = self._original(value)
            made, reads = self.origin[before].phase, phase
            hops = self._hops_of(dtype, before[1], at)
            phase = self.due.get((before[0], at), phase)
            for hop in hops:
                after = (before[0], hop.after)
                if after not in self.origin:
                    by = self.due.get(after, phase)
                    self._hop(before, hop, index, why, self._phases(before, after, at, by))
                self._check_phase(after, why, reads if hop is hops[-1] else phase, made)
                before = after
            if before != key and key not in self.origin:
                self._rename(before, key, index)
        else:
            fed = (value, at.without_partial())
            self.feeds.update({(device, fed): size for device, size in self._sizes(fed).items()})
            self.origin.setdefault(fed, _Made(-1, 0, 0))
            if key not in self.origin:
                hop = self._hops_of(dtype, fed[1], at)[-1]
                self._hop(fed, hop, index, why, self._phases(fed, key, at, phase))
        return key

    def _hops_of(self, dtype: str, before: Placement, at: Placement) -> Sequence[Hop]:
        """The steps of a reshard, as far as they concern devices that are observed."""
        if self.observed is None:
            return self.resharder.hops(dtype, before, at)
        if before == at:
            return ()
        key = dtype, before, at
        if key not in self.steps:
            observed = frozenset((*self._observed_of(before.mesh), *self._observed_of(at.mesh)))
            low, real = self.resharder.lowest(*key)
            self.steps[key] = [hop.on(real, observed) for hop in low]
        return self.steps[key]

    def _reside(self, key: Key, block: int | None) -> None:
        partial = [axis for axis, _ in key[1].sharding.partial]
        points = dict(key[1].mesh.coords())
        for device, size in self._sizes(key).items():
            self.residents[(device, key)] = size
            self.readers.setdefault((device, key), set()).add(block)
            if any(points[device][axis] for axis in partial):
                self.zeros.add((device, key))

    def _hop(self, before: Key, hop: Hop, index: int, why: str, phases: tuple[int, int]) -> None:
        """Add one step of a reshard; `phases` are those of its sources and of its targets."""
        value, after = before[0], (before[0], hop.after)
        beside = value in self.beside
        anchor, _, hops = self.origin[before]
        phase, target_phase = phases
        is_move = before[1].mesh.members.isdisjoint(hop.after.mesh.members)
        sizes = self._sizes(after)
        for device in hop.zeros:
            self.residents[(device, after)] = sizes[device]
            self.zeros.add((device, after))
        if hop.has_more and not beside:
            targets_of_all = {d for p in hop.comms for d in self._observed(p.comm.targets())}
            if len({max(anchor, self.busy.get(d, -1)) for d in targets_of_all}) > 1:
                raise UnequalWorkError  # those that are not observed may have other anchors
        for priced in hop.comms:
            targets = self._observed(priced.comm.targets())
            if not beside:  # else no node waits for it before it is due
                anchor = max([anchor, *(self.busy.get(d, -1) for d in targets)])
            comm = priced.comm.renamed(
                source=value, target=value, phase=phase, target_phase=target_phase, why=why
            )
            seconds = priced.busy_seconds(beside=beside)
            whole = priced.whole_seconds(beside=beside)
            hidden = {d: more for d, s in seconds.items() if (more := whole[d] - s)}
            task = Task(
                f"{comm.kind} {value}",
                seconds,
                tuple((d, before) for d in sorted(self._observed(comm.sources()))),
                tuple((d, after, sizes[d]) for d in sorted(targets)),
                comm=comm,
                phase=phase,
                target_phase=target_phase,
                hops=hops,
                target_hops=hops + is_move,
                hidden=hidden,
                may_share=beside and priced.joined is not None,
            )
            self._insert(min(anchor, index - 1), task)
        anchor = min(anchor, index - 1)
        self._alias(before, after, hop.aliases, anchor, phase)
        self.origin[after] = _Made(anchor, target_phase, hops + is_move)

    def _phases(self, before: Key, after: Key, target: Placement, phase: int) -> tuple[int, int]:
        """Phases of the sources and the targets of a step of a reshard to `target`.

        A value that does not leave its devices is resharded in the phase that reads it; one that
        does is reduced where it is made, and sent for that phase; once a step if all micro-batches
        have the same, or if its sum over them is read.
        """
        origin = self.origin[before].phase
        held, then = before[1].mesh.members, after[1].mesh.members
        sums = self.order.phases.of(phase)[0] is Part.REDUCE
        if held == target.mesh.members or sums:
            return phase, phase
        stays = held == then or self.order.phases.is_once(origin)
        return origin, origin if stays else phase

    def _original(self, value: str) -> Key:
        """The value that a value is another name of, which other devices may have already."""
        producer = self.graph.producers[value]
        while row_of(producer).again and producer.inputs[0] in self.home:
            value = producer.inputs[0]
            producer = self.graph.producers[value]
        return value, self.home[value]

    def _rename(self, old: Key, new: Key, index: int) -> None:
        made = self.origin[old]
        made = made._replace(anchor=min(made.anchor, index - 1))
        self._alias(old, new, old[1].mesh.devices, made.anchor, made.phase)
        self.origin[new] = made

    def _alias(self, old: Key, new: Key, devices: Collection[int], anchor: int, phase: int) -> None:
        """Have the buffers of a value bear another key too, on the observed ones of devices."""
        if observed := sorted(self._observed(devices)):
            pairs = tuple(((d, new), (d, old)) for d in observed)
            reads = tuple(key for _, key in pairs)
            hops = self.origin[old].hops
            task = Task(
                f"alias {new[0]}", {}, reads, (), None, None, phase, phase, hops, hops, pairs
            )
            self._insert(anchor, task)

    def _check_phase(self, key: Key, why: str, phase: int, made: int) -> None:
        """Note a part that is fetched in a phase that may run later than one that reads it."""
        fetched = self.origin[key].phase
        if fetched == phase:
            return
        device = min(key[1].mesh.devices)
        if not self.order.is_before(fetched, phase, device):
            readers = frozenset((fetched, phase))
            by = NeededPart(why, key[0], self.order, device, made, readers)
            self.early[key] = by if key not in self.early else self.early[key].and_by(by)

    def _observed(self, devices: Collection[int]) -> Collection[int]:
        return devices if self.observed is None else self.observed.intersection(devices)

    def _observed_of(self, mesh: DeviceMesh) -> tuple[int, ...]:
        if mesh not in self.meshes:
            observed = self._observed(mesh.members)
            self.meshes[mesh] = tuple(device for device in mesh.devices if device in observed)
        return self.meshes[mesh]

    def _insert(self, anchor: int, task: Task) -> None:
        self.tasks.append((anchor, len(self.tasks) + 1, task))
        for device in task.devices:
            self.busy[device] = max(self.busy.get(device, -1), anchor)

    def _sizes(self, key: Key) -> Mapping[int, int]:
        at, dtype = key[1], self.graph.types[key[0]].dtype
        if (at, dtype) not in self.sizes:
            mesh, shape = at.mesh, at.sharding.local_shape
            self.sizes[at, dtype] = {
                device: dense_bytes(math.prod(shape(mesh, mesh.coord(device))), dtype)
                for device in self._observed_of(mesh)
            }
        return self.sizes[at, dtype]
