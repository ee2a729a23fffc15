"""Modules whose batch is not dim 0 of every input: attention over (T, B, E), a graph, bags.

Each returns its loss first. Sizes are odd, so that parts differ.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Tensor, ...]]


class TimeFirst(nn.Module):
    """A layer of a transformer over (T, B, E), with its targets as (B, E)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 12),
            nn.Linear(12, width),
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        h = (h + self.down(functional.gelu(self.up(h)))).mean(0)
        return functional.mse_loss(h, y), h


class Messages(nn.Module):
    """Two rounds of messages along the edges of a graph, whose nodes are the batch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, edges: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in (self.first, self.second):
            h = layer(x)
            sent = h.index_select(0, edges[0])
            x = torch.tanh(h + torch.zeros_like(h).index_add(0, edges[1], sent))
        return functional.cross_entropy(x, y), x


class Bags(nn.Module):
    """Bags of words of unequal lengths beside dense features: a small recommendation model."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(11, width, mode="sum")
        self.dense, self.out = nn.Linear(3, width), nn.Linear(2 * width, 1)

    def forward(
        self, words: Tensor, offsets: Tensor, dense: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = torch.cat([self.words(words, offsets), self.dense(dense).relu()], 1)
        logits = self.out(h).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, y), logits


def _time_first() -> Made:
    return TimeFirst(), (torch.randn(4, 7, 8), torch.randn(7, 8))


def _messages() -> Made:
    edges = torch.randint(9, (2, 20))
    return Messages(), (edges, torch.randn(9, 5), torch.randint(3, (9,)))


def _bags() -> Made:
    words, offsets = torch.randint(11, (17,)), torch.tensor([0, 3, 3, 5, 9, 10, 15])
    return Bags(), (words, offsets, torch.randn(7, 3), torch.rand(7).round())


MAKERS: Mapping[str, Callable[[], Made]] = {
    "time first": _time_first,
    "messages": _messages,
    "bags": _bags,
}


def made(name: str) -> Made:
    """A model of `MAKERS` and its batch; the same each time."""
    torch.manual_seed(0)
    return MAKERS[name]()
