"""A graph to be cut into pipeline stages on equal devices, whose nodes run in several ways.

A stage is a set of nodes on d times t devices: t share each node, d take turns at micro-batches.
No edge leads back to an earlier stage, d divides the number of micro-batches, and all d sum to
that number at most. A stage's time per sample is

    (2 * (cut edges' bytes and syncs) / d + 4 * (d - 1) / d * parameters / n) / bandwidth
    + seconds / d

and the largest counts. A device holds flying_bytes * y + resident_bytes of each node, where
y = ceil(d of this stage and all later ones / d). (Tarnawski, Narayanan, Phanishayee: "Piper:
Multidimensional Planner for DNN Parallelization", NeurIPS 2021.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.solver.problem import SolverError
from partitioner.solver.stages.model import Bools, Floats, Ints


@dataclass(frozen=True)
class Config:
    """A way to run a node on some number of devices."""

    name: str  #: Its id.
    time_s: float  #: Seconds a sample.
    flying_bytes: float  #: Held for each micro-batch in flight.
    resident_bytes: float  #: Held besides.


@dataclass(frozen=True)
class Sharded:
    """A node on one number of devices."""

    configs: tuple[Config, ...]  #: The ways to run it; at least one.
    parameter_bytes: float  #: Of its weights on a device, the same in all ways.
    #: For each predecessor, paid if its edge is cut; the same in all ways.
    sync_in_bytes: Mapping[int, float]
    sync_out_bytes: Mapping[int, float]  #: For each successor.


@dataclass(frozen=True)
class StageGraph:
    """The nodes, the edges and the devices; `dataclasses.replace` it for other limits."""

    devices: int
    limit_bytes: float  #: Memory of each device.
    bandwidth_bytes_per_s: float  #: From each device to the others.
    microbatches: int  #: In a batch.
    #: For each id, the node on each number of devices it can be on; topological order.
    nodes: Mapping[int, Mapping[int, Sharded]]
    edges: Mapping[tuple[int, int], float]  #: (source, target) -> bytes of activations.

    @cached_property
    def needs(self) -> Mapping[int, frozenset[int]]:
        """The nodes that each node has an edge from."""
        needs: dict[int, set[int]] = {v: set() for v in self.nodes}
        for source, target in self.edges:
            needs[target].add(source)
        return {v: frozenset(before) for v, before in needs.items()}

    @cached_property
    def degrees(self) -> tuple[tuple[int, int], ...]:
        """(data degree, tensor degree) of each kind of stage that may be, by the latter."""
        degrees = tuple(
            (data, tensor)
            for tensor in sorted({t for shards in self.nodes.values() for t in shards})
            for data in range(1, min(self.devices // tensor, self.microbatches) + 1)
            if self.microbatches % data == 0
        )
        if not degrees:
            raise SolverError("no number of devices holds any node")
        return degrees

    @property
    def most_in_flight(self) -> int:
        """Bound the micro-batches that a stage holds."""
        return min(self.devices // min(t for _, t in self.degrees), self.microbatches)


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan: the name of the config of each of its nodes, and its degrees."""

    configs: Mapping[int, str]
    data_degree: int
    tensor_degree: int


#: Downsets that are enumerated at most.
MOST_DOWNSETS = 1_000

Downset = frozenset[int]


def enumerate_downsets(graph: StageGraph) -> tuple[Downset, ...] | None:
    """All downsets by size, then by their nodes; None if there are more than `MOST_DOWNSETS`."""
    downsets: set[Downset] = {frozenset()}
    largest = downsets
    while largest:
        largest = {
            downset | {v}
            for downset in largest
            for v, needs in graph.needs.items()
            if v not in downset and needs <= downset
        }
        downsets |= largest
        if len(downsets) > MOST_DOWNSETS:
            return None
    return in_order(downsets)


def in_order(downsets: Iterable[Downset]) -> tuple[Downset, ...]:
    """Downsets by size, then by their nodes."""
    return tuple(sorted(downsets, key=lambda downset: (len(downset), sorted(downset))))


def between(cuts: Sequence[Downset], order: Sequence[int]) -> tuple[Downset, ...]:
    """Some downsets, each a part of the next, and between two the heads of an order."""
    downsets: set[Downset] = {frozenset()}
    head: list[int] = []
    for low, high in zip([frozenset(), *cuts], [*cuts, frozenset(order)], strict=True):
        head += [v for v in order if v in high and v not in low]
        downsets.update(frozenset(head[:many]) for many in range(len(low), len(head) + 1))
    return in_order(downsets)


def around(graph: StageGraph, cuts: Sequence[Downset], most: int) -> tuple[Downset, ...]:
    """The downsets that are the nearest to some, by nodes that come or go; at most so many."""
    wanted_by: dict[int, set[int]] = {v: set() for v in graph.nodes}
    for source, target in graph.edges:
        wanted_by[source].add(target)
    nearest: dict[Downset, None] = dict.fromkeys([frozenset(), frozenset(graph.nodes), *cuts])
    ring = list(cuts)
    while ring and len(nearest) < most:
        further: list[Downset] = []
        for cut in ring:
            more = (cut | {v} for v, needs in graph.needs.items() if v not in cut and needs <= cut)
            fewer = (cut - {v} for v in cut if not wanted_by[v] & cut)
            further += [near for near in (*more, *fewer) if near not in nearest]
        ring = list(dict.fromkeys(further))[: most - len(nearest)]
        nearest |= dict.fromkeys(ring)
    return in_order(nearest)


@dataclass(frozen=True)
class Layout:
    """Record which downset has which node, for sums over the nodes of all stages.

    With I a part of J, a sum over J less I is the sum over J less the sum over I, and an edge
    enters the stage if its source is in I and its target in J only.
    """

    graph: StageGraph
    downsets: tuple[Downset, ...]

    @cached_property
    def has(self) -> Floats:
        """[downset, node]: 1 where the node is in it."""
        nodes = self.graph.nodes
        return np.array([[float(v in downset) for v in nodes] for downset in self.downsets])

    @cached_property
    def column(self) -> dict[int, int]:
        """Column of each node in `has`."""
        return {v: index for index, v in enumerate(self.graph.nodes)}

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """I and J of each stage: the pairs of which I is a smaller part of J."""
        both, size = self.has @ self.has.T, self.has.sum(axis=1)
        start, stop = np.nonzero((both == size[:, None]) & (size[:, None] < size))
        return start, stop

    def stage_nodes(self, start: int, stop: int) -> Downset:
        """The nodes of a stage."""
        return self.downsets[stop] - self.downsets[start]

    def moved_s(self, data: int, tensor: int) -> Floats:
        """Seconds of communication of each stage on so many devices; (pairs,)."""
        batch, bandwidth = self.graph.microbatches, self.graph.bandwidth_bytes_per_s
        cut, parameters = self._moved_bytes[tensor]
        return np.asarray((2 * cut / data + 4 * (data - 1) / data * parameters / batch) / bandwidth)

    @cached_property
    def _moved_bytes(self) -> dict[int, tuple[Floats, Floats]]:
        """For each tensor degree the bytes that each stage's cuts move, and of its parameters."""
        start, stop = self.pairs
        moved_bytes = {}
        for tensor in sorted({tensor for _, tensor in self.graph.degrees}):
            sharded = {v: shards.get(tensor) for v, shards in self.graph.nodes.items()}
            cut = np.zeros(len(start))
            for (u, v), moved in self.graph.edges.items():
                source, target = self.has[:, self.column[u]], self.has[:, self.column[v]]
                head, tail, behind = sharded[v], sharded[u], (source - target)[start]
                if head is not None:
                    cut += behind * target[stop] * (moved + head.sync_in_bytes[u])
                if tail is not None:
                    leaves = (1 - source[start]) * (source - target)[stop]
                    cut += leaves * (moved + tail.sync_out_bytes[v])
            sizes = [0.0 if of is None else of.parameter_bytes for of in sharded.values()]
            moved_bytes[tensor] = cut, self.sums(sizes)
        return moved_bytes

    def missing(self, tensor: int) -> Bools:
        """Tell of each stage whether a node cannot be on so many devices; (pairs,)."""
        lacks = [float(tensor not in shards) for shards in self.graph.nodes.values()]
        return np.asarray(self.sums(lacks) > 0)

    def sums(self, values: Sequence[float]) -> Floats:
        """Sum of one value a node over the nodes of each stage; (pairs,)."""
        total = self.has @ np.array(values)
        start, stop = self.pairs
        return np.asarray(total[stop] - total[start])
