"""A GPT of a few thousand weights that returns its loss first."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class SmallGPT(nn.Module):
    def __init__(self, layers: int = 1, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def small_gpt(layers: int = 1, dropout: float = 0.0) -> tuple[SmallGPT, tuple[torch.Tensor, ...]]:
    """A model and a batch of 8 sequences; the same each time."""
    torch.manual_seed(0)
    model = SmallGPT(layers, dropout=dropout)
    ids, labels = torch.randint(64, (2, 8, 16))
    return model, (ids, labels)
