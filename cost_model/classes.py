"""Devices that do alike, so that one of them tells what all do.

Devices are alike if they are of one specification, run the same nodes on parts of equal sizes, and
take the same part in every step of every reshard, beside devices that are alike again. Then they
have the same tasks in the same order, and so the same seconds, waits, bytes and traffic. Classes
are split until nothing tells two devices of one apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.reshard import Hop, Resharder
from partitioner.cost_model.traffic import leaving
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode


def representatives(
    graph: Graph, placed: Sequence[PlacedNode], cluster: Cluster, resharder: Resharder
) -> Mapping[int, int]:
    """For each device the first one of its class, itself if it is like no other before it.

    Args:
        graph: The model.
        placed: Its nodes in the plan's order.
        cluster: The devices.
        resharder: What makes the plan's reshards.
    """
    steps = [_Step(hop) for hop in _hops(graph, placed, resharder)]
    colours = _split([0] * len(cluster), dict(enumerate(cluster.devices)))
    for parts in (*_parts(placed), *(step.own() for step in steps)):
        colours = _split(colours, parts)
    colours = _settled(colours, steps)
    first: dict[int, int] = {}
    found = {device: first.setdefault(colour, device) for device, colour in enumerate(colours)}
    together = all(step.shows(found) for step in steps)
    return found if together else {device: device for device in found}


def _settled(colours: list[int], steps: Sequence[_Step]) -> list[int]:
    """Split classes by whom their members meet, until nothing changes."""
    while True:
        before = len(set(colours))
        for step in steps:
            colours = _split(colours, step.peers(colours))
        if len(set(colours)) == before:
            return colours


def _split(colours: Sequence[int], parts: Mapping[int, Hashable]) -> list[int]:
    """Classes by what the devices were and what these parts say of them."""
    found: dict[Hashable, int] = {}
    both = ((colour, parts.get(device)) for device, colour in enumerate(colours))
    return [found.setdefault(one, len(found)) for one in both]


def _parts(placed: Sequence[PlacedNode]) -> Iterator[Mapping[int, Hashable]]:
    """How much each device of a group has of each dim and loop that is cut on it."""
    cuts: dict[tuple[DeviceMesh, DimLayout], None] = {}
    for node in placed:
        cuts.setdefault((node.mesh, DimLayout.whole(1)))
        for layout in node.layouts.values():
            cuts.setdefault((node.mesh, layout))
        for _, at in (*node.operands(), *node.results()):
            for dim in at.sharding.dims:
                if dim.axes:
                    cuts.setdefault((at.mesh, dim))
    for mesh, layout in cuts:
        yield {device: layout.local_size(mesh, point) for device, point in mesh.coords()}


def _hops(graph: Graph, placed: Sequence[PlacedNode], resharder: Resharder) -> Iterator[Hop]:
    """The steps of all reshards that a schedule has, each once."""
    homes: dict[str, Placement] = {}
    wanted: dict[tuple[str, Placement, Placement], None] = {}

    def whole(at: Placement) -> Placement:
        return Placement(at.mesh, at.sharding.without_partial())

    for node in placed:
        for value, at in node.operands():
            if value not in graph.constants:
                home = homes[value] if value in homes else whole(at)
                wanted.setdefault((graph.types[value].dtype, home, at))
        homes.update(node.results())
    for value in graph.outputs:
        home = homes[value]
        wanted.setdefault((graph.types[value].dtype, home, whole(home)))
    found = {id(hop): hop for one in wanted for hop in resharder.hops(*one)}
    yield from found.values()


@dataclass(frozen=True)
class _Step:
    """One step of a reshard, seen by the devices that take part."""

    hop: Hop

    def own(self) -> Mapping[int, Hashable]:
        """What each device does, whoever the others are."""
        found: dict[int, list[Hashable]] = defaultdict(list)
        for priced in self.hop.comms:
            comm = priced.comm
            sends = leaving(comm.transfers)
            for device, seconds in priced.seconds.items():
                sides = device in comm.sources(), device in comm.targets()
                moved = sends.get(device, 0)
                found[device].append((comm.kind, seconds, priced.overlap, sides, moved))
        for device in self.hop.aliases:
            found[device].append("alias")
        for device in self.hop.zeros:
            found[device].append("zeros")
        return {device: tuple(parts) for device, parts in found.items()}

    def peers(self, colours: Sequence[int]) -> Mapping[int, Hashable]:
        """Of which classes those are that each device gets from, and sends to."""
        found: dict[int, list[Hashable]] = defaultdict(list)
        for priced in self.hop.comms:
            sides = priced.comm.sources(), priced.comm.targets()
            classes = tuple(frozenset(colours[device] for device in side) for side in sides)
            for device in priced.seconds:
                found[device].append(classes)
        return {device: tuple(parts) for device, parts in found.items()}

    def shows(self, first: Mapping[int, int]) -> bool:
        """Whether the first ones of classes that meet anywhere meet each other."""
        members = (set(priced.seconds) for priced in self.hop.comms)
        return all(
            {first[device] for device in group} <= group
            for group in members
            if any(first[device] == device for device in group)
        )
