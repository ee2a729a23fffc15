"""Seconds, FLOPs and bytes of nodes: as measured, or by a roofline with a launch floor.

Seconds are those of the device's profile, where it has one that knows the operator. By the device's
rates, a kernel takes max(launch, FLOPs / peak, bytes / bandwidth); where the device names a table
of published measurements, matrix products and fused attention take what `published.Kernels` says.
The launch is a floor and not an addend, because launches are asynchronous: while one kernel runs,
the host submits the next, so that the slower of the two paces a stream of kernels. The peak is
that of the first floating-point operand (matrix products accumulate in a wider type but read this
one). Bytes are those that the op's row moves, by default every operand and result once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.prices.collectives import dispatch_seconds
from partitioner.cost_model.profiles.entries import Estimate
from partitioner.cost_model.profiles.forms import (
    LocalShape,
    call_form,
    form_of,
    stores_parts,
    trains,
    turns_back,
)
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.in_place import writes_in_place
from partitioner.ir.ops import row_of
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.plan import PlacedNode, devices_of
from partitioner.ir.rule import Rule
from partitioner.ir.types import DTYPE_BITS, dense_bytes

_Point = Mapping[str, int]
_FREE = Estimate(0.0, "datasheet")  #: Of a node without a kernel.


def node_seconds(
    graph: Graph,
    placed: PlacedNode,
    cluster: Cluster,
    devices: Sequence[int] | None = None,
) -> Mapping[int, float]:
    """Seconds that each device of the node's group, or of `devices`, spends on its part."""
    estimates = node_estimates(graph, placed, cluster, devices)
    return {device: estimate.seconds for device, estimate in estimates.items()}


def node_estimates(
    graph: Graph,
    placed: PlacedNode,
    cluster: Cluster,
    devices: Sequence[int] | None = None,
    *,
    in_parts: bool | None = None,
) -> Mapping[int, Estimate]:
    """Seconds on each device, messages inside of the node included, with where they come from.

    `in_parts` is `forms.stores_parts` of the plan; None if there is no plan yet: an update has the
    least price then that it has in a plan.
    """
    if placed.sent:
        sent_s = dispatch_seconds(placed, cluster)
        inside = node_estimates(graph, placed.inside(graph), cluster, devices, in_parts=in_parts)
        return {d: replace(one, seconds=one.seconds + sent_s[d]) for d, one in inside.items()}
    if is_free(placed):
        some = placed.mesh.devices if devices is None else devices
        return {device: call_estimate(placed, cluster.devices[device]) for device in some}
    known: dict[tuple[tuple[int, ...], DeviceSpec, float], Estimate] = {}
    uneven = placed.rule is not None and placed.rule.is_uneven(placed.layouts)
    estimates = {}
    cuts = [  # local sizes of the cut factors: equal ones mean equal work
        (layout.sizes(), mesh_indices(placed.mesh, layout.axes))
        for layout in placed.layouts.values()
    ]
    coords, order = placed.mesh.coords(), placed.mesh.devices
    for index in range(len(order)) if devices is None else map(order.index, devices):
        device, point = coords[index]
        spec, sizes = cluster.devices[device], tuple([cut[of[index]] for cut, of in cuts])
        flops = (
            local_flops(graph, placed, point) if uneven or (sizes, spec, 0.0) not in known else 0.0
        )
        key = (sizes, spec, flops if uneven else 0.0)
        if key not in known:
            moved = local_moved_bytes(graph, placed, point)
            rule, shape = placed.rule, partial(shape_at, point)
            popularity = (
                1.0 if rule is None else rule.popularity(placed.layouts, placed.mesh, point)
            )
            known[key] = kernel_estimate(
                graph,
                placed,
                spec,
                flops,
                moved,
                shape,
                in_parts=in_parts,
                popularity=popularity,
            )
        estimates[device] = known[key]
    return estimates


@dataclass(frozen=True)
class Sources:
    """Where the seconds of a plan's nodes come from, added up over nodes and devices."""

    seconds: Mapping[str, float]  #: By source of an `Estimate`.
    error_s: float  #: Of those that are measured or fitted, each times its error.

    @classmethod
    def of(cls, graph: Graph, placed: Sequence[PlacedNode], cluster: Cluster) -> Sources:
        """The sources of a plan's nodes; none where all that is known is in datasheets."""
        if all(spec.profile is None and spec.table is None for spec in cluster.first_of_spec):
            return cls({}, 0.0)
        cluster = cluster.beside(devices_of(placed))
        seconds: dict[str, float] = {}
        error_s = 0.0
        in_parts = stores_parts(placed)
        for node in placed:
            estimates = node_estimates(graph, node, cluster, in_parts=in_parts)
            for estimate, times in Counter(estimates.values()).items():
                spent_s = seconds.get(estimate.source, 0.0)
                seconds[estimate.source] = spent_s + times * estimate.seconds
                error_s += times * estimate.seconds * estimate.error
        return cls(seconds, error_s)

    def shares(self) -> Mapping[str, float]:
        """Share of the seconds by source; of none, all is "datasheet"."""
        whole = sum(self.seconds.values())
        if not whole:
            return {"datasheet": 1.0}
        return {source: part / whole for source, part in self.seconds.items() if part}

    @property
    def error(self) -> float:
        """Mean error of the seconds that are measured or fitted; 0 for none."""
        known = sum(self.seconds.get(source, 0.0) for source in ("measured", "fitted"))
        return self.error_s / known if known else 0.0


def shape_at(point: _Point, at: Placement) -> tuple[int, ...]:
    """Shape of a placement's part at a mesh coordinate."""
    return at.sharding.local_shape(at.mesh, point)


def kernel_estimate(
    graph: Graph,
    placed: PlacedNode,
    spec: DeviceSpec,
    flops: float,
    moved_bytes: int,
    local_shape: LocalShape,
    *,
    in_parts: bool | None = None,
    popularity: float = 1.0,
) -> Estimate:
    """Seconds of a part of a node, of some `popularity`: by the device's profile or rates."""
    dtype = compute_dtype(graph, placed)
    profile = spec.profile
    if profile is None:
        return _by_rates(placed, flops, moved_bytes, dtype, spec)
    options = (False, True) if in_parts is None and trains(placed.node) else (bool(in_parts),)
    forms = (form_of(graph, placed, local_shape, in_parts=option) for option in options)
    estimates = (profile.estimate(form, dtype, flops, moved_bytes) for form in forms)
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return _by_rates(placed, flops, moved_bytes, dtype, spec)
    least = min(known, key=lambda estimate: estimate.seconds)
    is_measured = least.source == "measured"
    return replace(least, seconds=least.seconds * popularity) if is_measured else least


def _by_rates(
    placed: PlacedNode, flops: float, moved_bytes: int, dtype: str, spec: DeviceSpec
) -> Estimate:
    kernels = spec.kernels
    if kernels is None:
        return Estimate(kernel_seconds(flops, moved_bytes, dtype, spec), "datasheet")
    rate = spec.flops_per_s(dtype)
    memory_s = moved_bytes / spec.memory_bytes_per_s
    shaped_s = None
    if row_of(placed.node).attention:
        share = kernels.attention_share(dtype)
        shaped_s = None if share is None else kernels.product_s(flops / rate / share, memory_s)
    elif dtype in kernels.compute_shares and placed.rule is not None and placed.rule.is_product:
        shaped_s = kernels.product_s(flops / rate, memory_s)
    if shaped_s is not None:
        return Estimate(max(spec.launch_s, shaped_s), "published")
    # A copy's bandwidth is measured; peaks of other arithmetic are not.
    seconds = kernel_seconds(flops, moved_bytes, dtype, spec)
    return Estimate(seconds, "published" if seconds == memory_s else "datasheet")


def call_estimate(placed: PlacedNode, spec: DeviceSpec) -> Estimate:
    """Seconds of the call that PyTorch makes for a node without a kernel, where it is measured."""
    form = None if placed.absent else call_form(placed.node)
    if form is None or spec.profile is None:
        return _FREE
    return spec.profile.estimate(form, "", 0.0, 0) or _FREE


def is_free(placed: PlacedNode) -> bool:
    """Test whether a node runs no kernel: left out, stored, or a view whose row moves no bytes."""
    row = row_of(placed.node)
    return placed.absent or row.stored or (row.view and row.moved is None)


def node_limit(graph: Graph, placed: PlacedNode, device: int, cluster: Cluster) -> str:
    """The largest term of a node's roofline: "launches", "arithmetic" or "memory bandwidth"."""
    spec, point = cluster.devices[device], placed.mesh.coord(device)
    terms = {
        "launches": spec.launch_s,
        "arithmetic": local_flops(graph, placed, point)
        / spec.flops_per_s(compute_dtype(graph, placed)),
        "memory bandwidth": local_moved_bytes(graph, placed, point) / spec.memory_bytes_per_s,
    }
    return max(terms, key=terms.__getitem__)


def kernel_seconds(flops: float, moved_bytes: int, dtype: str, device: DeviceSpec) -> float:
    """Seconds of one kernel of this many FLOPs and bytes, by the rates of a device."""
    return max(
        device.launch_s,
        flops / device.flops_per_s(dtype),
        moved_bytes / device.memory_bytes_per_s,
    )


def adding_seconds(
    graph: Graph, gradient: str, nbytes: int, device: DeviceSpec, micro_batches: int
) -> float:
    """Seconds that each micro-batch takes to add its part of a gradient to the sum of the others.

    The first one gives the sum its memory. A product of matrices reads the sum where it would write
    its result. Others write a result, and then read the sum and write it.
    """
    passes = 1 if _is_added_by_its_kernel(graph, gradient) else 2
    seconds = kernel_seconds(0.0, passes * nbytes, graph.types[gradient].dtype, device)
    return seconds * (micro_batches - 1) / micro_batches


def _is_added_by_its_kernel(graph: Graph, gradient: str) -> bool:
    """Test whether the kernel that computes a gradient adds it to the sum of it.

    A pass adds the results that it returns (see `backends.torch.graphs.totals`): the operator's own
    result, which nothing else reads, or that result turned and turned back.
    """
    value, turns = gradient, list[Node]()
    while (node := graph.producers.get(value)) is not None and len(graph.consumers[value]) == 1:
        row = row_of(node)
        if row.adds:
            return not turns
        if turns and turns_back(graph, node, turns[-1]):
            turns.pop()
        elif row.view:
            turns.append(node)
        else:
            return False
        value = node.inputs[0]
    return False


def local_flops(graph: Graph, placed: PlacedNode, point: _Point) -> float:
    """FLOPs at a mesh coordinate; those of nodes without a rule are estimated."""
    rule = placed.rule
    if rule is None:
        return estimated_flops(graph, placed.node)
    return rule.local_flops(placed.layouts, placed.mesh, point)


def local_moved_bytes(graph: Graph, placed: PlacedNode, point: _Point) -> int:
    """Bytes read and written at a mesh coordinate."""

    def local_bytes(at: Placement, dtype: str) -> int:
        return dense_bytes(math.prod(at.sharding.local_shape(at.mesh, point)), dtype)

    return moved_bytes(graph, placed, local_bytes)


def moved_bytes(
    graph: Graph, placed: PlacedNode, local_bytes: Callable[[Placement, str], int]
) -> int:
    """Bytes read and written on one device, by the bytes of its part of a placement and dtype."""
    node = placed.node
    ins, outs = (
        tuple(
            local_bytes(at, graph.types[value].dtype) if at is not None else 0
            for value, at in zip(values, placements, strict=True)
        )
        for values, placements in (
            ((*node.inputs, *node.captures), placed.ins),
            (node.outputs, placed.outs),
        )
    )
    row = row_of(node)
    if row.moved is not None:
        return row.moved(ins[: len(node.inputs)], outs) + 2 * _state_bytes(graph, node, ins)
    if row.overwrites and node.name in writes_in_place(graph):
        return 2 * sum(ins[1:])  # what is written is read first
    return sum(ins) + sum(outs)


def _state_bytes(graph: Graph, node: Node, ins: Sequence[int]) -> int:
    """Bytes of the optimizer's state of the stored value that a node updates; 0 for other nodes."""
    slot = row_of(node).in_place
    stored = None if slot is None else graph.producers.get(node.inputs[slot])
    if slot is None or stored is None:
        return 0
    state_bytes = stored.attrs.get("state_bytes", 0)
    assert isinstance(state_bytes, int)
    return ins[slot] * 8 // DTYPE_BITS[graph.types[node.inputs[slot]].dtype] * state_bytes


def stored_bytes(node: Node, dtype: str, nbytes: float, at: Sharding | None = None) -> int:
    """Bytes of a part of a node's stored value and of its optimizer state; `nbytes` without it.

    Of the state alone, where the value is rows of what another node stores, in one memory.
    """
    state_bytes = node.attrs.get("state_bytes", 0)  # by element
    assert isinstance(state_bytes, int)
    in_rows = at is None or not any(dim.axes for dim in at.dims[1:])
    own = 0 if node.attrs.get("apart") and in_rows else nbytes
    return int(own + nbytes * 8 // DTYPE_BITS[dtype] * state_bytes)


def sharded_flops_share(graph: Graph, placed: Sequence[PlacedNode]) -> float:
    """Share of the FLOPs of splittable nodes whose node is cut over all axes of its group.

    A node is splittable if its rule has link classes that the axes of the plan's largest group
    could cut into parts of at least one element, or if it has no rule (then with estimated FLOPs).
    0 if the largest group is one device, or no node is splittable.
    """
    mesh = max((node.mesh for node in placed), key=DeviceMesh.size, default=None)
    if mesh is None or mesh.size() == 1:
        return 0.0
    whole = cut = 0.0
    for node in placed:
        if is_free(node) or not (node.rule is None or _can_cut(node.rule, mesh)):
            continue
        flops = estimated_flops(graph, node.node) if node.rule is None else node.rule.flops
        axes = {axis for layout in node.layouts.values() for axis in layout.axes}
        whole += flops
        cut += flops if axes and axes == set(node.mesh.names) else 0.0
    return cut / whole if whole else 0.0


def _can_cut(rule: Rule, mesh: DeviceMesh) -> bool:
    """Test whether some assignment of the axes to link classes leaves no part empty."""
    limits = [min(rule.factors[name].size for name in link) for link in rule.links]
    for links in itertools.product(range(len(limits)), repeat=len(mesh.axes)):
        parts = [1] * len(limits)
        for link, (_, size) in zip(links, mesh.axes, strict=True):
            parts[link] *= size
        if all(count <= limit for count, limit in zip(parts, limits, strict=True)):
            return True
    return False


def compute_dtype(graph: Graph, placed: PlacedNode) -> str:
    """Type of the first floating-point operand or result; of the first one if there is none."""
    values = [value for value in (*placed.node.inputs, *placed.node.outputs) if value]
    dtypes = [graph.types[value].dtype for value in values] or ["float32"]
    floats = (dtype for dtype in dtypes if dtype.startswith(("float", "bfloat")))
    return next(floats, dtypes[0])


@lru_cache(maxsize=4096)
def mesh_indices(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The place of each device along some axes."""
    return tuple(mesh.linear(axes, point) for _, point in mesh.coords())
