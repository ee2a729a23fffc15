"""Softmax, negative log-likelihood, cross entropy and embedding tables in PyTorch."""

from typing import Any

import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_opaque, check_row, f32, ints, scalar

NONE, MEAN, SUM = 0, 1, 2


def target(*shape: int) -> Any:
    """Classes 0 to 5; 5 is the one that is ignored."""
    return ints(*shape, low=0, high=5)


CASES = [
    *(
        aten("nll_loss_forward", f32(8, 6), target(8), None, how, 5, options={"min_cuts": cuts})
        for how, cuts in ((NONE, 1), (MEAN, 0), (SUM, 1))
    ),
    aten("nll_loss_forward", f32(8, 6), target(8), f32(6, low=0.1), SUM, 5),
    aten("nll_loss_forward", f32(6), target(), None, SUM, 5, options={"min_cuts": 0}),
    *(
        aten(
            "nll_loss_backward",
            *(f32(*grad), f32(8, 6), target(8), None, how, 5, scalar(7, "float32")),
            options={"min_cuts": 2},
        )
        for how, grad in ((NONE, (8,)), (MEAN, ()), (SUM, ()))
    ),
    *(
        aten(
            "nll_loss2d_forward",
            *(f32(4, 6, 4, 5), target(4, 4, 5), None, how, 5),
            options={"min_cuts": cuts},
        )
        for how, cuts in ((NONE, 3), (MEAN, 0), (SUM, 3))
    ),
    *(
        aten(
            "nll_loss2d_backward",
            *(f32(*grad), f32(4, 6, 4, 5), target(4, 4, 5), None, how, 5, scalar(7, "float32")),
            options={"min_cuts": 4},
        )
        for how, grad in ((NONE, (4, 4, 5)), (MEAN, ()))
    ),
    *(
        aten(
            "partitioner::cross_entropy_parts",
            *(f32(4, 12, *more), f32(4, 1, *more), ints(4, *more, low=0, high=11)),
            *(-100, 12, [0], [12]),
            options={"min_cuts": 2 + len(more)},
        )
        for more in ((), (5,))
    ),
    aten(
        "partitioner::cross_entropy_parts",
        *(f32(12), f32(1), scalar(7), -100, 12, [0], [12]),
    ),
    *(
        aten(
            "partitioner::cross_entropy_grad",
            *(f32(4, *more), f32(4, *more), f32(4, 12, *more), f32(4, 1, *more)),
            *(ints(4, *more, low=0, high=11), [0], [12]),
            options={"min_cuts": 3 + len(more)},
        )
        for more in ((), (5,))
    ),
    # Of a part of the classes, which may be in pieces.
    *(
        aten(
            "partitioner::cross_entropy_parts",
            *(f32(4, 12), f32(4, 1), ints(4, low=0, high=19), -100, 20, starts, lengths),
            options={"min_cuts": 2},
        )
        for starts, lengths in (([5], [12]), ([1, 9], [5, 7]))
    ),
    *(
        aten(
            "partitioner::cross_entropy_grad",
            *(f32(4), f32(4), f32(4, 12), f32(4, 1)),
            *(ints(4, low=0, high=19), starts, lengths),
            options={"min_cuts": 3},
        )
        for starts, lengths in (([5], [12]), ([1, 9], [5, 7]))
    ),
    aten("_log_softmax", f32(4, 6, 5), 1, False, options={"min_cuts": 2}),
    aten(
        "_log_softmax_backward_data",
        *(f32(4, 6, 5), f32(4, 6, 5, low=-3.0, high=-0.1), -1, "float32"),
        options={"min_cuts": 3},
    ),
    aten("_safe_softmax", f32(4, 6, 5), -1, options={"min_cuts": 2}),
    aten("_softmax", f32(4, 6, 5), -1, False, options={"min_cuts": 2}),
    aten("_softmax", f32(4, 6), 0, False),
    aten(
        "_softmax_backward_data",
        *(f32(4, 6, 5), f32(4, 6, 5, low=0.0, high=0.4), 1, "float32"),
        options={"min_cuts": 3},
    ),
    aten("embedding", f32(12, 6), ints(4, 5, low=0, high=11), options={"min_cuts": 5}),
    aten("embedding", f32(12, 6), ints(4, low=0, high=11), 3, options={"min_cuts": 4}),
    aten(
        "embedding_dense_backward",
        *(f32(4, 5, 6), ints(4, 5, low=0, high=11), 12, -1, False),
        options={"min_cuts": 5},
    ),
    aten(
        "embedding_dense_backward",
        *(f32(8, 6), ints(8, low=0, high=3), 12, 2, False),
        options={"min_cuts": 4},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_class_outside_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cross entropy target out of range: not in 0 to 9"):
        torch.ops.partitioner.cross_entropy_parts(
            *(torch.ones(2, 4), torch.ones(2, 1), torch.tensor([3, 10]), -100, 10, [4], [4])
        )


def test_gradients_scaled_by_frequency_have_no_rule() -> None:
    case = aten("embedding_dense_backward", f32(8, 6), ints(8, low=0, high=3), 12, 2, True)
    assert check_opaque(case) == "scale_grad_by_freq is set"


def test_an_id_outside_the_whole_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match="embedding index out of range: not in 0 to 9"):
        torch.ops.partitioner.embedding_part(torch.ones(4, 2), torch.tensor([3, 10]), 10, [4], [4])
