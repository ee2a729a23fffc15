"""Decoders with caches: one step of a language model, whose caches it takes and gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.api.compiled.base import Compiled
from partitioner.ir.plan import PlacedNode, resolve

VOCABULARY = 31


def llama(attention: str = "sdpa", layers: int = 2, **more: Any) -> nn.Module:
    """A small Llama: four query heads over two heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(layers, attention), **more)).eval()


def qwen(attention: str = "sdpa", layers: int = 2, **more: Any) -> nn.Module:
    """A small Qwen, with norms of queries and keys, and heads wider than their share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_sizes(layers, attention), head_dim=6, **more)
    return Qwen3ForCausalLM(config).eval()


def _sizes(layers: int, attention: str) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": attention,
    }


class _Caches:
    """Caches of a model's layers, in the form that its attention asks for."""

    is_sliding: Sequence[bool]

    def __init__(self, held: Sequence[Tensor], position: Tensor, *, grow: bool) -> None:
        self.held, self.position, self.grow = [*held], position, grow
        self.is_sliding = [False] * (len(held) // 2)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a step; returns all."""
        for index, new in ((2 * layer, key), (2 * layer + 1, value)):
            past = self.held[index]
            if self.grow:
                self.held[index] = torch.cat((past, new), dim=2)
            else:
                self.held[index] = past.index_copy(2, self.position, new)
        return self.held[2 * layer], self.held[2 * layer + 1]


class Step(nn.Module):
    """A step over a few tokens: ids, their positions, caches -> logits, caches.

    Caches are keys and values of each layer in turn, (batch, heads, length, channels). Tokens are
    written at their positions or, if caches grow, behind all others.
    """

    def __init__(self, model: nn.Module, *, grow: bool = False) -> None:
        super().__init__()
        self.model, self.grow = model, grow

    def forward(self, ids: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        held = _Caches(caches, position, grow=self.grow)
        size = caches[0].shape[2] + (ids.shape[1] if self.grow else 0)
        seen = (torch.arange(size) <= position[:, None])[None, None]
        mask = seen
        if self.model.config._attn_implementation == "eager":
            dtype = caches[0].dtype
            zeros = torch.zeros(seen.shape, dtype=dtype)
            mask = zeros.masked_fill(seen.logical_not(), torch.finfo(dtype).min)
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position[None],
            past_key_values=held,
            use_cache=True,
        ).logits
        return (logits, *held.held)

    def example(self, size: int, at: int, rows: int = 1, batch: int = 1) -> tuple[Tensor, ...]:
        """Arguments: tokens from a position on, and caches of so many positions filled before."""
        config = self.model.config
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        length = at if self.grow else size
        dtype = next(self.model.parameters()).dtype
        shape = (batch, config.num_key_value_heads, length, width)
        caches = [torch.randn(shape) for _ in range(2 * config.num_hidden_layers)]
        for cache in caches:
            cache[:, :, at:] = 0
        ids = torch.randint(config.vocab_size, (batch, rows))
        return (ids, torch.arange(at, at + rows), *(cache.to(dtype) for cache in caches))


class Static(nn.Module):
    """A model whose caches are buffers of a fixed length: ids, position -> logits."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.step = Step(model)
        for index, cache in enumerate(self.step.example(length, 0)[2:]):
            self.register_buffer(f"cache{index}", torch.zeros_like(cache))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        held = [*self.buffers(recurse=False)]
        logits, *following = self.step(ids, position, *held)
        for cache, new in zip(held, following, strict=True):
            cache.copy_(new)
        return logits


class Attend(nn.Module):
    """Attention of a few queries over a cache, by the products and the softmax of its lines."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ value


class Keeping(nn.Module):
    """Layers of attention that keep their caches as buffers: x, position -> x."""

    def __init__(self, width: int, length: int, layers: int = 2, batch: int = 1) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.layers = layers
        for layer in range(layers):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{layer}", torch.zeros(batch, 2, length, width // 2))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in range(self.layers):
            q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in self.projections)
            keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            seen = torch.arange(keys.shape[2]) <= position[:, None]
            heads = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + heads.transpose(1, 2).flatten(2)
        return x


def over_keys(program: Compiled) -> list[PlacedNode]:
    """The nodes of attention in parts that multiply or reduce along the keys."""
    nodes = (p for p in resolve(program.graph, program.plan) if "/keys/" in p.node.name)
    reducing = ("aten::amax", "aten::sum.dim_IntList", "ReduceMax", "ReduceSum")
    return [p for p in nodes if p.rule and (p.rule.is_product or p.node.op in reducing)]


def are_cut_along_keys(program: Compiled, axis: str = "cp") -> bool:
    """Whether a plan has attention in parts, all of whose products and reductions lie in parts.

    Scores are ``.. m n`` of ``.. m d, .. d n``; of reductions and the other product no result has
    the keys.
    """
    nodes = over_keys(program)
    cuts = [{n for n, at in p.layouts.items() if axis in at.axes} for p in nodes]
    kinds = [
        any(p.rule and (p.rule.factors[n].reduce or n == "n") for n in cut)
        for p, cut in zip(nodes, cuts, strict=True)
    ]
    return bool(nodes) and all(kinds)


def writes(program: Compiled) -> list[PlacedNode]:
    """The nodes that write to caches."""
    ops = ("aten::index_copy", "aten::cat", "aten::index_put", "Concat")
    nodes = resolve(program.graph, program.plan)
    return [p for p in nodes if p.node.op in ops and p.node.writes[0] in program.graph.outputs]
