"""`torch.cond`: one node, its branches whole graphs, which every device of its group runs whole.

``higher_order::cond`` reads a predicate (one boolean), then the operands that its branches take, in
their inputs' order. Attributes `BRANCHES` are graphs; the results are theirs, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from partitioner.ir.graph import Graph
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

COND = "higher_order::cond"
#: Attributes: what runs if the predicate is true, and if it is not.
BRANCHES = ("true", "false")


def cond(view: OpView) -> Rule:
    """Nothing is cut; FLOPs are those of the dearer branch."""
    results = [
        ["1" if size == 1 else f"w{size}" for size in shape or ()] for shape in view.out_shapes
    ]
    sizes = {size for shape in view.out_shapes for size in shape or () if size != 1}
    graphs = [view.attr(name) for name in BRANCHES]
    flops = max(_flops(graph) for graph in graphs if isinstance(graph, Graph))
    return Rule.of(
        [None] * len(view.node.inputs),
        results,
        view.shapes,
        view.out_shapes,
        whole={f"w{size}" for size in sizes},
        flops=flops / max(math.prod(sizes), 1),
    )


def _flops(graph: Graph) -> float:
    from partitioner.ir.ops import rule_of  # the table that this row is in

    rules = (rule_of(graph, node) for node in graph.nodes)
    return sum(rule.flops for rule in rules if isinstance(rule, Rule))


ROWS: Mapping[str, OpRow] = {COND: OpRow(cond)}
