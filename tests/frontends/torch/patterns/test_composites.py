"""Upsampling and RMS norm stay one operator each, in inference and in a training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner.frontends.torch.patterns.composites import keep_composites
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.tracing.capture import capture, export_module


class Resize(nn.Module):
    """`interpolate` with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, **self.options)


MODELS = [
    (nn.RMSNorm(8), (4, 6, 8), "rms_norm"),
    (nn.RMSNorm([6, 8], elementwise_affine=False), (4, 6, 8), "rms_norm"),
    (Resize(scale_factor=2), (2, 3, 4), "upsample"),
    (Resize(scale_factor=1.5, mode="bilinear"), (2, 3, 5, 5), "upsample"),
    (Resize(size=(7, 9), mode="bilinear", align_corners=True), (2, 3, 5, 5), "upsample"),
    (Resize(size=(3, 4), mode="bicubic", antialias=True), (2, 3, 5, 5), "upsample"),
    (Resize(scale_factor=2, mode="nearest-exact"), (2, 3, 4, 3, 2), "upsample"),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("model", "shape", "name"), MODELS)
def test_a_composite_is_one_operator(
    model: nn.Module, shape: tuple[int, ...], name: str, training: bool
) -> None:
    names, _ = operators(model, shape, training)
    backward = {"rms_norm": "rms_norm_grad_input", "upsample": "upsample_backward"}[name]
    assert f"partitioner::{name}" in names
    assert (f"partitioner::{backward}" in names) == training
    assert not {"aten::_unsafe_index", "aten::rsqrt"}.intersection(names)


@pytest.mark.parametrize(("model", "shape"), [case[:2] for case in MODELS])
def test_values_and_gradients_stay(model: nn.Module, shape: tuple[int, ...]) -> None:
    _, graph = operators(model, shape, training=True)
    x = torch.randn(shape, requires_grad=True)
    loss = model(x).square().sum()
    gradients = torch.autograd.grad(loss, [*model.parameters(), x])
    (value,), traced = graph(
        [*(p.detach() for p in model.parameters()), x.detach()], [torch.tensor(1.0)]
    )
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(tuple(traced), gradients)


class Loss(nn.Module):
    """The sum of squares of a model's result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


def operators(
    model: nn.Module, shape: tuple[int, ...], training: bool
) -> tuple[list[str], torch.fx.GraphModule]:
    """The names of a captured model's operators, and its graph."""
    x = torch.randn(shape, requires_grad=training)
    whole = Loss(model) if training else model
    program = export_module(whole, (x,), {})
    keep_composites(program.graph_module)
    graph = capture(whole, program, DECOMPOSITIONS, training=training).graph
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return [op._schema.name for op in calls if isinstance(op, torch._ops.OpOverload)], graph


def test_a_result_of_the_model_keeps_its_name() -> None:
    program = export_module(nn.RMSNorm(8), (torch.randn(4, 8),), {})
    keep_composites(program.graph_module)
    program.graph_module.graph.lint()
    x = torch.randn(4, 8)
    torch.testing.assert_close(program.module()(x), nn.functional.rms_norm(x, [8]))


@pytest.mark.parametrize("space", [2, 3])
@pytest.mark.parametrize("training", [False, True])
def test_the_average_of_a_plane_is_a_mean(space: int, training: bool) -> None:
    """In a channels-last format PyTorch's own decomposition writes through strides."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[space]
    x = torch.randn(2, 3, *[4] * space, requires_grad=training)
    pool = {2: nn.AdaptiveAvgPool2d(1), 3: nn.AdaptiveAvgPool3d(1)}[space]

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = pool(x.to(memory_format=last))
            return out.square().sum() if training else out

    program = export_module(Last(), (x,), {})
    keep_composites(program.graph_module)
    torch.testing.assert_close(program.module()(x), Last()(x))
    graph = capture(Last(), program, DECOMPOSITIONS, training=training).graph
    targets = {str(node.target) for node in graph.graph.nodes}
    assert "aten.mean.dim" in targets
    assert not [target for target in targets if "strided" in target]


@pytest.mark.parametrize(
    ("pool", "kept"),
    [
        (nn.AdaptiveAvgPool2d((2, 3)), ""),
        (nn.AdaptiveMaxPool2d((2, 1), return_indices=True), ""),
        (nn.AdaptiveAvgPool2d((3, 3)), "aten.adaptive_avg_pool2d.default"),
        (nn.AdaptiveMaxPool2d((3, 3), return_indices=True), "aten.adaptive_max_pool2d.default"),
    ],
    ids=str,
)
def test_adaptive_pools_of_equal_windows_are_pools(pool: nn.Module, kept: str) -> None:
    x = torch.randn(2, 3, 4, 6)
    program = export_module(pool, (x,), {})
    keep_composites(program.graph_module)
    adaptive = {str(n.target) for n in program.graph.nodes if "adaptive" in str(n.target)}
    assert adaptive == ({kept} if kept else set())
    torch.testing.assert_close(program.module()(x), pool(x))


def test_other_calls_stay() -> None:
    program = export_module(nn.Linear(4, 4), (torch.randn(2, 4),), {})
    before = [node.target for node in program.graph.nodes]
    keep_composites(program.graph_module)
    assert [node.target for node in program.graph.nodes] == before
