"""Losses of many kinds over one batch: some are those of its parts, others mix samples."""

# ruff: noqa: ARG005 - all losses have the same arguments

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation

SAMPLES, CLASSES = 12, 8
Loss = Callable[[Any, Tensor, Tensor, Tensor], Any]


#: Layers of the losses that have more than two of them, by the loss's name.
LAYERS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "batch norm": {"bn": lambda: nn.BatchNorm1d(8)},
    "group norm": {"gn": lambda: nn.GroupNorm(2, 8)},
    "layer norm": {"ln": lambda: nn.LayerNorm(8)},
    "convolution": {"conv": lambda: nn.Conv1d(3, 4, 3)},
    "embedding": {"emb": lambda: nn.Embedding(20, 8)},
    "frequencies": {"emb": lambda: nn.Embedding(20, 8)},
    "gru": {"gru": lambda: nn.GRU(6, 8, batch_first=True)},
    "gru of the batch": {"gru": lambda: nn.GRU(6, 8)},
    "attention": {"attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True)},
    "attention of the batch": {"attention": lambda: nn.MultiheadAttention(8, 2)},
}


class Batch(nn.Module):
    """Two layers, and others that its loss has, over two inputs and a class for each sample."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)
        self.rows, self.scale = nn.Parameter(torch.randn(SAMPLES, 8)), nn.Parameter(torch.ones(()))
        for layer, build in LAYERS.get(name, {}).items():
            self.add_module(layer, build())
        self.loss = LOSSES[name]

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Any:
        return self.loss(self, x, y, t)


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor, Tensor]:
    """Two inputs, and classes of which some are more frequent in the first half."""
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, 6, generator=random) for _ in range(2))
    return x, y, torch.randint(0, CLASSES, (samples,), generator=random)


def module(name: str) -> Batch:
    """A module with the loss of this name."""
    torch.manual_seed(0)
    return Batch(name)


def accumulated(name: str, count: int) -> dict[str, Tensor]:
    """Results and gradients of a step in equal micro-batches, whose losses' mean is taken."""
    whole, loss, results = module(name), torch.zeros(()), []
    for part in zip(*(tensor.chunk(count) for tensor in batch()), strict=True):
        result = whole(*part)
        result = result if isinstance(result, tuple) else (result,)
        loss = loss + result[0] / count
        results.append(result[1:])
    loss.backward()  # type: ignore[no-untyped-call]
    named = whole.named_parameters()
    values = {"loss": loss.detach(), **{n: p.grad for n, p in named if p.grad is not None}}
    for index, parts in enumerate(zip(*results, strict=True)):
        tensors = [part.detach() for part in parts]
        joined = torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors).mean()
        values[f"result {index}"] = joined
    return values


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Whether values are equal but for rounding."""
    return some.keys() == others.keys() and all(
        torch.allclose(some[name], others[name], rtol=1e-3, atol=1e-5) for name in some
    )


def _pairs(m: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """InfoNCE."""
    sims = F.normalize(m.a(x), dim=-1) @ F.normalize(m.b(y), dim=-1).T * m.scale
    return F.cross_entropy(sims, torch.arange(x.shape[0]))


def _supervised_pairs(m: Any, x: Tensor, _: Tensor, t: Tensor) -> Tensor:
    z = F.normalize(m.a(x), dim=-1)
    sims = z @ z.T / 0.2
    same = (t[:, None] == t[None]) & ~torch.eye(len(t), dtype=torch.bool)
    return -((sims - sims.logsumexp(1, keepdim=True)) * same).sum() / same.sum().clamp(min=1)


def _views(m: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """SimCLR."""
    z = F.normalize(torch.cat([m.a(x), m.b(y)]), dim=-1)
    sims = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(sims, (torch.arange(len(z)) + len(x)) % len(z))


def _redundancy(m: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """Barlow twins."""
    a, b = m.a(x), m.b(y)
    cross = (a - a.mean(0)).T @ (b - b.mean(0)) / len(x)
    loss: Tensor = (cross - torch.eye(8)).square().sum()
    return loss


def _balance(m: Any, x: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """The auxiliary loss of experts."""
    chances = m.a(x).softmax(-1)
    loss: Tensor = chances.mean(0) @ F.one_hot(chances.argmax(-1), 8).float().mean(0) * 8
    return loss


def _overlap(a: Tensor, b: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Dice."""
    a, b = a.sigmoid(), b.sigmoid()
    return 2 * (a * b).sum(dim) / (a.sum(dim) + b.sum(dim))


def _half_ignored(m: Any, x: Tensor, _: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(m.a(x), torch.where(t > 4, t, -100))


LOSSES: dict[str, Loss] = {
    "mse": lambda m, x, y, t: F.mse_loss(m.a(x), m.b(y)),
    "huber": lambda m, x, y, t: F.smooth_l1_loss(m.a(x), m.b(y)),
    "cross entropy": lambda m, x, y, t: F.cross_entropy(m.a(x), t),
    "label smoothing": lambda m, x, y, t: F.cross_entropy(m.a(x), t, label_smoothing=0.1),
    "soft targets": lambda m, x, y, t: F.cross_entropy(m.a(x), m.b(y).softmax(-1)),
    "cross entropy sum": lambda m, x, y, t: F.cross_entropy(m.a(x), t, reduction="sum"),
    "sum / n": lambda m, x, y, t: F.cross_entropy(m.a(x), t, reduction="sum") / len(t),
    "class weights": lambda m, x, y, t: F.cross_entropy(m.a(x), t, torch.arange(1.0, 9.0)),
    "ignored class": lambda m, x, y, t: F.cross_entropy(m.a(x), t, ignore_index=0),
    "half ignored": _half_ignored,
    "nll weights": lambda m, x, y, t: F.nll_loss(m.a(x).log_softmax(-1), t, torch.arange(1.0, 9)),
    "bce": lambda m, x, y, t: F.binary_cross_entropy_with_logits(m.a(x)[:, 0], (t > 3).float()),
    "kl batchmean": lambda m, x, y, t: F.kl_div(
        m.a(x).log_softmax(-1), m.b(y).softmax(-1), reduction="batchmean"
    ),
    "kl sum": lambda m, x, y, t: F.kl_div(
        m.a(x).log_softmax(-1), m.b(y).softmax(-1), reduction="sum"
    ),
    "poisson": lambda m, x, y, t: F.poisson_nll_loss(m.a(x)[:, 0], t.float()),
    "cosine embedding": lambda m, x, y, t: F.cosine_embedding_loss(m.a(x), m.b(y), (t > 3) * 2 - 1),
    "1 - cosine": lambda m, x, y, t: 1 - F.cosine_similarity(m.a(x), m.b(y)).mean(),
    "triplet": lambda m, x, y, t: F.triplet_margin_loss(m.a(x), m.b(y), m.b(x)),
    "hardest": lambda m, x, y, t: (
        (torch.diagonal(torch.cdist(m.a(x), m.b(y))) - torch.cdist(m.a(x), m.b(y)).amin(1))
        .relu()
        .mean()
    ),
    "pairs": _pairs,
    "pairs both ways": lambda m, x, y, t: (_pairs(m, x, y, t) + _pairs(m, y, x, t)) / 2,
    "supervised pairs": _supervised_pairs,
    "views": _views,
    "sigmoid pairs": lambda m, x, y, t: (
        -F.logsigmoid((m.a(x) @ m.b(y).T) * (2 * torch.eye(len(x)) - 1)).sum() / len(x)
    ),
    "redundancy": _redundancy,
    "deviation": lambda m, x, y, t: (1 - m.a(x).std(0)).relu().mean(),
    "variance": lambda m, x, y, t: m.a(x).var(0).mean(),
    "variance of rows": lambda m, x, y, t: m.a(x).var(1).mean(),
    "kernel": lambda m, x, y, t: torch.exp(-torch.cdist(m.a(x), m.b(y))).mean(),
    "list": lambda m, x, y, t: -(m.a(x)[:, 0].log_softmax(0) * m.b(y)[:, 0].softmax(0)).sum(),
    "dice": lambda m, x, y, t: 1 - _overlap(m.a(x), m.b(y), (0, 1)),
    "dice of rows": lambda m, x, y, t: (1 - _overlap(m.a(x), m.b(y), (1,))).mean(),
    "rmse": lambda m, x, y, t: F.mse_loss(m.a(x), m.b(y)).sqrt(),
    "log mse": lambda m, x, y, t: F.mse_loss(m.a(x), m.b(y)).log(),
    "focal of mean": lambda m, x, y, t: (1 - torch.exp(-F.mse_loss(m.a(x), m.b(y)))) ** 2,
    "hard samples": lambda m, x, y, t: (
        F.cross_entropy(m.a(x), t, reduction="none").topk(max(1, len(t) // 4)).values.sum()
    ),
    "trimmed": lambda m, x, y, t: m.a(x).square().mean(1).sort().values[1:].mean(),
    "median": lambda m, x, y, t: m.a(x).square().mean(1).median(),
    "max": lambda m, x, y, t: m.a(x).max(),
    "logsumexp": lambda m, x, y, t: m.a(x).flatten().logsumexp(0),
    "norm": lambda m, x, y, t: m.a(x).norm(),
    "norm of rows": lambda m, x, y, t: m.a(x).norm(dim=1).mean(),
    "masked": lambda m, x, y, t: (m.a(x).mean(1) * (t > 3)).sum() / (t > 3).sum(),
    "masked, at least 1": lambda m, x, y, t: (
        (m.a(x).mean(1) * (t > 3)).sum() / (t > 3).sum().clamp(min=1)
    ),
    "masked by floats": lambda m, x, y, t: (
        (m.a(x).mean(1) * (t > 3).float()).sum() / (t > 3).float().sum()
    ),
    "masked means": lambda m, x, y, t: (m.a(x).mean(1) * (t > 3)).mean() / (t > 3).float().mean(),
    "masked mean": lambda m, x, y, t: (m.a(x).mean(1) * (t > 3)).mean(),
    "mean times mean": lambda m, x, y, t: m.a(x).mean() * (t > 3).float().mean(),
    "weights": lambda m, x, y, t: (m.a(x).mean(1) * y[:, 0]).sum() / y[:, 0].sum(),
    "weights of softmax": lambda m, x, y, t: (m.a(x).mean(1) * y[:, 0].softmax(0)).sum(),
    "sum / 12": lambda m, x, y, t: m.a(x).square().sum() / 12,
    "sum / 3": lambda m, x, y, t: m.a(x).square().sum() / 3,
    "sum / n^2": lambda m, x, y, t: m.a(x).square().sum() / len(x) ** 2,
    "sum / (n - 1)": lambda m, x, y, t: m.a(x).square().sum() / (len(x) - 0.5),
    "mean * n": lambda m, x, y, t: m.a(x).square().mean() * len(x),
    "mean + n": lambda m, x, y, t: m.a(x).square().mean() + len(x),
    "mean + 1": lambda m, x, y, t: m.a(x).square().mean() + 1,
    "values / n": lambda m, x, y, t: (m.a(x) / x.shape[0]).square().mean(),
    "places": lambda m, x, y, t: (m.a(x).mean(1) * torch.arange(len(x))).mean(),
    "line": lambda m, x, y, t: (m.a(x).mean(1) * torch.linspace(0, 1, len(x))).mean(),
    "ones": lambda m, x, y, t: (m.a(x).mean(1) * torch.ones(len(x)) * 3).mean(),
    "zeros": lambda m, x, y, t: torch.cat([m.a(x), torch.zeros(len(x), 2)], 1).mean(),
    "lower": lambda m, x, y, t: (torch.ones(len(x), len(x)).tril() @ m.a(x)).square().mean(),
    "rows of a parameter": lambda m, x, y, t: (m.a(x) * m.rows[: len(x)]).mean(),
    "indexed parameter": lambda m, x, y, t: (m.a(x) * m.rows[t]).mean(),
    "running sum": lambda m, x, y, t: m.a(x).cumsum(0).square().mean(),
    "running sum of rows": lambda m, x, y, t: m.a(x).cumsum(1).square().mean(),
    "flipped": lambda m, x, y, t: (m.a(x) * m.b(y).flip(0)).mean(),
    "rolled": lambda m, x, y, t: (m.a(x) * m.b(x).roll(1, 0)).mean(),
    "steps": lambda m, x, y, t: m.a(x).diff(dim=0, prepend=m.b(y)[:1]).square().mean(),
    "first": lambda m, x, y, t: m.a(x)[0].square().mean(),
    "softmax of the batch": lambda m, x, y, t: (m.a(x).softmax(0) * m.b(y)).mean(),
    "batch norm": lambda m, x, y, t: m.bn(m.a(x)).pow(3).mean(),
    "group norm": lambda m, x, y, t: m.gn(m.a(x)).pow(3).mean(),
    "layer norm": lambda m, x, y, t: m.ln(m.a(x)).pow(3).mean(),
    "centred": lambda m, x, y, t: (m.a(x) - m.a(x).mean(0)).square().mean(),
    "centred, detached": lambda m, x, y, t: (m.a(x) - m.a(x).detach().mean(0)).square().mean(),
    "scaled, detached": lambda m, x, y, t: (m.a(x) / m.a(x).detach().abs().max()).square().mean(),
    "columns": lambda m, x, y, t: F.normalize(m.a(x), dim=0).pow(3).mean(),
    "convolution": lambda m, x, y, t: m.conv(m.a(x)[:, None].expand(-1, 3, -1)).square().mean(),
    "gru": lambda m, x, y, t: m.gru(x[:, None].expand(-1, 4, -1))[0].square().mean(),
    "gru of the batch": lambda m, x, y, t: m.gru(x[:, None])[0].square().mean(),
    "attention": lambda m, x, y, t: (
        m.attention(*[m.a(x)[:, None].expand(-1, 3, -1)] * 3)[0].square().mean()
    ),
    "attention of the batch": lambda m, x, y, t: (
        m.attention(*[m.a(x)[:, None]] * 3)[0].square().mean()
    ),
    "embedding": lambda m, x, y, t: (m.emb(t) * m.a(x)).square().mean(),
    "frequencies": lambda m, x, y, t: (
        (m.emb.weight * F.one_hot(t, 20).float().sum(0)[:, None]).square().mean() + m.a(x).mean()
    ),
    "scattered": lambda m, x, y, t: torch.zeros(8, 8).index_add(0, t, m.a(x)).square().sum(),
    "prototypes": lambda m, x, y, t: torch.cdist(m.a(x), F.one_hot(t, 8).float().T @ m.b(y)).mean(),
    "penalty": lambda m, x, y, t: m.a(x).square().mean() + m.a.weight.square().sum(),
    "balance": _balance,
    "ratio": lambda m, x, y, t: m.a(x).sum() / m.b(y).square().sum(),
    "sum": lambda m, x, y, t: m.a(x).square().sum(),
    "and rows": lambda m, x, y, t: (F.mse_loss(m.a(x), m.b(y)), m.a(x)),
    "and mean": lambda m, x, y, t: (F.mse_loss(m.a(x), m.b(y)), m.a(x).mean()),
    "and sum": lambda m, x, y, t: (F.mse_loss(m.a(x), m.b(y)), m.a(x).sum()),
    "accuracy": lambda m, x, y, t: (
        F.cross_entropy(m.a(x), t),
        (m.a(x).argmax(-1) == t).float().mean(),
    ),
    "noise of the batch": lambda m, x, y, t: (m.a(x) + torch.rand(8)).square().mean(),
    "dropout and pairs": lambda m, x, y, t: _pairs(m, F.dropout(x, 0.5), y, t),
    "any": lambda m, x, y, t: (m.a(x) * (t > 6).any()).square().mean(),
    "range": lambda m, x, y, t: (m.a(x) / (m.a(x).amax() - m.a(x).amin())).mean(),
    "outer": lambda m, x, y, t: torch.einsum("bi,bj->ij", m.a(x), m.b(y)).square().mean(),
    "outer sum": lambda m, x, y, t: (m.a(x).T @ m.b(y)).sum() / len(x),
    "by size": lambda m, x, y, t: m.a(x).square().mean() if len(x) > 4 else m.a(x).abs().mean(),
    "clamped mean": lambda m, x, y, t: m.a(x).mean().clamp(min=0.1),
    "transposed": lambda m, x, y, t: (m.a(x).T.reshape(len(x), 8) * m.b(y)).mean(),
    "repeated": lambda m, x, y, t: m.a(x.repeat(2, 1)).square().mean(),
    "joined": lambda m, x, y, t: m.a(torch.cat([x, y])).square().mean(),
    "joined, centred": lambda m, x, y, t: (
        (torch.cat([m.a(x), m.b(y)]) - torch.cat([m.a(x), m.b(y)]).mean(0)).square().mean()
    ),
}
