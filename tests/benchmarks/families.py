"""Families of models, each compiled as it is, without a word about it: what is cut, proven, equal.

    OMP_NUM_THREADS=1 python tests/benchmarks/families.py [--only WORD] [--devices 2 4]
        [--seconds 300]

Rows are classes of `transformers` with small configs and random weights, two modules of PyTorch and
ONNX networks, for inference and training. Each row and number of devices is a process of its own
that compiles the model into parts of operators (`strategy="intra"`, one axis of the mesh), proves
its rank programs, runs the ranks on this machine beside the whole model, and compiles once more
with the plan in the cache. Columns: the share of FLOPs in operators that are cut, the proof, the
comparison, CPU seconds to compile (without imports), and those of the second compilation.

A line that begins with `!` is of a model that did not trace, or is not proven or equal. Exits
with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import Loss
from helpers.modules.unets import UNet
from partitioner import examples

WORDS = 128


class Family(NamedTuple):
    """A model, made with random weights, and its example inputs by keyword or in order."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    trains: bool = True


def words(*more: str) -> dict[str, Tensor]:
    """A batch of 8 x 16 ids under each of some names besides `input_ids` and `labels`."""
    ids = torch.randint(3, WORDS, (8, 16))
    return dict.fromkeys(("input_ids", *more, "labels"), ids)


def images(size: int) -> dict[str, Tensor]:
    """A batch of 4 images with a class each."""
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.tensor([0, 1, 1, 0])}


def text(name: str, **config: Any) -> Family:
    """A language model whose labels are its ids."""
    return Family(lambda: made(name, vocab_size=WORDS, **config), words)


def decoder(name: str, **config: Any) -> Family:
    """A decoder of two layers, 64 wide, with four heads."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "use_cache": False,
    }
    return text(name, **sizes, **config)


def gated(name: str, **config: Any) -> Family:
    """A decoder as the Llama one, with two heads of keys and a width within of 96."""
    sizes = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    return decoder(name, **sizes, **config)


def encoder(name: str, **config: Any) -> Family:
    """An encoder of two layers, 64 wide, with four heads, that fills in words."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    return text(name, **sizes, **config)


def vision(name: str, size: int = 32, **config: Any) -> Family:
    """A network that names images."""
    return Family(lambda: made(name, num_labels=2, **config), lambda: images(size))


def made(name: str, **config: Any) -> nn.Module:
    """The model of a class's name, without dropout, which would be drawn on each rank."""
    model = getattr(transformers, name)
    result: nn.Module = model(model.config_class(**config))
    for module in result.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return result


class Lstm(nn.Module):
    """Two LSTM layers over 12 steps, and a line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(x)[0][:, -1])
        return result


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIDES = dict(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
    decoder_start_token_id=2,
    **SPECIAL,
)
PATCHES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
TOWERS = {
    "text_config": dict(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=16,
        projection_dim=32,
        **SPECIAL,
    ),
    "vision_config": dict(PATCHES, projection_dim=32),
}


def both() -> dict[str, Tensor]:
    """Four images beside four texts."""
    ids = torch.randint(3, WORDS, (4, 16))
    ids[:, -1] = SPECIAL["eos_token_id"]
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32)}


def sounds() -> dict[str, Tensor]:
    """Four spectrograms of 80 bands and the words said."""
    return {
        "input_features": torch.randn(4, 80, 64),
        "labels": torch.randint(3, WORDS, (4, 12)),
    }


WAVES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}
FAMILIES: Mapping[str, Family] = {
    "albert": encoder("AlbertForMaskedLM", embedding_size=32),
    "bart": Family(
        lambda: made("BartForConditionalGeneration", vocab_size=WORDS, use_cache=False, **SIDES),
        words,
    ),
    "beit": vision("BeitForImageClassification", **PATCHES),
    "bert": encoder("BertForMaskedLM"),
    "bloom": text("BloomForCausalLM", hidden_size=64, n_layer=2, n_head=4, use_cache=False),
    "clip": Family(lambda: made("CLIPModel", **TOWERS), both, trains=False),
    "cohere": gated("CohereForCausalLM"),
    "convnextv2": vision(
        "ConvNextV2ForImageClassification", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]
    ),
    "deberta-v2": encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c"]),
    "dinov2": vision("Dinov2ForImageClassification", **PATCHES),
    "distilbert": text("DistilBertForMaskedLM", dim=64, n_layers=2, n_heads=4, hidden_dim=96),
    "efficientnet": vision("EfficientNetForImageClassification", 64),
    "electra": encoder("ElectraForMaskedLM", embedding_size=32),
    "falcon": decoder("FalconForCausalLM"),
    "gemma2": gated("Gemma2ForCausalLM"),
    "gpt2": text("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, use_cache=False),
    "gpt-neox": decoder("GPTNeoXForCausalLM", intermediate_size=96),
    "gptj": text("GPTJForCausalLM", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, use_cache=False),
    "granite": decoder("GraniteForCausalLM", intermediate_size=96, num_key_value_heads=2),
    "jamba": decoder(
        "JambaForCausalLM",
        intermediate_size=96,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=8,
    ),
    "levit": vision("LevitForImageClassification", 224),
    "llama": gated("LlamaForCausalLM"),
    "lstm": Family(Lstm, lambda: torch.randn(8, 12, 32)),
    "mamba": text(
        "MambaForCausalLM", hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False
    ),
    "marian": Family(
        lambda: made("MarianMTModel", vocab_size=WORDS, use_cache=False, **SIDES), words
    ),
    "mistral": gated("MistralForCausalLM"),
    "mobilenet-v2": vision("MobileNetV2ForImageClassification", 64),
    "mobilevit": vision("MobileViTForImageClassification", 64),
    "modernbert": encoder("ModernBertForMaskedLM", **SPECIAL, cls_token_id=1, sep_token_id=2),
    "olmo2": decoder("Olmo2ForCausalLM", intermediate_size=96),
    "opt": decoder("OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64),
    "phi": decoder("PhiForCausalLM", intermediate_size=96),
    "poolformer": vision(
        "PoolFormerForImageClassification", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]
    ),
    "qwen3": gated("Qwen3ForCausalLM"),
    "regnet": vision("RegNetForImageClassification", 64, depths=[1, 1, 2, 1]),
    "roberta": encoder("RobertaForMaskedLM", **SPECIAL),
    "segformer": vision("SegformerForImageClassification", 64),
    "siglip": Family(lambda: made("SiglipModel", **TOWERS), both, trains=False),
    "stablelm": decoder("StableLmForCausalLM", intermediate_size=96, num_key_value_heads=2),
    "swin": vision(
        "SwinForImageClassification",
        image_size=32,
        patch_size=2,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "t5": Family(
        lambda: made(
            "T5ForConditionalGeneration",
            vocab_size=WORDS,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        words,
    ),
    "unet": Family(lambda: UNet(8, 2), lambda: torch.randn(4, 3, 32, 32)),
    "vit": vision("ViTForImageClassification", **PATCHES),
    "wav2vec2": Family(
        lambda: made("Wav2Vec2ForCTC", **WAVES),
        lambda: {"input_values": torch.randn(4, 1600)},
        trains=False,
    ),
    "whisper": Family(
        lambda: made(
            "WhisperForConditionalGeneration",
            vocab_size=WORDS,
            max_source_positions=32,
            max_target_positions=64,
            use_cache=False,
            **SIDES,
        ),
        sounds,
    ),
}


def rows() -> list[tuple[str, str]]:
    """Each row's model and what it is compiled for."""
    modules = [
        (name, kind)
        for name, family in FAMILIES.items()
        for kind in ("inference", "training")
        if kind == "inference" or family.trains
    ]
    return modules + [(name, "ONNX") for name in examples.NAMES]


def one(name: str, kind: str, devices: int) -> dict[str, Any]:
    """Compile, prove, run and compile again; what came of it."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "cluster": f"{devices}xideal",
        "strategy": "intra",
        "mesh": {"m": devices},
    }
    model: Any
    if kind == "ONNX":
        model, inputs = examples.build(name), None
    else:
        family = FAMILIES[name]
        model, inputs = family.make(), family.inputs()
        model.train(kind == "training")
        if kind == "training":
            options |= {"training": True, "optimizer": "sgd"}
            model = model if isinstance(inputs, dict) else Loss(model)
        elif isinstance(inputs, dict):
            inputs.pop("labels", None)
            if name in ("bart", "marian", "t5", "whisper"):
                first = next(iter(inputs.values()))
                inputs["decoder_input_ids"] = torch.randint(3, WORDS, (len(first), 12))
    seconds = []
    for _ in range(2):
        began = time.process_time()
        result = partitioner.compile(model, inputs, **options)
        seconds.append(time.process_time() - began)
    began = time.monotonic()
    proof, equal = result.verify(symbolic=True), result.verify()
    return {
        "share": result.summary["sharded_flops_share"],
        "proof": str(proof).splitlines()[0],
        "equal": str(equal).splitlines()[0],
        "first_s": seconds[0],
        "second_s": seconds[1],
        "verified_s": time.monotonic() - began,
    }


def in_process(name: str, kind: str, devices: int, limit_s: float) -> dict[str, Any]:
    """`one` in a process of its own, with a cache of its own; `error` where it did not end well."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--one", name, kind, str(devices)]
        environment = {**os.environ, "PARTITIONER_CACHE": cache}
        try:
            done = subprocess.run(
                command,
                check=False,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {limit_s:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "KIND", "DEVICES"))
    asked = parser.parse_args()
    if asked.one:
        name, kind, devices = asked.one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(one(name, kind, int(devices))))
        return 0
    wrong = 0
    print(f"{'':2}{'model':14}{'for':11}{'ranks':>5}{'cut':>7}{'compile':>9}{'again':>8}  results")
    for name, kind in rows():
        if asked.only not in f"{name} {kind}":
            continue
        for devices in asked.devices:
            row = in_process(name, kind, devices, asked.seconds)
            start = f"{name:14}{kind:11}{devices:5}"
            if "error" in row:
                wrong += 1
                print(f"! {start}  {row['error']}", flush=True)
                continue
            is_right = row["proof"].startswith("proven") and row["equal"].startswith("equal")
            wrong += not is_right
            said = "proven, equal" if is_right else f"{row['proof']}; {row['equal']}"
            print(
                f"{' ' if is_right else '!'} {start}{row['share']:7.1%}"
                f"{row['first_s']:7.1f} s{row['second_s']:6.1f} s  {said}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
