"""Language models whose sequence is cut: each form of attention, ten steps as one process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules.expert_models import BUILDERS
from helpers.plans.sequences import FORMS, forced, is_of_form, keys_of, trains_alike

VOCABULARY, ROWS = 31, 9


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2 * ROWS,
        "use_cache": False,
        **more,
    }


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_common()))


def qwen2() -> nn.Module:
    """Biases of queries, keys and values; tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_common(tie_word_embeddings=True)))


def qwen2_sliding() -> nn.Module:
    """A window of four positions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    return Qwen2ForCausalLM(Qwen2Config(**_common(**window)))


def qwen3() -> nn.Module:
    """Norms of queries and keys; heads wider than their share of the hidden size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_common(head_dim=6)))


def deepseek2() -> nn.Module:
    """Latent attention whose values are narrower than its keys, with experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = _common(
        num_key_value_heads=4,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        topk_group=1,
        n_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    )
    return DeepseekV2ForCausalLM(DeepseekV2Config(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen2 sliding": qwen2_sliding,
    "qwen3": qwen3,
    "mixtral": lambda: BUILDERS["mixtral"](4),
    "qwen moe": lambda: BUILDERS["qwen"](4),
    "deepseek2": deepseek2,
    "deepseek3": lambda: BUILDERS["deepseek"](4),
}


def inputs_of(seed: int) -> dict[str, torch.Tensor]:
    """Two sequences of nine tokens, which no number of devices divides evenly."""
    ids = torch.randint(0, VOCABULARY, (2, ROWS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    module: Any = MODELS[name]()
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("batched_mm")
    return module.train()


@cache
def keys_by_name(name: str) -> tuple[str, ...]:
    return tuple(keys_of(made(name), inputs_of(1)))


#: Each model with each form; each of both on two and on four devices.
CASES = [
    (name, form, (2, 4)[(i + j) % 2])
    for i, name in enumerate(MODELS)
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("name", "form", "devices"), CASES)
@pytest.mark.slow
def test_models_train_alike_with_each_form(name: str, form: str, devices: int) -> None:
    module = made(name)
    keys = () if form == "ring" else keys_by_name(name)
    program = forced(module, inputs_of(1), form, devices, keys, time_limit_s=1)
    assert is_of_form(program, form)
    found = program.verify(seed=0)
    assert found.equal, str(found)
    trains_alike(program, module, inputs_of(2), rate=0.01)
