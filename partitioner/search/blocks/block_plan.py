"""The plan of a graph of which stretches run in blocks: in stages, spread, or shared by devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.plan import NodePlan, Plan
from partitioner.problem.decode import planned_on
from partitioner.rewrites.block_graph import BlockGraph
from partitioner.search.blocks.shared import Shared
from partitioner.search.request import Budget
from partitioner.strategies.spaces import Family


@dataclass(frozen=True)
class BlockPlan:
    """A way to run a graph in blocks."""

    blocks: Blocks  #: The stretches.
    #: Position at which each stage begins, with its device; ascending, the first is 0.
    stages: tuple[tuple[int, int], ...]
    #: Whether the blocks of a stretch that is cut run on all devices, on that of its stage first.
    is_spread: bool = False
    #: How every device runs its part of each node, in place of stages; None if nodes are placed
    #: whole.
    shared: Shared | None = None

    def plan(
        self, graph: Graph, cut: BlockGraph, cluster: Cluster, budget: Budget
    ) -> tuple[Family, Plan] | None:
        """The plan of the graph of all blocks; None if the search finds none.

        Args:
            graph: The whole graph.
            cut: The graph of all blocks.
            cluster: The devices.
            budget: The budget of the search.
        """
        if self.shared is not None:
            planned = self.shared.plan(cut.graph, cluster, budget)
            if planned is None:
                return None
            family, plan = planned
            return family, replace(plan, blocks=self.blocks)
        groups = tuple(DeviceMesh.single(device) for device in range(len(cluster)))
        name = "inter" if len(cluster) > 1 else "single"
        devices = self.devices(graph, cut, len(cluster))
        decided = {name: NodePlan(device, {}) for name, device in devices.items()}
        _, plan = planned_on(cut.graph, cluster, groups, decided)
        return Family(name, groups, groups, symmetric=False), replace(plan, blocks=self.blocks)

    def devices(self, graph: Graph, cut: BlockGraph, count: int) -> Mapping[str, int]:
        """The device of each node of the graph of all blocks.

        Args:
            graph: The whole graph.
            cut: The graph of all blocks.
            count: Number of devices.
        """
        blocks = {graph.order[s.first]: s.blocks for s in self.blocks.stretches if s.chunks}
        devices = {}
        for node in cut.graph.nodes:
            position = cut.positions[node.name]
            device = max((begin, device) for begin, device in self.stages if begin <= position)[1]
            if self.is_spread and node.name in cut.numbers:
                of = blocks[position]
                turn = cut.numbers[node.name] * min(count, of) // of
                device = (device + turn) % count
            devices[node.name] = device
        return devices
