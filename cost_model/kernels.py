"""Nodes that take no time of their own: another node's kernel computes them too.

ONNX Runtime folds a BatchNormalization into its Conv's weights, and a Conv's kernel adds the other
operand of a sum and applies the activation. Timed alone, these nodes are a quarter of ResNet-50.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of

_KNOWN: WeakKeyDictionary[Graph, Mapping[str, str]] = WeakKeyDictionary()


def computed_within(graph: Graph) -> Mapping[str, str]:
    """Names of the nodes that the kernel of another one computes, and that one's name.

    The other node is the producer of an operand that nothing else reads.
    """
    if graph not in _KNOWN:
        within: dict[str, str] = {}
        outputs = frozenset(graph.outputs)
        for node in graph.nodes:
            row = row_of(node)
            if row is None or not row.within:
                continue
            for value in node.inputs:
                producer = graph.producers.get(value)
                if producer is None or producer.op not in row.within or value in outputs:
                    continue
                above = row_of(producer)
                ends_in_kernel = producer.name in within or (above is not None and not above.within)
                if ends_in_kernel and len(graph.consumers[value]) == 1:
                    within[node.name] = producer.name
                    break
        _KNOWN[graph] = within
    return _KNOWN[graph]
