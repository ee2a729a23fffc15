"""Layers of experts in PyTorch: every cut of tokens, experts and columns."""

import numpy as np
import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, ints
from partitioner.backends.torch.operators.experts import ACTIVATIONS

TOKENS, CHOSEN, EXPERTS, CHANNELS, WIDTH = 6, 2, 5, 4, 3


def _operands(gates: int, ids: object) -> tuple[object, ...]:
    return (
        f32(TOKENS, CHANNELS),
        ids,
        f32(TOKENS, CHOSEN),
        f32(EXPERTS, gates * WIDTH, CHANNELS),
        f32(EXPERTS, CHANNELS, WIDTH),
    )


def _kept(gates: int) -> np.ndarray:
    """First products that are all missing."""
    return np.zeros((TOKENS, CHOSEN, gates * WIDTH), np.float32)


ANY = ints(TOKENS, CHOSEN, low=0, high=EXPERTS - 1)
#: All tokens go to one expert, which drops none.
ONE = np.full((TOKENS, CHOSEN), 3)
SETTINGS = ("silu", True, True, EXPERTS, [0], [EXPERTS])
#: A part of the experts of a larger layer.
OF_MORE = ints(TOKENS, CHOSEN, low=0, high=EXPERTS + 3)
PART = ("silu", True, True, EXPERTS + 4, [1, 6], [2, EXPERTS - 2])
#: Two products, one after the other: rounding is that of numbers larger than the results.
OPTIONS = {"min_cuts": 3, "tolerance": 1e-5}
CASES = [
    aten("partitioner::experts", *_operands(2, ANY), *SETTINGS, options=OPTIONS),
    aten("partitioner::experts", *_operands(2, ONE), *SETTINGS, options=OPTIONS),
    aten(
        "partitioner::experts",
        *(*_operands(1, ANY), "gelu", False, False, *SETTINGS[3:]),
        options=OPTIONS,
        absent=(1,),
    ),
    aten("partitioner::experts", *_operands(2, OF_MORE), *PART, options=OPTIONS),
    aten(
        "partitioner::experts_backward",
        *(f32(TOKENS, CHANNELS), *_operands(2, OF_MORE), _kept(2), *PART),
        options=OPTIONS,
    ),
    aten(
        "partitioner::experts_backward",
        *(f32(TOKENS, CHANNELS), *_operands(2, ANY), _kept(2), *SETTINGS),
        options=OPTIONS,
    ),
    aten(
        "partitioner::experts_backward",
        *(f32(TOKENS, CHANNELS), *_operands(2, ANY), _kept(2), *SETTINGS),
        options=OPTIONS,
        absent=(2, 3),  # frozen experts
    ),
    aten(
        "partitioner::experts_backward",
        *(f32(TOKENS, CHANNELS), *_operands(1, ANY), _kept(1), "relu", False, *SETTINGS[2:]),
        options=OPTIONS,
        absent=(0, 1),
    ),
    aten(
        "partitioner::experts_backward",
        *(f32(TOKENS, CHANNELS), *_operands(1, ONE), _kept(1), "relu", False, *SETTINGS[2:]),
        options=OPTIONS,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def _plain(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *setting: object,
) -> torch.Tensor:
    """The layer as written down: for each token and choice, its expert."""
    act = {
        "gelu": torch.nn.functional.gelu,
        "gelu-tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[str(setting[0])]
    before = torch.einsum("th,tknh->tkn", x, up[ids])
    gate, *other = before.chunk(2, -1) if setting[1] else (before,)
    inner = act(gate) * other[0] if other else act(gate)
    return torch.einsum("tk,tkhi,tki->th", weights, down[ids], inner)


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gradients_are_those_of_autograd(activation: str, gates: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, CHOSEN))  # nobody chooses the last one
    shapes = (
        (TOKENS, CHANNELS),
        (TOKENS, CHOSEN),
        (EXPERTS, gates * WIDTH, CHANNELS),
        (EXPERTS, CHANNELS, WIDTH),
    )
    x, *others = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    setting = (activation, gates == 2, True, EXPERTS, [0], [EXPERTS])
    results = []
    for layer in (_plain, lambda *call: torch.ops.partitioner.experts(*call)[0]):
        out = layer(x, ids, *others, *setting)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, *others))))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradients_do_not_depend_on_which_products_were_kept() -> None:
    """A plan may keep the products of other experts than those whose gradients it computes."""
    torch.manual_seed(0)
    ids = torch.randint(0, EXPERTS, (TOKENS, CHOSEN))
    shapes = (
        (TOKENS, CHANNELS),
        (TOKENS, CHOSEN),
        (EXPERTS, 2 * WIDTH, CHANNELS),
        (EXPERTS, CHANNELS, WIDTH),
    )
    x, *others = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    grad = torch.randn_like(x)
    _, kept = torch.ops.partitioner.experts(x, ids, *others, *SETTINGS)
    assert (kept != 0).all()
    backward = torch.ops.partitioner.experts_backward
    expected = backward(grad, x, ids, *others, kept.clone(), *SETTINGS)
    for missing in (ids < 2, ids >= 2, ids >= 0):
        some = kept.masked_fill(missing.unsqueeze(-1), 0)
        actual = backward(grad, x, ids, *others, some, *SETTINGS)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    operands = [torch.zeros(1, 2), torch.tensor([[5]]), torch.zeros(1, 1)]
    with pytest.raises(RuntimeError, match="expert out of range: not in 0 to 4"):
        torch.ops.partitioner.experts(
            *operands, torch.zeros(5, 3, 2), torch.zeros(5, 2, 3), "relu", False, False, 5, [0], [5]
        )
