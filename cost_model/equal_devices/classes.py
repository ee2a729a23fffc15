"""Classes of devices that execute identical work: one representative of each is evaluated.

Devices are of one class if they have one specification, run the same nodes on parts of equal sizes,
and take the same part in every step of every reshard, together with devices of the same classes.
Then they have the same tasks in the same order, and so the same seconds, waits, bytes and traffic.
Classes are refined until no two devices of one class can be told apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import dispatch_comms, dispatch_seconds
from partitioner.cost_model.prices.compute import mesh_indices
from partitioner.cost_model.prices.reshard import Hop, Real, Resharder
from partitioner.ir.exchange import sent_numel
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh, copies_on
from partitioner.ir.plan import PlacedNode

_Numbers = npt.NDArray[np.int64]


def representatives(
    graph: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    resharder: Resharder,
    everywhere: frozenset[str] = frozenset(),
) -> Mapping[int, int]:
    """A device that is evaluated for each device: the first of its class, or itself.

    Every device gets the outputs in `everywhere` whole.

    Where a communication of one that is evaluated has ranks of a class whose first takes no part in
    it, one of these is evaluated too.
    """
    steps = _steps(graph, placed, resharder, everywhere)
    classes = _Classes(np.zeros(len(cluster), np.int64))
    if not cluster.has_equal_devices:
        classes.refine(*_numbered(dict(enumerate(cluster.devices))))
    for labels in _local_sizes(placed):
        classes.refine(*labels)
    for node in (node for node in placed if node.sent):
        classes.refine(*_numbered(dispatch_seconds(node, cluster)))
        for comm in dispatch_comms(node):
            classes.refine(*_numbered(sent_numel(comm.transfers)))
    for step in steps:
        classes.refine(step.devices, step.roles)
    count, known = 0, dict[tuple[int, bytes], _Numbers]()
    while classes.count != count:
        count = classes.count
        for step in steps:
            own = np.unique(classes.of[step.devices], return_inverse=True)[1]
            key = id(step.hop), own.tobytes()
            if key not in known:
                known[key] = step.peers(own)
            classes.refine(step.devices, known[key])
    labels, first = classes.of.tolist(), dict[int, int]()
    shared = {device: first.setdefault(label, device) for device, label in enumerate(labels)}
    return shared | {device: device for device in _beside(steps, classes.of, first.values())}


@dataclass
class _Classes:
    """The class of each device."""

    of: _Numbers

    @property
    def count(self) -> int:
        return len(np.unique(self.of))

    def refine(self, devices: _Numbers, labels: _Numbers) -> None:
        """Split each class by the labels of some devices; those without a label stay together."""
        if len(devices):
            pairs = self.of[devices] * (1 + labels.max()) + labels
            self.of[devices] = 1 + self.of.max() + np.unique(pairs, return_inverse=True)[1]


def _numbered(labels: Mapping[int, Hashable]) -> tuple[_Numbers, _Numbers]:
    """Devices, and a number for each label of theirs."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(label, len(numbers)) for label in labels.values()]
    return np.array([*labels], np.int64), np.array(found, np.int64)


@dataclass(frozen=True)
class _Step:
    """A step of a reshard among some devices."""

    hop: Hop  #: The step among the lowest devices, which stand for them.
    real: Real
    low: _Numbers  #: The lowest devices.
    devices: _Numbers  #: Those that they stand for.
    roles: _Numbers  #: A number for the role of each.

    def peers(self, classes: _Numbers) -> _Numbers:
        """A number for the classes that each device meets, by the classes of the devices."""
        of = dict(zip(self.low.tolist(), classes.tolist(), strict=True))
        met: dict[int, list[Hashable]] = {device: [] for device in of}
        for priced in self.hop.comms:
            sides = priced.comm.sources(), priced.comm.targets()
            pair = tuple(frozenset(of[device] for device in side) for side in sides)
            for device in priced.seconds:
                met[device].append(pair)
        return _numbered({device: tuple(pairs) for device, pairs in met.items()})[1]

    def groups(self, device: int) -> Iterator[tuple[int, ...]]:
        """The devices that each communication of a device is among."""
        for number in self.hop.comms_of.get(self.real.low(device), ()):
            yield tuple(map(self.real.of, self.hop.comms[number].seconds))


def _local_sizes(placed: Sequence[PlacedNode]) -> Iterator[tuple[_Numbers, _Numbers]]:
    """Devices of each group, and those of unequal parts by size; work of uneven nodes."""
    meshes: dict[DeviceMesh, None] = {}
    cuts: dict[tuple[DeviceMesh, DimLayout], None] = {}
    places: dict[Placement, None] = {}
    for node in placed:
        if node.rule is not None and node.rule.is_uneven(node.layouts):
            coords = node.mesh.coords()
            yield _numbered({d: node.rule.work(node.layouts, node.mesh, at) for d, at in coords})
        meshes.setdefault(node.mesh)
        cuts.update(((node.mesh, layout), None) for layout in node.layouts.values())
        places.update((at, None) for _, at in (*node.operands(), *node.results()))
    cuts.update(((at.mesh, dim), None) for at in places for dim in at.sharding.dims)
    for mesh in meshes:
        yield np.array(mesh.devices), np.zeros(mesh.size(), np.int64)
    for mesh, layout in cuts:
        if not layout.is_equal:
            indices = np.array(mesh_indices(mesh, layout.axes))
            yield np.array(mesh.devices), np.array(layout.sizes())[indices]


def _steps(
    graph: Graph,
    placed: Sequence[PlacedNode],
    resharder: Resharder,
    everywhere: frozenset[str],
) -> Sequence[_Step]:
    homes: dict[str, Placement] = {}
    reshards: dict[tuple[str, Placement, Placement], None] = {}
    for node in placed:
        for value, at in node.operands():
            if value not in graph.constants:
                home = homes.get(value) or at.without_partial()
                reshards.setdefault((graph.types[value].dtype, home, at))
        homes.update(node.results())
    copies = copies_on(node.mesh for node in placed)
    for value in graph.outputs:
        dtype, home = graph.types[value].dtype, homes[value]
        whole = home.without_partial()
        reshards.setdefault((dtype, home, whole))
        if value in everywhere:
            everyone = whole.delivered(len(resharder.cluster), copies)
            reshards.setdefault((dtype, whole, everyone))
    found = (resharder.lowest(*args) for args in reshards if args[1] != args[2])
    steps, roles = list[_Step](), dict[int, tuple[_Numbers, _Numbers]]()
    for hop, real in ((hop, real) for hops, real in found for hop in hops):
        if id(hop) not in roles:
            roles[id(hop)] = _numbered(hop.roles)
        low, of_low = roles[id(hop)]
        steps.append(_Step(hop, real, low, real.of_all(low), of_low))
    return steps


def _beside(steps: Sequence[_Step], classes: _Numbers, firsts: Iterable[int]) -> Iterator[int]:
    """More devices to evaluate, so that all classes of a communication's ranks take part in it."""
    evaluated = set(firsts)
    waiting = deque(sorted(evaluated))
    while waiting:
        device = waiting.popleft()
        groups = {group for step in steps for group in step.groups(device)}
        for group in sorted(groups, key=sorted):
            present = {classes[other] for other in group if other in evaluated}
            for other in sorted(set(group) - evaluated):
                if classes[other] not in present:
                    present.add(classes[other])
                    evaluated.add(other)
                    waiting.append(other)
                    yield other
