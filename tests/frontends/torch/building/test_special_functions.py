"""Modules of rare functions, of PyTorch's `special` and `fft`, are split as others are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import partitioner


class Special(nn.Module):
    """Functions whose backward passes are rare, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.inner(x)).abs().sum()
        return waves + torch.lgamma(torch.logaddexp(self.inner(x), x[:, :1]) + 2).sum()


def test_a_module_of_rare_functions_is_split() -> None:
    torch.manual_seed(0)
    module, x = Special(), torch.rand(4, 6) + 0.5
    program = partitioner.compile(module, x, devices=2, cluster="ideal", training=True)
    ops = {node.op for node in program.graph.nodes}
    assert {"aten::lgamma", "aten::logaddexp", "aten::digamma", "aten::_fft_r2c"} <= ops
    assert not program.summary["notes"]
    assert program.summary["sharded_flops_share"] > 0.9
    loss, gradients = program.gradients(x)
    expected = module(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
