"""What the choices of a problem cost on each of its columns: a device, or one of many alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from partitioner.cost_model.compute import node_seconds
from partitioner.cost_model.devices import Cluster
from partitioner.cost_model.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.plan import PlacedNode


class Prices(Protocol):
    """Prices by device; only the devices that have a column count."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each column."""

    @property
    def resharder(self) -> Resharder:
        """Prices of reshards."""

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """Seconds that a node takes, by device."""

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Bytes of a value's part, by device."""

    def memory_bytes(self, device: int) -> int:
        """Memory of a device."""


@dataclass(frozen=True)
class DevicePrices:
    """A column for every device of a cluster."""

    graph: Graph
    cluster: Cluster
    resharder: Resharder

    @property
    def devices(self) -> tuple[int, ...]:
        """All."""
        return tuple(range(len(self.cluster)))

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """See `compute.node_seconds`."""
        return node_seconds(self.graph, placed, self.cluster)

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """See `Placement.local_bytes`."""
        return at.local_bytes(dtype)

    def memory_bytes(self, device: int) -> int:
        """As the cluster says."""
        return self.cluster.devices[device].memory_bytes


@dataclass(frozen=True)
class EvenPrices:
    """A column for a group of devices that do alike, and one for another such group, if any.

    Placements are on the groups' stand-ins; see `cost_model.even`.
    """

    graph: Graph
    even: EvenMesh
    resharder: EvenResharder

    @property
    def devices(self) -> tuple[int, ...]:
        """The device that stands for each group."""
        other = self.resharder.other
        return (self.even.device,) if other is None else (self.even.device, other.device)

    def node_seconds(self, placed: PlacedNode) -> Mapping[int, float]:
        """Of the device that stands for the node's group."""
        seconds = self.even.node_seconds(self.graph, placed)
        return {self.resharder.column(placed.mesh): seconds}

    def local_bytes(self, at: Placement, dtype: str) -> Mapping[int, int]:
        """Likewise."""
        return {self.resharder.column(at.mesh): self.even.local_bytes(at, dtype)}

    def memory_bytes(self, device: int) -> int:
        """As the cluster says."""
        return self.even.cluster.devices[device].memory_bytes
