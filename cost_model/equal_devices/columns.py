"""Costs by column of a problem; a column is a device, or the representative of a device group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from partitioner.cost_model.equal_devices.even_mesh import EvenResharder
from partitioner.cost_model.prices.compute import adding_seconds, node_seconds
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode


@dataclass(frozen=True)
class DeviceColumns:
    """A column per device of the cluster."""

    graph: Graph
    resharder: Resharder  #: Gives the reshards.
    micro_batches: int = 1  #: Times that the graph runs in a step.
    lanes: int = 1  #: Groups of devices that share what is stored and the gradients, in stages.
    #: Seconds of nodes by identity: several problems of one search have the same strategies.
    _seconds: dict[int, tuple[PlacedNode, Mapping[int, float]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def held_share(self, value: str) -> float:
        """Share of the bytes of a value that a device of one stage holds.

        The first stages hold the activations of as many micro-batches as there are lanes, which is
        as much as one micro-batch of the whole model.
        """
        return 1 / self.lanes if self.lanes > 1 and value in self._at_rest else 1.0

    @cached_property
    def _at_rest(self) -> frozenset[str]:
        """Stored values and gradients, which are views of others at most."""
        updates = (node for node in self.graph.nodes if node.attrs.get("role") == "gradient")
        values = {value for node in updates for value in (node.inputs[0], *node.writes)}
        for node in reversed(self.graph.nodes):
            row = row_of(node)
            if row.stored or (row.view and values.intersection(node.writes)):
                values.update(node.writes if row.stored else node.inputs[:1])
        return frozenset(values)

    def move_share(self, value: str, before: Placement, after: Placement) -> float:
        """Share of the seconds of a reshard that a micro-batch takes.

        Gradients are added up over devices once a step, unless parts are stored cut further.
        """
        if self.micro_batches == 1 or value not in self._gradients:
            return 1.0
        same = before.sharding.dims == after.sharding.dims
        return 1 / self.micro_batches if same else 1.0

    @cached_property
    def _gradients(self) -> frozenset[str]:
        nodes = (node for node in self.graph.nodes if node.attrs.get("role") == "gradient")
        return frozenset(node.inputs[0] for node in nodes)

    @property
    def takers(self) -> frozenset[str]:
        """Nodes whose results are views that hold the bytes of what they are views of."""
        return frozenset()

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each column."""
        return tuple(range(len(self.resharder.cluster)))

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """Seconds of a node in a micro-batch, by column; the optimizer runs once a step."""
        seconds = self._run_seconds(placed)
        if self.micro_batches == 1 or placed.node.attrs.get("role") != "gradient":
            return seconds
        (gradient, at), *_ = placed.operands()
        sizes = self.local_bytes(at, self.graph.types[gradient].dtype)
        count, devices = self.micro_batches, self.resharder.cluster.devices
        return {
            column: s / count
            + adding_seconds(self.graph, gradient, sizes[column], devices[column], count)
            for column, s in seconds.items()
        }

    def _run_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        if id(placed) not in self._seconds:
            seconds = node_seconds(self.graph, placed, self.resharder.cluster)
            self._seconds[id(placed)] = placed, seconds
        return self._seconds[id(placed)][1]

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Bytes of a value's local parts by device."""
        return at.local_bytes(dtype)


@dataclass(frozen=True)
class GroupColumns(DeviceColumns):
    """A column per group of an `EvenResharder`; placements are on the groups' stand-in meshes."""

    resharder: EvenResharder

    @property
    def devices(self) -> tuple[int, ...]:
        """The representative of each group."""
        even, other = self.resharder.even, self.resharder.other
        return (even.device,) if other is None else (even.device, other.device)

    @cached_property
    def takers(self) -> frozenset[str]:
        """The only readers of what a pass makes, which they view whole, in training.

        A reshard on the way to such a view, as of a gradient that is summed over devices, frees its
        operand. By the referee's exact count it does, too, which searches of columns look at where
        nothing fits by their own.
        """
        graph, takers, holding = self.graph, set[str](), set[str]()
        for node in graph.nodes if graph.backward else ():
            row = row_of(node)
            if not row.view or row.either:
                holding.update(() if row.stored else node.writes)
                continue
            if len(node.writes) != 1:
                continue
            value, (result,) = node.inputs[0], node.writes
            before, after = graph.types[value], graph.types[result]
            alike = (before.numel, before.dtype) == (after.numel, after.dtype)
            alone = len(graph.consumers[value]) == 1 and value not in graph.outputs
            if value in holding and alike and alone:
                takers.add(node.name)
                holding.add(result)
        return frozenset(takers)

    def _run_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        seconds = self.resharder.even.node_seconds(self.graph, placed)
        return {self.resharder.column(placed.mesh): seconds}

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Bytes of a value's local part on the representative of its group."""
        return {self.resharder.column(at.mesh): self.resharder.even.local_bytes(at, dtype)}
