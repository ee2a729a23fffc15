"""Nodes of a ring of attention."""

import pytest

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rings import attention
from helpers.op_rows.rows import Case, Draw, check_row, f32, flags
from partitioner.rewrites.ring import STEP, ring


def operand(name: str, rows: int) -> Draw | None:
    if name in ("", "l", "m"):
        saved = {"l": f32(2, 4, rows, low=1.0, high=3.0), "m": flags(rows, rows)}
        return saved.get(name)
    return f32(2, 4 if name in ("q", "o", "g") else 2, rows, 8)


def steps(parts: int, rows: int, causal: bool, mask: bool = False) -> list[Case]:
    """The nodes of a ring that are cut by part, as rows of the table."""
    cases = {}
    for node in ring(attention(rows, causal=causal, mask=mask), parts).nodes:
        tensors = [operand(name, rows) for name in node.inputs]
        if node.op.startswith(STEP) or node.op == "partitioner::turn":
            settings = tuple(node.attrs.values())
            if node.op.startswith(STEP):
                settings = (causal, None, *(node.attrs[n] for n in ("intervals", "counts", "step")))
            cases[node.op, settings] = aten(
                node.op, *tensors, *settings, options={"min_cuts": 3, "tolerance": 1e-5}
            )
    return [*cases.values()]


OUT, LSE = f32(2, 4, 6, 8), f32(2, 4, 6, low=-1.0, high=2.0)

CASES = [
    *steps(2, 6, True),
    *steps(3, 7, False),
    *steps(2, 5, False, True),
    *(
        aten("partitioner::attention_join", OUT, LSE, OUT, LSE, last, options={"min_cuts": 4})
        for last in (True, False)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
