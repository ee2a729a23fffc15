"""Results that are inputs of the next call, which are passed on where these lie."""

from collections.abc import Mapping

import numpy as np
import pytest

from helpers.op_rows.rows import Case, check_row, f32
from partitioner.ir.ops.table import LocalOp


def pass_on(local: LocalOp, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give what rank files do with these nodes: the result is the first operand."""
    (node,) = local.nodes
    return {node.outputs[0]: values[node.inputs[0]]}


CASES = (
    Case("partitioner::feed", (f32(4, 6, 5), f32(4, 6, 5)), runner=pass_on, min_cuts=3),
    Case("partitioner::feed", (f32(4, 7, 5), f32(4, 6, 5)), runner=pass_on, min_cuts=2),
    Case("partitioner::feed", (f32(4), f32(4)), runner=pass_on),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
