"""Small mixtures of experts: well-known architectures, and a layer of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - registers its grouped products
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from helpers.modules.torch_models import Model

VOCABULARY, WIDTH, ROWS = 32, 16, 6


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": ROWS,
        "num_experts_per_tok": 2,
        "use_cache": False,
        **more,
    }


def _mixtral(experts: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _common(intermediate_size=24, num_local_experts=experts)
    return MixtralForCausalLM(MixtralConfig(**sizes))


def _qwen(experts: int) -> nn.Module:
    """With an expert that all tokens share, behind a gate."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    widths = {"intermediate_size": 24, "moe_intermediate_size": 24}
    sizes = _common(**widths, shared_expert_intermediate_size=24, num_experts=experts)
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))


def _deepseek(experts: int) -> nn.Module:
    """Latent attention, a dense layer, then one whose router chooses groups of experts first."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = _common(
        num_hidden_layers=2,
        num_key_value_heads=4,
        intermediate_size=24,
        moe_intermediate_size=24,
        n_routed_experts=experts,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1 if experts % 2 else 2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))


BUILDERS: Mapping[str, Callable[[int], nn.Module]] = {
    "mixtral": _mixtral,
    "qwen": _qwen,
    "deepseek": _deepseek,
}


def expert_model(
    name: str, experts: int, form: str, *, batch: int, training: bool = False
) -> Model:
    """A language model with a layer of experts, the same at every call.

    Args:
        name: One of `BUILDERS`.
        experts: Number of experts.
        form: "batched_mm" or "grouped_mm", how the model computes them.
        batch: Number of sequences.
        training: With labels, and in training mode.
    """
    torch.manual_seed(0)
    module: Any = BUILDERS[name](experts)
    module.set_experts_implementation(form)
    ids = torch.randint(0, VOCABULARY, (batch, ROWS))
    labels = {"labels": ids.clone()} if training else {}
    return Model(module.train(training), {"input_ids": ids, **labels})


class Experts(nn.Module):
    """A norm, a router and experts.

    Attributes:
        chosen: Experts a token.
        gated: Whether half of the first product is a gate.
        transposed: Whether weights are stored as (experts, input, output).
        grouped: Whether rows are sorted by expert, in place of gathered weights.
    """

    def __init__(
        self,
        width: int = 8,
        inner: int = 6,
        experts: int = 5,
        chosen: int = 2,
        *,
        gated: bool = True,
        transposed: bool = False,
        grouped: bool = False,
        act: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.chosen, self.gated, self.transposed, self.grouped = chosen, gated, transposed, grouped
        self.act = act
        up, down = ((2 if gated else 1) * inner, width), (width, inner)
        if transposed:
            up, down = up[::-1], down[::-1]
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, *up) / 3)
        self.down = nn.Parameter(torch.randn(experts, *down) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights, ids = torch.topk(torch.softmax(self.router(x), -1), self.chosen)
        flat, rows = ids.reshape(-1), x.repeat_interleave(self.chosen, dim=0)
        scales = weights.reshape(-1)
        if self.grouped:
            sorted_ids, order = torch.sort(flat)
            rows, scales = x[order // self.chosen], scales[order]
            last = len(self.up) - 1
            counts = torch.histc(sorted_ids.float(), len(self.up), min=0, max=last)
            flat = torch.cumsum(counts, 0, dtype=torch.int32)
        before = self._product(rows, self.up, flat)
        if self.gated:
            gate, other = before.chunk(2, -1)
            inner = other * self.act(gate)
        else:
            inner = self.act(before)
        results = scales.unsqueeze(-1) * self._product(inner, self.down, flat)
        if self.grouped:
            results = results[torch.argsort(order)]
        return results.view(x.shape[0], self.chosen, -1).sum(1)

    def _product(self, rows: Tensor, weights: Tensor, which: Tensor) -> Tensor:
        """`which` are ids of rows, or, in the grouped form, the ends of groups."""
        if self.grouped:
            matrices = weights if self.transposed else weights.transpose(1, 2)
            narrow = rows.dtype == torch.bfloat16  # others cannot be exported in PyTorch's own form
            grouped = F.grouped_mm if narrow else torch.ops.transformers.grouped_mm_fallback
            product: Tensor = grouped(rows, matrices, offs=which)
            return product
        if self.transposed:
            return torch.bmm(rows.unsqueeze(1), weights[which]).squeeze(1)
        return torch.bmm(weights[which], rows.unsqueeze(-1)).squeeze(-1)


class Loss(nn.Module):
    """The mean square of a module's result beside a target."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.inner(x) - target).square().mean()
