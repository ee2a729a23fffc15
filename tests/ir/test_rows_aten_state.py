"""Stored values: what reads and writes them passes a value on."""

from collections.abc import Mapping

import numpy as np
import pytest
from rows import Case, check_row, f32

from partitioner.ir.ops import LocalOp


def pass_on(local: LocalOp, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What emission does with these nodes: the result is the first operand."""
    (node,) = local.nodes
    return {node.outputs[0]: values[node.inputs[0]]}


CASES = [
    Case("partitioner::alias", (f32(4, 6),), runner=pass_on, min_cuts=3),
    Case("partitioner::either", (f32(4, 6),), runner=pass_on, min_cuts=2),
    Case("partitioner::either", (f32(4, 6), f32(4, 6)), runner=pass_on, min_cuts=2),
    Case("partitioner::update", (f32(4, 6), f32(4, 6)), runner=pass_on, min_cuts=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
