"""Models of any number of layers, for searches that are compared at many sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
import transformers
from torch import Tensor, nn


class Loss(nn.Module):
    """A module whose result's mean square is the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        loss: Tensor = self.module(*inputs).float().square().mean()
        return loss


class Called(nn.Module):
    """A model of `transformers`, called by keyword, whose first result is kept."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))[0]
        return result


class Gpt(nn.Module):
    """Decoder blocks over embedded words."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


class ChannelsLast(nn.Module):
    """A net of images, which it turns first so that their channels lie last in memory."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x.contiguous(memory_format=torch.channels_last))
        return result


def perceptron(layers: int, width: int) -> nn.Module:
    """Square linear layers, each with a ReLU."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


def convolutions(layers: int) -> nn.Module:
    """Convolutions of more and more channels, pooled before a linear layer."""
    widths = (3, 32, 64, 64, *(128,) * 5)[: layers + 1]
    pairs = [(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(widths)]
    made = [module for pair in pairs for module in pair]
    return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 100))


def normalised_convolutions(width: int) -> nn.Module:
    """Convolutions with batch norms, one of them strided, behind a pool."""

    def layer(before: int, after: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        return [conv, nn.BatchNorm2d(after), nn.ReLU()]

    twice = 2 * width
    made = [*layer(3, width), nn.MaxPool2d(2), *layer(width, twice, 2), *layer(twice, twice)]
    return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(twice, 50))


def t5(layers: int) -> nn.Module:
    """A T5 of so many layers in the encoder and in the decoder, called with ids for both."""
    config = transformers.T5Config(
        vocab_size=2048,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=layers,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Called(model, "input_ids", "decoder_input_ids")


def ids(*shape: int) -> Tensor:
    """Ids of words, all the first."""
    return torch.zeros(*shape, dtype=torch.int64)
