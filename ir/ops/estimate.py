"""FLOPs of nodes without a rule, estimated: what is unknown is not free.

A product of weights, by the family that the op's name tells, multiplies each weight once for every
position of its first operand; anything else computes once for each element that it reads or writes.
A node with bodies runs the dearest of them.
"""

from __future__ import annotations

import math
import re

from partitioner.ir.graph import Graph, Node, Opaque

#: Ops that multiply weights: projections inside attention, recurrent and expert layers too.
_PRODUCTS = re.compile("MatMul|Gemm|Conv(?!ert)|Attention|MoE|LSTM|GRU|RNN")
#: Ops whose channels are dim 1 of the first operand; those of others are the last.
_CHANNELS_FIRST = re.compile("(?<!Nhwc)(?<!NhwcFused)Conv")
#: Ops of which each position meets `k` of the experts.
_EXPERTS = re.compile("MoE")


def estimated_flops(graph: Graph, node: Node) -> float:
    """FLOPs of a node, by the sizes of its operands and results.

    A weight is a constant operand of two dims or more, of elements of the compute type. Attributes
    `K` and `N`, and `bits` or `expert_weight_bits`, tell the elements of packed ones.
    """
    operands = [graph.types[name] for name in (*node.inputs, *node.captures) if name]
    results = [graph.types[name] for name in node.outputs if name]
    touched = float(sum(math.prod(type_.shape) for type_ in (*operands, *results)))
    bodies = [attr.flops for attr in node.attrs.values() if isinstance(attr, Opaque)]
    if any(bodies):
        return max(bodies)
    if not _PRODUCTS.search(node.op) or not operands or not results:
        return touched
    shape, positions = results[0].shape, 1.0
    if len(shape) > 1:
        channels = shape[1 if _CHANNELS_FIRST.search(node.op) else -1]
        positions = math.prod(shape) / max(channels, 1)
    return max(touched, 2.0 * positions * _weights(graph, node))


def _weights(graph: Graph, node: Node) -> float:
    """Elements of the weights that one position meets."""
    depth, columns = node.attrs.get("K"), node.attrs.get("N")
    if isinstance(depth, int) and isinstance(columns, int):
        return float(depth * columns)
    constants = {name for name in node.inputs if name in graph.constants}
    types = [graph.types[name] for name in sorted(constants)]
    bits = node.attrs.get("bits", node.attrs.get("expert_weight_bits", 8))
    packed = 8 // bits if isinstance(bits, int) and 0 < bits < 8 else 1  # elements in a byte
    weights = sum(
        math.prod(type_.shape) * (packed if type_.dtype == "uint8" else 1)
        for type_ in types
        if type_.rank > 1
    )
    experts = max((type_.shape[0] for type_ in types if type_.rank == 3), default=1)
    chosen = node.attrs.get("k", experts)
    if _EXPERTS.search(node.op) and isinstance(chosen, int):
        return weights * min(chosen, experts) / max(experts, 1)
    return float(weights)
