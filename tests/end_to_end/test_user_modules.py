"""Modules as users write them, trained on two ranks: results, gradients and buffers verified."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import partitioner
from partitioner.api.compiled.module import variant
from partitioner.api.verify.module import allowance
from partitioner.backends.errors import BackendError
from partitioner.foundations.files import ResultError
from partitioner.frontends.errors import FrontendError

Forward = Callable[..., Tensor]


class Holder(nn.Module):
    """A layer, a cell and buffers, and a function that computes with them."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 4, 8))
        self.run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self, *inputs)


class Loss(nn.Module):
    """The mean square of a module's first result, then that result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        results = self.inner(*inputs)
        first = results[0] if isinstance(results, tuple) else results
        return first.square().mean(), first


def cells(m: Holder, x: Tensor) -> Tensor:
    hidden = kept = x.new_zeros(4, 8)
    for step in range(3):
        hidden, kept = m.cell(x + step, (hidden, kept))
    return hidden


def views(m: Holder, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[:, :4].mul_(2.0)
    y.view(4, 2, 4)[:, 0].add_(y[:, 4:])
    y.transpose(0, 1)[0] = 0.0
    return y


def buffers(m: Holder, x: Tensor) -> Tensor:
    y = m.layer(x) + m.last[0]
    m.steps.add_(1)
    m.last[1] = y.detach()
    m.last[0].copy_(x)
    return y * m.steps + m.last.sum(0)


def writes(m: Holder, x: Tensor, at: Tensor) -> Tensor:
    out = torch.zeros(12, 8)
    out[at] = m.layer(x)
    out.index_add_(0, at, x)
    return out


def routing(m: Holder, x: Tensor) -> Tensor:
    chances = m.layer(x).softmax(-1)
    value, index = chances.topk(2, -1)
    kept = torch.zeros_like(chances).scatter(-1, index, value)
    ordered, order = m.layer(x).sort(-1, descending=True)
    return torch.einsum("be,bf->bf", kept, ordered.gather(1, order))


def checkpointed(m: Holder, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda y: m.layer(m.layer(y).relu()), x, use_reentrant=False)
    return y


def fourier(m: Holder, x: Tensor) -> Tensor:
    weight = torch.view_as_complex(m.cell.weight_hh[:3, :2].contiguous())
    return torch.fft.irfft(torch.fft.rfft(m.layer(x), dim=0) * weight[:, None], n=4, dim=0)


def solved(m: Holder, x: Tensor) -> Tensor:
    """PyTorch checks these by calls that have an effect."""
    y = m.layer(x)
    square = y @ y.mT + torch.eye(4)
    return torch.linalg.solve(square, x) + torch.linalg.cholesky(square) @ x


def grouped(m: Holder, x: Tensor) -> Tensor:
    heads = m.layer(x).view(1, 4, 4, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(
        heads, heads[:, :2], heads[:, :2], is_causal=True, enable_gqa=True
    )


def casts(m: Holder, x: Tensor) -> Tensor:
    y = m.layer(x)
    return y.double().float() + y.bfloat16().float() + (y > 0).to(torch.int32).float()


def masked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
            return y

    return Masked(), (torch.randn(4, 6, 8), torch.arange(24).view(4, 6) % 5 == 4)


def holder(run: Forward, *more: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Holder(run), (torch.randn(4, 8), *more)


def image(*layers: nn.Module) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Conv2d(4, 4, 1), *layers), (torch.randn(4, 4, 6, 6),)


def row(layer: nn.Module, *shape: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return layer, (torch.randn(*shape),)


Made = tuple[nn.Module, tuple[Tensor, ...]]
MODULES: dict[str, Callable[[], Made]] = {
    "LSTM": lambda: row(nn.LSTM(8, 8, batch_first=True), 4, 3, 8),
    "linalg": lambda: holder(solved),
    "EmbeddingBag offsets": lambda: (
        nn.EmbeddingBag(32, 8, mode="sum"),
        (torch.randint(0, 32, (12,)), torch.tensor([0, 4, 8])),
    ),
    "views written": lambda: holder(views),
    "buffers written": lambda: holder(buffers),
    # the gradients of what an instance norm follows are zero but for rounding and its epsilon
    "rounding": lambda: image(nn.Conv2d(4, 8, 3, padding=1), nn.InstanceNorm2d(8)),
}
MORE: dict[str, Callable[[], Made]] = {
    "LSTM cells": lambda: holder(cells),
    "LSTM both ways": lambda: row(nn.LSTM(8, 8, bidirectional=True), 3, 4, 8),
    "GRU": lambda: row(nn.GRU(8, 8), 3, 4, 8),
    "attention with a mask": masked,
    "encoder layer": lambda: row(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 4, 6, 8
    ),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(32, 8, mode="max"), (torch.randint(0, 32, (4, 6)),)),
    "group norm": lambda: image(nn.GroupNorm(2, 4)),
    "instance norm": lambda: image(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Sigmoid()
    ),
    "pixel shuffle": lambda: image(nn.PixelShuffle(2)),
    "bilinear": lambda: image(nn.Upsample(scale_factor=2, mode="bilinear")),
    "transposed": lambda: image(nn.ConvTranspose2d(4, 8, 3, stride=2, output_padding=1)),
    "3d": lambda: row(nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.MaxPool3d(2)), 4, 4, 4, 6, 6),
    "Bilinear": lambda: (nn.Bilinear(8, 6, 4), (torch.randn(4, 8), torch.randn(4, 6))),
    "weight norm": lambda: row(parametrizations.weight_norm(nn.Linear(8, 8)), 4, 8),
    "spectral norm": lambda: row(parametrizations.spectral_norm(nn.Linear(8, 8)), 4, 8),
    "index writes": lambda: holder(writes, torch.tensor([1, 5, 3, 7])),
    "routing": lambda: holder(routing),
    "checkpoint": lambda: holder(checkpointed),
    "fft": lambda: holder(fourier),
    "grouped heads": lambda: holder(grouped),
    "casts": lambda: holder(casts),
}


@pytest.mark.parametrize(
    "name", [*MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_training_is_verified(name: str) -> None:
    torch.manual_seed(0)
    module, example = {**MODULES, **MORE}[name]()
    program = partitioner.compile(Loss(module), example, cluster="2xideal", training=True)
    verification = program.verify()
    assert verification, str(verification)


class Plain(nn.Module):
    """Reads a tensor that is a plain attribute, and returns numbers and text beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.scale = torch.linspace(0.5, 1, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int, dict[str, object]]:
        y = self.layer(x) * self.layer.scale
        return y.square().mean(), 3, {"name": "plain", "none": None, "pair": (y, 0.5, True)}


TABLE = torch.tensor([2, 0, 1, 3])


def test_a_variable_outside_the_module_is_a_constant() -> None:
    module, x = Loss(Holder(lambda m, x: m.layer(x)[TABLE])), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    torch.testing.assert_close(program(x), module(x))


def test_calls_with_other_floats_are_refused() -> None:
    module, x = Loss(Holder(lambda m, x: m.layer(x))), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    for training in (True, False):
        with pytest.raises(
            BackendError, match=r"input 'inputs_0' is float64; the module was compiled with float32"
        ):
            variant(program, (x.double(),), {}, training=training, share=lambda run: run())


def test_a_call_in_words_is_one_line() -> None:
    program = partitioner.compile(nn.Linear(8, 8), torch.randn(4, 8), cluster="2xideal")
    assert program.signature.described((np.eye(2),), {"s": "a  b\n"}) == (
        "array([[1., 0.], [0., 1.]]), s 'a  b\\n'"
    )


def test_a_saved_program_names_other_example_inputs(tmp_path: Path) -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    folder = partitioner.compile(module, x, cluster="2xideal").save(tmp_path / "plan")
    with pytest.raises(
        ResultError, match=r"given are float64\[4,8\]; the plan is for float32\[4,8\]"
    ):
        partitioner.load(folder, module, x.double())


@pytest.mark.parametrize("training", [False, True])
def test_plain_attributes_and_results_that_are_no_tensors(training: bool) -> None:
    module, x = Plain(), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=training)
    loss, number, more = program(x)
    right, right_number, right_more = module(x)
    torch.testing.assert_close((loss, more.pop("pair")[0]), (right, right_more.pop("pair")[0]))
    assert (number, more) == (right_number, right_more)


@pytest.mark.parametrize(
    ("error", "whole", "exact", "allowed"),
    [
        (1e-3, [1.0, 2.0], [1.0, 2.002], 1e-2),
        (1.0, [1.0, 2.0], [1.0, 4.0], 0.25),  # it jumps
        (1.0, [1e-8, 2e-9], [0.0, 1e-17], 10.0),  # zero but for rounding
        (math.inf, [math.inf, 1.0], [1e9, 1.0], 0.0),
    ],
)
def test_rounding_is_allowed(
    error: float, whole: list[float], exact: list[float], allowed: float
) -> None:
    assert allowance(error, np.array(whole), np.array(exact)) == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda m, x: m.layer(x.add_(1)), "the module writes into one of its inputs"),
        (lambda m, x: halved(m) + m.layer(x), "writes into its parameter inner.layer.weight"),
        (
            lambda m, x: m.layer(x)[x > 0],
            (
                r"user_modules\.py:\d+ \(.*\): the forward and backward passes cannot be traced: "
                r".*aten.nonzero.default gives depend on data: keep all elements and mask them"
            ),
        ),
        (
            lambda m, x: m.layer(x) * x.sum().item(),
            (
                r"user_modules\.py:\d+ \(.*\): .*_local_scalar_dense.default gives depend on data: "
                r"keep it a tensor, without \.item\(\)"
            ),
        ),
        (
            lambda m, x: m.layer(x) if x.sum() > 0 else x,
            (
                r"user_modules\.py:\d+ \(.*\): torch\.export cannot trace it: Could not guard on "
                r"data-dependent .*: choose by torch\.where, or by torch\.cond"
            ),
        ),
        (
            lambda m, x: m.layer(x) * torch.from_numpy(x.numpy()),
            r"\(.*from_numpy.*\): torch\.export cannot trace it: .*: compute with PyTorch's op",
        ),
        (
            lambda m, x: checkpoint(m.layer, x, use_reentrant=True),
            r"use_reentrant=True gives its parameters no gradient where none of its arguments",
        ),
    ],
    ids=["input", "parameter", "sizes", "values", "branch", "NumPy", "checkpoint"],
)
def test_modules_that_cannot_be_traced_are_refused(
    run: Forward, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FrontendError, match=message) as caught:
        partitioner.compile(Loss(Holder(run)), torch.randn(4, 8), cluster="2xideal", training=True)
    assert "\n" not in str(caught.value)
    assert "aten" not in capsys.readouterr().err


def test_a_dynamic_export_has_the_sizes_of_its_calls(tmp_path: Path) -> None:
    """A file has the sizes of its example; in Python each size is traced anew."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(x.shape[0], 2, 4).sum(0) / x.shape[0]

    torch.manual_seed(0)
    module, shapes = Mean(), ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(module, (torch.randn(4, 8),), dynamic_shapes=shapes)
    whole = exported.module()
    for size in (6, 4):
        x = torch.randn(size, 8)
        program = partitioner.compile(whole, x, cluster="2xideal")
        torch.testing.assert_close(program(x), module(x))
    again = variant(program, (torch.randn(10, 8),), {}, training=False, share=lambda run: run())
    assert {name: plan.cuts for name, plan in again.plan.nodes.items()} == {
        name: plan.cuts for name, plan in program.plan.nodes.items()
    }
    with pytest.raises(FrontendError, match=r"cannot trace it: .*size\(\)\[0\] <= 64"):
        partitioner.compile(whole, torch.randn(100, 8), cluster="2xideal")
    torch.export.save(exported, tmp_path / "m.pt2")
    read = partitioner.compile(tmp_path / "m.pt2", cluster="2xideal")
    assert read.verify()
    with pytest.raises(BackendError, match=r"is float32\[6,8\]; the program is for float32\[4,8\]"):
        read(torch.randn(6, 8))
    with pytest.raises(FrontendError, match=r"Expected input .* to be equal to 4, but got 6"):
        partitioner.compile(read.whole, torch.randn(6, 8), cluster="2xideal")


def halved(m: Holder) -> Tensor:
    with torch.no_grad():
        return m.layer.weight.mul_(0.5).sum()
