"""Upsampling and RMS norm stay one operator each, in inference and in a training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from partitioner.frontends.torch_composites import keep_composites


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


@pytest.mark.parametrize(("model", "shape", "name"), MODELS)
def test_a_composite_is_one_operator(model: nn.Module, shape: tuple[int, ...], name: str) -> None:
    x = torch.randn(shape)
    program = torch.export.export(model, (x,), strict=False)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    keep_composites(module)

    def step(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = module(x)
        return out, torch.autograd.grad(out, x, seed)[0]

    out = model(x)
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, out.detach())
    targets = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if t.startswith(f"partitioner.{name}")]
    assert [t for t in targets if t.startswith("aten") and "detach" not in t] == []
    wanted = model(x.requires_grad_())
    (theirs,) = torch.autograd.grad(wanted, x, out.detach())
    found, ours = traced(x.detach(), out.detach())
    torch.testing.assert_close(found, wanted, check_stride=False)
    torch.testing.assert_close(ours, theirs)


def test_other_calls_stay() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),), strict=False)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    before = [node.target for node in module.graph.nodes]
    keep_composites(module)
    assert [node.target for node in module.graph.nodes] == before
