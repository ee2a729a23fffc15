"""Operators without a row of their own: the front end hangs a rule, derived elsewhere, on the node.

Attribute `RULE` is the rule as text: ``"p0 w0, p0 1 -> p0 w1"``, dims of the operands and results
that are there. Factors that start with p pass, with s are summed, with w are whole.
"""

from __future__ import annotations

from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: Name of the attribute.
RULE = "rule"
PASSES, SUMMED, WHOLE = "p", "s", "w"


def derived(view: OpView) -> Rule:
    """The rule that the node brings along; one FLOP an iteration."""
    before, _, after = str(view.attr(RULE)).partition("->")
    operands, results = _dims(before), _dims(after)
    names = {name for dims in (*operands, *results) for name in dims}
    given = iter(operands)
    return Rule.of(
        [next(given) if name else None for name in view.node.inputs],
        [dims if name else None for dims, name in zip(results, view.node.outputs, strict=True)],
        view.shapes,
        view.out_shapes,
        reduce={name: "sum" for name in names if name.startswith(SUMMED)},
        whole={name for name in names if name.startswith(WHOLE)},
        flops=1.0,
    )


def _dims(side: str) -> list[list[str]]:
    return [tensor.split() for tensor in side.split(",")]


DERIVED = OpRow(derived)
