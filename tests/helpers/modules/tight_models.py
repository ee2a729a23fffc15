"""Small models of many kinds, drawn at random, with ways to plan them and limits that bind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.modules.small_gpt import small_gpt

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "gelu": functional.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "tanh": torch.tanh,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: nn.Identity(),
    "layer": nn.LayerNorm,
    "batch": nn.BatchNorm1d,
}
#: Ways to plan training: default options come more often.
TRAINED: tuple[Mapping[str, Any], ...] = (
    *({},) * 3,
    *({"parallel": kind} for kind in ("pp", "pp", "dp", "tp", "zero3")),
    *({"parallel": "pp", "recompute": choice} for choice in (True, True, False)),
    *({"micro_batches": count} for count in (1, 2, "auto")),
    *({"schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zb1", "zbv", "dualpipev")),
    *({"schedule": name, "recompute": True} for name in ("zb1", "zbv")),
    {"strategy": "inter"},
)
#: The same for inference.
INFERRED: tuple[Mapping[str, Any], ...] = (
    *({},) * 3,
    *({"parallel": kind} for kind in ("pp", "dp", "tp")),
    *({"micro_batches": count} for count in (1, 2, "auto")),
    {"schedule": "forward"},
    {"strategy": "inter"},
)


class Layers(nn.Module):
    """Linear layers with norms and activations between them; in training the loss."""

    def __init__(self, widths: Sequence[int], activations: Sequence[str], norm: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(widths)))
        self.norms = nn.ModuleList(map(NORMS[norm], widths[1:-1]))
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        """The loss, or outputs of the last width."""
        for index, norm in enumerate(self.norms):
            name = self.activations[index % len(self.activations)]
            x = ACTIVATIONS[name](norm(self.layers[index](x)))
        x = self.layers[-1](x)
        return x.square().mean() if self.training else x


class Images(nn.Module):
    """Convolutions with norms, a pool and a head; in training the loss."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        widths = [3, *[channels] * count]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(*ends, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU())
            for ends in itertools.pairwise(widths)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The loss, or scores of 10 classes."""
        for layer in self.layers:
            x = layer(x)
        x = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return x.logsumexp(-1).mean() if self.training else x


class Translation(nn.Module):
    """An encoder, whose result all layers of a decoder read; in training the loss."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.decoder = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(count))

    def forward(self, ids: Tensor, out: Tensor) -> Tensor:
        """The loss, or scores of the words."""
        memory, x = self.words(ids), self.words(out)
        for layer in self.encoder:
            memory = memory + torch.tanh(layer(memory))
        for layer in self.decoder:
            query, gate, more = layer(x).chunk(3, -1)
            seen = functional.scaled_dot_product_attention(query, memory, memory)
            x = x + torch.relu(more) * torch.sigmoid(gate) + seen
        x = x @ self.words.weight.T
        return functional.cross_entropy(x.flatten(0, 1), out.flatten()) if self.training else x


@dataclass(frozen=True)
class Tight:
    """A model, and a way to plan it on devices that hardly hold it.

    Attributes:
        module: The model, for training or not.
        example: Its inputs.
        devices: Number of devices.
        options: Options of `compile` but the limit.
        way: The way: more options, which may leave too little room.
        share: Where the limit lies between what hardly anything fits, 0, and the whole model, 1.
    """

    module: nn.Module
    example: tuple[Tensor, ...]
    devices: int
    options: Mapping[str, Any]
    way: Mapping[str, Any]
    share: float

    def limit(self, whole_bytes: int) -> int:
        """The limit of a device, for a model that takes so many bytes on one device."""
        least = whole_bytes / (1.6 * self.devices)
        return int(least * (1.02 * whole_bytes / least) ** self.share)


def tight(seed: int) -> Tight:
    """A model and a way that are drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module, example = draw.choice((*(_layers,) * 4, _images, _translation, _gpt))(draw)
    is_gpt = isinstance(example[-1], Tensor) and len(example) == 2 and hasattr(module, "head")
    training = is_gpt or draw.random() < 0.75
    module.train(training)
    options: dict[str, Any] = {"cluster": draw.choice(("ideal", None))}
    if training:
        options |= {"training": True, "optimizer": draw.choice(("adamw", "sgd"))}
    way = draw.choice(TRAINED if training else INFERRED)
    share = draw.randrange(20) / 19
    return Tight(module, example, draw.choice((1, 2, 2, 2, 3, 4)), options, way, share)


def _layers(draw: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width = draw.choice((8, 16, 32))
    inner = [width * draw.choice((1, 1, 2, 4)) for _ in range(draw.randint(1, 7))]
    names = draw.sample(sorted(ACTIVATIONS), draw.randint(1, 3))
    module = Layers((width, *inner, width), names, draw.choice(("none", *NORMS)))
    return module, (torch.randn(draw.choice((4, 16, 64)), width),)


def _images(draw: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    module = Images(draw.choice((4, 8)), draw.randint(1, 3))
    return module, (torch.randn(draw.choice((4, 8)), 3, 8, 8),)


def _translation(draw: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows = draw.choice((2, 4, 8))
    ids, out = torch.randint(32, (rows, 7)), torch.randint(32, (rows, 5))
    return Translation(draw.choice((16, 32)), draw.randint(1, 2)), (ids, out)


def _gpt(draw: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return small_gpt(1, draw.choice((0.0, 0.1)))
