"""Convolutional nets that return their loss, and what training them apart from PyTorch changes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.modules.unets import UNet


class Loss(nn.Module):
    """A net with the cross-entropy of its scores: of pixels, or of images; class 1 is ignored."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        return functional.cross_entropy(self.net(x), y, ignore_index=1)


def plain_unet(base: int = 8, levels: int = 3) -> UNet:
    """A U-Net as it was published, without norms."""
    net = UNet(base, levels)
    for parent in net.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
    return net


def normed_unet(base: int = 8, levels: int = 3) -> UNet:
    """A U-Net without the biases that its norms take out again, whose gradients are next to 0."""
    net = UNet(base, levels)
    for block in (*net.down, *net.joint):
        assert isinstance(block, nn.Sequential)
        block[0].register_parameter("bias", None)
    for up in net.up:
        up.register_parameter("bias", None)
    return net


def vgg(*widths: int) -> nn.Module:
    """A net of its kind for ten classes: convolutions of these widths, a pool behind each two."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise((3, *widths)), 1):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number % 2 == 0 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def apart(module: nn.Module, step: Any, example: tuple[Tensor, ...]) -> float:
    """Largest difference of what is stored from plain PyTorch's after ten steps of AdamW."""
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, step)]
    for number in range(10):
        torch.manual_seed(number)
        x = torch.randn_like(example[0])
        for one, optimizer in zip((reference, step), optimizers, strict=True):
            one(x, *example[1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = step.full_state_dict()
    return max(
        float((value - state[name]).abs().max()) for name, value in reference.state_dict().items()
    )
