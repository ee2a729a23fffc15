"""Modules whose criterion stands outside of them, on ranks of a gloo group."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram


class Classifier(nn.Module):
    """As people write it: its forward pass gives logits, whose scale has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 6)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        """Logits of the rows of `x`."""
        logits: Tensor = self.down(self.norm(self.up(x)).relu())
        return logits * scale


class Answers(Classifier):
    """Gives its logits first, and its loss in the same dict where it is told the labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Logits and, with labels, the loss."""
        outputs = {"logits": super().forward(x)}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(outputs["logits"], labels)
        return outputs


def seeded(kind: type[Classifier]) -> Classifier:
    torch.manual_seed(0)
    return kind().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, generator=draw, dtype=torch.float64)
    return x, torch.randint(6, (8,), generator=draw)


def criterion() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(torch.arange(1.0, 7.0, dtype=torch.float64), label_smoothing=0.1)


@cache
def outside() -> ModuleProgram:
    x, y = batch(0)
    return partitioner.compile(
        seeded(Classifier),
        x,
        2,
        training=True,
        loss=criterion(),
        target=y,
        parallel="zero3",
    )


@cache
def named() -> ModuleProgram:
    x, labels = batch(0)
    inputs = {"x": x, "labels": labels}
    return partitioner.compile(
        seeded(Answers), inputs, 2, training=True, loss="loss", parallel="tp"
    )


def trains_outside(_: int) -> None:
    """Ten steps equal one process's; in evaluation, calls without a target give the outputs."""
    module, plain, loss = outside().module(), copy.deepcopy(seeded(Classifier)), criterion()
    updates = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (module, plain)]
    for step in range(10):
        x, y = batch(step)
        losses = module(x, 2.0, target=y), loss(plain(x), y)
        for one, update in zip(losses, updates, strict=True):
            one.backward()
            update.step()
            update.zero_grad()
        torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(module.full_state_dict(), plain.state_dict())
    module.eval()
    plain.eval()
    x, y = batch(11)
    with torch.no_grad():
        torch.testing.assert_close(module(x[:6]), plain(x[:6]))
        torch.testing.assert_close(module(x[:6], target=y[:6]), loss(plain(x[:6]), y[:6]))


def trains_by_name(_: int) -> None:
    """The outputs are the model's, by keywords or by position, and lead to gradients."""
    module, plain = named().module(), copy.deepcopy(seeded(Answers))
    updates = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]
    for step in range(3):
        x, labels = batch(step)
        outputs = module(x, labels) if step else module(labels=labels, x=x)
        expected = plain(x, labels)
        torch.testing.assert_close(dict(sorted(outputs.items())), dict(sorted(expected.items())))
        for one, update in zip((outputs, expected), updates, strict=True):
            one["loss"].backward()
            update.step()
            update.zero_grad()
    torch.testing.assert_close(module.full_state_dict(), plain.state_dict())
    module.eval()
    assert list(module(batch(4)[0])) == ["logits"]


@cache
def of_matrices(parallel: str) -> ModuleProgram:
    """Muon's: it looks at whole matrices."""
    x, y = batch(0)
    return partitioner.compile(
        seeded(Classifier),
        x,
        2,
        training=True,
        loss=criterion(),
        target=y,
        optimizer="muon",
        parallel=parallel,
    )


def trains_whole_matrices(parallel: str, _: int) -> None:
    """Ten steps of Muon over matrices, and of AdamW over the rest, equal one process's."""
    module, plain, loss = of_matrices(parallel).module(), seeded(Classifier), criterion()
    updates = []
    for one in (module, plain):
        own = list(one.parameters())
        matrices, rest = [x for x in own if x.ndim == 2], [x for x in own if x.ndim != 2]
        updates.append((torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)))
    for step in range(10):
        x, y = batch(step)
        losses = module(x, target=y), loss(plain(x), y)
        for one, optimizers in zip(losses, updates, strict=True):
            one.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    trained = module.full_state_dict()
    torch.testing.assert_close(trained, plain.state_dict(), atol=2e-4, rtol=0)  # in bfloat16
    assert (trained["up.weight"] - seeded(Classifier).up.weight).abs().max() > 0.01
