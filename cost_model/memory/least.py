"""Bytes that the devices of any plan hold together when a step ends, by which none may fit.

They hold what is kept from step to step, and in training all gradients, with the head-room that the
referee adds or with what the optimizer's step takes beside them on GPUs. In inference each device
holds all results that every rank gets whole. Values that may share memory count once.
Micro-batches, stages, blocks, and values that are computed again make none of this less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import MOST_RANKS, executor_of
from partitioner.cost_model.memory.lifetimes import kept_bytes, with_headroom
from partitioner.cost_model.memory.torch_kernels import whole_step_bytes
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of


@dataclass(frozen=True)
class LeastBytes:
    """Bytes that devices hold together at least."""

    parts: Mapping[str, int]  #: Bytes by what they are, in words.

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster) -> LeastBytes:
        """Count the bytes of a graph of the whole batch; none of one that loads what it keeps."""
        if executor_of(graph).loads_blocks:
            return cls({})
        kept = {"stored values": kept_bytes(graph)}
        if not graph.backward:
            copies = len(cluster) if len(cluster) <= MOST_RANKS else 1
            sizes, known = _sizes(graph, graph.delivered), {*graph.constants, *_stored(graph)}
            # what is stored lies on one rank already
            results = sum(size * (copies - (root in known)) for root, size in sizes.items())
            return cls({**kept, "results, whole on every rank": results})
        updates = (node for node in graph.nodes if node.attrs.get("role") == "gradient")
        sizes, stored = _sizes(graph, (node.outputs[0] for node in updates)), _stored(graph)
        gradients = sum(sizes[root] for root in sizes.keys() & graph.producers.keys() - stored)
        # the referee rounds the head-room of each device down
        room = max(0, with_headroom(gradients) - gradients - len(cluster))
        step = whole_step_bytes(graph) if all(spec.is_gpu for spec in cluster.devices) else 0
        more = {"the optimizer's step": step} if step > room else {"head-room": room}
        return cls({**kept, "gradients": gradients, **more})

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


def _stored(graph: Graph) -> set[str]:
    return {value for node in graph.nodes if row_of(node).stored for value in node.writes}


def _sizes(graph: Graph, values: Iterable[str]) -> Mapping[str, int]:
    """Least bytes of the memory that values lie in, by the value that others are views of."""
    sizes: dict[str, int] = {}
    for value in values:
        root, least = value, graph.types[value].nbytes
        while (node := graph.producers.get(root)) is not None:
            row = row_of(node)
            if not (row.view or row.again or row.either or row.in_place is not None):
                break
            root = node.inputs[0]
            least = min(least, graph.types[root].nbytes)
        sizes[root] = max(least, sizes.get(root, 0))
    return sizes
