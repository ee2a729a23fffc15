"""The meaning of a text that names a model; nothing heavy is loaded here."""

from __future__ import annotations

import os
from pathlib import Path


def module_name(text: str) -> str | None:
    """A name for a PyTorch module's file or factory; None for an ONNX model.

    ``model.pt2`` is an exported program; a ``.json`` file, or a folder that has a ``config.json``,
    a configuration of transformers; ``package.module:factory`` a function, where there is no file
    of that name.
    """
    if text.endswith(".pt2"):
        return Path(text).stem
    if config := config_file(text):
        return config.resolve().parent.name if config.name == _CONFIG else config.stem
    words = text.replace(":", ".").split(".")
    factory = text.count(":") == 1 and all(word.isidentifier() for word in words)
    return words[-1] if factory and not os.path.lexists(text) else None


def config_file(text: str) -> Path | None:
    """The configuration of transformers that a text names, itself or by its folder."""
    path = Path(text)
    if path.suffix == ".json":
        return path
    return path / _CONFIG if os.path.isfile(path / _CONFIG) else None  # noqa: PTH113 - any text


def unusable(text: str) -> str | None:
    """Why a file of this name holds no graph, and what to give instead; None for other names."""
    suffix = Path(text).suffix.lower()
    if suffix == ".py":
        name = Path(text).with_suffix("").as_posix().replace("/", ".")
        return (
            "a Python file is no model; write a function in it that returns (module, "
            f"example_inputs), and give {name}:FUNCTION"
        )
    if suffix in _WEIGHTS:
        return (
            f"a {suffix} file holds weights, no graph; give package.module:factory, a function "
            "that returns (module, example_inputs) with the weights loaded, or an .onnx or .pt2 "
            "file that you export"
        )
    return None


_CONFIG = "config.json"
#: Suffixes of files with weights alone. TorchScript has `.pt` too, and is not read either.
_WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".h5")
