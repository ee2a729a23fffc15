"""The trace of a few layers, extended by the others, is the trace of all layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module
from partitioner.frontends.torch.tracing import joint, repeated_layers
from partitioner.frontends.torch.tracing.capture import export_module
from partitioner.frontends.torch.tracing.repeated_layers import KEPT

LAYERS, WIDTH = 8, 6


class Block(nn.Module):
    """Two linear maps behind a norm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x) + bias))) * self.scale


class Attention(Block):
    """The same behind attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, 2, WIDTH // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return super().forward(x, bias)


class Deep(nn.Module):
    """Embeddings, blocks and a tied head."""

    def __init__(self, layers: int = LAYERS, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self.norm(x) @ self.embed.weight.T).logsumexp(-1).mean()


class Biased(Deep):
    """Blocks that share a trained bias, whose gradient is a sum over them.

    Embeddings are not trained, so the input of the first block has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), self.bias * 2
        for block in self.blocks:
            x = block(x, bias)
        return self.loss(x)


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
        for block in self.more:
            y = block(y, x)
        return self.loss(y)


class HalfFrozen(Deep):
    """Weights of the lower blocks are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:4]:
            block.requires_grad_(False)


class Masked(Deep):
    """Each block has a mask that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            del block.scale
            block.scale = torch.full((WIDTH,), 0.5)


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
    """All blocks but the first read what that one gives: it is none of the repeated ones."""

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
        self.blocks[5].norm.eps = 1e-3


class Overwritten(Deep):
    """Each block overwrites what the one before needs for its gradients."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).clone()
        for block in self.blocks:
            x += torch.nn.functional.gelu(x * block.down(block.up(x)))
        return self.loss(x)


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
    monkeypatch.setattr(repeated_layers, "LEAST", 8)


@pytest.fixture
def layers_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each joint trace had."""
    counts: list[int] = []
    trace = joint._trace

    def counted(program: ExportedProgram, *args: Any, **kwargs: Any) -> joint.Joint:
        targets = [node.target for node in program.graph.nodes]
        counts.append(targets.count(torch.ops.aten.gelu.default))
        return trace(program, *args, **kwargs)

    monkeypatch.setattr(joint, "_trace", counted)
    return counts


IDS = torch.arange(10).reshape(2, 5)


def traced(module: nn.Module, *, training: bool) -> ModuleGraph:
    return trace_module(module, Example((IDS,), {}), ModuleOptions(training=training)).traced


def exported(module: nn.Module) -> ExportedProgram:
    return export_module(module, (IDS,), {}, training=True)


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
    assert (one.call.results, one.stored) == (other.call.results, other.stored)
    assert (one.gradients, one.fixed) == (other.gradients, other.fixed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Deep(block=Attention),
        Biased,
        Masked,
        pytest.param(FromFirst, marks=pytest.mark.slow),
    ],
    ids=["attention", "shared bias", "plain attributes", "shared result"],
)
def test_repeated_layers_are_traced_a_few_times(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    module = make()
    graph = traced(module, training=True)
    assert layers_traced == [KEPT + isinstance(module, FromFirst)]
    assert_same(graph, whole(monkeypatch, module))


def test_layers_are_traced_a_few_times_for_inference(
    monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    module = Deep().eval()
    graph = traced(module, training=False)
    assert layers_traced == [KEPT]
    assert_same(graph, whole(monkeypatch, module, training=False))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Shared, Counted])
def test_all_layers_are_traced_where_the_trace_of_few_is_not_regular(
    make: Callable[[], nn.Module], layers_traced: list[int]
) -> None:
    traced(make(), training=True)
    assert layers_traced == [KEPT, LAYERS]


def test_what_is_refused_is_said_of_all_layers(layers_traced: list[int]) -> None:
    with pytest.raises(FrontendError, match=f"expected version {LAYERS - 1} instead"):
        traced(Overwritten(), training=True)
    assert layers_traced[0] == KEPT
    assert layers_traced[-1] == LAYERS


def test_the_longer_of_two_stacks_is_shortened() -> None:
    layers = repeated_layers.repeated_layers(exported(Two()))
    assert layers is not None
    assert layers.left_out == LAYERS + 1 - KEPT
    assert {name.split(".")[0] for name in layers.weights.place} == {"more"}


@pytest.mark.parametrize("make", [HalfFrozen, Tied, Collected, TwoBack, Uneven])
def test_other_layers_are_not_taken_for_repeated(make: Callable[[], nn.Module]) -> None:
    assert repeated_layers.repeated_layers(exported(make())) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers_have_the_graphs_of_whole_traces(
    name: str, monkeypatch: pytest.MonkeyPatch, layers_traced: list[int]
) -> None:
    import transformers

    sizes = {"vocab_size": 29, "num_hidden_layers": KEPT + 1, "use_cache": False}
    if name == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = transformers.GPT2Config(
            n_embd=16, n_head=2, n_positions=8, **sizes, **dropout
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, **sizes, **heads)
        model = transformers.LlamaForCausalLM(config)
    module = LossOf(model)
    graph = traced(module, training=True)
    assert len(layers_traced) == 1
    assert_same(graph, whole(monkeypatch, module))
    assert len(layers_traced) == 2


class LossOf(nn.Module):
    """The loss of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss
