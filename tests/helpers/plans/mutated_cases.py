"""Plans of all kinds whose rank programs are mutated: small, of ONNX models and of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from helpers.modules.transformer_block import Block
from helpers.plans.mutation_table import Case
from partitioner import examples

Build = Callable[[], tuple[Any, Any]]


class Square(nn.Module):
    """The mean square of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        return x.pow(2).mean()


class Classes(nn.Module):
    """An embedding, layers with a normalisation, and the cross entropy of their logits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.layers = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and logits."""
        x = self.table(ids)
        logits = self.norm(x + self.layers(x)) @ self.table.weight.t()
        return fn.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Convolved(nn.Module):
    """Convolutions with batch normalisation and pooling, and the mean square as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding=1),
            nn.MaxPool2d(3, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        return self.net(x).pow(2).mean()


class Shortcut(nn.Module):
    """Convolutions beside one whose windows leave out rows, and the mean square as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.short = nn.Conv2d(4, 4, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        x = self.first(x).relu()
        return (self.second(x) + self.short(x)).relu().pow(2).mean()


class Attention(nn.Module):
    """Causal attention of four heads, and the mean square of its results as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        heads = (of.unflatten(-1, (4, 4)).transpose(1, 2) for of in self.mix(x).chunk(3, -1))
        mixed = fn.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).pow(2).mean()


class Chosen(nn.Module):
    """A sum of experts that a router weighs."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 12) / 4)
        self.down = nn.Parameter(torch.randn(experts, 12, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        weights = self.router(x).softmax(-1)
        made = torch.einsum(
            "ebh,ehd->ebd", torch.einsum("bd,edh->ebh", x, self.up).relu(), self.down
        )
        return (made * weights.t().unsqueeze(-1)).sum(0).pow(2).mean()


def onnx_model(name: str, **sizes: Any) -> Build:
    """An example of the package."""
    return lambda: (examples.build(name, **sizes), None)


def module(make: Callable[[], nn.Module], *shape: int) -> Build:
    """A module in float64 with random weights, and an example input."""

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return make().double(), (torch.randn(shape, dtype=torch.float64),)

    return build


def classes(batch: int = 8) -> Build:
    """`Classes` with ids and labels."""

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        ids = torch.randint(10, (batch, 6))
        return Classes().double(), (ids, ids.roll(1, 1))

    return build


def linear(batch: int = 8, layers: int = 3) -> Build:
    """Linear layers with a loss."""

    def make() -> nn.Module:
        of = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)]
        return nn.Sequential(*of, Square())

    return module(make, batch, 8)


MLP = onnx_model("mlp", layers=3, hidden=16, batch=8)
ODD = onnx_model("mlp", layers=3, hidden=15, batch=7)
TINY = onnx_model("tiny")
LLAMA = onnx_model("llama")
BLOCK = module(Block, 4, 8, 16)
ODD_BLOCK = module(Block, 5, 7, 16)
IMAGE = module(Convolved, 4, 2, 9, 8)
SHORT = module(Shortcut, 2, 2, 4, 4)


def _case(name: str, devices: int, build: Build, **options: Any) -> Case:
    return Case(name, build, {"devices": devices, "cluster": f"{devices}xideal", **options})


_train = functools.partial(_case, training=True)
_pipeline: Mapping[str, Any] = {"parallel": "pp", "micro_batches": 4}
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1", "zbv")

CASES: tuple[Case, ...] = (
    # ONNX
    _case("onnx dp 2", 2, MLP, parallel="dp"),
    _case("onnx dp 3 odd", 3, ODD, parallel="dp"),
    _case("onnx tp 2", 2, MLP, parallel="tp"),
    _case("onnx tp 3 odd", 3, ODD, parallel="tp"),
    _case("onnx tp 4", 4, MLP, parallel="tp"),
    _case("onnx dp+tp 4", 4, MLP, parallel="dp+tp"),
    _case("onnx dp+tp 2x3", 6, MLP, parallel="dp+tp", mesh={"dp": 2, "tp": 3}),
    _case("onnx searched 2x2", 4, MLP, mesh={"a": 2, "b": 2}, strategy="intra"),
    _case("onnx searched 2x3", 6, ODD, mesh={"a": 2, "b": 3}, strategy="intra"),
    _case("onnx channel 2", 2, TINY, strategy="intra"),
    _case("onnx spatial 3", 3, TINY, parallel="spatial"),
    _case("onnx dp+spatial 4", 4, onnx_model("tiny", batch=4, size=33), parallel="dp+spatial"),
    _case("onnx inter 2", 2, TINY, strategy="inter", cluster=None),
    _case("onnx pp 2", 2, MLP, parallel="pp"),
    _case("onnx pp+tp 4", 4, MLP, parallel="pp+tp"),
    _case("onnx pp 2 in micro-batches", 2, MLP, parallel="pp", micro_batches=4),
    _case("onnx llama tp 2", 2, LLAMA, parallel="tp"),
    _case("onnx llama cp 4", 4, LLAMA, parallel="cp"),
    _case("onnx blocks 3", 3, onnx_model("tiny", size=33, channels=12, batch=8), memory="400kB",
          strategy="inter", cluster=None),
    # inference of modules
    _case("module dp 2", 2, classes(), parallel="dp"),
    _case("module tp 3 odd", 3, ODD_BLOCK, parallel="tp"),
    _case("module cp 2", 2, module(Attention, 2, 16, 16), parallel="cp"),
    _case("module ring 4", 4, module(Attention, 2, 16, 16), parallel="ring"),
    _case("module spatial 2", 2, IMAGE, parallel="spatial"),
    _case("module pp 2", 2, linear(), **_pipeline),
    _case("module experts 2", 2, module(Chosen, 8, 8), strategy="intra"),
    _case("module copies 2", 2, linear(), strategy="copies"),
    # training
    _train("train dp 2", 2, classes(), parallel="dp"),
    _train("train dp 3 odd", 3, classes(7), parallel="dp"),
    _train("train zero1 2", 2, classes(), parallel="zero1"),
    _train("train zero2 2", 2, classes(), parallel="zero2"),
    _train("train zero3 2", 2, classes(), parallel="zero3"),
    _train("train zero3 3 odd", 3, ODD_BLOCK, parallel="zero3"),
    _train("train tp 2", 2, BLOCK, parallel="tp"),
    _train("train tp 4", 4, BLOCK, parallel="tp"),
    _train("train dp+tp 4", 4, BLOCK, parallel="dp+tp"),
    _train("train dp+tp 2x3", 6, module(Block, 4, 6, 16), parallel="dp+tp",
           mesh={"dp": 2, "tp": 3}),
    _train("train zero3+tp 4", 4, BLOCK, parallel="zero3+tp"),
    _train("train cp 2", 2, module(Attention, 2, 16, 16), parallel="cp"),
    _train("train ring 2", 2, module(Attention, 2, 16, 16), parallel="ring"),
    _train("train spatial 2", 2, IMAGE, parallel="spatial"),
    _train("train spatial 3 odd", 3, SHORT, parallel="spatial"),
    _train("train channel 2", 2, IMAGE, strategy="intra"),
    _train("train experts 2", 2, module(Chosen, 8, 8), strategy="intra"),
    _train("train inter 2", 2, linear(), strategy="inter", cluster=None),
    _train("train dp in micro-batches", 2, classes(), parallel="dp", micro_batches=2),
    _train("train zero3 in micro-batches", 2, classes(), parallel="zero3", micro_batches=2),
    *(
        _train(f"train pp {schedule}", 2, linear(layers=4), **_pipeline, schedule=schedule)
        for schedule in _SCHEDULES
    ),
    _train("train pp+tp 4", 4, linear(layers=4), parallel="pp+tp", micro_batches=4),
    _train("train pp+zero3 4", 4, linear(layers=4), parallel="pp+zero3", micro_batches=2),
    _train("train recomputed dp 2", 2, BLOCK, parallel="dp", recompute=True),
)  # fmt: skip
