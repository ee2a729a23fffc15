"""Operators without a row: the front end attaches the rule that it derived to the node.

Attribute `RULE` is the rule as text: ``"p0 w0, p0 1 -> p0 w1"``, dims of the operands and results
that are there. Factors that start with p pass, with s are summed, with w are whole.
"""

from __future__ import annotations

from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: Name of the attribute.
RULE = "rule"
PASSES, SUMMED, WHOLE = "p", "s", "w"


def _derived(view: OpView) -> Rule:
    """The rule that the node brings along; one FLOP an iteration."""
    before, _, results = str(view.attr(RULE)).partition("->")
    operands = iter(before.split(","))
    factors = set(f"{before} {results}".replace(",", " ").split())
    return view.rule(
        [next(operands) if name else None for name in view.node.inputs],
        results,
        reduce=[name for name in factors if name.startswith(SUMMED)],
        whole=[name for name in factors if name.startswith(WHOLE)],
        flops=1.0,
    )


DERIVED = OpRow(_derived)
