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


def _gpt_oss(experts: int) -> nn.Module:
    """With biases, and gates in every second column, which are clamped."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = _common(intermediate_size=24, num_local_experts=experts, head_dim=4)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    module = GptOssForCausalLM(GptOssConfig(**sizes, rope_parameters=rope))
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return module


BUILDERS: Mapping[str, Callable[[int], nn.Module]] = {
    "mixtral": _mixtral,
    "qwen": _qwen,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
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
        biased: Whether biases are added to both products.
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
        biased: bool = False,
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
        self.up_bias, self.down_bias = (
            nn.Parameter(torch.randn(experts, columns) / 3) if biased else None
            for columns in ((2 if gated else 1) * inner, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights, ids = torch.topk(torch.softmax(self.router(x), -1), self.chosen)
        which, rows = ids.reshape(-1), x.repeat_interleave(self.chosen, dim=0)
        flat, scales = which, weights.reshape(-1)
        if self.grouped:
            which, order = torch.sort(flat)
            rows, scales = x[order // self.chosen], scales[order]
            last = len(self.up) - 1
            counts = torch.histc(which.float(), len(self.up), min=0, max=last)
            flat = torch.cumsum(counts, 0, dtype=torch.int32)
        before = self._product(rows, self.up, flat)
        if self.up_bias is not None:
            before.add_(self.up_bias[which])
        if self.gated:
            gate, other = before.chunk(2, -1)
            inner = other * self.act(gate)
        else:
            inner = self.act(before)
        product = self._product(inner, self.down, flat)
        if self.down_bias is not None:
            product = product + self.down_bias[which]
        results = scales.unsqueeze(-1) * product
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


class Mlp(nn.Module):
    """An expert with biases."""

    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class SwiGlu(nn.Module):
    """An expert of three matrices without biases."""

    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class NormedMlp(nn.Module):
    """An expert with a norm and a residual of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x)).tanh()
        return result


class Listed(nn.Module):
    """Experts in an `nn.ModuleList`, all of which compute all tokens.

    Attributes:
        form: How what they give is joined: "add", "stack", "einsum" or "where"; or "choice", where
            each expert chooses its tokens.
        chosen: Experts a token; 0 for all of them, each times its probability.
        shared: An expert for all tokens, if there is one.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = Mlp,
        experts: int = 4,
        form: str = "add",
        chosen: int = 2,
        *,
        shared: bool = False,
        width: int = 8,
    ) -> None:
        super().__init__()
        self.form, self.chosen = form, chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([make() for _ in range(experts)])
        self.shared = make() if shared else None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, ids = scores.topk(self.chosen or 1, -1)
        if self.chosen:
            scores = torch.zeros_like(scores).scatter(-1, ids, weights / weights.sum(-1, True))
        joined = self._joined(x, scores, ids)
        return joined if self.shared is None else joined + self.shared(x)

    def _joined(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        if self.form in ("stack", "einsum"):
            results = torch.stack([expert(x) for expert in self.experts], -2)
            if self.form == "stack":
                return (results * scores.unsqueeze(-1)).sum(-2)
            return torch.einsum("...e,...eh->...h", scores, results)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            score = scores[..., index : index + 1]
            if self.form == "choice":
                best, places = score.squeeze(-1).topk(x.shape[0] // 2)
                out = out.index_add(0, places, expert(x[places]) * best.unsqueeze(-1))
            elif self.form == "where":
                is_chosen = (ids == index).any(-1, keepdim=True)
                out = out + torch.where(is_chosen, expert(x), torch.zeros_like(x)) * score
            else:
                out = out + score * expert(x)
        return out


class ListedNet(nn.Module):
    """Layers of experts in lists between two linear ones; in training with a loss.

    Attributes:
        tied: Whether all layers are the same one.
    """

    def __init__(self, layers: int = 1, *, tied: bool = False, **listed: Any) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(8, 8), nn.Linear(8, 5)
        made = [Listed(**listed) for _ in range(1 if tied else layers)]
        self.layers = nn.ModuleList(made * layers if tied else made)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (8,)))
        scores: Tensor = self.end(x)
        return scores if target is None else F.cross_entropy(scores, target)
