"""Layers of experts in PyTorch: every cut of tokens, experts and columns."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, ints
from partitioner.backends.torch.operators.activations import activation, with_gradient
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


def _biases(gates: int) -> tuple[object, ...]:
    return f32(EXPERTS, gates * WIDTH), f32(EXPERTS, CHANNELS)


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
#: The activation of gpt-oss: its gates are every second column.
PROGRAM = (
    "every %0 0 2; clamp_max %1 0.7; every %0 1 2; clamp_min %3 -0.7; clamp_max %4 0.7; add %5 1; "
    "mul %2 1.7; sigmoid %7; mul %2 %8; mul %6 %9"
)
#: Two products, one after the other: rounding is that of numbers larger than the results.
OPTIONS = {"min_cuts": 3, "tolerance": 1e-5}
#: Columns are whole where there are biases, or the activation is a program.
WHOLE = {**OPTIONS, "min_cuts": 2}
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
    aten("partitioner::experts", *_operands(2, ANY), PROGRAM, *SETTINGS[1:], options=WHOLE),
    aten(
        "partitioner::experts_biased",
        *(*_operands(2, OF_MORE), *_biases(2), PROGRAM, *PART[1:]),
        options=WHOLE,
    ),
    aten(
        "partitioner::experts_biased",
        *(*_operands(1, ONE), *_biases(1), "gelu", False, *SETTINGS[2:]),
        options=WHOLE,
    ),
    *(
        aten(
            "partitioner::experts_biased_backward",
            *(f32(TOKENS, CHANNELS), *_operands(2, ids), *_biases(2), _kept(2), *settings),
            options=WHOLE,
        )
        for ids, settings in (
            (ANY, SETTINGS),
            (ONE, (PROGRAM, *SETTINGS[1:])),
            (OF_MORE, (PROGRAM, *PART[1:])),
        )
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


def _oss(columns: torch.Tensor) -> torch.Tensor:
    gate, up = columns[..., ::2].clamp(max=0.7), columns[..., 1::2].clamp(-0.7, 0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.7))


#: Programs, and what they compute.
PROGRAMS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "oss": (PROGRAM, _oss),
    "halves": (
        "part %0 0 2; silu %1; part %0 1 2; tanh %3; mul %2 %4; neg %5",
        lambda x: -(F.silu(x[..., :3]) * x[..., 3:].tanh()),
    ),
    "one": (
        "relu %0; pow %1 2; exp %0; div %2 %3; sub %4 0.5; add %5 %0; gelu %6; gelu-tanh %7",
        lambda x: F.gelu(F.gelu(x.relu() ** 2 / x.exp() - 0.5 + x), approximate="tanh"),
    ),
    "a number first": ("div 2.0 %0; sub 1 %1; mul 3 %2", lambda x: 3 * (1 - 2.0 / x)),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_programs_are_those_of_autograd(name: str, biased: bool) -> None:
    torch.manual_seed(0)
    text, act = PROGRAMS[name]
    gates = 2 if name in ("oss", "halves") else 1
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, CHOSEN))
    shapes = [
        (TOKENS, CHANNELS),
        (TOKENS, CHOSEN),
        (EXPERTS, gates * WIDTH, CHANNELS),
        (EXPERTS, CHANNELS, WIDTH),
    ]
    shapes += [(EXPERTS, gates * WIDTH), (EXPERTS, CHANNELS)] if biased else []
    operands = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    x, weights, up, down, *biases = operands
    before = torch.einsum("th,tknh->tkn", x, up[ids]) + (biases[0][ids] if biased else 0)
    rows = torch.einsum("tkhi,tki->tkh", down[ids], act(before))
    expected = torch.einsum("tk,tkh->th", weights, rows + (biases[1][ids] if biased else 0))
    layer = torch.ops.partitioner.experts_biased if biased else torch.ops.partitioner.experts
    settings = text, gates == 2, True, EXPERTS, [0], [EXPERTS]
    actual = layer(x, ids, *operands[1:], *settings)[0]
    for one, other in zip(
        (actual, *torch.autograd.grad(actual.square().sum(), operands)),
        (expected, *torch.autograd.grad(expected.square().sum(), operands)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_activations_have_gradients_in_inference_mode() -> None:
    before, grad = torch.randn(3, 4), torch.randn(3, 2)
    expected = with_gradient(activation(PROGRAM), before, grad)
    with torch.inference_mode():
        for columns in (before, before.clone()):
            found = with_gradient(activation(PROGRAM), columns, grad.clone())
            assert all(map(torch.equal, found, expected))


def test_a_step_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'system %0': there is no step 'system'"):
        activation("system %0")


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
