"""Modules drawn at random whose layers read any values before them, with random cuts in stages."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from partitioner.ir.graph import Graph
from partitioner.rewrites.staging import changing_nodes

WIDTH, ROWS, CLASSES = 8, 4, 6


class Both(nn.Module):
    """Two values through one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the width of each."""
        return self.mix(torch.cat([a, b], -1))


class Attention(nn.Module):
    """Queries of one value, keys and values of another, through one projection of both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Of the width of each."""
        q, _, _ = self.qkv(a).chunk(3, -1)
        _, k, v = self.qkv(b).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(*(x.unsqueeze(1) for x in (q, k, v)))
        return seen.squeeze(1)


class Norm(nn.Module):
    """A batch norm over the last dim, whose statistics each micro-batch writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        """As large as its operand."""
        return self.norm(a.transpose(1, 2)).transpose(1, 2)


class Counted(nn.Module):
    """A layer that counts its calls, and is weighed by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        """As large as its operand."""
        before = self.calls.clone()
        self.calls += 1
        return self.layer(a) * before / self.calls.clone()


class Gated(nn.Module):
    """Parameters that are used in several places, and one through a function of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, a: Tensor) -> Tensor:
        """As large as its operand."""
        matrix = self.matrix + self.matrix.t()
        return a @ matrix * self.gate.exp() + self.gate


def _in_place(a: Tensor) -> Tensor:
    copy = a * 2
    copy[:, 1:] += a[:, :-1]
    return copy.relu_()


def _positions(a: Tensor) -> Tensor:
    return a * torch.arange(ROWS, dtype=a.dtype).view(1, ROWS, 1).cos()


ONE: tuple[Callable[[], Callable[[Tensor], Tensor]], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.LayerNorm(WIDTH),
    Norm,
    Counted,
    Gated,
    lambda: torch.relu,
    lambda: torch.tanh,
    lambda: _in_place,
    lambda: _positions,
    lambda: lambda a: a.flip(1),
    lambda: lambda a: a.detach(),
    lambda: lambda a: a.transpose(1, 2).reshape(a.shape),
    lambda: lambda a: a - a.mean((1, 2), keepdim=True),
    lambda: lambda a: a[:, :1].expand(-1, ROWS, -1),
)
TWO: tuple[Callable[[], Callable[[Tensor, Tensor], Tensor]], ...] = (
    lambda: torch.add,
    lambda: lambda a, b: a * torch.sigmoid(b),
    Both,
    Attention,
)


class Drawn(nn.Module):
    """Layers that read one or two values before them, some of them with shared weights.

    Attributes:
        steps: Each layer with the places of the values that it reads.
        heads: Places of the values that the loss is of.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        torch.manual_seed(draw.randrange(2**31))
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = []
        values = 2  # the embedded words, and the other input
        for _ in range(draw.randint(3, 12)):
            shared = [step for step in self.steps if isinstance(step[0], nn.Module)]
            if shared and draw.random() < 0.2:
                layer, read = draw.choice(shared)
                count = len(read)
            else:
                count = draw.choice((1, 1, 2))
                layer = draw.choice(ONE if count == 1 else TWO)()
            near = [max(0, values - 1 - int(draw.expovariate(0.6))) for _ in range(count)]
            self.steps.append((layer, tuple(near)))
            if isinstance(layer, nn.Module):
                self.layers.append(layer)
            values += 1
        self.heads = sorted({values - 1, *(draw.randrange(values) for _ in range(2))})
        self.tied = draw.random() < 0.5
        self.out = nn.Linear(WIDTH, CLASSES, bias=draw.random() < 0.5)
        if self.tied:
            self.out.weight = self.words.weight
        self.shows_scores = draw.random() < 0.5

    def forward(self, words: Tensor, x: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The loss and, of some modules, scores."""
        values = [self.words(words), x]
        for layer, read in self.steps:
            values.append(layer(*(values[place] for place in read)))
        scores = self.out(torch.stack([values[place] for place in self.heads]).sum(0))
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss = loss + sum(values[place].square().mean() for place in self.heads[:-1]) * 0.1
        return (loss, scores) if self.shows_scores else loss


def batch(draw: random.Random, size: int) -> tuple[Tensor, ...]:
    """Words, another input, and labels."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    words, labels = torch.randint(CLASSES, (2, size, ROWS), generator=generator)
    x = torch.randn(size, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return words, x, labels


def drawn_stages(draw: random.Random, graph: Graph, stages: int) -> dict[str, int]:
    """Stage of each node of the forward pass: values pass to the same stage or to later ones.

    Half of them are stretches of the traced order, the others of a random order that the data
    allow.
    """
    nodes = list(changing_nodes(graph))
    if draw.random() < 0.5:
        nodes = _shuffled(draw, graph, nodes)
    ends = sorted(draw.sample(range(1, len(nodes)), stages - 1))
    return {node.name: sum(end <= place for end in ends) for place, node in enumerate(nodes)}


def _shuffled(draw: random.Random, graph: Graph, nodes: list) -> list:
    left = {node.name: node for node in nodes}
    done: list = []
    while left:
        ready = [
            node
            for node in left.values()
            if not any(v in graph.producers and graph.producers[v].name in left for v in node.reads)
        ]
        node = draw.choice(ready)
        done.append(left.pop(node.name))
    return done
