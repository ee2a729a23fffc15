"""Custom functions and hooks of a module's own: trained as PyTorch trains them, or refused."""

# ruff: noqa: ARG004 - the parameters of custom functions are PyTorch's

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import partitioner
from partitioner.frontends.errors import FrontendError

Step = Callable[["Pair", Tensor], Tensor]
TABLE = torch.arange(8.0)


class Pair(nn.Module):
    """Two layers, and a function that computes a loss with them."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


class Function(torch.autograd.Function):
    """With types for its call."""

    @classmethod
    def of(cls, *args: Any) -> Any:
        return cls.apply(*args)


class Round(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Reverse(Function):
    """A gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * grad, None


class Same(Function):
    """Returns its argument itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class Several(Function):
    """Several results, one of them no tensor, one without a gradient; an option."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float = 3.0) -> tuple[Any, ...]:
        ctx.mask, ctx.factor = x > 0, factor
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(ctx.mask)
        return x * y, ctx.mask, 3, x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y * ctx.mask * ctx.factor + grads[-1], grad * x


class Setup(Function):
    """With a context of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 3 * grad @ weight.t(), 5 * x.t() @ grad


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 9


class Partial(Function):
    """Is given None for a result that nothing uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: None) -> Tensor:  # type: ignore[override]
        return grad * (5 if other is None else 7)


class Nested(Function):
    """Applies another one, and makes tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        result: Tensor = Round.of(x) * torch.tensor([1.0, 2.0] * 4) + torch.arange(8)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(again.tanh(), again, grad)
        return inner * torch.ones(8)


class Mixed(Function):
    """For autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), x.t() @ grad


class OwnApply(Function):
    """Whose `apply` does more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 11

    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(x + 1)


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def under(function: type[Function], *args: Any) -> Step:
    return lambda m, x: loss(m.b(function.of(m.a(x) * 3, *args)))


def several(m: Pair, x: Tensor) -> Tensor:
    product, mask, number, total = Several.of(m.a(x), m.b(x))
    return loss(product * mask + number + m.b(total))


def without_grad(m: Pair, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = Round.of(m.a(x))
    return loss(m.b(x) + y)


def unused(m: Pair, x: Tensor) -> Tensor:
    Round.of(m.a(x))
    return loss(m.b(x))


def checkpointed(m: Pair, x: Tensor, *, reentrant: bool) -> Tensor:
    y: Tensor = checkpoint(lambda y: m.b(Round.of(y * 3)), m.a(x), use_reentrant=reentrant)
    return loss(y)


def in_inference_mode(m: Pair, x: Tensor) -> Tensor:
    """A region that is no function, and has no gradients either."""
    with torch.inference_mode():
        y = m.a(x)
    return loss(m.b(y.clone()) + m.a(x))


FUNCTIONS: dict[str, Step] = {
    "straight-through": under(Round),
    "reversal": under(Reverse, 0.5),
    "several results": several,
    "in place": under(InPlace),
    "once differentiable": under(Once),
}
MORE_FUNCTIONS: dict[str, Step] = {
    "the argument itself": under(Same),
    "vjp and setup_context": lambda m, x: loss(Setup.of(m.a(x), m.b.weight)),
    "results without a gradient": lambda m, x: loss(Partial.of(m.a(x))[0]),
    "nested": under(Nested),
    "autocast": lambda m, x: loss(Mixed.of(m.a(x), m.b.weight)),
    "own apply": under(OwnApply),
    "no_grad": without_grad,
    "unused": unused,
    "checkpoint": lambda m, x: checkpointed(m, x, reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpointed(m, x, reentrant=True),
    "inference_mode": in_inference_mode,
}


def doubled(_: nn.Module, grads: Any, *more: Any) -> Any:
    """A full backward hook, and a pre-hook."""
    del more
    return tuple(None if grad is None else grad * 2 for grad in grads)


def hooked(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    mask = (y > 0).float()
    z = m.b(y.relu())
    y.register_hook(lambda grad: grad * mask)
    y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return loss(z) + y.mean()


def hooked_and_written(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    y.register_hook(lambda grad: grad * 2)
    y.mul_(3)
    y.register_hook(lambda grad: grad + 1)
    return loss(m.b(y))


def plain(m: Pair, x: Tensor) -> Tensor:
    return loss(m.b(m.b(m.a(x).relu())))


def on_module(m: Pair) -> None:
    m.b.register_full_backward_hook(doubled)
    m.b.register_full_backward_pre_hook(doubled)


def on_parameter(m: Pair) -> None:
    m.a.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    m.a.weight.register_hook(lambda grad: grad * 3)


def on_tied(m: Pair) -> None:
    """The hook sees the gradient of both uses."""
    m.b.weight = m.a.weight
    on_parameter(m)


def on_forward(m: Pair) -> None:
    m.a.register_forward_hook(lambda _, __, y: y * 2)
    m.b.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


HOOKS: dict[str, tuple[Step, Callable[[Pair], None]]] = {
    "of a tensor": (hooked, lambda _: None),
    "of a tensor that is written": (hooked_and_written, lambda _: None),
    "of modules": (plain, on_module),
    "of a parameter": (plain, on_parameter),
    "of a tied parameter": (plain, on_tied),
    "forward": (plain, on_forward),
}


def check(module: nn.Module) -> None:
    """Gradients of two ranks are the module's, and `verify` finds it so."""
    x = torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    assert isinstance(program, partitioner.ModuleProgram)
    gradients = program.gradients(x)[1]
    module(x).backward()
    for name, parameter in module.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients.get(name, torch.zeros_like(parameter)), expected)
    assert program.verify()


@pytest.mark.parametrize(
    "name", [*FUNCTIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FUNCTIONS)]
)
def test_custom_functions_keep_their_backward_pass(name: str) -> None:
    torch.manual_seed(0)
    check(Pair({**FUNCTIONS, **MORE_FUNCTIONS}[name]))


def test_inference_needs_no_backward_pass() -> None:
    module = Pair(under(Unknown))
    assert partitioner.compile(module, torch.randn(4, 8), cluster="2xideal").verify()


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_traced(name: str) -> None:
    torch.manual_seed(0)
    step, set_hooks = HOOKS[name]
    module = Pair(step)
    set_hooks(module)
    check(module)


def test_verify_notices_a_parameters_hook() -> None:
    module, x = Pair(plain), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=True)
    assert program.verify()
    module.a.weight.register_hook(lambda grad: grad * 2)
    assert not program.verify()


# Refusals ----------------------------------------------------------------------------------------


class Unknown(Function):
    """Its backward pass is no PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(grad.numpy() * 2)


class Branches(Unknown):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 if grad.sum() > 0 else grad


class Global(Unknown):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * TABLE


class OfModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Linear) -> Tensor:
        return nn.functional.linear(x, module.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def hooks_own_weight(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    y.register_hook(lambda grad: grad * m.b.bias)
    return loss(m.b(y))


def looks(m: Pair, x: Tensor) -> Tensor:
    seen = []
    y = m.a(x)
    y.register_hook(seen.append)
    return loss(m.b(y))


def removes(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    y.register_hook(lambda grad: grad).remove()
    return loss(m.b(y))


def hooks_a_parameter(m: Pair, x: Tensor) -> Tensor:
    m.a.weight.register_hook(lambda grad: grad * 2)
    return loss(m.a(x))


def hooks_a_node(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda grads, _: grads)
    return loss(m.b(y))


def retains(m: Pair, x: Tensor) -> Tensor:
    y = m.a(x)
    y.retain_grad()
    return loss(m.b(y))


def packs(m: Pair, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return loss(m.b(m.a(x)))


def legacy(m: Pair) -> None:
    m.b.register_backward_hook(lambda *_: None)  # type: ignore[arg-type]


def accumulates(m: Pair) -> None:
    m.a.weight.register_post_accumulate_grad_hook(lambda _: None)


def observes(m: Pair) -> None:
    m.b.register_full_backward_hook(lambda *_: None)


def branches(m: Pair) -> None:
    m.a.weight.register_hook(lambda grad: grad * 2 if grad.sum() > 0 else grad)


def vmapped(m: Pair, x: Tensor) -> Tensor:
    return loss(torch.vmap(Setup.of, (0, None))(m.a(x), m.b.weight))


@pytest.mark.parametrize(
    ("step", "set_hooks", "message"),
    [
        (under(Unknown), None, r"Unknown\.backward cannot be traced: \.numpy\(\) is not supported"),
        (under(Branches), None, r"Branches\.backward cannot be traced: .* depend on data"),
        (under(Global), None, r"Global\.backward reads a tensor \[8\] that is not its argument"),
        (
            lambda m, x: loss(OfModule.of(m.a(x), m.b)),
            None,
            r"OfModule\.forward reads a tensor \[8, 8\] .*: give it as an argument",
        ),
        (vmapped, None, r"Setup\.apply in a transform of torch\.func"),
        (hooks_own_weight, None, r"hook .*test_backward_code.py:\d+\) of a tensor reads a tensor"),
        (looks, None, r"hook list\.append of a tensor returns None: it would run once"),
        (removes, None, r"of a tensor: forward removes it"),
        (hooks_a_parameter, None, r"forward sets it on a parameter, once more in each call"),
        (hooks_a_node, None, r"forward calls AddmmBackward0\.register_hook: hooks of autograd's"),
        (retains, None, r"forward calls retain_grad\(\), which would act once"),
        (packs, None, r"saved_tensors_hooks in forward: what autograd keeps cannot be packed"),
        (plain, legacy, r"^b: hooks of register_backward_hook cannot be traced"),
        (plain, accumulates, r"of parameter a\.weight runs after gradients are accumulated"),
        (plain, observes, r"backward hook .* of a Linear returns None"),
        (plain, branches, r"hook .* of parameter a\.weight cannot be traced: .* depend on data"),
    ],
)
def test_backward_code_that_cannot_be_traced_is_refused(
    step: Step, set_hooks: Callable[[Pair], None] | None, message: str
) -> None:
    module = Pair(step)
    if set_hooks is not None:
        set_hooks(module)
    with pytest.raises(FrontendError, match=message) as caught:
        partitioner.compile(module, torch.randn(4, 8), cluster="2xideal", training=True)
    assert "\n" not in str(caught.value)
