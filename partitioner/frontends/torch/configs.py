"""Modules of transformers by their configuration alone, on the meta device: without weights.

A configuration is data: its classes are transformers' own, code that it names (`auto_map`) is
never run, and nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partitioner.foundations.files import read_text
from partitioner.frontends.errors import FrontendError
from partitioner.ir.errors import OptionError, did_you_mean, naming

#: Tokens of a sequence where nobody says how many, if the model takes so many.
_LENGTH = 2048
#: Samples of a second of sound, of which a model gets one where nobody says how many.
_SAMPLES = 16_000
#: Names of numbers of parts of a model, each of which is made by itself.
_COUNT = re.compile(r"(^|_)n?(layers?|depths?|blocks?|experts?|stages?)($|_(?!.*(size|dim)))")
#: The most parts of a kind: beyond any model, and making them would not end.
_MOST_PARTS = 4_096
#: Ends of the names of classes whose labels are a class for each sample, and for each token.
_BY_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_BY_TOKEN = (
    *("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration"),
    "ForTokenClassification",
)


def open_config(
    file: Path, sizes: Mapping[str, int], *, training: bool
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module that a configuration describes and example inputs, all on the meta device.

    Args:
        file: ``config.json`` as transformers writes it.
        sizes: "batch" (1 unless given) and "length", of a sequence of tokens or of samples of
            sound (2,048 tokens or the model's most, or a second of sound).
        training: Give labels, too, with which the module returns its loss first.

    Raises:
        FrontendError: The file is no configuration, transformers lacks its model, or takes inputs
            or labels that are not known here.
        OptionError: A size has another name, or the model has no such dim.
    """
    data = _data(file)
    config = _config(file, data)
    if not isinstance(config.dtype, torch.dtype | None):
        raise FrontendError(f"{file}: dtype is {config.dtype!r}, not a type of PyTorch")
    kind = _class(file, data, type(config))
    with naming(f"{file}: making {kind.__name__}", FrontendError), torch.device("meta"), _offline():
        for part in (config, config.get_text_config()):
            part.use_cache = False  # keys and values would be results of the call
            part.return_dict = True
        module = _made(kind, config)
    module.train(training)
    if training:  # scores are no result of a step
        module.register_forward_hook(lambda module, args, outputs: outputs.loss)  # noqa: ARG005
    inputs = _Inputs(file, module, dict(sizes))
    with naming(f"{file}: example inputs of {kind.__name__}", FrontendError):
        example = inputs.features()
        if training:
            example |= inputs.labels()
    for name in sizes.keys() - inputs.asked:
        what = f"has no dim {name!r}{did_you_mean(name, inputs.asked)}"
        dims = " and ".join(sorted(inputs.asked))
        raise OptionError(f"{file}: the call of {kind.__name__} {what}; its dims are {dims}")
    return module, example


def _data(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise FrontendError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise FrontendError(
            f"{file}: not a configuration of transformers, which is a JSON object with a model_type"
        )
    return data


def _config(file: Path, data: dict[str, Any]) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise FrontendError(
            f"{file} needs transformers, which is not installed: pip install "
            "'graph-partitioner[huggingface]'"
        ) from error
    _check_counts(file, data)
    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        from transformers import __version__

        own = ", and code that it names (auto_map) is not run" if "auto_map" in data else ""
        hint = did_you_mean(kind, CONFIG_MAPPING)
        raise FrontendError(
            f"{file}: transformers {__version__} has no model_type {kind!r}{hint}{own}"
        )
    if data.get("quantization_config"):
        raise FrontendError(
            f"{file}: models are planned in the type of their config, not quantized: remove "
            "quantization_config"
        )
    with naming(str(file), FrontendError), _offline():
        return CONFIG_MAPPING[kind].from_dict(data)


def _check_counts(file: Path, data: Mapping[str, Any]) -> None:
    """Refuse numbers of layers, and of other parts, that no model has."""
    for name, value in data.items():
        if isinstance(value, dict):
            _check_counts(file, value)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int) and count > _MOST_PARTS and _COUNT.search(name):
                why = f"is over {_MOST_PARTS:,}, more than any model has"
                raise FrontendError(f"{file}: {name} {why}")


def _class(file: Path, data: Mapping[str, Any], config: type) -> Any:
    """The class that `architectures` names first; without any, the model without a head."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    names = data.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FrontendError(f"{file}: architectures is {names!r}, not a list of names of classes")
    auto: Any = MODEL_MAPPING
    kind: Any = getattr(transformers, names[0], None) if names else auto.get(config, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model or kind.config_class is not config:
        name = names[0] if names else None
        raise FrontendError(
            f"{file}: transformers has no class {name!r} of a {data['model_type']!r} model: name "
            "one in architectures"
        )
    return kind


def _made(kind: Any, config: Any) -> nn.Module:
    dtype = config.dtype or torch.float32
    way = "sdpa" if kind._supports_sdpa else "eager"
    made: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=way)
    return made


@contextmanager
def _offline() -> Iterator[None]:
    """Refuse what a configuration may have its class fetch from the hub, such as a backbone."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class _Inputs:
    """Example inputs of a module of transformers; `asked` has the names of their free dims."""

    def __init__(self, file: Path, module: Any, sizes: dict[str, int]) -> None:
        self.file, self.module, self.config = file, module, module.config
        self.name = type(module).__name__
        self.sizes = sizes
        self.asked: set[str] = set()
        self.takes = inspect.signature(module.forward).parameters

    def features(self) -> dict[str, torch.Tensor]:
        """Whatever the module computes its results from."""
        main = self.module.main_input_name
        makers = {
            "input_ids": self._tokens,
            "pixel_values": self._pixels,
            "input_values": self._sound,
            "input_features": self._spectrum,
        }
        if main not in makers:
            raise FrontendError(
                f"{self.file}: {self.name} takes {main}, for which no example is known; give "
                "package.module:factory, a function that returns (module, example_inputs)"
            )
        example = {main: makers[main]()}
        if self.config.is_encoder_decoder and "decoder_input_ids" in self.takes:
            example["decoder_input_ids"] = self._tokens()
        if main == "input_ids" and "pixel_values" in self.takes and not self.module.can_generate():
            example["pixel_values"] = self._pixels()  # two encoders, as of CLIP
        return example

    def labels(self) -> dict[str, torch.Tensor]:
        """The labels that the module takes to return its loss."""
        if self.name.endswith("ForQuestionAnswering"):
            return {name: self._numbers() for name in ("start_positions", "end_positions")}
        if self.name.endswith(_BY_SAMPLE):
            return {"labels": self._numbers()}
        if self.name.endswith(_BY_TOKEN):
            return {"labels": self._tokens()}
        raise FrontendError(
            f"{self.file}: no labels are known for {self.name}, with which it would return a loss; "
            "give package.module:factory, a function that returns (module, example_inputs)"
        )

    def _size(self, name: str, otherwise: int) -> int:
        self.asked.add(name)
        return self.sizes.get(name, otherwise)

    def _numbers(self, *shape: int) -> torch.Tensor:
        batch = self._size("batch", 1)
        return torch.empty((batch, *shape), dtype=torch.long, device="meta")

    def _floats(self, *shape: int) -> torch.Tensor:
        batch = self._size("batch", 1)
        return torch.empty((batch, *shape), dtype=self.module.dtype, device="meta")

    def _tokens(self) -> torch.Tensor:
        text = self.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or _LENGTH
        return self._numbers(self._size("length", min(_LENGTH, most)))

    def _sound(self) -> torch.Tensor:
        return self._floats(self._size("length", _SAMPLES))

    def _spectrum(self) -> torch.Tensor:
        config = self.config
        if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
            raise FrontendError(
                f"{self.file}: the size of the sound that {self.name} takes is not known; give "
                "package.module:factory, a function that returns (module, example_inputs)"
            )
        return self._floats(config.num_mel_bins, 2 * config.max_source_positions)

    def _pixels(self) -> torch.Tensor:
        config = getattr(self.config, "vision_config", self.config)
        size = getattr(config, "image_size", None) or 224  # of convolutional nets, as trained
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return self._floats(getattr(config, "num_channels", 3), height, width)
