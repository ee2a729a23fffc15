"""Operators of experts that send tokens, on all ranks in turn: beside those of one device."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.backends.torch.operators.registry import SENDING, Steps, packed, unpacked

ops = torch.ops.partitioner
WIDTH, INNER = 8, 6
SETTINGS = ("silu", True, True)

#: Tokens, choices, the rank of each expert, the element type.
CASES: dict[str, tuple[int, int, list[int], torch.dtype]] = {
    "2": (6, 1, [0, 1, 1, 0, 1], torch.float64),
    "3": (7, 2, [0, 2, 1, 1, 0], torch.float32),
    "5": (11, 5, [4, 2, 0, 0, 1, 3, 1, 0, 2], torch.float64),
    "narrow": (11, 1, [4, 2, 0, 0, 1, 3, 1, 0, 2], torch.bfloat16),
}


def driven(ranks: Sequence[Steps]) -> list[tuple[Tensor, ...]]:
    """Results by rank; each all-to-all is carried out when all wait in it."""
    answers: list[Any] = [None] * len(ranks)
    done: list[tuple[Tensor, ...]] = []
    while not done:
        calls = []
        for steps, answer in zip(ranks, answers, strict=True):
            try:
                calls.append(steps.send(answer)[1])
            except StopIteration as stop:
                done.append(stop.value)
        parts = [tensor.split(leaving) for tensor, _, leaving, _ in calls]
        for rank, (_, awaited, _, _) in enumerate(calls):
            assert [part[rank].numel() for part in parts] == awaited
        answers = [torch.cat([part[rank] for part in parts]) for rank in range(len(calls))]
    assert len(done) == len(ranks)
    return done


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_one_device(case: str, biased: bool) -> None:
    """Experts lie on any rank, in any order; ranks have unlike numbers of tokens."""
    count, chosen, owners, dtype = CASES[case]
    torch.manual_seed(0)
    experts, ranks = len(owners), 1 + max(owners)
    x, grad = torch.randn(2, count, WIDTH, dtype=dtype)
    weights = torch.rand(count, chosen, dtype=dtype)
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(count)])
    up = torch.randn(experts, 2 * INNER, WIDTH, dtype=dtype)
    down = torch.randn(experts, WIDTH, INNER, dtype=dtype)
    sizes = (2 * INNER, WIDTH) if biased else ()
    weights_of = [up, down, *(torch.randn(experts, size, dtype=dtype) for size in sizes)]
    name = "experts_biased" if biased else "experts"
    tokens = torch.arange(count).tensor_split(ranks)
    held = [[expert for expert in range(experts) if owners[expert] == r] for r in range(ranks)]

    def call(rank: int, *kept: Tensor) -> tuple[Any, ...]:
        own, at = tokens[rank], held[rank]
        operands = x[own], ids[own], weights[own], *(one[at] for one in weights_of), *kept
        settings = (*SETTINGS, experts, at, [1] * len(at))
        group = [*range(ranks)], rank, owners, [int(own[0])], [len(own)]
        return (*operands, *settings, *group, count)

    forward, backward = (
        SENDING[getattr(ops, f"{name}_sent").default],
        SENDING[getattr(ops, f"{name}_backward_sent").default],
    )
    results = driven([forward(*call(rank)) for rank in range(ranks)])
    steps = [backward(grad[tokens[r]], *call(r, results[r][1].clone())) for r in range(ranks)]
    grads = driven(steps)

    whole = (*SETTINGS, experts, [0], [experts])
    plain, plain_backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    out, kept = plain(x, ids, weights, *weights_of, *whole)
    expected = plain_backward(grad, x, ids, weights, *weights_of, kept.clone(), *whole)
    is_narrow = dtype == torch.bfloat16
    tolerance = {"rtol": 3e-2, "atol": 0.3} if is_narrow else {"rtol": 1e-5, "atol": 1e-5}
    close = torch.testing.assert_close
    close(torch.cat([one[0] for one in results]), out, **tolerance)
    close(sum(one[1] for one in results), kept, **tolerance)
    for index in (0, 1):
        close(torch.cat([one[index] for one in grads]), expected[index], **tolerance)
    for rank, at in enumerate(held):
        for of_rank, of_all in zip(grads[rank][2:], expected[2:], strict=True):
            close(of_rank, of_all[at], **tolerance)


def test_rows_are_packed_where_no_element_may_begin() -> None:
    """A byte stands before each row of doubles."""
    columns = [torch.arange(4, dtype=torch.uint8).view(4, 1), torch.randn(4, 3).double()]
    chosen = [torch.tensor([2]), torch.tensor([], dtype=torch.long), torch.tensor([3, 0, 2])]
    flat = packed(columns, chosen)
    assert len(flat) == 4 * (1 + 24)
    like = [(column.dtype, column.shape[1]) for column in columns]
    for rows, parts in zip(chosen, unpacked(flat, list(map(len, chosen)), like), strict=True):
        for column, part in zip(columns, parts, strict=True):
            torch.testing.assert_close(part, column[rows], rtol=0, atol=0)
