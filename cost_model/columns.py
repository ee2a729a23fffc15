"""Costs by column of a problem; a column is a device, or the representative of a device group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.cost_model.compute import node_seconds
from partitioner.cost_model.even_mesh import EvenResharder
from partitioner.cost_model.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.plan import PlacedNode


@dataclass(frozen=True)
class DeviceColumns:
    """A column per device of the cluster."""

    graph: Graph
    resharder: Resharder

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each column."""
        return tuple(range(len(self.resharder.cluster)))

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """Seconds of a node by device."""
        return node_seconds(self.graph, placed, self.resharder.cluster)

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Bytes of a value's local parts by device."""
        return at.local_bytes(dtype)


@dataclass(frozen=True)
class GroupColumns(DeviceColumns):
    """A column per group of equal devices: the group of an `EvenResharder`, and its other one.

    Placements are on the groups' stand-in meshes; see `cost_model.even_mesh`.
    """

    resharder: EvenResharder

    @property
    def devices(self) -> tuple[int, ...]:
        """The representative of each group."""
        even, other = self.resharder.even, self.resharder.other
        return (even.device,) if other is None else (even.device, other.device)

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """Seconds of a node on the representative of its group."""
        seconds = self.resharder.even.node_seconds(self.graph, placed)
        return {self.resharder.column(placed.mesh): seconds}

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Bytes of a value's local part on the representative of its group."""
        return {self.resharder.column(at.mesh): self.resharder.even.local_bytes(at, dtype)}
