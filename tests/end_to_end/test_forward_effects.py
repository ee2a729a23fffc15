"""What a forward pass does in Python, once while it is traced: refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import partitioner
from partitioner.frontends.errors import FrontendError


class Counting(nn.Module):
    """Two layers, generators and a number, and a function that computes a loss with them."""

    def __init__(self, step: Callable[[Counting, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own, self.dice = np.random.default_rng(0), random.Random(0)
        self.calls, self.sizes = 0, None
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def counts(m: Counting, x: Tensor) -> Tensor:
    m.calls += 1
    return loss(m.a(x)) * m.calls


def seeds(m: Counting, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return loss(m.a(x) + torch.rand(4, 8))


def assigns_data(m: Counting, x: Tensor) -> Tensor:
    y = m.a(x).clone()
    y.data = y.round()
    return loss(y)


def penalised(m: Counting, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)
    return loss(m.a(x)) + loss(slope)


def differentiates(m: Counting, x: Tensor) -> Tensor:
    return loss(m.a(x)) + loss(torch.func.jacrev(lambda y: m.a(y).tanh().sum())(x))


def goes_back(m: Counting, x: Tensor) -> Tensor:
    y = loss(m.a(x))
    y.backward(retain_graph=True)
    return y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, x: loss(m.a(x)) * random.random(), r"draws numbers from Python's random: they"),
        (lambda m, x: loss(m.a(x)) * np.random.rand(), r"draws numbers from NumPy's random"),  # noqa: NPY002
        (lambda m, x: loss(m.a(x)) * m.own.random(), r"draws numbers from own: .* with PyTorch"),
        (lambda m, x: loss(m.a(x)) * m.dice.random(), r"draws numbers from dice"),
        (seeds, r"forward calls torch\.manual_seed"),
        (counts, r"forward changes Counting\.calls from 0 to 1: .* make it a buffer"),
        (assigns_data, r"forward assigns to tensor\.data"),
        (
            penalised,
            (
                r"^.*test_forward_effects\.py:\d+ \(\(slope,\) = torch\.autograd\.grad\(.*\)\): "
                r"forward calls torch\.autograd\.grad, which is not traced: .* \(a gradient pena"
            ),
        ),
        (differentiates, r"forward calls torch\.autograd\.grad, which is not traced"),
        (goes_back, r"\(y\.backward\(retain_graph=True\)\): forward calls torch\.autograd\.backwa"),
    ],
    ids=[
        *("random", "NumPy", "NumPy's generator", "Random", "seed", "count", "data"),
        *("gradient", "jacobian", "backward"),
    ],
)
def test_effects_are_refused(
    step: Callable[[Counting, Tensor], Tensor], message: str, training: bool
) -> None:
    options = {"cluster": "2xideal", "training": training}
    with pytest.raises(FrontendError, match=message) as caught:
        partitioner.compile(Counting(step), torch.randn(4, 8), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_hooks_of_all_modules_are_refused() -> None:
    handle = register_module_forward_hook(lambda _, __, y: y)
    try:
        with pytest.raises(FrontendError, match=r"<lambda> is a hook of all modules, also of PyT"):
            partitioner.compile(nn.Linear(8, 8), torch.randn(4, 8), cluster="2xideal")
    finally:
        handle.remove()


def reads_data(m: Counting, x: Tensor) -> Tensor:
    """Stops gradients, of a value and of a weight; notes sizes."""
    m.sizes = x.shape
    return loss(m.b(m.a(x).data) + m.a(x) @ m.b.weight.data)


def other_type(m: Counting, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ones = torch.ones(8)
    finally:
        torch.set_default_dtype(before)
    return loss(m.b(m.a(x)) * ones)


@pytest.mark.parametrize("step", [reads_data, other_type])
def test_effects_that_are_traced(step: Callable[[Counting, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Counting(step), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    assert program.verify()
    assert program(x).dtype == module(x).dtype


class HeadsInPlace(nn.Module):
    """Writes into views of what a layer gives, as DeBERTa scales its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        heads = y.view(*x.shape[:2], 3, 4).permute(0, 2, 1, 3)
        heads /= 2.0 + y.detach().square().sum()
        heads[:, 1].copy_(x[0, 0, :4])
        return (heads @ heads.transpose(-1, -2)).sin().sum()


@pytest.mark.parametrize(("parallel", "devices"), [("dp", 2), ("tp", 2), ("zero3", 3)])
def test_what_is_written_into_permuted_views(parallel: str, devices: int) -> None:
    torch.manual_seed(0)
    program = partitioner.compile(
        HeadsInPlace(), torch.randn(6, 5, 6), devices, training=True, parallel=parallel
    )
    assert program.verify()


@pytest.mark.parametrize("training", [False, True])
def test_cumulative_statistics_are_refused_by_name(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None), nn.Flatten(0))
    message = (
        r"^1 is a BatchNorm1d with momentum=None, which weights .* call its eval\(\) before com"
    )
    with pytest.raises(FrontendError, match=message):
        partitioner.compile(model, torch.randn(6, 4), 2, training=training)
    model.eval()
    assert partitioner.compile(model, torch.randn(6, 4), 2).verify()


def sets(m: Counting, x: Tensor) -> Tensor:
    """A window that is set by the sizes of the input, as Swin sets its own."""
    m.calls = 1
    m.calls = x.shape[1]
    return loss(m.a(x)) * m.calls


def sets_late(m: Counting, x: Tensor) -> Tensor:
    scale = m.calls + 1
    m.calls = 5
    return loss(m.a(x)) * scale


def test_a_number_that_the_next_call_leaves_as_it_is() -> None:
    torch.manual_seed(0)
    module, x = Counting(sets), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    assert module.calls == 0
    assert program.verify()
    torch.testing.assert_close(program(x), module(x))
    torch.testing.assert_close(program(x), module(x))
    assert module.calls == 8


def test_a_number_that_the_next_call_reads_is_refused() -> None:
    module = Counting(sets_late)
    with pytest.raises(FrontendError, match=r"\(m\.calls = 5\): forward changes Counting\.calls f"):
        partitioner.compile(module, torch.randn(4, 8), cluster="2xideal", training=True)
    assert module.calls == 0
