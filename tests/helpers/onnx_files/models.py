"""Small random `transformers` models exported to ONNX, for tests and benchmarks.

Static shapes: batch 2, sequence 16 (ViT: 32 x 32 pixels in patches of 8).
Weights are random from a fixed seed. Needs the `test` extra.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

BATCH = 2
SEQUENCE = 16
VOCABULARY = 128
OPSET = 20

_SEED = 0

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        build: Builds the model, with weights from torch's global generator.
        arguments: Name and contents of each input: `tokens` or `pixels`.
        output: Attribute of the model's result that is exported.
    """

    build: Callable[[], torch.nn.Module]
    arguments: tuple[tuple[str, str], ...]
    output: str


class _OneOutput(torch.nn.Module):
    """Calls a model by keyword and returns one tensor, the output of the exported graph."""

    def __init__(self, model: torch.nn.Module, source: Source) -> None:
        super().__init__()
        self.model = model
        self.source = source

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        names = (name for name, _ in self.source.arguments)
        result: torch.Tensor = getattr(
            self.model(**dict(zip(names, inputs, strict=True))), self.source.output
        )
        return result


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return transformers.BertModel(config)


def _vit() -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def _t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # the exporter fails on its scaled dot product
    return model


def _mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # the default is a custom operator
    return model


_TOKENS = (("input_ids", "tokens"),)

SOURCES = {
    "bert": Source(_bert, _TOKENS, "last_hidden_state"),
    "gpt2": Source(_gpt2, _TOKENS, "logits"),
    "llama": Source(_llama, _TOKENS, "logits"),
    "mixtral": Source(_mixtral, _TOKENS, "logits"),
    "t5": Source(_t5, (*_TOKENS, ("decoder_input_ids", "tokens")), "logits"),
    "vit": Source(_vit, (("pixel_values", "pixels"),), "logits"),
}


def module(name: str) -> torch.nn.Module:
    """The model of `SOURCES[name]` in evaluation mode, with the same weights every time."""
    source = SOURCES[name]
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return _OneOutput(source.build(), source).eval()


def inputs(name: str, *, seed: int = _SEED) -> dict[str, Array]:
    """Random inputs: tokens are int64 (2, 16), pixels float32 (2, 3, 32, 32)."""
    random = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for argument, contents in SOURCES[name].arguments:
        if contents == "tokens":
            drawn[argument] = random.integers(0, VOCABULARY, (BATCH, SEQUENCE), np.int64)
        else:
            drawn[argument] = random.standard_normal((BATCH, 3, 32, 32), np.float32)
    return drawn


def expected(name: str, feeds: dict[str, Array]) -> Array:
    """The output of the torch model itself for these inputs."""
    with torch.no_grad():
        result: Array = module(name)(*map(torch.from_numpy, feeds.values())).numpy()
    return result


def export(name: str, path: Path) -> None:
    """Export `SOURCES[name]` to `path` as the dynamo exporter gives it; takes 5 to 10 s."""
    feeds = inputs(name)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and transformers
        program = torch.onnx.export(
            module(name),
            tuple(map(torch.from_numpy, feeds.values())),
            input_names=list(feeds),
            output_names=["output"],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise RuntimeError(f"torch.onnx.export returned nothing for {name}")
    program.save(path, external_data=False)
