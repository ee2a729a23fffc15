"""A resolved plan as tasks in one global order: nodes, and the communications between them.

The search prices with the same reshards, the referee sums these tasks, the simulator times
them and the lowering turns them into rank programs, so all four describe the same execution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import bucket_seconds, comm_cost, whole_bytes
from partitioner.cost_model.prices.compute import NodePrices, adding_seconds, stored_bytes
from partitioner.cost_model.prices.overlap import beside_compute
from partitioner.cost_model.prices.reshard import Hop, PricedComm, Resharder
from partitioner.cost_model.profiles.forms import stores_parts
from partitioner.cost_model.schedule.buckets import Bucket, in_buckets
from partitioner.cost_model.schedule.tasks import Key, LocalKey, Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.ops.pieces import is_of_torch
from partitioner.ir.phases import Part, PhaseError, StepOrder, step_order
from partitioner.ir.plan import Pipeline, PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import item_bytes

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
    #: The order of phases and micro-batches; None for a plan without stages. Then the phase of a
    #: task is of `ir.phases`, its tasks are of one micro-batch, and the global order is that of
    #: the tasks of each phase.
    order: StepOrder | None = None
    #: Collectives that travel together, by `Comm.bucket`; their members are positions of tasks.
    buckets: tuple[Bucket, ...] = ()

    @cached_property
    def outputs(self) -> frozenset[LocalKey]:
        """Local tensors of the graph outputs, held to the end."""
        keys = self.output_keys.values()
        return frozenset((device, key) for key in keys for device in key[1].mesh.devices)

    def times(self, task: Task) -> int:
        """The number of times that a task runs in a request, or in a step of a plan with stages."""
        if self.order is None or self.order.phases.is_once(task.phase):
            return 1
        return self.order.table.micro_batches

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

    `placed` has the nodes in the plan's order. Every device of the cluster gets the outputs in
    `everywhere` whole, at the end of the forward pass if there is a backward pass; the cost of a
    plan does not include that. The tasks are those of the `observed` devices (see
    `classes.representatives`), of all if None. `pipeline` is that of the plan; `units` are as
    of `step_order`.

    Raises:
        UnequalWorkError: Tasks of other devices would change the order of those of `observed`.
        PhaseError, PipelineScheduleError: The plan's stages cannot run in micro-batches.
    """
    resharder, beside = resharder or Resharder(cluster), beside_compute(graph)
    cluster = cluster.beside(device for node in placed for device in node.mesh.devices)
    order = None if pipeline is None else step_order(graph, placed, pipeline, units)
    in_parts = stores_parts(placed)
    if order is not None:
        placed = sorted(placed, key=lambda node: order.numbers[node.node.name])
    needed = dict[Key, _Needed]()
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


def _in_messages(tasks: Sequence[Task], cluster: Cluster) -> list[Task]:
    """The tasks of a plan in stages; those that share a message have shares of its seconds.

    All that passes from a phase of a device to a phase of another one is one message, whose
    start-up is paid once.
    """
    by_phases: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for task in tasks:
        if task.comm is not None and task.phase != task.target_phase:
            by_phases[task.phase, task.target_phase].append(task)
    shares = {
        phases: _message_shares(some, cluster)
        for phases, some in by_phases.items()
        if len(some) > 1
    }
    return [
        task
        if task.comm is None or (task.phase, task.target_phase) not in shares
        else _scaled(task, shares[task.phase, task.target_phase])
        for task in tasks
    ]


def _message_shares(tasks: Sequence[Task], cluster: Cluster) -> Mapping[int, float]:
    """Seconds of communications in one message, over those of each by itself, by device."""
    nbytes: dict[tuple[int, int], int] = defaultdict(int)
    alone_s: defaultdict[int, float] = defaultdict(float)
    for task in tasks:
        assert task.comm is not None
        for transfer in task.comm.transfers:
            size = math.ceil(transfer.numel * item_bytes(task.comm.dtype))
            nbytes[transfer.source, transfer.target] += size
        for device, seconds in task.devices.items():
            alone_s[device] += seconds + task.hidden.get(device, 0.0)
    transfers = tuple(
        Transfer(source, target, (((0, size),),), (((0, size),),))
        for (source, target), size in nbytes.items()
    )
    ranks = tuple(sorted({rank for pair in nbytes for rank in pair}))
    joined_s = comm_cost(Comm(0, CommKind.SEND, ranks, "", "", "uint8", transfers), 0, cluster)
    return {
        device: min(1.0, joined_s.seconds[device] / seconds) if seconds else 1.0
        for device, seconds in alone_s.items()
    }


def _scaled(task: Task, shares: Mapping[int, float]) -> Task:
    """A task with a share of its seconds on each device."""
    return replace(
        task,
        devices={device: seconds * shares[device] for device, seconds in task.devices.items()},
        hidden={device: seconds * shares[device] for device, seconds in task.hidden.items()},
    )


def _as_they_travel(
    tasks: Sequence[Task], buckets: Sequence[Bucket], cluster: Cluster
) -> list[Task]:
    """The tasks, with the seconds that those which may share a bucket take as they travel.

    One in a bucket takes its share of what the bucket takes, as full as it is; the others travel
    alone. Members that a node waits for at once pay for themselves. The rest share what they add to
    such a bucket, of which nothing passes beside compute.
    """
    messages: dict[int, _Message] = {}
    for bucket in buckets:
        positions = [member.position for member in bucket.members]
        message = _Message.of([tasks[position] for position in positions])
        messages |= dict.fromkeys(positions, message)
    return [
        task if not task.may_share else _travelling(task, messages.get(position), cluster)
        for position, task in enumerate(tasks)
    ]


@dataclass(frozen=True)
class _Message:
    """Sum up the communications of a bucket.

    Attributes:
        shared_bytes: `whole_bytes` of those that share what it takes.
        paid_bytes: The same of those that a node waits for at once.
        paid_s: Seconds that these pay for themselves, by device; empty if there are none.
    """

    shared_bytes: float
    paid_bytes: float
    paid_s: Mapping[int, float]

    @classmethod
    def of(cls, members: Sequence[Task]) -> _Message:
        """Add up the members of a bucket."""
        nbytes: dict[bool, float] = {True: 0.0, False: 0.0}
        paid_s: dict[int, float] = defaultdict(float)
        for member in members:
            nbytes[member.may_share] += _whole_bytes(member)
            if not member.may_share:
                for device, seconds in member.devices.items():
                    paid_s[device] += seconds
        return cls(nbytes[True], nbytes[False], dict(paid_s))


def _travelling(task: Task, message: _Message | None, cluster: Cluster) -> Task:
    """A task with its seconds in the message of a bucket; None for one that is alone.

    It takes no less than it is priced at, which is the least that it may.
    """
    comm = task.comm
    assert comm is not None
    if message is None:
        travels_s = comm_cost(comm, _numel(task), cluster).seconds
    else:
        sizes = _whole_bytes(task), message.shared_bytes
        travels_s = {
            device: bucket_seconds(
                comm.kind,
                comm.ranks,
                *sizes,
                device,
                cluster,
                message.paid_bytes,
                message.paid_s.get(device, 0.0),
            )
            for device in task.devices
        }
    ratios = {}
    for device, seconds in task.devices.items():
        priced_s = seconds + task.hidden.get(device, 0.0)
        ratios[device] = max(1.0, travels_s[device] / priced_s) if priced_s else 1.0
    task = _scaled(task, ratios)
    if message is None or not message.paid_s:
        return task
    whole_s = {device: s + task.hidden.get(device, 0.0) for device, s in task.devices.items()}
    return replace(task, devices=whole_s, hidden={})


def _whole_bytes(task: Task) -> float:
    """`whole_bytes` of a communication."""
    assert task.comm is not None
    return whole_bytes(task.comm, _numel(task))


def _numel(task: Task) -> int:
    """The most elements that a communication writes on a device."""
    assert task.comm is not None
    return round(max((size for *_, size in task.writes), default=0) / item_bytes(task.comm.dtype))


def unlike_parts(tasks: Sequence[Task]) -> frozenset[int]:
    """Positions of communications and aliases in which devices have unlike parts.

    That is a step of a reshard by which some devices get what others have already, or for which
    they hold zeros, or in which one only sends or only receives. Sizes of parts do not count.
    """
    everyone = {device for task in tasks for device in task.devices}
    steps: dict[tuple[Key, ...], list[int]] = defaultdict(list)
    for position, task in enumerate(tasks):
        if task.placed is None:
            made = [
                *(key for _, key, _ in task.writes[:1]),
                *(new for (_, new), _ in task.aliases[:1]),
            ]
            steps[(*(key for _, key in task.reads[:1]), *made)].append(position)
    return frozenset(
        position
        for positions in steps.values()
        if not _is_of_all([tasks[position] for position in positions], everyone)
        for position in positions
    )


def _is_of_all(tasks: Sequence[Task], everyone: Collection[int]) -> bool:
    """Test whether all devices do the same in a step of a reshard: communicate, or alias."""
    comms = [task.comm for task in tasks if task.comm is not None]
    if not all(comm.sources() == comm.targets() == set(comm.ranks) for comm in comms):
        return False
    kinds = {None if task.comm is None else task.comm.kind for task in tasks}
    return len(kinds) == 1 and {device for task in tasks for device, _ in task.reads} == everyone


def _blocks(graph: Graph, tasks: Sequence[Task]) -> Mapping[tuple[int, int], tuple[int, int]]:
    """Positions of the first and the last task of each block on each device."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for position, task in enumerate(tasks) if graph.blocks else ():
        block = None if task.placed is None else graph.blocks.get(task.name)
        if block is None:
            continue
        for device in task.devices:
            first, _ = spans.get((device, block), (position, position))
            spans[device, block] = first, position
    return spans


@dataclass(frozen=True)
class _Needed:
    """A part of a value that several phases of its devices read, in no order that data decide.

    Attributes:
        why: The node that reads it before it is there.
        value: Name of the value.
        order: The order of the phases.
        device: A device that holds the part.
        made: The phase that makes the value.
        readers: Phases that read the part, or that were to fetch it. In split schedules a lane of
            two stages may run the weight gradients of one before or behind the backward pass of
            the other one, from micro-batch to micro-batch.
    """

    why: str
    value: str
    order: StepOrder
    device: int
    made: int
    readers: frozenset[int]

    def and_by(self, other: _Needed) -> _Needed:
        """The same part with the readers of both."""
        return replace(other, readers=self.readers | other.readers)

    @property
    def phase(self) -> int:
        """The last phase in which the device may fetch the part for all its readers.

        Raises:
            PhaseError: There is none.
        """
        earlier = [phase for phase in self.order.own(self.device) if phase <= min(self.readers)]
        before = [phase for phase in earlier if self._serves(phase)]
        if not before:
            shown = (" ".join(map(str, self.order.phases.of(p))) for p in sorted(self.readers))
            raise PhaseError(
                f"{self.why!r} reads {self.value!r}, which device {self.device} needs in "
                f"{' and '.join(shown)}: it has no phase in which it could get it for both"
            )
        return max(before)

    def _serves(self, phase: int) -> bool:
        """Tell whether a phase runs behind the one that makes the value, and before all readers."""
        is_before = self.order.is_before
        return (phase == self.made or is_before(self.made, phase, self.device)) and all(
            phase == reader or is_before(phase, reader, self.device) for reader in self.readers
        )


@dataclass
class _Builder:
    """Grows a schedule node by node.

    A task is anchored to a node: it comes behind it and before the next. So a communication goes
    as early as the devices that receive are free.
    """

    graph: Graph
    cluster: Cluster
    resharder: Resharder
    everywhere: frozenset[str]
    observed: frozenset[int] | None
    beside: frozenset[str]
    order: StepOrder | None
    in_parts: bool
    #: The phases in which parts are fetched that a later phase than the first reader's is to have
    #: earlier.
    due: Mapping[Key, int] = field(default_factory=dict)
    early: dict[Key, _Needed] = field(default_factory=dict)  # read before they are fetched
    tasks: list[tuple[int, int, Task]] = field(default_factory=list)  # (anchor, 0 for a node, _)
    feeds: dict[LocalKey, int] = field(default_factory=dict)
    residents: dict[LocalKey, int] = field(default_factory=dict)
    zeros: set[LocalKey] = field(default_factory=set)
    home: dict[str, Placement] = field(default_factory=dict)
    origin: dict[Key, tuple[int, int]] = field(default_factory=dict)  # key -> (anchor, phase)
    busy: dict[int, int] = field(default_factory=dict)  # device -> anchor of its last task
    readers: dict[LocalKey, set[int | None]] = field(default_factory=dict)  # blocks, of constants
    meshes: dict[DeviceMesh, tuple[int, ...]] = field(default_factory=dict)  # observed devices

    def run(self, placed: Sequence[PlacedNode]) -> Schedule:
        delivered: dict[str, Key] = {}
        end = len(placed)
        turn = next((i for i, p in enumerate(placed) if self._is_behind_results(p.node)), end)
        for index, node in enumerate(placed):
            if index == turn:
                delivered.update(self._deliver(index))
            self._node(index, node)
        if turn == end:
            delivered.update(self._deliver(end))
        for value in self.graph.outputs:
            if value not in delivered:
                at = self.home[value].without_partial()
                phase = self.origin[(value, self.home[value])][1]
                delivered[value] = self._fetch(value, at, end, value, phase)
        tasks = [task for _, _, task in sorted(self.tasks, key=lambda entry: entry[:2])]
        if self.order is not None:
            # A communication of a later phase comes early by its anchor: what it writes is not
            # held while earlier phases run.
            tasks = _in_messages(sorted(tasks, key=lambda task: task.phase), self.cluster)
        loads, blocks = self._loads(), _blocks(self.graph, tasks)
        tasks = self._loading(tasks, loads, blocks)
        buckets: tuple[Bucket, ...] = ()
        is_of_one_mesh = len({node.mesh.devices for node in placed}) == 1
        if is_of_one_mesh and is_of_torch(self.graph):  # ranks of ONNX Runtime join none
            staged = self.order is not None
            tasks, buckets = in_buckets(
                tasks, unlike_parts(tasks), self.graph.backward, staged=staged
            )
        tasks = _as_they_travel(tasks, buckets, self.cluster)
        return Schedule(
            tuple(
                task if task.comm is None else replace(task, comm=task.comm.renamed(seq=seq))
                for seq, task in enumerate(tasks)
            ),
            self.feeds,
            self.residents,
            {value: delivered[value] for value in self.graph.outputs},
            frozenset(self.zeros),
            loads,
            blocks,
            self.order,
            buckets,
        )

    @cached_property
    def _prices(self) -> NodePrices:
        return NodePrices(self.graph, self.cluster, self.in_parts)

    @cached_property
    def _loads_constants(self) -> bool:
        """Tell whether blocks load their constants: a PyTorch module holds them anyway."""
        return not is_of_torch(self.graph)

    def _loads(self) -> Mapping[LocalKey, frozenset[int]]:
        """The blocks that hold each constant that only blocks read."""
        return {
            key: frozenset(block for block in blocks if block is not None)
            for key, blocks in self.readers.items()
            if None not in blocks
        }

    def _loading(
        self,
        tasks: Sequence[Task],
        loads: Mapping[LocalKey, frozenset[int]],
        blocks: Mapping[tuple[int, int], tuple[int, int]],
    ) -> list[Task]:
        """The tasks; the first of a block on a device has the seconds of loading its constants."""
        loading: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for key, of in loads.items():
            for block in of:
                first, _ = blocks[key[0], block]
                loading[first][key[0]] += self.residents[key] / LOAD_BYTES_PER_S
        timed = list(tasks)
        for position, seconds in loading.items():
            devices = dict(timed[position].devices)
            for device, more in seconds.items():
                devices[device] = devices.get(device, 0.0) + more
            timed[position] = replace(timed[position], devices=devices)
        return timed

    def _is_behind_results(self, node: Node) -> bool:
        """Test whether a node runs behind the delivery of the results."""
        if self.order is None:
            return node.name in self.graph.backward
        return self.order.numbers[node.name] > self._delivery

    @property
    def _delivery(self) -> int:
        """The phase in which results are brought to all devices; 0 without stages."""
        return 0 if self.order is None else self.order.phases.number(Part.DELIVER)

    def _deliver(self, index: int) -> Iterator[tuple[str, Key]]:
        """Bring outputs whole to all devices."""
        everyone = DeviceMesh.line(len(self.cluster))
        for value in self.graph.outputs:
            if value in self.everywhere:
                at = self.home[value].without_partial()
                self._fetch(value, at, index, value, self._delivery)
                self.home[value] = at
                mesh = at.mesh if at.mesh.size() == everyone.size() else everyone
                whole = Placement(mesh, Sharding.replicate(at.sharding.shape))
                yield value, self._fetch(value, whole, index, value, self._delivery)

    def _node(self, index: int, placed: PlacedNode) -> None:
        name = placed.node.name
        phase = 0 if self.order is None else self.order.numbers[name]
        operands = placed.operands()
        keys = dict.fromkeys(self._fetch(value, at, index, name, phase) for value, at in operands)
        if self.order is None:
            phase = max((self.origin[key][1] for key in keys if key in self.origin), default=0)
        writes = []
        row = row_of(placed.node)
        stored = row is not None and row.stored
        for value, at in placed.results():
            key = (value, at)
            self.home[value] = at
            self.origin[key] = (index, phase)
            for device, size in self._sizes(key).items():
                if stored:
                    dtype = self.graph.types[value].dtype
                    self.residents[(device, key)] = stored_bytes(
                        placed.node, dtype, size, at.sharding
                    )
                writes.append((device, key, 0 if stored else size))
        devices = self._observed_of(placed.mesh)
        seconds = self._prices.seconds(placed, devices)
        if self.order is not None:
            seconds = self._with_sums(placed, phase, seconds, self.order)
        reads = tuple((device, key) for device in devices for key in keys)
        task = Task(name, seconds, reads, tuple(writes), placed, None, phase, phase)
        self.tasks.append((index, 0, task))
        for device in devices:
            self.busy[device] = index

    def _with_sums(
        self, placed: PlacedNode, phase: int, seconds: Mapping[int, float], order: StepOrder
    ) -> Mapping[int, float]:
        """Seconds in a step of micro-batches: each adds its gradients to those of the others.

        The optimizer runs once a step. An update that takes a part of each micro-batch's sum over
        devices has its seconds spread over the micro-batches.
        """
        is_update = placed.node.attrs.get("role") == "gradient"
        if is_update and not order.phases.is_once(phase):
            spread = {device: s / order.table.micro_batches for device, s in seconds.items()}
            return self._adding(placed.operands()[0], spread)
        for value, at in placed.results():
            if value in self._summed:
                seconds = self._adding((value, at), seconds)
        return seconds

    def _adding(self, key: Key, seconds: Mapping[int, float]) -> Mapping[int, float]:
        """The seconds, and those of adding a value to the sum of it."""
        assert self.order is not None
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
        if self.order is None:
            return frozenset()
        numbers, phases = self.order.numbers, self.order.phases
        return frozenset(
            node.inputs[0]
            for node in self.graph.nodes
            if node.attrs.get("role") == "gradient" and phases.is_once(numbers[node.name])
        )

    def _fetch(self, value: str, at: Placement, index: int, why: str, phase: int) -> Key:
        """The key of the value at a placement that a node reads; reshards it if need be.

        `phase` is that of the node, in a plan with stages.
        """
        key, dtype = (value, at), self.graph.types[value].dtype
        if value in self.graph.constants:
            self._reside(key, self.graph.blocks.get(why) if self._loads_constants else None)
        elif value in self.home:
            before = (value, self.home[value])
            if self.order is not None and key not in self.origin and self._leaves(key):
                before = self._original(value)
            made, reads = self.origin[before][1], phase
            hops = self.resharder.hops(dtype, before[1], at)
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
            self.origin.setdefault(fed, (-1, 0))
            if key not in self.origin:
                hop = self.resharder.hops(dtype, fed[1], at)[-1]
                self._hop(fed, hop, index, why, self._phases(fed, key, at, phase))
        return key

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
        anchor = self.origin[before][0]
        phase, target_phase = phases
        sizes = self._sizes(after)
        for device in self._observed(hop.zeros):
            self.residents[(device, after)] = sizes[device]
            self.zeros.add((device, after))
        comms = [priced for priced in hop.comms if self._observed(priced.comm.ranks)]
        if len(comms) < len(hop.comms) and not beside:
            self._check_order(anchor, comms)
        for priced in comms:
            targets = self._observed(priced.comm.targets())
            if not beside:  # else no node waits for it before it is due
                anchor = max([anchor, *(self.busy.get(d, -1) for d in targets)])
            comm = priced.comm.renamed(
                source=value, target=value, phase=phase, target_phase=target_phase, why=why
            )
            busy = priced.busy_seconds(beside=beside)
            whole = priced.whole_seconds(beside=beside)
            seconds = {d: busy[d] for d in self._observed(busy)}
            hidden = {d: more for d, s in seconds.items() if (more := whole[d] - s)}
            task = Task(
                f"{comm.kind} {value}",
                seconds,
                tuple((d, before) for d in sorted(self._observed(comm.sources()))),
                tuple((d, after, sizes[d]) for d in sorted(targets)),
                comm=comm,
                phase=phase,
                target_phase=target_phase,
                hidden=hidden,
                may_share=beside and priced.joined is not None,
            )
            self._insert(min(anchor, index - 1), task)
        if aliases := sorted(self._observed(hop.aliases)):
            pairs = tuple(((d, after), (d, before)) for d in aliases)
            reads = tuple(old for _, old in pairs)
            task = Task(f"alias {value}", {}, reads, (), None, None, phase, phase, pairs)
            self._insert(min(anchor, index - 1), task)
        self.origin[after] = (min(anchor, index - 1), target_phase)

    def _phases(self, before: Key, after: Key, target: Placement, phase: int) -> tuple[int, int]:
        """Phases of the sources and the targets of a step of a reshard to `target`.

        Without stages: the number of moves between groups. With stages: a value that does not leave
        its devices is resharded in the phase that reads it; one that does is reduced where it is
        made, and sent for the phase that reads it; once a step if it is the same in all
        micro-batches, or if its sum over them is read.
        """
        origin = self.origin[before][1]
        held, then = set(before[1].mesh.devices), set(after[1].mesh.devices)
        if self.order is None:
            return origin, origin + held.isdisjoint(then)
        sums = self.order.phases.of(phase)[0] is Part.REDUCE
        if held == set(target.mesh.devices) or sums:
            return phase, phase
        if held == then:
            return origin, origin
        if self.order.phases.is_once(origin):
            return origin, origin
        return origin, phase

    def _leaves(self, key: Key) -> bool:
        """Test whether a key lies on other devices than its value is computed on."""
        value, at = key
        return set(self.home[value].mesh.devices) != set(at.mesh.devices)

    def _original(self, value: str) -> Key:
        """The value that a value is another name of, which other devices may have already."""
        producer = self.graph.producers[value]
        row = row_of(producer)
        while row is not None and row.again and producer.inputs[0] in self.home:
            value = producer.inputs[0]
            producer = self.graph.producers[value]
            row = row_of(producer)
        return value, self.home[value]

    def _rename(self, old: Key, new: Key, index: int) -> None:
        """Give a value that was fetched under its original name the other name."""
        anchor, phase = self.origin[old]
        devices = sorted(self._observed(old[1].mesh.devices))
        pairs = tuple(((d, new), (d, old)) for d in devices)
        reads = tuple(key for _, key in pairs)
        task = Task(f"alias {new[0]}", {}, reads, (), None, None, phase, phase, pairs)
        self._insert(min(anchor, index - 1), task)
        self.origin[new] = (min(anchor, index - 1), phase)

    def _check_phase(self, key: Key, why: str, phase: int, made: int) -> None:
        """Note a part that is fetched in a phase that may run later than one that reads it.

        Args:
            key: The part.
            why: The node that reads it.
            phase: The phase of the node.
            made: The phase that makes the value.
        """
        if self.order is None:
            return
        fetched = self.origin[key][1]
        device = min(key[1].mesh.devices)
        if fetched != phase and not self.order.is_before(fetched, phase, device):
            readers = frozenset((fetched, phase))
            by = _Needed(why, key[0], self.order, device, made, readers)
            self.early[key] = by if key not in self.early else self.early[key].and_by(by)

    def _check_order(self, anchor: int, comms: Sequence[PricedComm]) -> None:
        """Refuse if the communications of one step, observed or not, have different anchors.

        Raises:
            UnequalWorkError: They have.
        """
        targets = {d for priced in comms for d in self._observed(priced.comm.targets())}
        if len({max(anchor, self.busy.get(d, -1)) for d in targets}) > 1:
            raise UnequalWorkError

    def _observed(self, devices: Iterable[int]) -> Sequence[int]:
        observed = self.observed
        return tuple(devices) if observed is None else [d for d in devices if d in observed]

    def _observed_of(self, mesh: DeviceMesh) -> tuple[int, ...]:
        if mesh not in self.meshes:
            self.meshes[mesh] = tuple(self._observed(mesh.devices))
        return self.meshes[mesh]

    def _insert(self, anchor: int, task: Task) -> None:
        self.tasks.append((anchor, len(self.tasks) + 1, task))
        for device in task.devices:
            self.busy[device] = max(self.busy.get(device, -1), anchor)

    def _sizes(self, key: Key) -> Mapping[int, int]:
        """Bytes on each observed device."""
        value, at = key
        sizes = at.local_bytes(self.graph.types[value].dtype)
        return {device: sizes[device] for device in self._observed_of(at.mesh)}
