"""Modules of several forms for tests of pipelines, in float64, with batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.modules import torch_models
from helpers.modules.trained import Gpt


class Towers(nn.Module):
    """Two inputs through towers of their own; the loss compares all pairs of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Loss."""
        scores = self.left(one) @ self.right(other).t() * self.scale
        return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _of(name: str) -> nn.Module:
    return torch_models.build(name, training=True).module.double()


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: (lambda name=name: _of(name)) for name in ("gpt2", "t5", "resnet", "unet")},
    "tied": lambda: _seeded(lambda: Gpt(blocks=2)),
    "towers": lambda: _seeded(Towers),
}


def batch_of(module: nn.Module, step: int, size: int) -> dict[str, Tensor]:
    """The batch of a step, as keyword arguments of a module of `MODELS`."""
    draw = torch.Generator().manual_seed(step)
    kind = type(module).__name__

    def real(*shape: int) -> Tensor:
        return torch.randn(size, *shape, generator=draw, dtype=torch.float64)

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(below, (size, *shape), generator=draw)

    if kind == "Towers":
        return {"one": real(12), "other": real(12)}
    if kind == "UNet":
        classes = whole(torch_models.CLASSES, 16, 16)
        return {"pixel_values": real(4, 16, 16), "labels": classes}
    if kind == "ResNetForImageClassification":
        return {"pixel_values": real(4, 16, 16), "labels": whole(torch_models.CLASSES)}
    ids = whole(torch_models.VOCABULARY, torch_models.ROWS)
    return {"ids" if kind == "Gpt" else "input_ids": ids, "labels": ids.roll(-1, 1)}
