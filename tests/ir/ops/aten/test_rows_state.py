"""Stored values, which are passed on by what reads and writes them, and random draws."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, scalar
from partitioner.ir.ops.table import LocalOp


def pass_on(local: LocalOp, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What emission does with these nodes: the result is the first operand."""
    (node,) = local.nodes
    return {node.outputs[0]: values[node.inputs[0]]}


CASES = [
    Case("partitioner::alias", (f32(4, 6),), runner=pass_on, min_cuts=3),
    Case("partitioner::either", (f32(4, 6),), runner=pass_on, min_cuts=2),
    Case("partitioner::either", (f32(4, 6), f32(4, 6)), runner=pass_on, min_cuts=2),
    Case("partitioner::keep", (f32(4, 6), f32(4, 6)), runner=pass_on, min_cuts=2),
    Case("partitioner::rest", (f32(4, 6),), runner=pass_on, min_cuts=2),
    Case("partitioner::update", (f32(4, 6), f32(4, 6)), runner=pass_on, min_cuts=2),
    aten("partitioner::dropout", f32(4, 6, 5), scalar(7), 0.3, 2, options={"min_cuts": 3}),
    aten("partitioner::dropout", f32(6, 5), scalar(-3), 0.5, 0, options={"min_cuts": 2}),
    aten("partitioner::dropout", f32(12), scalar(3), 0.5, 0),
    aten("partitioner::dropout", f32(6, 5), scalar(3), 1.0, 0, options={"min_cuts": 2}),
    aten(  # rows 3 to 6, columns 0 to 2 and 4 to 6, and the last five
        "partitioner::dropout_part",
        *(f32(4, 6, 5), scalar(7), 0.3, 2, [9, 7, 8]),
        *([1, 2, 1], [3, 0, 4, 3], [4, 3, 3, 5]),
        options={"min_cuts": 3},
    ),
    aten(
        "partitioner::uniform_part",
        *(scalar(3), 1, [9, 7, 8], torch.float32, [1, 2, 1], [3, 0, 4, 3], [4, 3, 3, 5]),
        options={"min_cuts": 3, "exact": True},
    ),
    aten(
        "partitioner::uniform",
        *(scalar(3), 1, [6, 5, 4], torch.float32),
        options={"min_cuts": 3, "exact": True},
    ),
    aten("partitioner::uniform", scalar(3), 1, [6], torch.float64, options={"exact": True}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
