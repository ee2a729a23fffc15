"""`torch.cond`: every device runs it whole; it costs what its dearer branch does."""

import numpy as np
import pytest

from helpers.op_rows.aten_rows import run_torch
from helpers.op_rows.rows import Case, check_row, f32, make_trial
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import rule_of
from partitioner.ir.ops.aten.branches import BRANCHES, COND
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType


def branch(op: str, inputs: tuple[str, ...], count: int = 1) -> Graph:
    """``y = op(inputs)``, for matrices of 4 x 4."""
    kind = TensorType.of("float32", (4, 4))
    names = [*(f"t{index}" for index in range(1, count)), "y"]
    nodes = [Node("n0", op, inputs, (names[0],))]
    nodes += [
        Node(f"n{i}", op, (names[i - 1], inputs[1]), (names[i],)) for i in range(1, len(names))
    ]
    types = dict.fromkeys(("a", "b", *names), kind)
    return Graph("branch", ("a", "b"), ("y",), tuple(nodes), types, {}, {"aten": 1})


BODIES = dict(
    zip(BRANCHES, (branch("aten::mm", ("a", "b"), 2), branch("aten::mm", ("b", "a"))), strict=True)
)
CASES = [
    Case(
        COND, (np.array(flag), f32(4, 4), f32(4, 4)), BODIES, opset=1, min_cuts=0, runner=run_torch
    )
    for flag in (True, False)
]


@pytest.mark.parametrize("case", CASES, ids=["true", "false"])
def test_row(case: Case) -> None:
    check_row(case)


def test_each_branch_is_taken_and_the_dearer_one_counts() -> None:
    yes, no = map(make_trial, CASES)
    _, a, b = yes.operands
    assert np.allclose(yes.results[0], a @ b @ b, rtol=1e-5)
    assert np.allclose(no.results[0], no.operands[2] @ no.operands[1], rtol=1e-5)
    rule = rule_of(yes.graph, yes.node)
    assert isinstance(rule, Rule)
    assert rule.flops == 2 * (2 * 4**3)
