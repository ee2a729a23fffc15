"""U-Nets of any size, as modules and as ONNX files."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Two convolutions at each level, halved by pools and grown by transposed convolutions."""

    def __init__(self, base: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(levels)]
        ups = list(reversed(widths[:-1]))
        self.down = nn.ModuleList(map(self.block, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in ups)
        self.joint = nn.ModuleList(self.block(2 * width, width) for width in ups)
        self.out = nn.Conv2d(base, 2, 1)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, 1, 1)
        return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, joint in zip(self.up, self.joint, strict=True):
            x = joint(torch.cat([up(x), skips.pop()], 1))
        return self.out(x)


def unet(base: int = 8, levels: int = 3) -> UNet:
    torch.manual_seed(0)
    return UNet(base, levels).eval()


def exported(module: nn.Module, sizes: tuple[int, ...], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(module, (torch.randn(*sizes),), path, dynamo=False)
    return path
