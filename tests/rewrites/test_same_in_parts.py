"""What a module computes otherwise where its batch runs in micro-batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partitioner.frontends.torch.building.graph import SEED
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch, trace_module
from partitioner.ir.layout import MAX_SEGMENTS
from partitioner.rewrites.same_in_parts import Difference, difference

SAMPLES, COUNT = 16, 4
Forward = Callable[["Parts", Tensor, Tensor], Any]


class Parts(nn.Module):
    """Layers, of which a function computes the results."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.embedding, self.batch_norm = nn.Embedding(50, 8), nn.BatchNorm1d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.dropout, self.token = nn.Dropout(0.5), nn.Parameter(torch.ones(1, 1, 8))
        self.forward_of = forward

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.forward_of(self, x, y)


def tokens(m: Parts, x: Tensor) -> Tensor:
    return m.attention(m.embedding(x[:, :6].abs().mul(10).long().clamp(max=49)))


def crossed(m: Parts, x: Tensor, y: Tensor) -> Tensor:
    logits = m.linear(m.norm(tokens(m, x)))
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


SAME: dict[str, Forward] = {
    "mean": lambda m, x, _: m.linear(x).square().mean(),
    "mse_loss": lambda m, x, _: functional.mse_loss(m.linear(x), x),
    "sum over length": lambda m, x, _: m.linear(x).square().sum() / len(x),
    "sum times 1 / length": lambda m, x, _: m.linear(x).square().sum() * (1 / len(x)),
    "cross entropy of a transformer": crossed,
    "penalty": lambda m, x, y: crossed(m, x, y) + 0.1 * m.linear.weight.square().sum(),
    "two losses": lambda m, x, y: crossed(m, x, y) + 0.5 * m.linear(x).square().mean(),
    "filled": lambda m, x, _: (m.linear(x) * torch.full((len(x), 1), 0.5)).square().mean(),
    "expanded": lambda m, x, _: (
        torch.cat([m.token.expand(len(x), 1, 8), m.linear(x)[:, None]], 1).square().mean()
    ),
    "more places than segments of layouts": lambda m, x, _: (
        m.attention(x[:, None].expand(-1, MAX_SEGMENTS + 16, 8)).square().mean()
    ),
    "results of samples": lambda m, x, _: (m.linear(x).square().mean(), m.norm(x)),
}
OTHER: dict[str, tuple[Forward, str]] = {
    "sum": (lambda m, x, _: m.linear(x).square().sum(), "is a sum over the batch, and not a mean"),
    "sum over 5": (lambda m, x, _: m.linear(x).square().sum() / 5, "a sum over the batch"),
    "batch norm": (
        lambda m, x, _: m.batch_norm(m.linear(x)).pow(3).mean(),
        "batch_norm_statistics",
    ),
    "root": (lambda m, x, _: m.linear(x).square().mean().sqrt(), "/sqrt combines the samples"),
    "product": (lambda m, x, _: m.linear(x).mean() * m.norm(x).square().mean(), "/mul combines"),
    "contrastive": (
        lambda m, x, _: functional.cross_entropy(m.linear(x) @ x.T, torch.arange(len(x))),
        "/mm combines the samples of a batch",
    ),
    "centred": (lambda m, x, _: (m.linear(x) - x.mean(0)).square().mean(), "/sub combines"),
    "scaled": (lambda m, x, _: (m.linear(x) * len(x)).square().mean(), "combines"),
    "transposed": (lambda m, x, _: (x.T.reshape(len(x), 8) * m.linear(x)).mean(), "combines"),
    "largest": (lambda m, x, _: m.linear(x).max(), "/max combines"),
    "first": (lambda m, x, _: m.linear(x)[0].square().mean(), "/select combines"),
    "places": (
        lambda m, x, _: (m.linear(x) * torch.arange(len(x))[:, None]).mean(),
        "/arange depends on the size of the batch",
    ),
    "first rows of all": (
        lambda m, x, _: m.linear(x)[:1].square().mean(),
        "/slice depends on the size of the batch",
    ),
    "first numbers of all": (
        lambda m, x, _: m.linear(x).reshape(-1)[:8].square().mean(),
        "/slice depends on the size of the batch",
    ),
    "a constant by size": (
        lambda m, x, _: (
            (m.linear(x) * torch.tensor(3.0 if len(x) == SAMPLES else 2.0)).square().mean()
        ),
        "_tensor_constant0 depends on the size of the batch",
    ),
    "operands by size": (
        lambda m, x, _: (m.linear(x) - x if len(x) == SAMPLES else x - m.linear(x)).mean(),
        "/sub depends on the size of the batch",
    ),
    "weighted classes": (
        lambda m, x, y: functional.cross_entropy(
            m.linear(x), y[:, 0], m.linear.bias.detach().exp()
        ),
        "combines",
    ),
}


def of(forward: Forward, *, training: bool = True, count: int = COUNT) -> Difference:
    module, batch = made(forward)
    example, options = Example(batch, {}), ModuleOptions(training)
    part = trace_micro_batch(module, example, options, count)
    whole = trace_module(module, example, options)
    assert part.micro is not None
    results = tuple(filter(None, whole.traced.call.results))
    return difference(whole.graph, part.graph, part.micro.split, results, count, SEED)


def made(forward: Forward) -> tuple[Parts, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Parts(forward), (torch.randn(SAMPLES, 8), torch.randint(0, 8, (SAMPLES, 6)))


def gradients(forward: Forward, count: int) -> dict[str, Tensor]:
    """The loss, and gradients by parameter, of a step in so many micro-batches."""
    module, batch = made(forward)
    loss = torch.zeros(())
    for part in zip(*(tensor.chunk(count) for tensor in batch), strict=True):
        result = module(*part)
        loss = loss + (result[0] if isinstance(result, tuple) else result) / count
    loss.backward()
    named = module.named_parameters()
    return {"loss": loss.detach(), **{n: p.grad for n, p in named if p.grad is not None}}


def differs(forward: Forward) -> bool:
    one, several = gradients(forward, 1), gradients(forward, COUNT)
    return any(not torch.allclose(one[n], several[n], rtol=1e-3, atol=1e-5) for n in one)


@pytest.mark.parametrize("name", SAME)
def test_what_is_proven_the_same_is(name: str) -> None:
    assert of(SAME[name]).reasons == ()
    assert not differs(SAME[name])


@pytest.mark.parametrize("name", OTHER)
def test_what_combines_samples_is_named(name: str) -> None:
    forward, reason = OTHER[name]
    assert reason in " ".join(of(forward).reasons)
    assert differs(forward)


@pytest.mark.slow
def test_one_sample_each_is_the_same_too() -> None:
    assert of(SAME["two losses"], count=SAMPLES // 2).reasons == ()
    assert of(SAME["mean"], count=SAMPLES).reasons == ()
    traced_otherwise = of(crossed, count=SAMPLES)
    assert "depends on the size of the batch" in traced_otherwise.reasons[0]
    assert traced_otherwise.sized


def test_a_mean_over_targets_counts_the_ignored() -> None:
    assert of(crossed).counted
    assert not of(SAME["mean"]).counted


def test_a_mean_over_what_a_mask_marks_counts_it() -> None:
    def masked(m: Parts, x: Tensor, y: Tensor) -> Tensor:
        marked = y[:, 0] > 3
        return (m.linear(x).square().mean(1) * marked).sum() / marked.count_nonzero()

    assert of(masked) == Difference((), counted=("count_nonzero",))
    assert differs(masked)  # the micro-batches' marks are not equally many


def test_random_numbers_and_written_buffers_are_named() -> None:
    (reason,) = of(lambda m, x, _: m.dropout(m.linear(x)).square().mean()).reasons
    assert reason == "/dropout/dropout draws other random numbers"
    written = of(lambda m, x, _: m.batch_norm(m.linear(x)).square().mean()).reasons[1]
    assert "/batch_norm/num_batches_tracked/next writes" in written


def test_batch_norms_of_inference_see_one_sample() -> None:
    def inferred(m: Parts, x: Tensor, _: Tensor) -> Tensor:
        statistics = m.batch_norm.running_mean, m.batch_norm.running_var
        return functional.batch_norm(m.linear(x), *statistics, training=False)

    assert of(inferred, training=False) == Difference(())
    assert (
        "is a sum over the batch"
        in of(lambda m, x, _: (m.linear(x).T @ x).mean(), training=False).reasons[0]
    )
