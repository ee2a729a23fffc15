"""Small nets of images and volumes, with layers whose windows meet borders in every way."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Two levels down and up again, with skips; one input of odd parts at each level."""

    def __init__(self, up: str) -> None:
        super().__init__()
        self.a, self.b = self.block(3, 4), self.block(4, 8)
        self.c = nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        self.rise = [self.grow(16, 8, up), self.grow(8, 4, up)]
        self.ups = nn.ModuleList(self.rise)
        self.d, self.e = self.block(16, 8), self.block(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, (5, 3), padding=(2, 1)),
        )

    @staticmethod
    def grow(before: int, after: int, up: str) -> nn.Module:
        if not up:
            return nn.ConvTranspose2d(before, after, 2, stride=2)
        return nn.Sequential(nn.Upsample(scale_factor=2, mode=up), nn.Conv2d(before, after, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(functional.max_pool2d(a, 2))
        c = functional.relu(self.c(functional.avg_pool2d(b, 3, 2, 1, count_include_pad=False)))
        d = self.d(torch.cat([self.ups[0](c), b], 1))
        return self.out(self.e(torch.cat([self.ups[1](d), a], 1)))


class Classifier(nn.Module):
    """The layers of a small ResNet, on an image of odd sizes; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.same = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.down, self.skip = nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(6, 8, 1, 2)
        self.classes = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        x = x + functional.relu(self.norms[1](self.same(x)))
        x = functional.avg_pool2d(
            functional.relu(self.down(x) + self.skip(x)), 3, 1, 1, count_include_pad=False
        )
        return functional.cross_entropy(self.classes(x.mean((2, 3))), torch.tensor([3]))


class Volumes(nn.Module):
    """A net of 3-D convolutions and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, (3, 2, 3), stride=(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.max_pool3d(functional.relu(self.a(x)), 2, 1))


class Planes(nn.Module):
    """Maxima along one dim only, norms of groups, an adaptive pool; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.pool, self.norm = nn.MaxPool2d((1, 3)), nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.down = nn.AdaptiveMaxPool2d((6, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.conv(self.norm(self.pool(x * self.first))))
        return (y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).square().mean()


class Grown(nn.Module):
    """A transposed convolution whose result has more elements than its windows reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.up = nn.ConvTranspose2d(2, 2, (2, 1), (2, 3), (0, 1), (1, 2), dilation=(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x * self.first).square().mean()
