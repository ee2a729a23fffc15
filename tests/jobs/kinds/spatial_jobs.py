"""Jobs of test_spatial.py: images cut over gloo ranks, ten AdamW steps each beside one process."""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification

import partitioner
from helpers.modules.image_nets import Classifier, UNet, Volumes
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram

STEPS = 10


class Loss(nn.Module):
    """The mean square of a net's result, which no pixel's neighbour evens out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)).square().mean()


class ResNet50(nn.Module):
    """The layers of ResNet-50, from a configuration of transformers, a quarter as wide."""

    def __init__(self) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], num_labels=10
        )
        self.net = ResNetForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x).logits, torch.tensor([3, 7]))


NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (Classifier, (1, 3, 61, 50)),
    "unet": (lambda: Loss(UNet("bilinear")), (1, 3, 36, 28)),
    "volumes": (lambda: Loss(Volumes()), (1, 2, 9, 8, 11)),
    "resnet50": (ResNet50, (2, 3, 97, 66)),
}


@cache
def program(name: str, mesh: tuple[tuple[str, int], ...]) -> ModuleProgram:
    """Compiled before the ranks are forked."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = make().double().train()
    ranks = 1
    for _, size in mesh:
        ranks *= size
    compiled = partitioner.compile(
        net,
        (torch.randn(shape, dtype=torch.float64),),
        devices=ranks,
        training=True,
        parallel="spatial",
        mesh=dict(mesh),
        time_limit_s=4,
    )
    assert isinstance(compiled, ModuleProgram)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return compiled


def train(name: str, mesh: tuple[tuple[str, int], ...]) -> None:
    compiled = program(name, mesh)
    whole = copy.deepcopy(compiled.whole)
    module = compiled.module()
    ours = torch.optim.AdamW(module.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(NETS[name][1], dtype=torch.float64)
        loss, expected = module(x), whole(x)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-7, rtol=1e-7)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = module.full_state_dict()
    for key, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[key], tensor, atol=1e-5, rtol=1e-5)


def job(name: str, *, slow: bool = True, **mesh: int) -> Job:
    ranks = 1
    for size in mesh.values():
        ranks *= size
    axes = tuple(mesh.items())
    return Job(ranks, lambda _: train(name, axes), [partial(program, name, axes)], slow=slow)


JOBS = {
    "resnet_2": job("resnet", h=2),
    "resnet_2x2": job("resnet", h=2, w=2),
    "unet_3": job("unet", w=3, slow=False),
    "unet_2x2": job("unet", h=2, w=2),
    "unet_2": job("unet", h=2),
    "resnet50_2": job("resnet50", w=2),
    "resnet50_3": job("resnet50", h=3),
    "resnet50_2x2": job("resnet50", h=2, w=2),
    "volumes_2": job("volumes", d=2),
    "volumes_3": job("volumes", h=3),
    "volumes_2x2": job("volumes", d=2, w=2),
}

if __name__ == "__main__":
    main(JOBS)
