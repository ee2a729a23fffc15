"""The operators to measure: those that a search could choose, as programs, and yardsticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from partitioner.api.lowering import lower
from partitioner.backends.regions import cut
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import (
    compute_dtype,
    is_free,
    local_flops,
    local_moved_bytes,
    node_seconds,
    shape_at,
)
from partitioner.cost_model.profiles.forms import Form, call_form, chain, form_of, trains
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.ir.graph import SMALL_CONSTANT, Constant, Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import is_stored, is_view, writes_stored
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.program import Compute, Part
from partitioner.ir.types import TensorType, dense_bytes, numpy_dtype
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.spaces import families

#: A form is cold if so much of what it moves was made long before.
_COLD_SHARE = 1 / 3
#: Bytes that copies move, half of them written: from a cache's to those of a large model's tensor.
MOVED_BYTES = tuple(2**power for power in (16, 20, 22, 24, 26, 28))
#: The largest copy moves at most this share of a device's memory.
_MEMORY_SHARE = 1 / 16
#: Rows, sums and columns of products: square ones, and a vector by a matrix.
PRODUCTS = ((128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (1, 2048, 2048))
_OPSET = 17


@dataclass(frozen=True)
class Candidate:
    """A form that some plan would run."""

    form: Form
    placed: PlacedNode  #: A node that has it, with a strategy.
    device: int  #: A device on which the node's part has it.
    dtype: str  #: Element type that it computes in.
    flops: float  #: FLOPs of the part.
    moved_bytes: int  #: Bytes that the part reads and writes.
    #: Seconds of all nodes that could take the form, each counted once, as priced before the
    #: measurement: what a wrong price of the form could cost.
    weight_s: float
    is_whole: bool  #: Whether a plan on one device would run it.
    #: The nodes that the node stands behind, in strategies that give it its operand where it wants
    #: it; empty for a form alone.
    behind: tuple[PlacedNode, ...] = ()


def candidates(
    graph: Graph,
    cluster: Cluster,
    strategy: str,
    mesh: Mapping[str, int] | None,
) -> tuple[Candidate, ...]:
    """Distinct forms of all strategies, of intra plans on `mesh`, those that matter most first."""
    rules, fuses = Rules.of(graph), executor_of(graph).fuses
    spaces = families(strategy, len(cluster), mesh)
    shapes = {group.axes: group for space in spaces for group in space.groups}
    single = DeviceMesh.single(0)
    meshes = [single, *(group for axes, group in shapes.items() if axes)]
    by_mesh = [strategies(graph, rules, group) for group in meshes]
    found: dict[str, Candidate] = {}
    for node in graph.nodes:
        offered = [(placed, by_node) for by_node in by_mesh for placed in by_node[node.name]]
        here: dict[str, Candidate] = {}
        for placed, by_node in offered or [(place(graph, node, single, {}, None), by_mesh[0])]:
            behind = _placed_chain(graph, placed, by_node) if fuses else ()
            for candidate in _of_strategy(graph, placed, behind, cluster):
                key = candidate.form.key
                if key not in here or candidate.is_whole:
                    here[key] = candidate
        for key, candidate in here.items():
            known = found.get(key, candidate)
            weight_s = candidate.weight_s + (known.weight_s if key in found else 0.0)
            is_whole = candidate.is_whole or known.is_whole
            found[key] = replace(known, weight_s=weight_s, is_whole=is_whole)
    return tuple(sorted(found.values(), key=lambda one: (-one.weight_s, one.form.key)))


def _placed_chain(
    graph: Graph, placed: PlacedNode, by_node: Mapping[str, Sequence[PlacedNode]]
) -> tuple[PlacedNode, ...]:
    """The nodes that a node stands behind, where no communication parts them; else empty."""
    found: list[PlacedNode] = []
    for node in reversed(chain(graph, placed.node.name)):
        wanted = dict((found[0] if found else placed).operands())
        value = next(value for value in node.writes if value in wanted)
        match = (one for one in by_node[node.name] if dict(one.results())[value] == wanted[value])
        above = next(match, None)
        if above is None:
            return ()
        found.insert(0, above)
    return tuple(found)


def _of_strategy(
    graph: Graph, placed: PlacedNode, behind: tuple[PlacedNode, ...], cluster: Cluster
) -> Iterator[Candidate]:
    """The forms of a placed node's parts; of rows that devices send each other, no other forms."""
    if placed.sent:
        return
    if is_free(placed):  # a view, which may be a call: it counts as a launch until it is measured
        call, device = call_form(placed.node), placed.mesh.devices[0]
        if call is not None and not placed.absent:
            launch_s = cluster.devices[device].launch_s
            dtype, is_whole = compute_dtype(graph, placed), not placed.mesh.axes
            yield Candidate(call, placed, device, dtype, 0.0, 0, launch_s, is_whole)
        return
    seconds = node_seconds(graph, placed, cluster)
    # of a plan that stores all parameters whole, and of one that stores parts
    parted = (False, True) if trains(placed.node) else (False,)
    for (device, point), in_parts in itertools.product(placed.mesh.coords(), parted):
        form = form_of(graph, placed, partial(shape_at, point), in_parts=in_parts)
        yield Candidate(
            form if behind else form.alone,
            placed,
            device,
            compute_dtype(graph, placed),
            local_flops(graph, placed, point),
            local_moved_bytes(graph, placed, point),
            seconds[device],
            not placed.mesh.axes and not in_parts,
            behind,
        )


def is_made_shortly_before(graph: Graph, node: Node, value: str) -> bool:
    """Test whether a model makes an operand of a node shortly before the node reads it.

    Weights, the inputs of a model and what its forward pass leaves to the backward pass are made
    long before: other tensors have driven them out of the caches.
    """
    producer = graph.producers.get(value)
    while producer is not None and is_view(producer):
        producer = graph.producers.get(producer.inputs[0])
    if producer is None or is_stored(producer):
        return False
    return node.name not in graph.backward or producer.name in graph.backward


def is_read_long_after(graph: Graph, node: Node, value: str) -> bool:
    """Test whether a model reads a result of a node, or a view of it, long after the node.

    The backward pass reads what the forward pass leaves, and the optimizer reads gradients: what
    they are written to has not been touched shortly before, as other tensors lie where the last
    ones were.
    """
    left = [value]
    while left:
        for reader in graph.consumers[left.pop()]:
            if reader.name in graph.backward and node.name not in graph.backward:
                return True
            if writes_stored(reader):
                return True
            if is_view(reader):
                left += reader.writes
    return False


def is_cold(graph: Graph, candidate: Candidate) -> bool:
    """Test whether much of what a candidate moves was made long before, or is read long after.

    The update of a parameter follows those of all others. A view moves nothing.
    """
    if not candidate.moved_bytes:
        return False
    if trains(candidate.placed.node):
        return True
    point = candidate.placed.mesh.coord(candidate.device)
    placed = candidate.placed
    cold = [
        (value, at)
        for value, at in placed.operands()
        if not is_made_shortly_before(graph, placed.node, value)
    ]
    cold += [
        (value, at)
        for value, at in placed.results()
        if is_read_long_after(graph, placed.node, value)
    ]
    cold_bytes = sum(
        dense_bytes(math.prod(shape_at(point, at)), graph.types[value].dtype) for value, at in cold
    )
    return cold_bytes >= _COLD_SHARE * candidate.moved_bytes


def local_graph(
    graph: Graph, candidate: Candidate, cluster: Cluster, *, is_before: bool = False
) -> Graph:
    """A candidate's part, or what it stands behind (`is_before`), a graph with random weights."""
    placed = candidate.behind if is_before else (*candidate.behind, candidate.placed)
    types, in_parts = graph.types, dict(candidate.form.attrs).get("in_parts")
    all_reads = dict.fromkeys(value for one in placed for value in one.node.reads)
    all_writes = dict.fromkeys(value for one in placed for value in one.node.writes)
    weights = {value for value in all_reads if value in graph.constants}
    steering = {
        value: graph.constants[value]
        for value in weights
        if not graph.constants[value].weight and types[value].numel <= SMALL_CONSTANT
    }
    alone = Graph(
        graph.name,
        tuple(v for v in all_reads if v not in steering and v not in all_writes),
        tuple(value for value in all_writes if value not in all_reads),
        tuple(one.node for one in placed),
        {value: types[value] for value in (*all_reads, *all_writes)},
        steering,
        graph.opsets,
    )
    lowered = lower(alone, schedule(alone, placed, cluster), len(cluster))
    program = lowered.ranks[candidate.device]
    nodes = tuple(step.node for step in program.steps if isinstance(step, Compute))
    if in_parts is not None:  # nodes that write to stored values are told
        nodes = tuple(replace(one, attrs={**one.attrs, "in_parts": in_parts}) for one in nodes)
    made = dict.fromkeys(value for one in nodes for value in one.writes)
    reads = dict.fromkeys(value for one in nodes for value in one.reads if value not in made)
    constants = {value: Constant.of(array) for value, array in program.literals.items()}
    for value, part in program.constants.items():
        kind = program.types[value]
        zeros = partial(np.zeros, kind.shape, numpy_dtype(kind.dtype))  # of a partial sum
        constants[value] = Constant(kind, zeros) if part.zero else _part(steering[part.whole], part)
    names = {value: program.types[value] for value in (*reads, *made)}
    for value in reads:
        is_weight = value.partition("@")[0] in weights and value not in constants
        if is_weight and names[value].dtype.startswith(("float", "bfloat")):
            constants[value] = Constant(names[value], partial(_drawn, names[value]), weight=True)
    return Graph(
        graph.name,
        tuple(value for value in reads if value not in constants),
        tuple(value for value in made if not any(value in one.reads for one in nodes)),
        nodes,
        names,
        {value: constants[value] for value in reads if value in constants},
        graph.opsets,
    )


def _part(constant: Constant, part: Part) -> Constant:
    whole = constant.load()
    array = whole if part.region is None else np.array(cut(whole, part.region))
    return Constant.of(array, constant.type.dtype)


def _drawn(tensor_type: TensorType) -> np.ndarray:
    array = np.random.default_rng(0).standard_normal(tensor_type.shape, np.float32)
    return array.astype(numpy_dtype(tensor_type.dtype))


def yardsticks(memory_bytes: float, *, is_module: bool) -> Graph:
    """Operators that are measured on every device, whatever the model, as a graph.

    An estimate compares an operator with what the device attains at its size. A model whose tensors
    fit the caches shows nothing of memory, nor one of convolutions of small products: copies and
    products by size do, each with inputs of its own.
    """
    copy, product, attrs = "Relu", "MatMul", dict[str, Any]()
    if is_module:
        copy, product = "aten::clone", "aten::mm"
        attrs = {"memory_format": "contiguous_format"}
    types: dict[str, TensorType] = {}
    nodes: list[Node] = []

    def add(op: str, shapes: Sequence[tuple[int, ...]], **attrs: Any) -> None:
        name = f"yardstick {len(nodes)}"
        *operands, result = names = [f"{name} {index}" for index in range(len(shapes))]
        types.update(zip(names, (TensorType.of("float32", one) for one in shapes), strict=True))
        nodes.append(Node(name, op, tuple(operands), (result,), attrs))

    for nbytes in MOVED_BYTES:
        if nbytes <= memory_bytes * _MEMORY_SHARE:
            shape = nbytes // 8 // 1024, 1024
            add(copy, (shape, shape), **attrs)
    for m, k, n in PRODUCTS:
        add(product, ((m, k), (k, n), (m, n)))
    made = {value for node in nodes for value in node.outputs}
    return Graph(
        "yardsticks",
        tuple(value for value in types if value not in made),
        tuple(value for value in types if value in made),
        tuple(nodes),
        types,
        {},
        {"aten": 1} if is_module else {"": _OPSET},
    )
