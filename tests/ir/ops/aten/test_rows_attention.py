"""Attention and its gradients as single nodes."""

import pytest

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, flags

Q, K, V, W = (4, 4, 6, 8), (4, 4, 5, 8), (4, 4, 5, 8), (4, 4, 5, 3)
GQ, GK = (2, 8, 6, 8), (2, 4, 5, 8)  #: Two query heads a key-value head.


def forward(*operands: object, causal: bool = False, cuts: int = 3) -> Case:
    return aten("partitioner::attention", *operands, causal, None, options={"min_cuts": cuts})


def backward(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    mask: object = None,
    causal: bool = False,
    absent: tuple[int, ...] = (),
) -> Case:
    """The gradients are functions of any result and log-sum-exp, right ones or not."""
    out = (*query[:-1], value[-1])
    operands = (f32(*out), f32(*query), f32(*key), f32(*value), mask)
    saved = (f32(*out), f32(*query[:-1], low=1.0, high=3.0))
    return aten(
        "partitioner::attention_backward",
        *(*operands, *saved, causal, None),
        options={"min_cuts": 3, "tolerance": 1e-5},
        absent=absent,
    )


def mask_backward(query: tuple[int, ...], key: tuple[int, ...], *mask: int, cuts: int) -> Case:
    operands = (f32(*query), f32(*query), f32(*key), f32(*key), f32(*mask), f32(*query))
    lse = f32(*query[:-1], low=1.0, high=3.0)
    return aten(
        "partitioner::attention_mask_backward",
        *(*operands, lse, 0.3),
        options={"min_cuts": cuts, "tolerance": 1e-5},
    )


CASES = [
    forward(f32(*Q), f32(*K), f32(*V), None),
    forward(f32(*Q), f32(*K), f32(*V), None, causal=True),
    forward(f32(*Q), f32(*K), f32(*W), None),
    forward(f32(*Q), f32(*K), f32(*V), f32(6, 5)),
    forward(f32(*Q), f32(*K), f32(*W), f32(1, 4, 6, 5)),
    forward(f32(*Q), f32(*K), f32(*V), flags(4, 1, 1, 5)),
    forward(f32(*GQ), f32(*GK), f32(*GK), None, cuts=4),
    forward(f32(*GQ), f32(*GK), f32(*GK), f32(2, 8, 6, 5), cuts=4),
    forward(f32(*GQ), f32(2, 1, 5, 8), f32(2, 1, 5, 3), None),
    backward(Q, K, V),
    backward(Q, K, W),
    backward(Q, K, V, f32(4, 1, 6, 5)),
    backward(Q, K, V, causal=True),
    backward(GQ, GK, GK),
    backward(GQ, GK, GK, absent=(0, 2)),  # of frozen weights
    backward(Q, K, V, causal=True, absent=(0,)),
    backward(GQ, GK, (*GK[:-1], 3), f32(8, 6, 5)),
    mask_backward(Q, K, 1, 4, 6, 5, cuts=4),
    mask_backward(Q, K, 6, 5, cuts=4),
    mask_backward(GQ, GK, 2, 8, 1, 5, cuts=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
