"""The operators of batch norm beside PyTorch's whole one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import partitioner.backends.torch.operators  # noqa: F401 - registers them
from helpers.processes.gpus import on_gpu

own = torch.ops.partitioner
EPS, MOMENTUM = 1e-5, 0.3


def strided(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers, contiguous or not."""
    batch, channels, *space = shape
    if kind == "sliced":
        return torch.randn(batch + 2, channels + 1, *space, dtype=torch.float64)[1:-1, 1:]
    if kind == "transposed":
        return torch.randn(channels, batch, *space, dtype=torch.float64).transpose(0, 1)
    whole = torch.randn(shape, dtype=torch.float64)
    last = kind == "channels_last" and len(space) == 2
    return whole.contiguous(memory_format=torch.channels_last) if last else whole


def in_parts(x: Tensor, grad: Tensor, weight: Tensor | None, running: list[Tensor]) -> list[Tensor]:
    """Result, gradients of the data and the weight, next running mean and variance."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    count = x.numel() // x.shape[1]
    sums = own.batch_norm_sums(x)
    mean, var, invstd = own.batch_norm_statistics(sums, count, EPS, dtype)
    result = own.batch_norm_apply(x, mean, var, weight, None, EPS)
    slopes = own.batch_norm_grad_sums(grad, x, mean, invstd)
    slope = own.batch_norm_grad_input(grad, x, mean, invstd, weight, slopes, count)
    return [
        result, slope, slopes[1], *own.batch_norm_running(mean, var, *running, count, MOMENTUM)
    ]  # fmt: skip


def check(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, **options: Any
) -> None:
    torch.manual_seed(0)
    channels = shape[1]
    x = (strided(kind, shape) + 3).to(device, dtype)
    grad = strided(kind, shape).to(device, dtype)
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    weigh = {"": None, "wide": kept, "narrow": dtype}[options["weighs"]]
    weight = None if weigh is None else torch.rand(channels, device=device, dtype=weigh) + 0.5
    running = [torch.rand(channels, device=device, dtype=kept) for _ in range(2)]
    results = in_parts(x, grad, weight, running)

    exact, exact_grad = (one.double().cpu() for one in (x, grad))
    exact.requires_grad_()
    scale = (torch.ones(channels) if weight is None else weight.cpu()).double().requires_grad_()
    next_running = [one.double().cpu() for one in running]
    whole = functional.batch_norm(exact, *next_running, scale, None, True, MOMENTUM, EPS)
    slopes = torch.autograd.grad(whole, (exact, scale), exact_grad)
    error = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    for mine, theirs in zip(results, (whole, *slopes, *next_running), strict=True):
        largest = float(theirs.detach().abs().max())
        assert float((mine.double().cpu() - theirs).detach().abs().max()) <= error[dtype] * largest
    assert results[1].dtype is dtype


SHAPES = [(6, 5), (3, 7, 11), (4, 3, 5, 7), (2, 5, 3, 4, 3), (1, 33, 1, 3)]
KINDS = ["contiguous", "sliced", "transposed", "channels_last"]
TYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighs", ["", "wide", "narrow"])
def test_on_a_processor(kind: str, shape: tuple[int, ...], weighs: str) -> None:
    for dtype in TYPES:
        check(kind, shape, dtype, "cpu", weighs=weighs)


@on_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighs", ["", "wide", "narrow"])
def test_on_a_gpu(kind: str, shape: tuple[int, ...], weighs: str) -> None:
    for dtype in (*TYPES, torch.float16):
        check(kind, shape, dtype, "cuda", weighs=weighs)


def test_dims_of_one_element_have_any_stride() -> None:
    """A sample that was taken alone, of images whose channels lie last, has its own strides."""
    torch.manual_seed(0)
    rng = random.Random(0)

    def laid_out(x: Tensor) -> Tensor:
        strides, step = [0] * x.dim(), 1
        for dim in rng.sample(range(x.dim()), x.dim()):
            strides[dim] = step if x.shape[dim] > 1 else rng.choice((step, 1, 7, 100))
            step *= x.shape[dim]
        return torch.empty(4096, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)

    for _ in range(300):
        shape = [rng.choice((1, 1, 2, 3)) for _ in range(rng.choice((2, 3, 4, 5)))]
        x, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
        running = [torch.rand(shape[1], dtype=torch.float64) for _ in range(2)]
        plain = in_parts(x, grad, None, running)
        odd = in_parts(laid_out(x), laid_out(grad), None, running)
        for mine, theirs in zip(odd, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
