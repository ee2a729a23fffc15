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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.solver.problem import SolverError


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
        """(data degree, tensor degree) of each kind of stage that may be, by the latter.

        Raises:
            SolverError: There is none.
        """
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
