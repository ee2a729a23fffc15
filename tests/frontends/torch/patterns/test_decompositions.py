"""Decompositions have PyTorch's values, and a cut batch has the whole batch's statistics."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS, DRAWS

aten = torch.ops.aten
own = torch.ops.partitioner

Call = tuple[torch._ops.OpOverload, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_near(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Equal to the tolerance, relative to the largest value; of the same type and shape."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    tolerance = max(tolerance, 4 * torch.finfo(expected.dtype).eps)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(largest, 1e-30))


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def conv_backward(
    *, groups: int = 1, transposed: bool = False, mask: Sequence[bool] = (True, True, True)
) -> Call:
    x = r(4, 8, 6, 6)
    weight = r(8, 8 // groups, 3, 3)
    settings = ([2, 2], [1, 1], [1, 1], transposed, [1, 1] if transposed else [0, 0], groups)
    out = aten.convolution(x, weight, None, *settings)
    args = (torch.randn_like(out), x, weight, [8], *settings, list(mask))
    return aten.convolution_backward.default, args


def layer_backward(dtype: torch.dtype, mask: Sequence[bool], affine: bool = True) -> Call:
    x = r(4, 3, 8, dtype=dtype)
    weight, bias = (r(8, dtype=dtype), r(8, dtype=dtype)) if affine else (None, None)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    args = (torch.randn_like(x), x, [8], mean, rstd, weight, bias, list(mask))
    return aten.native_layer_norm_backward.default, args


def group_backward(dtype: torch.dtype, mask: Sequence[bool], affine: bool = True) -> Call:
    x = r(4, 8, 3, 3, dtype=dtype)
    weight = r(8, dtype=dtype) if affine else None
    _, mean, rstd = aten.native_group_norm(x, weight, weight, 4, 8, 9, 2, 1e-5)
    args = (torch.randn_like(x), x, mean, rstd, weight, 4, 8, 9, 2, list(mask))
    return aten.native_group_norm_backward.default, args


def batch_forward(dtype: torch.dtype, training: bool = True, *shape: int) -> Call:
    x = r(*(shape or (4, 6, 5, 5)), dtype=dtype)
    weight, bias, mean = (r(6, dtype=dtype) for _ in range(3))
    args = (x, weight, bias, mean, mean.abs() + 0.5, training, 0.1, 1e-5)
    return aten._native_batch_norm_legit_functional.default, args


def batch_backward(
    dtype: torch.dtype,
    train: bool,
    mask: Sequence[bool] = (True, True, True),
    affine: bool = True,
) -> Call:
    x = r(4, 6, 5, 5, dtype=dtype)
    weight = r(6, dtype=dtype) if affine else None
    mean, var = r(6, dtype=dtype), r(6, dtype=dtype).abs() + 0.5
    _, save_mean, save_invstd = aten._native_batch_norm_legit.no_stats(
        x, weight, weight, True, 0.1, 1e-5
    )
    saved = (save_mean, save_invstd) if train else (x.new_empty(0), x.new_empty(0))
    args = (torch.randn_like(x), x, weight, mean, var, *saved, train, 1e-5, list(mask))
    return aten.native_batch_norm_backward.default, args


def group_forward(dtype: torch.dtype, groups: int, affine: bool = True) -> Call:
    x = r(4, 8, 3, 5, dtype=dtype)
    weight, bias = (r(8, dtype=dtype), r(8, dtype=dtype)) if affine else (None, None)
    return aten.native_group_norm.default, (x, weight, bias, 4, 8, 15, groups, 1e-5)


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ALL, DATA, WEIGHT = (True, True, True), (True, False, False), (False, True, False)

CALLS: list[Callable[[], Call]] = [
    conv_backward,
    lambda: conv_backward(groups=4),
    lambda: conv_backward(transposed=True),
    lambda: conv_backward(mask=(True, False, True)),
    lambda: conv_backward(mask=(False, True, False)),
    lambda: layer_backward(F32, ALL),
    lambda: layer_backward(F64, ALL),
    lambda: layer_backward(BF16, ALL),
    lambda: layer_backward(F32, DATA, affine=False),
    lambda: layer_backward(F32, WEIGHT),
    lambda: layer_backward(F32, (False, False, True)),
    lambda: group_backward(F32, ALL),
    lambda: group_backward(F64, ALL),
    lambda: group_backward(F32, DATA, affine=False),
    lambda: group_backward(F32, (True, True, False)),
    lambda: group_forward(F32, 2),
    lambda: group_forward(F64, 8),
    lambda: group_forward(F32, 1, affine=False),
    lambda: batch_forward(F32),
    lambda: batch_forward(F64),
    lambda: batch_forward(F32, True, 8, 6),
    lambda: batch_forward(F32, False),
    lambda: (aten._native_batch_norm_legit.no_stats, (r(4, 6, 5), r(6), r(6), True, 0.1, 1e-5)),
    lambda: batch_backward(F32, train=True),
    lambda: batch_backward(F64, train=True),
    lambda: batch_backward(F32, train=True, mask=DATA, affine=False),
    lambda: batch_backward(F32, train=True, mask=(False, True, True)),
    lambda: batch_backward(F32, train=False),
    lambda: batch_backward(F32, train=False, mask=DATA),
    lambda: (aten._conj.default, (r(3, 4, dtype=torch.complex64),)),
    lambda: (aten._neg_view.default, (r(3, 4),)),
    lambda: (aten.copy.default, (r(3, 4), r(3, 4))),
    lambda: (aten.copy.default, (r(3, 4), r(4, dtype=torch.bfloat16))),
]


@pytest.mark.parametrize("make", CALLS)
def test_a_decomposition_has_the_results_of_the_operator(make: Callable[[], Call]) -> None:
    op, args = make()
    expected, actual = op(*args), DECOMPOSITIONS[op](*args)
    if isinstance(expected, Tensor):
        expected, actual = (expected.resolve_conj().resolve_neg(),), (actual,)
    mask = args[-1] if isinstance(args[-1], list) else [True] * len(expected)
    for result, exact, wanted in zip(actual, expected, mask, strict=True):
        assert_near(result, exact if wanted else None, 1e-6)


def test_every_decomposition_is_tried() -> None:
    # those that keep their operator are tried in backends/torch/test_strides.py
    kept = {aten.as_strided.default, aten.as_strided_scatter.default}
    elsewhere = kept | set(DRAWS)
    assert {make()[0] for make in CALLS} == set(DECOMPOSITIONS) - elsewhere


@pytest.mark.parametrize("make", CALLS)
def test_decompositions_are_traced_with_fake_tensors(make: Callable[[], Call]) -> None:
    op, args = make()
    tensors = [x for x in args if isinstance(x, Tensor)]

    def call(*operands: Tensor) -> Any:
        left = iter(operands)
        return op(*(next(left) if isinstance(x, Tensor) else x for x in args))

    traced = make_fx(call, decomposition_table=dict(DECOMPOSITIONS), tracing_mode="fake")(*tensors)
    assert op not in {node.target for node in traced.graph.nodes}
    for actual, expected in zip(traced(*tensors), call(*tensors), strict=True):
        if isinstance(actual, Tensor):
            assert_near(actual, expected, 1e-6)


def test_half_precision_batch_norm_keeps_statistics_in_float32() -> None:
    op, args = batch_forward(BF16)
    out, mean, invstd, next_mean, next_var = DECOMPOSITIONS[op](*args)
    exact = op(*(x.double() if isinstance(x, Tensor) else x for x in args))
    assert (out.dtype, mean.dtype, invstd.dtype) == (BF16, F32, F32)
    assert (next_mean.dtype, next_var.dtype) == (BF16, BF16)
    assert_near(out.double(), exact[0], 0.02)
    assert_near(mean.double(), exact[1], 1e-6)
    assert_near(invstd.double(), exact[2], 1e-6)


def split_batch_norm(parts: Sequence[Tensor], weight: Tensor, bias: Tensor) -> list[Tensor]:
    """The batch norm of devices that hold parts of a batch: [output, mean, invstd]."""
    count = sum(part.numel() for part in parts) // parts[0].shape[1]
    sums = torch.stack([own.batch_norm_sums(part) for part in parts]).sum(0)
    mean, var, invstd = own.batch_norm_statistics(sums, count, 1e-5, F32)
    outs = [own.batch_norm_apply(part, mean, var, weight, bias, 1e-5) for part in parts]
    return [torch.cat(outs), mean, invstd]


@pytest.mark.parametrize("centre", [0.0, 1e3])
@pytest.mark.parametrize("rows", [[4, 4], [1, 5, 2], [0, 8]])
def test_a_cut_batch_has_the_statistics_of_the_whole(centre: float, rows: list[int]) -> None:
    x = torch.randn(8, 6, 7, 7) + centre
    weight, bias = r(6), r(6)
    out, mean, invstd = split_batch_norm(x.split(rows), weight, bias)
    exact = aten._native_batch_norm_legit.no_stats(
        *(t.double() for t in (x, weight, bias)), True, 0.1, 1e-5
    )
    # The parts' means are as exact as float32 allows, and so is x less its mean.
    assert_near(invstd.double(), exact[2], 1e-6 if centre == 0 else 4e-6)
    assert_near(mean.double(), exact[1], 1e-6)
    assert_near(out.double(), exact[0], 1e-6 if centre == 0 else 2e-4)


def test_a_variance_survives_a_mean_a_million_times_larger() -> None:
    x = torch.randn(4096, 2, dtype=F64) + 1e6
    sums = sum(own.batch_norm_sums(part) for part in x.chunk(4))
    _, var, _ = own.batch_norm_statistics(sums, 4096, 0.0, F64)
    assert_near(var, x.var(0, correction=0), 1e-3)


def test_gradients_of_a_cut_batch_are_those_of_the_whole() -> None:
    op, args = batch_backward(F32, train=True)
    grad_out, x, weight, _, _, mean, invstd, *_ = args
    pairs = list(zip(grad_out.split([1, 3]), x.split([1, 3]), strict=True))
    parts = [own.batch_norm_grad_sums(g, part, mean, invstd) for g, part in pairs]
    sums = parts[0] + parts[1]
    data = [
        own.batch_norm_grad_input(g, part, mean, invstd, weight, sums, 100) for g, part in pairs
    ]
    whole, scale, shift = op(*args)
    assert_near(torch.cat(data), whole, 1e-6)
    assert_near(sums[1], scale, 1e-6)
    assert_near(sums[0], shift, 1e-6)


def test_a_device_without_rows_adds_nothing() -> None:
    none, channel = torch.empty(0, 6, 5, 5), torch.ones(6)
    assert own.batch_norm_sums(none).eq(0).all()
    assert own.batch_norm_grad_sums(none, none, channel, channel).eq(0).all()


def test_the_variance_of_one_element_is_unknown() -> None:
    """As in PyTorch, whose unbiased variance divides by the count less one."""
    mean, var = own.batch_norm_running(*r(4, 3), 1, 0.1)
    assert mean.isfinite().all()
    assert var.isnan().all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("shape", [(4, 5, 6), (5, 6), (1, 5, 1)])
def test_a_copy_lies_in_memory_as_what_it_is_written_over(
    order: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    old = r(*(4 + dim for dim in order)).permute(sorted(range(3), key=order.__getitem__))
    source = r(*shape, dtype=torch.float64)
    copied = DECOMPOSITIONS[aten.copy.default](old, source)
    assert (copied.shape, copied.stride(), copied.dtype) == (old.shape, old.stride(), old.dtype)
    torch.testing.assert_close(copied, old.copy_(source))
