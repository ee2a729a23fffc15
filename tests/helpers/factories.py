"""Small PyTorch modules for tests; `partition helpers.factories:build` finds them too."""

import torch
from torch import nn
from torch.nn import functional


class Classifier(nn.Module):
    """Tied weights, batch statistics, and dropout of some probability."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor] | tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(self.table(ids).mean(1))
        logits = self.head(self.down(self.drop(torch.relu(self.norm(hidden)))))
        if labels is None:
            return {"logits": logits}
        return functional.cross_entropy(logits, labels), logits


def classifier(dropout: float = 0.0, *, training: bool = False) -> Classifier:
    torch.manual_seed(0)
    return Classifier(dropout).train(training)


def batch(*, labels: bool = False) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 24, (8, 3), generator=random)
    return (ids, torch.randint(0, 24, (8,), generator=random)) if labels else (ids,)


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module and its example inputs, for inference."""
    return classifier(), batch()


def build_training() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The same for training, with example inputs by keyword."""
    ids, labels = batch(labels=True)
    return classifier(training=True), {"ids": ids, "labels": labels}


def three() -> int:
    """A factory that returns no module."""
    return 3


def broken() -> None:
    """A factory that fails."""
    raise ValueError("no\nweights")
