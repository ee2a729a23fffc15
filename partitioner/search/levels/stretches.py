"""Costs of every stretch of the model as a stage on one mesh, all stretches at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.cost_model.prices.reshard import Hop, beside_compute
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pieces.repeats import crossing
from partitioner.search.levels.mesh_sharder import Sharded
from partitioner.solver.placement.contiguous import Charges, Floats, Ints, Rectangle, summed
from partitioner.solver.stages.model import StageOption

_Hops = dict[Placement, tuple[Hop, set[int]]]  #: By the placement after it: a hop, its readers.

#: Blocks that the order is cut into at most: stages begin and end between them.
MAX_BLOCKS = 480


def block_ends(graph: Graph) -> tuple[int, ...]:
    """The ends, exclusive, of blocks that stay whole: where the fewest bytes cross a window."""
    count = len(graph.nodes)
    crossing_bytes = crossing(graph, lambda value: graph.types[value].nbytes)
    windows = min(count, MAX_BLOCKS)
    edges = [round(index * count / windows) for index in range(windows + 1)]
    ends = {count}
    for first, last in pairwise(edges[1:]):
        ends.add(first + int(np.argmin(crossing_bytes[first:last])))
    return tuple(sorted(ends))


def stage_options(
    sharded: Sharded, ends: Sequence[int], stages: int, pool: int
) -> tuple[StageOption, StageOption]:
    """All stretches of blocks as stages on the mesh, with the least and the most that they hold.

    A value that leaves for readers far apart is charged for as many stages as they would be in if
    all stages had equal loads; one that is needed both inside and outside its stage may be charged
    for both. The referee counts the cuts of least load anew.

    Args:
        stages: Most stages that there may be.

    Returns:
        Stages that hold beside their weights what the model holds on the mesh at any one time, and
        those that hold all that they send and receive, and all that outlives its block, beside
        that.
    """
    sums, count = _stretch_sums(sharded, ends, stages), len(ends)
    between = np.zeros(
        (3, count + 1, count + 1)
    )  # of positions, where sums are of inclusive blocks
    between[:, :count, 1:] = np.maximum(sums, 0.0)  # sums and differences may leave -1e-20
    load, resident, more_bytes = between
    passing = np.zeros_like(load) + sharded.passing_bytes
    size = sharded.even.mesh.size()
    least = StageOption(size, load[None], resident[None], passing[None], pool=pool)
    return least, replace(least, flying_bytes=(passing + more_bytes)[None])


def _stretch_sums(sharded: Sharded, ends: Sequence[int], stages: int) -> Floats:
    """Sum over a device that runs blocks i to j, (3, blocks, blocks).

    They are seconds, bytes of weights, and bytes of what comes from and goes to other stages or
    outlives its block.
    Charges are in positions of nodes; those of one middle block are repeated for all of them.
    """
    folded = sharded.folded
    stretches, count = _Stretches.of(sharded, stages), len(folded.whole.nodes)
    run = folded.runs[0] if len(folded.runs) == 1 else None
    copies = range(run.block(2).start, run.block(run.count - 2).start) if run else range(0)
    sample = frozenset(run.block(1)) if run else frozenset()
    once = (i for i in range(count) if i not in copies and i not in sample)
    rectangles, parts = stretches.charges(once).arrays()
    if run:
        block, paid = stretches.charges(sample).arrays()
        shifts = np.array([index * run.period for index in range(run.count - 3)])
        stay = (block[:, 1:] == 0) | (block[:, 1:] == count)  # the ends of the order
        repeated = np.repeat(block[None], len(shifts), axis=0)
        repeated[:, :, 1:] += np.where(stay, 0, 1)[None] * shifts[:, None, None]
        rectangles = np.concatenate([rectangles, repeated.reshape(-1, 5)])
        parts = np.concatenate([parts, np.tile(paid, (len(shifts), 1))])
    last = np.array(ends) - 1
    first = np.concatenate([[0], last[:-1] + 1])
    in_blocks = rectangles.copy()
    in_blocks[:, 1:3] = np.searchsorted(first, rectangles[:, 1:3])
    in_blocks[:, 3:5] = np.searchsorted(last, rectangles[:, 3:5])
    return summed(in_blocks, parts, len(ends))


@dataclass(frozen=True)
class _Stretches:
    """Charges of the model on one mesh to the stretches that they are paid in."""

    sharded: Sharded  #: The model on the mesh.
    resharder: EvenResharder  #: Prices reshards within a stage, and to and from another stage.
    other: EvenMesh  #: The other stage: the farthest group of the same shape.
    stage: Ints  #: The stage of each node, if all stages had equal loads.
    #: Of values that were asked for; see `_readers`.
    _known_readers: dict[str, Mapping[Placement, list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sharded: Sharded, stages: int) -> _Stretches:
        even = sharded.even
        # The other stage is over the outermost level, if the group is not alone: some stages have
        # their neighbours in another node, and the busiest stage counts.
        size, first = even.mesh.size(), even.device
        last = len(even.cluster) - size - first
        shift = last if last >= size else -min(first, first // size * size)
        mesh = replace(even.mesh, devices=tuple(device + shift for device in even.mesh.devices))
        other = away(replace(even, mesh=mesh), beyond=even.model)
        resharder = EvenResharder(even.cluster, even=even, other=other)
        loads = np.array([sharded.loads_s[place] for place in sharded.folded.places])
        share = (np.cumsum(loads) - loads / 2) / max(float(loads.sum()), 1e-300)
        return cls(sharded, resharder, other, (share * stages).astype(np.intp))

    @property
    def graph(self) -> Graph:
        return self.sharded.folded.whole

    @property
    def outliving(self) -> frozenset[str]:
        """Values that are held beyond their block, and of which the folded model has a few."""
        return self.sharded.folded.outliving

    @cached_property
    def beside(self) -> frozenset[str]:
        return beside_compute(self.graph)

    def charges(self, positions: Iterable[int]) -> Charges:
        """Charges of nodes, the values that they make, and weights that they are first to read."""
        charges = Charges(len(self.graph.nodes), 3)
        for position in positions:
            node, place = self.graph.nodes[position], self.sharded.folded.places[position]
            placed = self.sharded.picks[place]
            charges.add((self.sharded.loads_s[place], 0.0, 0.0), charges.some_in([position]))
            for value, at in dict(_named((*node.inputs, *node.captures), placed.ins)).items():
                # a weight is resident, and so is an input as a sum with zeros
                stays = value in self.graph.constants or bool(at.sharding.partial)
                if value in self.graph.producers or not (stays or value in self.outliving):
                    continue
                readers = self._readers(value)[at]
                if position == readers[0]:
                    dtype = self.graph.types[value].dtype
                    resident = self._bytes(at, dtype) if stays else 0.0
                    more = self._passing(at, dtype) if value in self.outliving else 0.0
                    charges.add((0.0, resident, more), charges.some_in(readers))
            for value, home in _named(node.outputs, placed.outs):
                if value in self.outliving:
                    more = self._passing(home, self.graph.types[value].dtype)
                    charges.add((0.0, 0.0, more), charges.some_in([position]))
                for part, where in self._communications(charges, value, home, position):
                    charges.add(part, where)
        return charges

    def _readers(self, value: str) -> Mapping[Placement, list[int]]:
        """Positions of the readers of a value, by the placement that they read it in."""
        if value in self._known_readers:
            return self._known_readers[value]
        picks, places = self.sharded.picks, self.sharded.folded.places
        readers: dict[Placement, list[int]] = {}
        for node in self.graph.consumers[value]:
            position = self.graph.order[node.name]
            named = _named((*node.inputs, *node.captures), picks[places[position]].ins)
            for at in (at for name, at in named if name == value):
                readers.setdefault(at, []).append(position)
        self._known_readers[value] = readers
        return readers

    def _communications(
        self, charges: Charges, value: str, home: Placement, position: int
    ) -> Iterator[tuple[tuple[float, float, float], Iterable[Rectangle]]]:
        """The charge of each hop of a value, and the stretches in which a device pays for it."""
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        device = self.sharded.even.device
        readers = self._readers(value)
        inside: _Hops = {}
        leaving: _Hops = {}
        arriving: _Hops = {}
        if value in self.graph.outputs and home.sharding.partial and readers:
            # without readers it is in the node's own load
            _note(inside, self.resharder.hops(dtype, home, home.without_partial()), [position])
        for want, positions in readers.items():
            _note(inside, self.resharder.hops(dtype, home, want), positions)
            across = self.resharder.hops(dtype, home, moved(want, self.other))
            _note(leaving, across, positions)
            _note(arriving, across, positions)
        for after, (hop, near) in inside.items():
            both = leaving.pop(after, None)
            where = charges.some_in([position]) if both else charges.both_in(position, near)
            zeros = self._bytes(after, dtype) if hop.zeros else 0.0
            more = self._passing(after, dtype) if value in self.outliving else 0.0
            yield (_paid_s(hop, device, beside=beside), zeros, more), where
        for hop, far in leaving.values():
            stages = {int(self.stage[reader]) for reader in far} - {int(self.stage[position])}
            there = hop.after.mesh.devices[0] in self.other.model.devices
            times = max(1, len(stages)) if there else 1
            seconds = times * _paid_s(hop, device, beside=beside)
            more = 0.0 if there else self._passing(hop.after, dtype)
            yield (seconds, 0.0, more), charges.leaf_out(position, far)
        for hop, far in arriving.values():
            there = hop.after.mesh.devices[0] in self.other.model.devices
            seconds = _paid_s(hop, self.other.device, beside=beside)
            more = self._passing(hop.after, dtype) if there else 0.0
            yield (seconds, 0.0, more), charges.leaf_in(position, far)

    def _bytes(self, at: Placement, dtype: str) -> float:
        return float(self.sharded.even.local_bytes(at, dtype))

    def _passing(self, at: Placement, dtype: str) -> float:
        """Bytes of a value on each device, with head-room."""
        return float(with_headroom(self.sharded.even.local_bytes(at, dtype)))


def away(even: EvenMesh, beyond: DeviceMesh) -> EvenMesh:
    """The same group on a stand-in of devices beyond those of another stand-in."""
    shift = max(beyond.devices) + 1
    model = replace(even.model, devices=tuple(d + shift for d in even.model.devices))
    return replace(even, model=model)


def moved(at: Placement, other: EvenMesh) -> Placement:
    """The same placement on another group; of a single device, on the group's first."""
    mesh = other.model if at.mesh.axes else DeviceMesh.single(other.model.devices[0])
    return Placement(mesh, at.sharding)


def _paid_s(hop: Hop, device: int, *, beside: bool) -> float:
    """Seconds that a hop takes of a device, `beside` compute or before it."""
    comms = (priced for priced in hop.comms if device in priced.seconds)
    return sum(priced.busy_seconds(beside=beside)[device] for priced in comms)


def _named(
    values: Iterable[str], places: Iterable[Placement | None]
) -> Iterator[tuple[str, Placement]]:
    return ((v, at) for v, at in zip(values, places, strict=True) if at is not None)


def _note(readers: _Hops, hops: Iterable[Hop], positions: Sequence[int]) -> None:
    for hop in hops:
        readers.setdefault(hop.after, (hop, set()))[1].update(positions)
