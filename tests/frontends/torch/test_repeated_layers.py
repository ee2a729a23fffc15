"""The trace of a few layers, extended by the others, is the trace of all layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.frontends.torch import joint, repeated_layers
from partitioner.frontends.torch.graph import ModuleGraph
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.repeated_layers import KEPT
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module

LAYERS, WIDTH = 9, 6


class Block(nn.Module):
    """Attention of two heads and two linear maps, each behind a norm, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, WIDTH // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(mixed) * self.scale
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Deep(nn.Module):
    """Embeddings, blocks and a tied head."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self.norm(x) @ self.embed.weight.T).logsumexp(-1).mean()


class Biased(Deep):
    """Blocks that share a trained bias, whose gradient is a sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 5, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), self.bias * 2
        for block in self.blocks:
            x = block(x, bias)
        return self.loss(x)


class Frozen(Deep):
    """Embeddings without gradients: the first block has none for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class Shared(Deep):
    """One block that runs again and again: all its gradients are sums."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(LAYERS):
            x = self.blocks[0](x)
        return self.loss(x)


class Two(Deep):
    """Two stacks of blocks, the second with a bias that depends on what the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([Block() for _ in range(LAYERS + 1)])

    def forward(self, ids: Tensor) -> Tensor:
        x = y = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        bias = (x @ x.transpose(-1, -2)).unsqueeze(1)
        for block in self.more:
            y = block(y, bias)
        return self.loss(y)


class HalfFrozen(Deep):
    """Weights of the lower blocks are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:4]:
            block.requires_grad_(False)


class Tied(Deep):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[LAYERS - 1].up.weight = self.blocks[0].up.weight


class Collected(Deep):
    """What follows reads the results of all blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x, total = self.embed(ids), []
        for block in self.blocks:
            x = block(x)
            total.append(x)
        return self.loss(torch.stack(total).sum(0))


class FromFirst(Deep):
    """All blocks but the first read what the first one gives."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.blocks[0](self.embed(ids))
        for block in self.blocks[1:]:
            x = block(x) + first
        return self.loss(x)


class TwoBack(Deep):
    """Each block reads the results of the two before it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = before = self.embed(ids)
        for block in self.blocks:
            x, before = block(x) + before, x
        return self.loss(x)


class Uneven(Deep):
    """One block in the middle has another epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].norms[0].eps = 1e-3


class Counted(Deep):
    """Each block counts its calls in a buffer, which is a result of the trace."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            block.calls.add_(1.0)
            x = block(x)
        return self.loss(x)


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "LEAST", 20)


@pytest.fixture
def layers_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each joint trace had: queries are cut from each block's projection."""
    counts: list[int] = []
    trace = joint._trace

    def counted(program: ExportedProgram, *args: Any, **kwargs: Any) -> joint.Joint:
        targets = [node.target for node in program.graph.nodes]
        counts.append(targets.count(torch.ops.aten.softmax.int))
        return trace(program, *args, **kwargs)

    monkeypatch.setattr(joint, "_trace", counted)
    return counts


def traced(module: nn.Module, *, training: bool) -> ModuleGraph:
    ids = torch.arange(10).reshape(2, 5)
    return trace_module(module, Example((ids,), {}), ModuleOptions(training=training)).traced


def whole(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, *, training: bool = True
) -> ModuleGraph:
    """The graph of a module whose layers are all traced."""
    with monkeypatch.context() as patch:
        patch.setattr(joint, "repeated_layers", lambda _: None)
        return traced(module, training=training)


def assert_same(one: ModuleGraph, other: ModuleGraph) -> None:
    """Names and numbers included: twins are the forward nodes of the numbers of autograd."""
    pairs = [(one.graph, other.graph)]
    if one.graph.backward:
        pairs.append((one.offered, other.offered))
    for graph, expected in pairs:
        assert [node.name for node in graph.nodes] == [node.name for node in expected.nodes]
        assert graph.nodes == expected.nodes
        assert graph.types == expected.types
        assert graph.twins == expected.twins
        assert graph.digest == expected.digest
    assert (one.results, one.stored) == (other.results, other.stored)
    assert (one.gradients, one.fixed) == (other.gradients, other.fixed)


@pytest.mark.parametrize("make", [Deep, Biased, Frozen])
def test_repeated_layers_are_traced_a_few_times(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    module = make()
    graph = traced(module, training=True)
    assert layers_traced == [KEPT]
    assert_same(graph, whole(monkeypatch, module))


def test_layers_are_traced_a_few_times_for_inference(
    monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    module = Deep().eval()
    graph = traced(module, training=False)
    assert layers_traced == [KEPT]
    assert_same(graph, whole(monkeypatch, module, training=False))


def test_the_longer_of_two_stacks_is_shortened(
    monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    graph = traced(Two(), training=True)
    assert layers_traced[0] == KEPT + LAYERS
    assert_same(graph, whole(monkeypatch, Two()))


@pytest.mark.parametrize(
    "make", [Shared, HalfFrozen, Tied, Collected, FromFirst, TwoBack, Uneven, Counted]
)
def test_other_layers_are_all_traced(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    module = make()
    graph = traced(module, training=True)
    assert layers_traced[-1] == LAYERS
    assert_same(graph, whole(monkeypatch, module))
