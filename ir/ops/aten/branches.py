"""The rule of branches.

`torch.cond` is one node, its branches whole graphs, which every device of its group runs whole.
``higher_order::cond`` reads a predicate (one boolean), then the operands that its branches take, in
their inputs' order. Attributes `BRANCHES` are graphs; the results are theirs, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

COND = "higher_order::cond"
#: Attributes: what runs if the predicate is true, and if it is not.
BRANCHES = ("true", "false")


def cond_row(rule_of: Callable[[Graph, Node], Rule | str]) -> OpRow:
    """The row of `COND`; `rule_of` gives the rules of the nodes of its branches."""

    def flops(graph: Graph) -> float:
        rules = (rule_of(graph, node) for node in graph.nodes)
        return sum(rule.flops for rule in rules if isinstance(rule, Rule))

    def rule(view: OpView) -> Rule:
        """Cut nothing; FLOPs are those of the dearer branch."""
        shapes = [shape or () for shape in view.out_shapes]
        sizes = {size for shape in shapes for size in shape if size != 1}
        branches = [view.attr(name) for name in BRANCHES]
        most = max(flops(branch) for branch in branches if isinstance(branch, Graph))
        return view.rule(
            [],
            [["1" if size == 1 else f"w{size}" for size in shape] for shape in shapes],
            whole={f"w{size}" for size in sizes},
            flops=most / max(math.prod(sizes), 1),
        )

    return OpRow(rule)
