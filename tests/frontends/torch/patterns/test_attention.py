"""Attention of exported programs as our own operator has PyTorch's values and gradients."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from partitioner.frontends.torch.patterns.composites import REPLACEMENTS
from partitioner.frontends.torch.patterns.rewrite import replace_calls

ATTENTION = torch.ops.partitioner.attention.default
Tensors = tuple[torch.Tensor, ...]


class Attention(nn.Module):
    """Attention with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask, **self.options)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def rewritten(module: nn.Module, args: Tensors) -> torch.fx.GraphModule:
    flat = torch.export.export(module, args).module(check_guards=False)
    assert isinstance(flat, torch.fx.GraphModule)
    assert replace_calls(flat, REPLACEMENTS) == 1
    assert "aten.scaled_dot_product" not in str(flat.graph)
    return flat


def value_and_gradients(module: nn.Module, args: Tensors) -> Tensors:
    leaves = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in args)
    result = module(*leaves)
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return (result, *torch.autograd.grad(result, wanted, weights))


Q, K = (2, 4, 6, 8), (2, 4, 5, 8)
CASES: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "plain": (drawn(Q, K, K), {}),
    "scaled": (drawn(Q, K, K), {"scale": 0.1}),
    "causal": (drawn(Q, K, K), {"is_causal": True}),
    "causal, plain form": (drawn(Q, K, (2, 4, 5, 3)), {"is_causal": True}),
    "other channels": (drawn(Q, K, (2, 4, 5, 3)), {}),
    "groups": (drawn(Q, (2, 2, 5, 8), (2, 2, 5, 8)), {"enable_gqa": True}),
    "groups, plain form": (drawn(Q, (2, 2, 5, 8), (2, 2, 5, 3)), {"enable_gqa": True}),
    "one batch of keys": (drawn(Q, (1, 4, 5, 8), (1, 4, 5, 8)), {}),
    "learned bias": (drawn(Q, K, K, (4, 6, 5)), {}),
    "learned bias of a row": (drawn(Q, K, (2, 4, 5, 3), (1, 4, 1, 5)), {}),
    "mask": ((*drawn(Q, K, K), torch.arange(30).view(6, 5) % 4 > 0), {}),
    "mask, plain form": ((*drawn(Q, K, (2, 4, 5, 3)), torch.arange(30).view(6, 5) % 4 > 0), {}),
    "three dims": (drawn((4, 6, 8), (4, 5, 8), (4, 5, 8)), {}),
    "three dims, mask": (drawn((4, 6, 8), (4, 5, 8), (4, 5, 8), (4, 6, 5)), {}),
    "doubles": (drawn(Q, K, (2, 4, 5, 3), dtype=torch.float64), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name: str) -> None:
    args, options = CASES[name]
    module = Attention(**options)
    actual = value_and_gradients(rewritten(module, args), args)
    expected = value_and_gradients(module, args)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("values", [8, 3], ids=["fused", "plain"])
def test_a_row_that_sees_nothing_is_zero(values: int) -> None:
    query, key, value = drawn(Q, K, (2, 4, 5, values))
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2] = False
    args = (query, key, value, mask)
    result, *grads = value_and_gradients(rewritten(Attention(), args), args)
    assert not result[:, :, 2].any()
    assert not grads[0][:, :, 2].any()
    assert all(x.isfinite().all() for x in (result, *grads))


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_whose_mask_is_one_large_number(number: float) -> None:
    """Its log-sum-exp says no more how many columns there are."""
    mask = torch.zeros(6, 5)
    mask[2], mask[3, :2] = number, number
    args = (*drawn(Q, K, (2, 4, 5, 3)), mask)
    actual = value_and_gradients(rewritten(Attention(), args), args)
    torch.testing.assert_close(actual, value_and_gradients(Attention(), args), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("values", [8, 3], ids=["fused", "plain"])
def test_half_precision(values: int) -> None:
    args = drawn(Q, K, (2, 4, 5, values), dtype=torch.bfloat16)
    actual = value_and_gradients(rewritten(Attention(), args), args)
    assert {x.dtype for x in actual} == {torch.bfloat16}
    exact = value_and_gradients(Attention(), tuple(x.float() for x in args))
    torch.testing.assert_close(tuple(x.float() for x in actual), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("values", [8, 3], ids=["fused", "plain"])
def test_one_node_a_pass(values: int) -> None:
    """A trace calls our operators, and knows the strides of their results."""
    args = tuple(x.requires_grad_() for x in drawn(Q, K, (2, 4, 5, values)))
    flat = rewritten(Attention(), args)

    def step(*leaves: torch.Tensor) -> Tensors:
        result = flat(*leaves)
        return (result, *torch.autograd.grad(result.square().sum(), leaves))

    traced = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(*args)
    ours = [node for node in traced.graph.nodes if "partitioner." in str(node.target)]
    assert [str(node.target).split(".")[1] for node in ours] == ["attention", "attention_backward"]
    recorder = Recorder(traced)
    recorder.run(*args)
    results = [node for node in traced.graph.nodes if "getitem" in str(node.target)]
    assert results
    for node in results:
        assert node.meta["val"].stride() == recorder.values[node.name].stride(), node.name


class Recorder(torch.fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bias"])
def test_dropout_is_taken_apart(causal: bool) -> None:
    """The weights are dropped out before they multiply the values."""
    args = drawn(Q, (2, 2, 5, 8), (2, 2, 5, 8), *([] if causal else [(6, 5)]))
    flat = rewritten(Attention(dropout_p=0.4, is_causal=causal, enable_gqa=True), args)
    torch.manual_seed(1)
    actual = flat(*args)
    torch.manual_seed(1)
    key, value = (x.repeat_interleave(2, 1) for x in args[1:3])
    bias = torch.ones(6, 5).tril().log() if causal else args[3]
    weights = torch.softmax(args[0] @ key.mT / math.sqrt(8) + bias, -1)
    torch.testing.assert_close(actual, functional.dropout(weights, 0.4) @ value)


def test_heads_that_broadcast_otherwise_stay() -> None:
    args = drawn(Q, (2, 4, 5, 8), (2, 1, 5, 8))
    flat = torch.export.export(Attention(), args).module(check_guards=False)
    assert isinstance(flat, torch.fx.GraphModule)
    assert replace_calls(flat, REPLACEMENTS) == 0
    torch.testing.assert_close(flat(*args), Attention()(*args))


class Mixed(Attention):
    """Attention in the type that autocast chooses."""

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*operands)


def test_autocast_casts_the_operands() -> None:
    query, key, value = drawn(Q, K, K)
    args = (query, key, value.bfloat16())
    actual, expected = rewritten(Mixed(), args)(*args), Mixed()(*args)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)
