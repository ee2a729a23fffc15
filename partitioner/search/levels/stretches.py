"""What every stretch of the model costs as a stage on one mesh, all stretches at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from partitioner.cost_model.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.overlap import beside_compute
from partitioner.cost_model.reshard import Hop
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.search.levels.mesh_sharder import Sharded
from partitioner.solver.placement.intervals import Charges, Floats, Ints, summed
from partitioner.solver.stages import StageOption

#: Blocks that the order is cut into at most: stages begin and end between them.
MAX_BLOCKS = 480

#: Entries of a charge: seconds, bytes of weights.
SECONDS, WEIGHTS = range(2)


@dataclass(frozen=True)
class Blocks:
    """The order of the nodes, cut into blocks that stay whole.

    Attributes:
        ends: Where each block ends, exclusive.
    """

    ends: tuple[int, ...]


def blocks(graph: Graph) -> Blocks:
    """Blocks that end where few bytes cross.

    The order is divided into equal windows; each has one cut, where least crosses.
    """
    count = len(graph.nodes)
    crossing = _crossing(graph)
    windows = min(count, MAX_BLOCKS)
    edges = [round(index * count / windows) for index in range(windows + 1)]
    ends = {count}
    for first, last in pairwise(edges[1:]):
        ends.add(first + int(np.argmin(crossing[first:last])))
    return Blocks(tuple(sorted(ends)))


def _crossing(graph: Graph) -> Floats:
    """Bytes of values that cross the point before each node."""
    change = np.zeros(len(graph.nodes) + 1)
    for value, producer in graph.producers.items():
        readers = [graph.order[node.name] for node in graph.consumers[value]]
        if readers:
            nbytes = graph.types[value].nbytes
            change[graph.order[producer.name] + 1] += nbytes
            change[max(readers) + 1] -= nbytes
    return np.cumsum(change)[:-1]


def stage_option(sharded: Sharded, cut: Blocks, stages: int, pool: int, label: str) -> StageOption:
    """All stretches of blocks as stages on the mesh.

    A value that leaves for readers far apart is charged for as many stages as they would be in if
    all stages had equal loads; one that is needed both inside and outside its stage may be charged
    for both. What the cut that is taken in the end costs is counted anew (`figures`).

    Args:
        sharded: The model on the mesh.
        cut: The blocks.
        stages: How many stages there may be.
        pool: The pool of the mesh's devices.
        label: For people.
    """
    parts = _Stretches(sharded, cut, stages).run()
    load = _between(parts[SECONDS])
    held = _between(parts[WEIGHTS])
    passing = np.zeros_like(load) + sharded.passing_bytes
    mesh = sharded.even.mesh
    return StageOption(label, mesh.size(), load[None], held[None], passing[None], pool=pool)


def _between(parts: Floats) -> Floats:
    """[first, last] of inclusive blocks as [start, stop] of positions; (n + 1, n + 1)."""
    count = len(parts)
    found = np.zeros((count + 1, count + 1))
    found[:count, 1:] = np.maximum(parts, 0.0)  # sums and differences may leave -1e-20
    return found


@dataclass
class _Stretches:
    """What a device of the mesh takes with blocks i to j: [entry, i, j], (2, blocks, blocks).

    Charges are in positions of nodes; those of one middle block are repeated for all of them.
    """

    sharded: Sharded
    cut: Blocks
    stages: int

    def run(self) -> Floats:
        even, folded = self.sharded.even, self.sharded.folded
        self.graph = folded.whole
        self.beside = beside_compute(self.graph)
        self.device = even.device
        self.other = away(_neighbour(even), beyond=even.model)
        self.resharder = EvenResharder(even.cluster, even=even, other=self.other)
        self.stage = self._guessed()
        count = len(self.graph.nodes)
        run = folded.runs[0] if len(folded.runs) == 1 else None
        copies = range(run.block(2).start, run.block(run.count - 2).start) if run else range(0)
        sample = frozenset(run.block(1)) if run else frozenset()
        self.charges = Charges(count, 2)
        self._charge_nodes(i for i in range(count) if i not in copies and i not in sample)
        rectangles, parts = self.charges.arrays()
        if run:
            self.charges = Charges(count, 2)
            self._charge_nodes(sample)
            shifts = [index * run.period for index in range(run.count - 3)]
            more = _shifted(*self.charges.arrays(), shifts, count)
            rectangles, parts = (
                np.concatenate(pair) for pair in zip((rectangles, parts), more, strict=True)
            )
        return summed(self._in_blocks(rectangles), parts, len(self.cut.ends))

    def _guessed(self) -> Ints:
        """The stage of each node, if all stages had equal loads."""
        loads = np.array([self.sharded.loads_s[place] for place in self.sharded.folded.places])
        done = np.cumsum(loads) - loads / 2
        share = done / max(float(loads.sum()), 1e-300)
        return (share * self.stages).astype(np.intp)

    def _in_blocks(self, rectangles: Ints) -> Ints:
        """Rectangles of node positions as rectangles of blocks."""
        last = np.array(self.cut.ends) - 1
        first = np.concatenate([[0], last[:-1] + 1])
        found = rectangles.copy()
        found[:, 1:3] = np.searchsorted(first, rectangles[:, 1:3])
        found[:, 3:5] = np.searchsorted(last, rectangles[:, 3:5])
        return found

    def _charge_nodes(self, positions: Iterable[int]) -> None:
        """Charge nodes, the values that they make, and the weights that they are first to read."""
        picks, places = self.sharded.picks, self.sharded.folded.places
        for position in positions:
            node, place = self.graph.nodes[position], places[position]
            placed, seconds = picks[place], self.sharded.loads_s[place]
            self.charges.add((seconds, 0.0), self.charges.some_in([position]))
            for value, at in dict(_named((*node.inputs, *node.captures), placed.ins)).items():
                if value in self.graph.constants:
                    self._weight(value, at, position)
            for value, home in _named(node.outputs, placed.outs):
                self._value(value, home, position, self._readers(value))

    def _readers(self, value: str) -> list[tuple[Placement, int]]:
        """Where the readers of a value want it."""
        picks, places = self.sharded.picks, self.sharded.folded.places
        found = []
        for node in self.graph.consumers[value]:
            position = self.graph.order[node.name]
            named = _named((*node.inputs, *node.captures), picks[places[position]].ins)
            found += [(at, position) for name, at in named if name == value]
        return found

    def _weight(self, value: str, at: Placement, position: int) -> None:
        """The bytes of a weight, charged once a stage: by the first of its readers."""
        readers = [reader for where, reader in self._readers(value) if where == at]
        if position == readers[0]:
            nbytes = self.sharded.even.local_bytes(at, self.graph.types[value].dtype)
            self.charges.add((0.0, float(nbytes)), self.charges.some_in(readers))

    def _value(
        self, value: str, home: Placement, position: int, readers: Sequence[tuple[Placement, int]]
    ) -> None:
        dtype = self.graph.types[value].dtype
        inside: dict[Placement, tuple[Hop, set[int]]] = {}
        leaving: dict[Placement, tuple[Hop, set[int]]] = {}
        arriving: dict[Placement, tuple[Hop, set[int]]] = {}
        if value in self.graph.outputs and home.sharding.partial:
            done = Placement(home.mesh, home.sharding.without_partial())
            if readers:  # else it is in the node's own load
                _note(inside, self.resharder.hops(dtype, home, done), position)
        for want, reader in readers:
            _note(inside, self.resharder.hops(dtype, home, want), reader)
            across = self.resharder.hops(dtype, home, moved(want, self.other))
            _note(leaving, across, reader)
            _note(arriving, across, reader)
        beside = value in self.beside
        for after, (hop, own) in inside.items():
            both = leaving.pop(after, None)
            where = self.charges.both_in(position, own)
            span = self.charges.some_in([position]) if both else where
            self._charge(hop, span, self.device, beside=beside)
        for hop, own in leaving.values():
            stages = {int(self.stage[reader]) for reader in own} - {int(self.stage[position])}
            times = (
                max(1, len(stages)) if hop.after.mesh.devices[0] in self.other.model.devices else 1
            )
            span = self.charges.leaf_out(position, own)
            self._charge(hop, span, self.device, times, beside=beside)
        for hop, own in arriving.values():
            span = self.charges.leaf_in(position, own)
            self._charge(hop, span, self.other.device, beside=beside)

    def _charge(
        self,
        hop: Hop,
        where: Iterable[tuple[int, int, int, int, int]],
        at: int,
        times: int = 1,
        *,
        beside: bool,
    ) -> None:
        seconds, _ = paid(hop, at, beside=beside)
        self.charges.add((times * seconds, 0.0), where)


def _shifted(
    rectangles: Ints, parts: Floats, shifts: Sequence[int], count: int
) -> tuple[Ints, Floats]:
    """The rectangles of a block at each of its copies; the ends of the order stay."""
    fixed = (rectangles[:, 1:] == 0) | (rectangles[:, 1:] == count)
    copies = np.repeat(rectangles[None], len(shifts), axis=0)
    copies[:, :, 1:] += np.where(fixed, 0, 1)[None] * np.array(shifts)[:, None, None]
    return copies.reshape(-1, 5), np.tile(parts, (len(shifts), 1))


def away(even: EvenMesh, beyond: DeviceMesh) -> EvenMesh:
    """The same group on a stand-in of devices beyond those of another stand-in."""
    shift = max(beyond.devices) + 1
    model = replace(even.model, devices=tuple(d + shift for d in even.model.devices))
    return replace(even, model=model)


def moved(at: Placement, other: EvenMesh) -> Placement:
    """The same placement on another group; a single device is its first."""
    mesh = other.model if at.mesh.axes else DeviceMesh.single(other.model.devices[0])
    return Placement(mesh, at.sharding)


def paid(hop: Hop, device: int, *, beside: bool) -> tuple[float, float]:
    """Seconds that a hop takes of a device, and bytes that it sends.

    Args:
        hop: The hop.
        device: The device.
        beside: Whether it passes beside compute.
    """
    own = [priced for priced in hop.comms if device in priced.seconds]
    sent = sum(priced.sent_bytes for priced in own if device == priced.comm.ranks[0])
    return sum(priced.busy_seconds(beside=beside)[device] for priced in own), sent


def _neighbour(even: EvenMesh) -> EvenMesh:
    """The farthest group of the same shape, over the outermost level; itself if it is alone.

    Some stages have their neighbours in another node, and the busiest stage counts.
    """
    size, count = even.mesh.size(), len(even.cluster)
    last = count - size - even.device
    shift = last if last >= size else -min(even.device, even.device // size * size)
    devices = tuple(device + shift for device in even.mesh.devices)
    return replace(even, mesh=replace(even.mesh, devices=devices)) if shift else even


def _named(
    values: Iterable[str], places: Iterable[Placement | None]
) -> Iterator[tuple[str, Placement]]:
    return ((v, at) for v, at in zip(values, places, strict=True) if at is not None)


def _note(found: dict[Placement, tuple[Hop, set[int]]], hops: Iterable[Hop], reader: int) -> None:
    """Hops by what they leave, with the blocks of who needs it."""
    for hop in hops:
        found.setdefault(hop.after, (hop, set()))[1].add(reader)
