"""Small modules to cut into stages; each returns its loss first and makes its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

Batch = tuple[Tensor, ...]


class Tied(nn.Module):
    """A language model whose head is its embedding, with a skip from its first layer to its last.

    Its running means are per micro-batch, its dropout is drawn from a seed a micro-batch.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Loss."""
        first = x = self.words(ids).mean(1)
        for layer in self.layers:
            x = x + self.drop(layer(x).tanh())
        scores = self.head(self.norm(x + first))
        return F.cross_entropy(scores, labels)

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Words and classes."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(20, (size, 3), generator=draw)
        return ids, torch.randint(20, (size,), generator=draw)


class Wide(nn.Module):
    """Layers whose weights are much larger than what they make of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Rows."""
        draw = torch.Generator().manual_seed(seed)
        return (torch.randn((size, 256), generator=draw, dtype=torch.float64),)


class UNet(nn.Module):
    """Convolutions down and up again, with skips over every cut; returns loss, image and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image: Tensor, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and the image with its mean."""
        high = self.norm(self.enter(image)).relu()
        low = self.middle(self.down(high).relu()).relu()
        made = self.leave(torch.cat([self.up(low), high], 1))
        return (made - wanted).square().mean(), {"image": made, "mean": made.mean()}

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Images."""
        draw = torch.Generator().manual_seed(seed)
        shape = size, 2, 4, 4
        return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))


class Towers(nn.Module):
    """Two towers that meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
        self.right = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and scores."""
        left, right = self.left(a), self.right(b)
        scores = (left * right).sum(1) * self.scale
        return F.mse_loss(scores, y), scores

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Inputs of both towers, and targets."""
        draw = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(shape, generator=draw, dtype=torch.float64)
            for shape in ((size, 6), (size, 4), (size,))
        )


class Plain(nn.Module):
    """Four layers without statistics: any micro-batches give the gradients of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and scores."""
        for layer in self.layers:
            x = layer(x).relu()
        scores = self.last(x)
        return F.cross_entropy(scores, y), scores

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Inputs and classes."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 8, generator=draw, dtype=torch.float64)
        return x, torch.randint(4, (size,), generator=draw)


class Halved(nn.Module):
    """Two layers of which half the results are read: zeros are the gradients of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 10), nn.Linear(5, 8)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Loss."""
        first, _ = self.enter(x).chunk(2, -1)
        half, _ = self.leave(first.relu()).chunk(2, -1)
        return F.cross_entropy(half, wanted)

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Points and classes."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 6, generator=draw, dtype=torch.float64)
        return x, torch.randint(4, (size,), generator=draw)


class Added(nn.Module):
    """Parameters that are added together, and to the loss: several have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.left, self.right, self.turned = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.one, self.other = (nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        x = self.first(x).relu() @ (self.left + self.right + self.turned.t())
        return F.cross_entropy(self.second(x), y) + self.one + self.other

    batch = staticmethod(Plain.batch)


class Detached(nn.Module):
    """A parameter that stage 0 reads without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        x = self.first(x) * (self.gate.detach() + 1)
        return F.cross_entropy(self.second(x.relu() * self.gate), y)

    batch = staticmethod(Plain.batch)


class Faint(nn.Module):
    """A module whose loss is so small that its gradients are 0 in float16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        loss: Tensor = self.module(x, y)[0]
        return loss * 1e-6


Model = (
    type[Added]
    | type[Detached]
    | type[Halved]
    | type[Tied]
    | type[UNet]
    | type[Towers]
    | type[Plain]
)


def seeded(kind: Model, dtype: torch.dtype = torch.float64, **options: float) -> nn.Module:
    """The module with the same weights in every process."""
    torch.manual_seed(0)
    return kind(**options).to(dtype)
