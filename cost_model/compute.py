"""Seconds and FLOPs of nodes: a roofline with a launch floor.

A kernel takes max(launch, FLOPs / peak, bytes / bandwidth). The launch is a floor and not an
addend, because launches are asynchronous: while one kernel runs, the host submits the next, so
that a stream of kernels is paced by whichever is slower. The peak is that of the first operand
of a floating type (matrix products accumulate wider but read that); bytes are what the row says
that the op moves, by default every operand and result once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from partitioner.cost_model.cluster import Cluster, DeviceSpec
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.rule import Rule
from partitioner.ir.types import DTYPE_BITS

_Point = Mapping[str, int]
_Local = tuple[int, ...]  #: Local sizes of the cut factors.


def node_seconds(
    graph: Graph, placed: PlacedNode, cluster: Cluster, devices: Sequence[int] | None = None
) -> Mapping[int, float]:
    """Seconds that each device of the node's group spends on its part; or each of these of it.

    Views take none: their result is the operand's memory (a view whose row says what it moves, as
    the update of a parameter, takes that). A stored value takes none: it is there, and a node that
    is left out takes none. A node without a rule is priced by its bytes alone, as nothing is known
    of its loops.
    """
    row = row_of(placed.node)
    free = row is not None and (row.stored or (row.view and row.moved is None))
    if free or placed.absent:
        return dict.fromkeys(placed.mesh.devices if devices is None else devices, 0.0)
    dtype = compute_dtype(graph, placed)
    known: dict[tuple[_Local, DeviceSpec], float] = {}
    seconds = {}
    for (device, point), sizes in zip(_coords(placed.mesh), _cut_sizes(placed), strict=True):
        if devices is not None and device not in devices:
            continue
        spec = cluster.devices[device]
        if (sizes, spec) not in known:
            flops = local_flops(placed, point)
            moved = local_moved_bytes(graph, placed, point)
            known[sizes, spec] = kernel_seconds(flops, moved, dtype, spec)
        seconds[device] = known[sizes, spec]
    return seconds


def node_limit(graph: Graph, placed: PlacedNode, device: int, cluster: Cluster) -> str:
    """What bounds a node's seconds on one device of its group.

    Returns:
        "launches", "arithmetic" or "memory bandwidth": the largest term of the roofline.
    """
    spec, point = cluster.devices[device], placed.mesh.coord(device)
    terms = {
        "launches": spec.launch_s,
        "arithmetic": local_flops(placed, point) / spec.flops_per_s(compute_dtype(graph, placed)),
        "memory bandwidth": local_moved_bytes(graph, placed, point) / spec.memory_bytes_per_s,
    }
    return max(terms, key=terms.__getitem__)


def kernel_seconds(flops: float, moved_bytes: int, dtype: str, device: DeviceSpec) -> float:
    """Seconds of one kernel of this many FLOPs and bytes on a device."""
    return max(
        device.launch_s,
        flops / device.flops_per_s(dtype),
        moved_bytes / device.memory_bytes_per_s,
    )


def local_flops(placed: PlacedNode, point: _Point) -> float:
    """FLOPs at a mesh coordinate; 0 for nodes without a rule."""
    rule = placed.rule
    return rule.local_flops(placed.layouts, placed.mesh, point) if rule is not None else 0.0


def local_moved_bytes(graph: Graph, placed: PlacedNode, point: _Point) -> int:
    """Bytes read and written at a mesh coordinate."""
    node = placed.node
    ins = _local_bytes(graph, (*node.inputs, *node.captures), placed.ins, point)
    outs = _local_bytes(graph, node.outputs, placed.outs, point)
    row = row_of(node)
    if row is not None and row.moved is not None:
        return row.moved(ins[: len(node.inputs)], outs)
    return sum(ins) + sum(outs)


def stored_bytes(node: Node, dtype: str, nbytes: float) -> int:
    """Bytes of a part of a stored value, with the optimizer state that is kept beside it.

    Args:
        node: Producer of the value.
        dtype: Element type of the value.
        nbytes: Bytes of the part alone.
    """
    state_bytes = node.attrs.get("state_bytes", 0)  # by element
    assert isinstance(state_bytes, int)
    return int(nbytes + nbytes * 8 // DTYPE_BITS[dtype] * state_bytes)


def sharded_flops_share(placed: Sequence[PlacedNode]) -> float:
    """Of the FLOPs of splittable nodes, the share whose node is cut over all axes of its group.

    A node is splittable if its rule has link classes that the axes of the plan's largest group
    could cut into parts of at least one element. 0 if that group is one device, or nothing is.
    """
    mesh = max((node.mesh for node in placed), key=DeviceMesh.size, default=None)
    if mesh is None or mesh.size() == 1:
        return 0.0
    splittable = [node for node in placed if node.rule is not None and _can_cut(node.rule, mesh)]
    cut = (_flops(node) for node in splittable if _is_cut(node))
    whole = sum(map(_flops, splittable))
    return sum(cut) / whole if whole else 0.0


def _flops(placed: PlacedNode) -> float:
    return placed.rule.flops if placed.rule is not None else 0.0


def _is_cut(placed: PlacedNode) -> bool:
    used = {axis for layout in placed.layouts.values() for axis in layout.axes}
    return placed.mesh.size() > 1 and used == set(placed.mesh.names)


def _can_cut(rule: Rule, mesh: DeviceMesh) -> bool:
    """Whether some assignment of the axes to link classes leaves no part empty."""
    room = [min(rule.factors[name].size for name in link) for link in rule.links]
    parts = [size for _, size in mesh.axes]
    for chosen in itertools.product(range(len(room)), repeat=len(parts)):
        wanted = [1] * len(room)
        for link, size in zip(chosen, parts, strict=True):
            wanted[link] *= size
        if all(want <= have for want, have in zip(wanted, room, strict=True)):
            return True
    return False


def compute_dtype(graph: Graph, placed: PlacedNode) -> str:
    """Type of the first operand of a floating type; of the first operand if there is none."""
    names = [*placed.node.inputs, *placed.node.outputs]
    found = [graph.types[name].dtype for name in names if name]
    return next((dtype for dtype in found if _is_float(dtype)), found[0] if found else "float32")


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


@lru_cache(maxsize=4096)
def _coords(mesh: DeviceMesh) -> tuple[tuple[int, _Point], ...]:
    return tuple(mesh.coords())


@lru_cache(maxsize=4096)
def _indices(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Row-major coordinate over `axes` of each device."""
    return tuple(mesh.linear(axes, point) for _, point in mesh.coords())


def _cut_sizes(placed: PlacedNode) -> tuple[_Local, ...]:
    """Local sizes of the cut factors on each device; equal ones mean equal work."""
    if not placed.layouts:
        return ((),) * len(placed.mesh.devices)
    by_factor = []
    for layout in placed.layouts.values():
        sizes = layout.sizes()
        by_factor.append([sizes[index] for index in _indices(placed.mesh, layout.axes)])
    return tuple(zip(*by_factor, strict=True))


def _local_bytes(
    graph: Graph, names: Iterable[str], placements: Iterable[Placement | None], point: _Point
) -> tuple[int, ...]:
    """Bytes of each local tensor, 0 where absent."""
    return tuple(
        _nbytes(graph.types[name].dtype, at.sharding.local_shape(at.mesh, point)) if at else 0
        for name, at in zip(names, placements, strict=True)
    )


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
