"""Configurations of transformers are modules without weights, with inputs of asked sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import partitioner
from partitioner.cli.main import main
from partitioner.frontends.torch.configs import open_config
from partitioner.ir.errors import OptionError, PartitionerError

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 48,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TEXT}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}
SEQ2SEQ = {
    **dict.fromkeys(("d_model", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "vocab_size": 96,
}
SOUND = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 30}
CONVOLUTIONS = {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [8]}

#: Class, type, fields, and the shapes of the inputs for training with a batch of 3 and 16 tokens.
FAMILIES: list[tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    ("LlamaForCausalLM", "llama", TEXT, {"input_ids": (3, 16), "labels": (3, 16)}),
    ("BertForMaskedLM", "bert", TEXT, {"input_ids": (3, 16), "labels": (3, 16)}),
    ("BertForSequenceClassification", "bert", TEXT, {"input_ids": (3, 16), "labels": (3,)}),
    (
        *("BertForQuestionAnswering", "bert", TEXT),
        {"input_ids": (3, 16), "start_positions": (3,), "end_positions": (3,)},
    ),
    (
        *("T5ForConditionalGeneration", "t5", SEQ2SEQ),
        {"input_ids": (3, 16), "decoder_input_ids": (3, 16), "labels": (3, 16)},
    ),
    ("ViTForImageClassification", "vit", IMAGE, {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
    (
        *("WhisperForConditionalGeneration", "whisper", {**SEQ2SEQ, **SOUND}),
        {"input_features": (3, 8, 40), "decoder_input_ids": (3, 16), "labels": (3, 16)},
    ),
]


def written(folder: Path, **fields: Any) -> Path:
    """A config.json with these fields."""
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


@pytest.mark.parametrize(("name", "kind", "fields", "shapes"), FAMILIES)
def test_inputs_are_those_of_the_class(
    name: str, kind: str, fields: dict[str, Any], shapes: dict[str, Any], tmp_path: Path
) -> None:
    file = written(tmp_path, architectures=[name], model_type=kind, **fields)
    sizes = {"batch": 3} if kind == "vit" else {"batch": 3, "length": 16}
    module, example = open_config(file, sizes, training=True)
    assert type(module).__name__ == name
    assert module.training
    assert {key: tuple(value.shape) for key, value in example.items()} == shapes
    assert {tensor.device.type for tensor in module.parameters()} == {"meta"}
    _, for_inference = open_config(file, sizes, training=False)
    labels = {"labels", "start_positions", "end_positions"}
    assert {*for_inference} == {*shapes} - labels


def test_two_encoders_get_both_inputs_and_sound_its_samples(tmp_path: Path) -> None:
    both = {"text_config": TEXT, "vision_config": IMAGE}
    file = written(tmp_path, architectures=["CLIPModel"], model_type="clip", **both)
    _, example = open_config(file, {"length": 7}, training=False)
    shapes = {key: tuple(value.shape) for key, value in example.items()}
    assert shapes == {"input_ids": (1, 7), "pixel_values": (1, 3, 32, 32)}
    fields = {**TEXT, **CONVOLUTIONS, "num_feat_extract_layers": 1}
    file = written(tmp_path, architectures=["Wav2Vec2ForCTC"], model_type="wav2vec2", **fields)
    _, example = open_config(file, {}, training=False)
    assert {key: tuple(value.shape) for key, value in example.items()} == {
        "input_values": (1, 16_000)
    }


def test_sizes_and_types_are_the_models_own_unless_given(tmp_path: Path) -> None:
    file = written(tmp_path, **LLAMA, torch_dtype="bfloat16")
    module, example = open_config(file, {}, training=False)
    assert example["input_ids"].shape == (1, 48)
    assert {tensor.dtype for tensor in module.parameters()} == {torch.bfloat16}
    file = written(tmp_path, model_type="bert", **TEXT)  # no architectures: without a head
    module, _ = open_config(file, {}, training=False)
    assert type(module).__name__ == "BertModel"


WRONG = [
    ({}, "not a configuration of transformers"),
    ({"model_type": "lama"}, "has no model_type 'lama'; did you mean"),
    ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, r"\(auto_map\) is not run"),
    ({**LLAMA, "architectures": ["Trainer"]}, "no class 'Trainer' of a 'llama' model"),
    ({**LLAMA, "architectures": ["BertModel"]}, "no class 'BertModel' of a 'llama' model"),
    ({**LLAMA, "architectures": "LlamaModel"}, "architectures is 'LlamaModel', not a list"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "not quantized"),
    ({**LLAMA, "num_attention_heads": "four"}, "four|num_attention_heads"),
    ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is over 4,096, more than any"),
    ({**LLAMA, "text_config": {"decoder_layers": 10**25}}, "decoder_layers is over 4,096"),
    ({"model_type": "resnet", "depths": [1, 10**9]}, "depths is over 4,096"),
    ({"model_type": "qwen3_moe", "num_experts": 10**9}, "num_experts is over 4,096"),
    ({**LLAMA, "text_config": "x"}, "making LlamaForCausalLM: AttributeError"),
    ({**LLAMA, "max_position_embeddings": -1}, "example inputs of LlamaForCausalLM: RuntimeError"),
    ({**LLAMA, "dtype": 7}, "dtype is 7, not a type of PyTorch"),
    (
        {"architectures": ["DetrForObjectDetection"], "model_type": "detr"},
        "no labels are known for DetrForObjectDetection|OfflineModeIsEnabled|timm",
    ),
]


@pytest.mark.parametrize(("fields", "why"), WRONG)
def test_what_is_no_model_is_refused_by_one_line(
    fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    file = written(tmp_path, **fields)
    with pytest.raises(PartitionerError, match=why) as error:
        open_config(file, {}, training=True)
    assert "\n" not in str(error.value)


def test_a_size_that_no_input_has_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, **LLAMA)
    with pytest.raises(OptionError, match="no dim 'lenght'; did you mean 'length'"):
        open_config(file, {"lenght": 3}, training=False)
    with pytest.raises(OptionError, match="shapes is for ONNX models"):
        partitioner.compile(file, devices=2, cluster="ideal", shapes={"input_ids": (1, 3)})


def test_inputs_for_which_there_is_no_memory_are_refused_by_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, **LLAMA)
    with pytest.raises(PartitionerError, match="making the example inputs: RuntimeError") as error:
        partitioner.compile(file, devices=2, cluster="ideal", dims={"length": 10**17})
    assert "\n" not in str(error.value)


def test_a_training_step_of_a_configuration_is_planned_and_proven(tmp_path: Path) -> None:
    program = partitioner.compile(
        str(written(tmp_path, **LLAMA)),
        devices=2,
        cluster="ideal",
        training=True,
        parallel="dp",
        dims={"batch": 4, "length": 8},
    )
    results = [one for one in program.graph.outputs if not one.endswith(".gradient")]
    assert len(results) == 1  # the loss, without the scores
    assert program.verify(symbolic=True)


def test_the_command_writes_the_plan_of_a_folder_and_proves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    written(tmp_path / "tiny", **LLAMA)
    out = tmp_path / "out"
    sizes = ["--dim", "batch=2", "--dim", "length=8"]
    command = [str(tmp_path / "tiny"), "--devices", "2", "--cluster", "ideal", *sizes]
    assert main([*command, "--parallel", "tp", "-o", str(out)]) == 0
    written_text = capsys.readouterr()
    assert "a configuration has no weights" in written_text.err
    assert not [*out.glob("rank*")]
    assert json.loads((out / "graph.json").read_text())["name"] == "tiny"
    assert main(["verify", str(out), "--symbolic"]) == 0
    assert capsys.readouterr().out.startswith("proven: 2 ranks")
    assert main(["show", str(out)]) == 0
    assert main([*command, "--parallel", "tp", "--shape", "input_ids=2,8"]) == 2
    assert "--shape is for ONNX models" in capsys.readouterr().err
