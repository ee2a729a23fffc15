"""A resolved plan as tasks in one global order: nodes, and the communications between them.

The search prices with the same reshards, the referee sums these tasks, the simulator times
them and the lowering turns them into rank programs, so all four speak of the same execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import node_seconds, stored_bytes
from partitioner.cost_model.overlap import beside_compute
from partitioner.cost_model.reshard import Hop, PricedComm, Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm

Key = tuple[str, Placement]  #: A value under one placement.
LocalKey = tuple[int, Key]  #: Its part on one device.


@dataclass(frozen=True)
class Task:
    """One node on its group, or one communication.

    Attributes:
        name: Node name, or value and target of a communication.
        devices: Seconds by device that it occupies. Of a communication that passes beside compute
            (see `cost_model.overlap`) those that are not hidden.
        reads: Local tensors that it reads.
        writes: Local tensors that it makes, with their bytes.
        placed: The node; None for communications.
        comm: The communication, with its place in the global order as `seq`; None for nodes.
        phase: Cross-group hops from the inputs (see `Compute.phase`); of the sending side.
        target_phase: Phase in which the targets of a communication receive.
        aliases: Local tensors that come into being here as another name of one that is there:
            (new, old).
        hidden: Seconds by device that it takes beside compute.
    """

    name: str
    devices: Mapping[int, float]
    reads: tuple[LocalKey, ...]
    writes: tuple[tuple[int, Key, int], ...]
    placed: PlacedNode | None = None
    comm: Comm | None = None
    phase: int = 0
    target_phase: int = 0
    aliases: tuple[tuple[LocalKey, LocalKey], ...] = ()
    hidden: Mapping[int, float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """One of "compute" and "comm"."""
        return "comm" if self.comm is not None or self.placed is None else "compute"


@dataclass(frozen=True)
class Schedule:
    """All tasks in the global order.

    Attributes:
        tasks: In the order in which every device runs its share.
        feeds: Bytes of each local part of a graph input.
        residents: Bytes of each local part of a constant, and of each block of zeros.
        outputs: Local tensors that hold graph outputs; they live to the end.
        output_keys: Where each graph output lies.
        zeros: The residents that are zeros instead of a part of their value.
    """

    tasks: tuple[Task, ...]
    feeds: Mapping[LocalKey, int]
    residents: Mapping[LocalKey, int]
    outputs: frozenset[LocalKey]
    output_keys: Mapping[str, Key]
    zeros: frozenset[LocalKey] = frozenset()


class UnlikeError(Exception):
    """Devices that were taken for alike do not do the same in the same order."""


def schedule(
    graph: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    resharder: Resharder | None = None,
    everywhere: frozenset[str] = frozenset(),
    seen_by: frozenset[int] | None = None,
) -> Schedule:
    """Insert the communications that a resolved plan needs and price every task.

    Args:
        graph: The model.
        placed: Its nodes in the plan's order.
        cluster: The devices.
        resharder: Prices of communications; made if not given.
        everywhere: Outputs that every device of the cluster gets whole, once they are made (at the
            end of the forward pass, if there is a backward pass). No plan counts that.
        seen_by: Leave out what other devices do (see `alike.representatives`); None: all are seen.

    Raises:
        UnlikeError: What others do would change the order of what these do.
    """
    builder = _Builder(graph, cluster, resharder or Resharder(cluster), everywhere, seen_by)
    return builder.run(placed)


@dataclass
class _Builder:
    graph: Graph
    cluster: Cluster
    resharder: Resharder
    everywhere: frozenset[str]
    seen_by: frozenset[int] | None
    tasks: list[tuple[int, int, Task]] = field(default_factory=list)
    feeds: dict[LocalKey, int] = field(default_factory=dict)
    residents: dict[LocalKey, int] = field(default_factory=dict)
    zeros: set[LocalKey] = field(default_factory=set)
    home: dict[str, Placement] = field(default_factory=dict)
    made: dict[Key, tuple[int, int]] = field(default_factory=dict)  # key -> (anchor, phase)
    busy: dict[int, int] = field(default_factory=dict)  # device -> anchor of its last task

    def run(self, placed: Sequence[PlacedNode]) -> Schedule:
        self.beside = beside_compute(self.graph)
        found: dict[str, Key] = {}
        turned = False
        for index, node in enumerate(placed):
            if node.node.name in self.graph.backward and not turned:
                turned = True
                found.update(self._deliver(index))
            self._node(index, node)
        last = len(placed)
        if not turned:
            found.update(self._deliver(last))
        for value in self.graph.outputs:
            if value not in found:
                at = self.home[value]
                found[value] = self._fetch(
                    value, Placement(at.mesh, at.sharding.without_partial()), last, value
                )
        outputs = {value: found[value] for value in self.graph.outputs}
        self.tasks.sort(key=lambda entry: entry[:2])
        tasks = []
        for seq, (_, _, task) in enumerate(self.tasks):
            tasks.append(
                task if task.comm is None else replace(task, comm=task.comm.renamed(seq=seq))
            )
        local = frozenset((d, key) for key in outputs.values() for d in key[1].mesh.devices)
        return Schedule(
            tuple(tasks), self.feeds, self.residents, local, outputs, frozenset(self.zeros)
        )

    def _deliver(self, index: int) -> Iterator[tuple[str, Key]]:
        """Outputs for everybody."""
        everyone = DeviceMesh.line(len(self.cluster)) if len(self.cluster) > 1 else None
        for value in self.graph.outputs:
            if value in self.everywhere:
                at = self.home[value]
                mesh = at.mesh if everyone is None else everyone
                if at.mesh.size() == mesh.size():
                    mesh = at.mesh
                whole = Sharding.replicate(at.sharding.shape)
                at = Placement(at.mesh, at.sharding.without_partial())
                self._fetch(value, at, index, value)
                self.home[value] = at
                yield value, self._fetch(value, Placement(mesh, whole), index, value)

    def _node(self, index: int, placed: PlacedNode) -> None:
        keys = [self._fetch(value, at, index, placed.node.name) for value, at in placed.operands()]
        keys = list(dict.fromkeys(keys))
        phase = max((self.made[key][1] for key in keys if key in self.made), default=0)
        writes = []
        row = row_of(placed.node)
        stored = row is not None and row.stored
        for value, at in placed.results():
            self.home[value] = at
            self.made[(value, at)] = (index, phase)
            for device, size in self._sizes((value, at)).items():
                if stored:
                    kind = self.graph.types[value].dtype
                    self.residents[(device, (value, at))] = stored_bytes(placed.node, kind, size)
                writes.append((device, (value, at), 0 if stored else size))
        devices = self._seen(placed.mesh.devices)
        seconds = node_seconds(self.graph, placed, self.cluster, devices)
        reads = tuple((d, key) for d in devices for key in keys)
        task = Task(placed.node.name, seconds, reads, tuple(writes), placed, None, phase, phase)
        self.tasks.append((index, 0, task))
        for device in devices:
            self.busy[device] = index

    def _fetch(self, value: str, at: Placement, index: int, why: str) -> Key:
        """The key under which a consumer at `at` finds the value, made on the way if need be."""
        key = (value, at)
        if value in self.graph.constants:
            self._reside(key)
        elif value in self.home:
            before = (value, self.home[value])
            for hop in self.resharder.hops(self.graph.types[value].dtype, self.home[value], at):
                if (value, hop.after) not in self.made:
                    self._hop(before, hop, index, why)
                before = (value, hop.after)
        elif at.sharding.partial:
            plain = (value, Placement(at.mesh, at.sharding.without_partial()))
            self._feed(plain)
            if key not in self.made:
                self._hop(
                    plain,
                    self.resharder.hops(self.graph.types[value].dtype, plain[1], at)[-1],
                    index,
                    why,
                )
        else:
            self._feed(key)
        return key

    def _feed(self, key: Key) -> None:
        for device, size in self._sizes(key).items():
            self.feeds[(device, key)] = size
        self.made.setdefault(key, (-1, 0))

    def _reside(self, key: Key) -> None:
        partial = [axis for axis, _ in key[1].sharding.partial]
        points = dict(key[1].mesh.coords())
        for device, size in self._sizes(key).items():
            self.residents[(device, key)] = size
            if any(points[device][axis] for axis in partial):
                self.zeros.add((device, key))

    def _hop(self, before: Key, hop: Hop, index: int, why: str) -> None:
        value = before[0]
        beside = value in self.beside
        after = (value, hop.after)
        anchor, phase = self.made[before]
        sizes = self._sizes(after)
        for device in self._seen(hop.zeros):
            self.residents[(device, after)] = sizes[device]
            self.zeros.add((device, after))
        apart = not set(before[1].mesh.devices) & set(hop.after.mesh.devices)
        target_phase = phase + apart
        comms = [priced for priced in hop.comms if self._seen(priced.comm.ranks)]
        if len(comms) < len(hop.comms) and not beside:
            self._check_order(anchor, comms)
        for priced in comms:
            comm = priced.comm
            targets = self._seen(comm.targets())
            if not beside:  # else nobody waits for it before it is due
                anchor = max([anchor, *(self.busy.get(d, -1) for d in targets)])
            comm = comm.renamed(
                source=value, target=value, phase=phase, target_phase=target_phase, why=why
            )
            reads = tuple((d, before) for d in sorted(self._seen(comm.sources())))
            writes = tuple((d, after, sizes[d]) for d in sorted(targets))
            name = f"{comm.kind} {value}"
            busy = priced.busy_seconds(beside=beside)
            seconds = {d: busy[d] for d in self._seen(busy)}
            hidden = {d: more for d, s in seconds.items() if (more := priced.seconds[d] - s)}
            task = Task(
                name, seconds, reads, writes, None, comm, phase, target_phase, hidden=hidden
            )
            self._insert(min(anchor, index - 1), task)
        if aliases := self._seen(hop.aliases):
            pairs = tuple(((d, after), (d, before)) for d in sorted(aliases))
            task = Task(
                f"alias {value}",
                {},
                tuple(old for _, old in pairs),
                (),
                None,
                None,
                phase,
                phase,
                pairs,
            )
            self._insert(min(anchor, index - 1), task)
        self.made[after] = (min(anchor, index - 1), target_phase)

    def _check_order(self, anchor: int, comms: Sequence[PricedComm]) -> None:
        """All of a step's communications go to the same place, those that are not seen too.

        Raises:
            UnlikeError: They do not.
        """
        targets = {d for priced in comms for d in self._seen(priced.comm.targets())}
        if len({max(anchor, self.busy.get(d, -1)) for d in targets}) > 1:
            raise UnlikeError

    def _seen(self, devices: Iterable[int]) -> Sequence[int]:
        """Those of some devices that are looked at."""
        own = self.seen_by
        return tuple(devices) if own is None else [d for d in devices if d in own]

    def _insert(self, anchor: int, task: Task) -> None:
        self.tasks.append((anchor, len(self.tasks) + 1, task))
        for device in task.devices:
            self.busy[device] = max(self.busy.get(device, -1), anchor)

    def _sizes(self, key: Key) -> Mapping[int, int]:
        """Bytes on each device that is looked at."""
        value, at = key
        sizes = at.local_bytes(self.graph.types[value].dtype)
        return sizes if self.seen_by is None else {d: sizes[d] for d in self._seen(sizes)}
