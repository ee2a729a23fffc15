"""Cross entropy and negative log-likelihood in parts have PyTorch's values and gradients."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from partitioner.frontends.torch.patterns.composites import REPLACEMENTS
from partitioner.frontends.torch.patterns.rewrite import replace_calls

IGNORED = 3
SHAPES = {"rows": (8, 12), "places": (4, 12, 5, 2), "one row": (12,)}


class Loss(nn.Module):
    """Cross entropy with fixed options."""

    loss = staticmethod(functional.cross_entropy)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(logits, target, **self.options)


class Likelihood(Loss):
    """Negative log-likelihood of log-probabilities."""

    loss = staticmethod(functional.nll_loss)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(shape, generator=generator)
    rows = (*shape[:-1][:1], *shape[2:]) if len(shape) > 1 else ()
    return logits.to(dtype), torch.randint(0, 12, rows, generator=generator)


FORMS: dict[str, tuple[type[Loss], dict[str, Any]]] = {
    "plain": (Loss, {}),
    "weights": (Loss, {"weight": torch.linspace(0.1, 2, 12)}),
    "smoothing": (Loss, {"label_smoothing": 0.2}),
    "likelihood": (Likelihood, {}),
    "weighted likelihood": (Likelihood, {"weight": torch.linspace(0.1, 2, 12)}),
}


def exported(module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    flat = torch.export.export(module, args).module(check_guards=False)
    assert isinstance(flat, torch.fx.GraphModule)
    return flat


def rewritten(module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    flat = exported(module, args)
    assert replace_calls(flat, REPLACEMENTS) == 1
    assert not any(f"aten.{name}_loss" in str(flat.graph) for name in ("cross_entropy", "nll"))
    return flat


def value_and_gradient(
    module: nn.Module, logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaf = logits.clone().requires_grad_()
    result = module(leaf, target)
    weights = torch.linspace(0.5, 1, result.numel()).view(result.shape).to(result.dtype)
    return result, *torch.autograd.grad(result, leaf, weights)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [IGNORED, -100])
@pytest.mark.parametrize(("loss", "options"), FORMS.values(), ids=FORMS)
def test_value_and_gradient(
    shape: tuple[int, ...],
    reduction: str,
    ignored: int,
    loss: type[Loss],
    options: dict[str, Any],
) -> None:
    logits, target = drawn(shape)
    module = loss(reduction=reduction, ignore_index=ignored, **options)
    if target.dim():
        target[0] = ignored
    actual = value_and_gradient(rewritten(module, (logits, target)), logits, target)
    expected = value_and_gradient(module, logits, target)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_mean_over_nothing_is_not_a_number() -> None:
    logits, target = drawn((8, 12))
    module = Loss(ignore_index=IGNORED)
    target[:] = IGNORED
    assert rewritten(module, (logits, target))(logits, target).isnan()
    assert module(logits, target).isnan()


def test_large_logits_do_not_overflow() -> None:
    logits, target = drawn((8, 12))
    module = Loss()
    actual = value_and_gradient(rewritten(module, (logits, target)), 1000 * logits, target)
    torch.testing.assert_close(actual, value_and_gradient(module, 1000 * logits, target))


def test_half_precision_adds_up_in_single() -> None:
    logits, target = drawn((64, 12), torch.bfloat16)
    actual = value_and_gradient(rewritten(Loss(), (logits, target)), logits, target)
    exact = value_and_gradient(Loss(), logits.float(), target)
    rounded = tuple(x.bfloat16() for x in exact)
    torch.testing.assert_close(actual, rounded, rtol=0.01, atol=1e-4)


def test_a_trace_has_the_parts_and_no_gradient_of_the_maximum() -> None:
    logits, target = drawn((8, 12))
    flat = rewritten(Loss(), (logits, target))

    def step(leaf: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = flat(leaf, classes)
        return loss, *torch.autograd.grad(loss, leaf)

    leaf = logits.requires_grad_()
    traced = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(leaf, target)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    for name in ("aten.amax", "partitioner.cross_entropy_parts", "partitioner.cross_entropy_grad"):
        assert sum(name in other for other in names) == 1, name
    assert not any("log_softmax" in name or "scatter" in name for name in names)


def test_weights_with_smoothing_stay() -> None:
    logits, target = drawn((8, 12))
    module = Loss(weight=torch.ones(12), label_smoothing=0.1)
    flat = exported(module, (logits, target))
    assert replace_calls(flat, REPLACEMENTS) == 0
    torch.testing.assert_close(flat(logits, target), module(logits, target))


def test_probabilities_as_targets_stay() -> None:
    logits, _ = drawn((8, 12))
    flat = exported(Loss(), (logits, logits.softmax(1)))
    assert replace_calls(flat, REPLACEMENTS) == 0


class Mixed(Loss):
    """Cross entropy of half precision, which autocast computes in single."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(logits, target)


class MixedLikelihood(Mixed):
    loss = staticmethod(functional.nll_loss)


@pytest.mark.parametrize(
    "module",
    [Mixed(), Mixed(label_smoothing=0.1), MixedLikelihood()],
    ids=["plain", "smoothing", "likelihood"],
)
def test_autocast_chooses_the_type(module: Mixed) -> None:
    logits, target = drawn((64, 12), torch.bfloat16)
    actual = rewritten(module, (logits, target))(logits, target)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, module(logits, target))


def test_a_program_that_returns_the_loss_keeps_its_signature() -> None:
    logits, target = drawn((8, 12))
    program = torch.export.export(Loss(), (logits, target))
    assert replace_calls(program.graph_module, REPLACEMENTS) == 1
    (output,) = program.graph.output_node().args[0]
    assert program.graph_signature.user_outputs == (output.name,)
    torch.testing.assert_close(program.module()(logits, target), Loss()(logits, target))
