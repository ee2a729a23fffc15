"""A training step over ranks of a convolutional model with every normalization is PyTorch's."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram

#: The scale of gradients that are zero but for rounding (a bias before a batch norm); others are
#: larger.
LEAST = 1.0


class Vision(nn.Module):
    """Convolutions (plain, in groups, transposed), pools, upsampling, normalizations; a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.PixelShuffle(2),
            nn.Conv2d(4, 16, 3, padding=1, groups=4, bias=False),
            nn.GroupNorm(4, 16),
            nn.MaxPool2d(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ConvTranspose2d(16, 16, 2, stride=2),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(2),
        )
        self.rows = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.rows(self.images(x).flatten(2).transpose(1, 2))
        return (rows - y).square().sum()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 4, 8, 8) + 3, torch.randn(8, 4, 8)


def compiled(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: dict[str, int]) -> ModuleProgram:
    devices = math.prod(mesh.values())
    program = partitioner.compile(
        model, batch, devices, training=True, cluster="ideal", mesh=mesh, strategy="intra"
    )
    assert isinstance(program, ModuleProgram)
    return program


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_is_pytorchs(
    batch: tuple[Tensor, Tensor], mesh: dict[str, int], frozen: bool
) -> None:
    torch.manual_seed(1)
    model = Vision()
    if frozen:  # as in fine-tuning: batch norm uses its running statistics
        model.images[1].eval()
    program = compiled(model, batch, mesh)
    assert program.summary["sharded_flops_share"] > 0.9
    loss, gradients = program.gradients(*batch)
    step = program.ranks.step(batch, {}, seed=0)

    whole = copy.deepcopy(model).double()  # PyTorch's own float32 gradients are off by 1e-5
    expected = whole(*(x.double() for x in batch))
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        largest = max(parameter.grad.abs().max().item(), LEAST)
        torch.testing.assert_close(
            gradients[name].double(), parameter.grad, rtol=0, atol=5e-6 * largest, msg=name
        )
    buffers = dict(whole.named_buffers())
    assert set(program.traced.written) == (set() if frozen else set(buffers))
    for name, value in program.traced.written.items():
        written = step.results[value].to(buffers[name].dtype)
        torch.testing.assert_close(written, buffers[name], rtol=1e-6, atol=1e-6)


def test_a_cut_batch_is_summed_for_batch_norm(batch: tuple[Tensor, Tensor]) -> None:
    program = compiled(Vision(), batch, {"dp": 2})
    cuts = {node.op: program.plan.nodes[node.name].cuts for node in program.graph.nodes}
    assert "n" in cuts["partitioner::batch_norm_sums"]
    assert "n" in cuts["partitioner::batch_norm_grad_sums"]
