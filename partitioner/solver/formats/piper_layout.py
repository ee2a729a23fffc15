"""The stages that a set of downsets makes, and what they pay whatever ways their nodes take.

A *downset* is a set of nodes that holds all that its nodes need. In any plan the nodes of the
first k stages are one, for every k: so positions are downsets, and the stage from I to J is J less
I, where I is a part of J. With all downsets of a graph that loses no plan; with some of them, such
as the heads of a few orders, it is a search among the plans that they make. Seconds and bytes of
all stages are computed at once, as arrays over pairs of downsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.solver.formats.piper import Instance
from partitioner.solver.problem import SolverError
from partitioner.solver.stages.model import Bools, Floats, Ints

#: Downsets, and entries of all options, that the arrays are meant for.
MOST_DOWNSETS = 1_000
MOST_ENTRIES = 5 * 10**7

Downset = frozenset[int]


def enumerate_downsets(instance: Instance) -> tuple[Downset, ...] | None:
    """All downsets by size, then by their nodes; None if there are more than the arrays hold."""
    needs = needs_of(instance)
    downsets: set[Downset] = {frozenset()}
    largest = downsets
    while largest:
        largest = {
            downset | {v}
            for downset in largest
            for v in needs
            if v not in downset and needs[v] <= downset
        }
        downsets |= largest
        if len(downsets) > MOST_DOWNSETS:
            return None
    return in_order(downsets)


def needs_of(instance: Instance) -> dict[int, set[int]]:
    """The nodes that each node has an edge from."""
    needs: dict[int, set[int]] = {v: set() for v in instance.nodes}
    for source, target in instance.edges:
        needs[target].add(source)
    return needs


def in_order(downsets: Iterable[Downset]) -> tuple[Downset, ...]:
    """Downsets by size, then by their nodes."""
    return tuple(sorted(downsets, key=lambda downset: (len(downset), sorted(downset))))


def all_degrees(instance: Instance) -> tuple[tuple[int, int], ...]:
    """(data degree, tensor degree) of each kind of stage that may be.

    Raises:
        SolverError: There is none.
    """
    degrees = tuple(
        (data, tensor)
        for tensor in sorted({t for shards in instance.nodes.values() for t in shards})
        for data in range(1, min(instance.devices // tensor, instance.microbatches) + 1)
        if instance.microbatches % data == 0
    )
    if not degrees:
        raise SolverError("no number of devices holds any node")
    return degrees


@dataclass(frozen=True)
class Layout:
    """Record which downset has which node, for sums over the nodes of all stages.

    With I a part of J, a sum over J less I is the sum over J less the sum over I, and an edge
    enters the stage if its source is in I and its target in J only.
    """

    instance: Instance
    downsets: tuple[Downset, ...]

    @cached_property
    def has(self) -> Floats:
        """[downset, node]: 1 where the node is in it."""
        nodes = self.instance.nodes
        return np.array([[float(v in downset) for v in nodes] for downset in self.downsets])

    @cached_property
    def column(self) -> dict[int, int]:
        """Column of each node in `has`."""
        return {v: index for index, v in enumerate(self.instance.nodes)}

    @cached_property
    def nested(self) -> Bools:
        """[I, J]: whether I is a smaller part of J."""
        both = self.has @ self.has.T
        size = self.has.sum(axis=1)
        return np.asarray((both == size[:, None]) & (size[:, None] < size))

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """I and J of each stage, the pairs that are nested."""
        start, stop = np.nonzero(self.nested)
        return start, stop

    def stage_nodes(self, start: int, stop: int) -> Downset:
        """The nodes of a stage."""
        return self.downsets[stop] - self.downsets[start]

    def moved_s(self, tensor: int, data_degrees: Sequence[int]) -> list[Floats]:
        """[I, J] for each data degree: seconds of each stage's communication."""
        batch, bandwidth = self.instance.microbatches, self.instance.bandwidth_bytes_per_s
        sharded = [shards.get(tensor) for shards in self.instance.nodes.values()]
        parameters = self.sums([0.0 if of is None else of.parameter_bytes for of in sharded])
        cut = self._cut_bytes(tensor)
        return [
            np.asarray((2 * cut / data + 4 * (data - 1) / data * parameters / batch) / bandwidth)
            for data in data_degrees
        ]

    def missing(self, tensor: int) -> Bools:
        """[I, J]: whether a node of the stage cannot be on so many devices."""
        lacks = [float(tensor not in shards) for shards in self.instance.nodes.values()]
        return np.asarray(self.sums(lacks) > 0)

    def sums(self, values: Sequence[float]) -> Floats:
        """[I, J]: sum over the nodes of J less I of one value a node; 0 if I is not within J."""
        total = self.has @ np.array(values)
        return np.where(self.nested, total - total[:, None], 0.0)

    def _cut_bytes(self, tensor: int) -> Floats:
        total = np.zeros(self.nested.shape)
        for (u, v), moved in self.instance.edges.items():
            source, target = self.has[:, self.column[u]], self.has[:, self.column[v]]
            head, tail = (self.instance.nodes[end].get(tensor) for end in (v, u))
            if head is not None:
                enters = (source - target)[:, None] * target
                total += enters * (moved + head.sync_in_bytes[u])
            if tail is not None:
                leaves = (1 - source)[:, None] * (source - target)
                total += leaves * (moved + tail.sync_out_bytes[v])
        return np.where(self.nested, total, 0.0)
