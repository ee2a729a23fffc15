"""Small graphs, clusters and hand-made schedules with round figures."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

#: 1 GFLOP/s, 1 GB/s, launches of 1 us: a FLOP or byte a nanosecond.
SLOW = DeviceSpec("slow", {"float32": 1e9, "float16": 4e9}, 1e9, 10**9, 1e-6)
#: Inner links 1 us and 1 GB/s in pairs, outer ones 10 us and 0.1 GB/s.
INNER = LinkLevel("inner", 2, 1e9, 1e-6)
OUTER = LinkLevel("outer", 4, 1e8, 1e-5)
TWO_LEVELS = Cluster("two", (SLOW,) * 4, (INNER, OUTER))


def far_apart(nodes: int, devices: int) -> Cluster:
    """Nodes of so many devices each: only what they send to each other takes time."""
    cluster = resolve_cluster(f"{nodes}x{devices}xideal")
    near, far = cluster.levels
    return replace(cluster, levels=(near, replace(far, bandwidth_bytes_per_s=1.0)))


def flat(count: int, latency_s: float = 1e-6) -> Cluster:
    """`count` slow devices, all linked at 1 GB/s."""
    return Cluster("flat", (SLOW,) * count, (LinkLevel("link", count, 1e9, latency_s),))


def graph(
    nodes: list[Node],
    types: Mapping[str, TensorType],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    constants: tuple[str, ...] = (),
) -> Graph:
    weights = {name: Constant(types[name], lambda: np.zeros(0)) for name in constants}
    return Graph("test", inputs, outputs, tuple(nodes), types, weights, {"": 17})


def matmul_graph(m: int = 64, k: int = 128, n: int = 256, dtype: str = "float32") -> Graph:
    """``y = x w`` with w a weight."""
    types = {
        "x": TensorType.of(dtype, (m, k)),
        "w": TensorType.of(dtype, (k, n)),
        "y": TensorType.of(dtype, (m, n)),
    }
    return graph([Node("mm", "MatMul", ("x", "w"), ("y",))], types, ("x",), ("y",), ("w",))


def chain_graph(length: int = 3, size: int = 1000) -> Graph:
    """``v0 -> Relu -> v1 -> Relu -> ...`` of float32 vectors."""
    values = [f"v{index}" for index in range(length + 1)]
    nodes = [
        Node(f"relu{index}", "Relu", (values[index],), (values[index + 1],))
        for index in range(length)
    ]
    types = {value: TensorType.of("float32", (size,)) for value in values}
    return graph(nodes, types, (values[0],), (values[-1],))


def placed(
    owner: Graph, name: str, mesh: DeviceMesh, cuts: Mapping[str, tuple[str, ...]] | None = None
) -> PlacedNode:
    """A node on a mesh with even cuts of factors."""
    node = owner.by_name[name]
    rule = rule_of(owner, node)
    if not isinstance(rule, Rule):
        return place(owner, node, mesh, {}, None)
    layouts = {
        factor: DimLayout.even(rule.factors[factor].size, axes, mesh)
        for factor, axes in (cuts or {}).items()
    }
    return place(owner, node, mesh, layouts, rule)


def key(value: str, device: int = 0) -> Key:
    """The value, whole on one device."""
    return value, Placement(DeviceMesh.single(device), Sharding.replicate((1,)))


def compute(
    name: str,
    device: int,
    reads: tuple[str, ...],
    writes: Mapping[str, int],
    seconds: float = 1.0,
    hops: int = 0,
) -> Task:
    """A task of one device that reads and writes (value: bytes) whole values there."""
    return Task(
        name,
        {device: seconds},
        tuple((device, key(value, device)) for value in reads),
        tuple((device, key(value, device), nbytes) for value, nbytes in writes.items()),
        placed=_NODE,
        hops=hops,
        target_hops=hops,
    )


def send(
    value: str, source: int, target: int, nbytes: int, seconds: float = 1.0, hops: int = 0
) -> Task:
    """A one-way communication to a device one move further from the inputs."""
    part = ((0, nbytes),)
    transfer = Transfer(source, target, (part,), (part,))
    ranks = tuple(sorted((source, target)))
    comm = Comm(0, CommKind.SEND, ranks, value, value, "int8", (transfer,))
    return Task(
        f"send {value}",
        {source: seconds, target: seconds},
        ((source, key(value, source)),),
        ((target, key(value, target), nbytes),),
        comm=comm,
        hops=hops,
        target_hops=hops + 1,
    )


def tasks(
    *steps: Task,
    feeds: Mapping[str, int] | None = None,
    residents: Mapping[str, int] | None = None,
    outputs: tuple[str, ...] = (),
    device: int = 0,
) -> Schedule:
    """A schedule with feeds, residents (bytes by value) and outputs on one device."""
    return Schedule(
        steps,
        {(device, key(value, device)): size for value, size in (feeds or {}).items()},
        {(device, key(value, device)): size for value, size in (residents or {}).items()},
        {value: key(value, device) for value in outputs},
    )


_CHAIN = chain_graph(1, 1)
_NODE = placed(_CHAIN, "relu0", DeviceMesh.single(0))
