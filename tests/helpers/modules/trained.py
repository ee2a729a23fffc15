"""Small modules that return their loss first, with batches, for tests of training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]


class Mlp(nn.Module):
    """Two layers with batch normalisation and dropout.

    A parameter and a buffer are not used; another buffer is written, and not in `state_dict()`.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(32, 8)
        self.spare = nn.Linear(4, 4)
        self.register_buffer("version", torch.tensor(3))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and scores."""
        self.calls += 1
        scores = self.second(self.dropout(self.norm(self.first(x)).relu()))
        return functional.cross_entropy(scores, y), scores

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Inputs and classes."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 16, generator=draw, dtype=torch.float64)
        return x, torch.randint(8, (size,), generator=draw)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream in and out."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, 2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, dropout: float = 0.0, blocks: int = 1, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.places = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    @staticmethod
    def batch(seed: int, size: int = 4) -> Batch:
        """Words and the words after them."""
        words = torch.randint(32, (size, 9), generator=torch.Generator().manual_seed(seed))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Branching(nn.Module):
    """What is computed depends on the batch; every other one takes the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two, self.leave = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Loss."""
        h = torch.cond(
            x.mean() > 0,
            lambda z: self.one(z).relu().float(),
            lambda z: self.two(z).tanh().float(),
            (self.enter(x),),
        )
        return functional.cross_entropy(self.leave(h).float(), y)

    @staticmethod
    def batch(seed: int, size: int = 8) -> Batch:
        """Inputs and classes."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 16, generator=draw) + (-1) ** seed
        return x, torch.randint(16, (size,), generator=draw)
