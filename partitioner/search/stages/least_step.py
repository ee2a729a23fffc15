"""A bound on steps in micro-batches through stages, by the graph of the whole batch alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.compute import is_free, node_seconds
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import place
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class LeastStep:
    """The least seconds of a step by the number of its micro-batches.

    A kernel takes no less than its launch, and one of several parts of it no less than its share,
    so that smaller micro-batches save nothing. Communications are not counted. Measured kernels
    may take less together than alone: nothing is known of devices with a profile.
    """

    graph: Graph  #: The graph of the whole batch.
    cluster: Cluster
    most: int  #: Most devices of a stage.
    waits: bool  #: Whether the cost is that of one step from begin to end, and not of a stream.

    def seconds(self, count: int) -> float:
        """No step in so many micro-batches takes less.

        The devices share the kernels of all micro-batches, evenly at best; and a micro-batch takes
        its longest path, of kernels that the devices of a stage share.
        """
        if any(spec.profile is not None for spec in self.cluster.first_of_spec):
            return 0.0
        devices, load_s = len(self.cluster), 0.0
        done: dict[str, float] = {}
        for node in self.graph.nodes:
            begin = max((done.get(value, 0.0) for value in node.reads), default=0.0)
            times = count if node.name in self._repeated else 1
            whole_s = self._whole_s.get(node.name, 0.0)
            floor_s = min(self._launch_s, whole_s)
            load_s += max(times * floor_s, whole_s) / devices
            end = begin + max(floor_s, whole_s / (times * self.most))
            done.update(dict.fromkeys(node.writes, end))
        return max(load_s, max(done.values(), default=0.0)) if self.waits else load_s

    @property
    def _launch_s(self) -> float:
        return min(spec.launch_s for spec in self.cluster.first_of_spec)

    @cached_property
    def _whole_s(self) -> Mapping[str, float]:
        """Seconds of each kernel on the device that is fastest at it."""
        rules, specs = rules_of(self.graph), self.cluster.first_of_spec.values()
        seconds: dict[str, float] = {}
        for node in self.graph.nodes:
            rule = rules[node.name]
            own = rule if isinstance(rule, Rule) else None
            each: list[float] = []
            for device in specs:
                placed = place(self.graph, node, DeviceMesh.single(device), {}, own)
                if not is_free(placed):
                    each += node_seconds(self.graph, placed, self.cluster).values()
            if each:
                seconds[node.name] = min(each)
        return seconds

    @cached_property
    def _repeated(self) -> frozenset[str]:
        """The nodes that every micro-batch runs: those that follow from the inputs."""
        known, names = {*self.graph.inputs}, set[str]()
        for node in self.graph.nodes:
            if not known.isdisjoint(node.reads):
                known.update(node.writes)
                names.add(node.name)
        return frozenset(names)
