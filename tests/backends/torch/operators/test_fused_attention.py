"""Attention by PyTorch's fused kernels: which operands they take, and their results on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.processes.gpus import on_gpu
from partitioner.backends.torch.operators import attention, fused_attention
from partitioner.backends.torch.operators.fused_attention import Call, kernel_for


def operand(heads: int, rows: int, depth: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, rows, heads, depth, dtype=dtype).transpose(1, 2)


def test_the_cpu_kernel_takes_dense_operands_of_one_depth_and_type() -> None:
    query, key = operand(4, 5), operand(4, 7)
    mask = torch.zeros(1, 1, 5, 7)
    assert kernel_for(Call(query, key, key, mask, False, None)) is not None
    apart = torch.randn(2, 4, 8, 7).mT
    for other in (operand(4, 7, depth=6), key.double(), key[:, :, :0], apart):
        assert kernel_for(Call(query, key, other, None, False, None)) is None


@pytest.mark.parametrize(
    ("scale", "is_taken"), [(None, True), (0.5, True), (0.0, False), (-1.0, False)]
)
def test_kernels_of_a_gpu_take_positive_scales(
    scale: float | None, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_attention, "SDPAParams", lambda *_: None)
    monkeypatch.setattr(fused_attention, "can_use_flash_attention", lambda _: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 4, 5, 8, device="cuda")
        call = Call(query, query, query, None, False, scale)
        assert (kernel_for(call) is not None) == is_taken


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_gradients_of_shared_heads_are_those_of_the_heads_that_they_were_copied_to(
    heads: int,
) -> None:
    query, key = operand(6, 5).double(), operand(heads, 7).double()
    call = Call(query, key, key * 2, None, False, None)
    wide_key, wide_value = fused_attention._by_query(call)
    assert wide_key.shape == wide_value.shape == (2, 6, 7, 8)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, wide_key)
    grouped = query.unflatten(1, (heads, -1))
    assert torch.allclose(
        scores.unflatten(1, (heads, -1)), torch.einsum("bgiqd,bgkd->bgiqk", grouped, key)
    )
    slope = torch.randn_like(wide_key)
    total = fused_attention._by_key(call, slope)
    assert total.shape == key.shape
    assert torch.allclose((slope * wide_key).sum(), (total * key).sum())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "shared", "rows", "columns", "depth"),
    [
        (4, 4, 128, 128, 64),
        (4, 2, 33, 33, 32),
        (6, 2, 65, 65, 40),
        (2, 1, 17, 50, 16),
        (4, 4, 1, 77, 64),
        (3, 3, 7, 7, 8),
        (2, 2, 100, 100, 256),
        (2, 2, 9, 9, 12),
    ],
)
def test_fused_kernels_of_a_gpu_give_what_the_plain_form_does(
    dtype: torch.dtype,
    is_causal: bool,
    heads: int,
    shared: int,
    rows: int,
    columns: int,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    query, key, value, grad = (
        operand(count, size, depth, dtype).cuda()
        for count, size in ((heads, rows), (shared, columns), (shared, columns), (heads, rows))
    )
    call = attention._Attention(query, key, value, None, is_causal, None)
    is_fused = kernel_for(call) is not None
    assert is_fused or depth == 12 or (is_causal and rows != columns)
    saved = attention._forward(call)
    gradients = attention._backward(call, grad, *saved, is_whole=True)
    monkeypatch.setattr(attention, "kernel_for", lambda _: None)
    wide = attention._Attention(query.double(), key.double(), value.double(), None, is_causal, None)
    expected = attention._forward(wide)
    slopes = attention._backward(wide, grad.double(), *expected, is_whole=True)
    most = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip((*saved, *gradients), (*expected, *slopes), strict=True):
        # of a single column that is seen, gradients are zero
        size = other.norm() if other.norm() > 1e-9 else grad.double().norm()
        assert (one.double() - other).norm() <= most * size
