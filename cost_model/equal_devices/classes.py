"""Classes of devices that execute identical work: one representative of each is evaluated.

Devices are of one class if they have one specification, run the same nodes on parts of equal sizes,
and take the same part in every step of every reshard, together with devices of the same classes.
Then they have the same tasks in the same order, and so the same seconds, waits, bytes and traffic.
Classes are refined until no two devices of one class can be told apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import dispatch_comms, dispatch_seconds
from partitioner.cost_model.prices.reshard import Hop, Resharder
from partitioner.ir.exchange import sent_numel
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode


def representatives(
    graph: Graph, placed: Sequence[PlacedNode], cluster: Cluster, resharder: Resharder
) -> Mapping[int, int]:
    """A device that is evaluated for each device: the first of its class, or itself.

    Where a communication of one that is evaluated has ranks of a class whose first takes no part in
    it, one of these is evaluated too.
    """
    hops = _hops(graph, placed, resharder)
    classes = [0] * len(cluster)
    sizes, inside = _local_sizes(placed), list[Mapping[int, Hashable]]()
    for node in (node for node in placed if node.sent):
        inside += [dispatch_seconds(node, cluster)]
        inside += [sent_numel(comm.transfers) for comm in dispatch_comms(node)]
    for labels in (dict(enumerate(cluster.devices)), *sizes, *inside, *(hop.roles for hop in hops)):
        _refine(classes, labels)
    count = 0
    while len(set(classes)) != count:
        count = len(set(classes))
        for hop in hops:
            peers: dict[int, list[Hashable]] = defaultdict(list)
            for priced in hop.comms:
                sides = priced.comm.sources(), priced.comm.targets()
                pair = tuple(frozenset(classes[device] for device in side) for side in sides)
                for device in priced.seconds:
                    peers[device].append(pair)
            _refine(classes, {device: tuple(parts) for device, parts in peers.items()})
    first: dict[int, int] = {}
    shared = {device: first.setdefault(label, device) for device, label in enumerate(classes)}
    return shared | {device: device for device in _beside(hops, classes, first.values())}


def _refine(classes: list[int], labels: Mapping[int, Hashable]) -> None:
    """Split each class by the label of its devices; those without a label stay together."""
    free = 1 + max(classes, default=0)
    numbers: dict[tuple[int, Hashable], int] = {}
    for device, label in labels.items():
        pair = classes[device], label
        numbers.setdefault(pair, free + len(numbers))
        classes[device] = numbers[pair]


def _local_sizes(placed: Sequence[PlacedNode]) -> Iterator[Mapping[int, Hashable]]:
    """Local size of every cut dim and loop on each device of its group; work of uneven nodes."""
    cuts: dict[tuple[DeviceMesh, DimLayout], None] = {}
    for node in placed:
        if node.rule is not None and node.rule.is_uneven(node.layouts):
            yield {
                device: node.rule.work(node.layouts, node.mesh, point)
                for device, point in node.mesh.coords()
            }
        cuts.setdefault((node.mesh, DimLayout.whole(1)))
        for layout in node.layouts.values():
            cuts.setdefault((node.mesh, layout))
        for _, at in (*node.operands(), *node.results()):
            for dim in at.sharding.dims:
                if dim.axes:
                    cuts.setdefault((at.mesh, dim))
    yield from (_sizes(mesh, layout) for mesh, layout in cuts)


@lru_cache(maxsize=4096)
def _sizes(mesh: DeviceMesh, layout: DimLayout) -> Mapping[int, Hashable]:
    return {device: layout.local_size(mesh, point) for device, point in mesh.coords()}


def _hops(graph: Graph, placed: Sequence[PlacedNode], resharder: Resharder) -> Sequence[Hop]:
    homes: dict[str, Placement] = {}
    reshards: dict[tuple[str, Placement, Placement], None] = {}
    for node in placed:
        for value, at in node.operands():
            if value not in graph.constants:
                home = homes.get(value) or at.without_partial()
                reshards.setdefault((graph.types[value].dtype, home, at))
        homes.update(node.results())
    for value in graph.outputs:
        home = homes[value]
        reshards.setdefault((graph.types[value].dtype, home, home.without_partial()))
    return [*{id(hop): hop for args in reshards for hop in resharder.hops(*args)}.values()]


def _beside(hops: Sequence[Hop], classes: Sequence[int], firsts: Iterable[int]) -> Iterator[int]:
    """More devices to evaluate, so that all classes of a communication's ranks take part in it."""
    groups_of: dict[int, set[frozenset[int]]] = defaultdict(set)
    for group in {frozenset(priced.seconds) for hop in hops for priced in hop.comms}:
        for device in group:
            groups_of[device].add(group)
    evaluated = set(firsts)
    waiting = deque(sorted(evaluated))
    while waiting:
        for group in sorted(groups_of[waiting.popleft()], key=sorted):
            present = {classes[device] for device in group & evaluated}
            for device in sorted(group - evaluated):
                if classes[device] not in present:
                    present.add(classes[device])
                    evaluated.add(device)
                    waiting.append(device)
                    yield device
