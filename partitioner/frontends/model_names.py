"""The meaning of a text that names a model; nothing heavy is loaded here."""

from __future__ import annotations

import os
from pathlib import Path


def module_name(text: str) -> str | None:
    """A name for a PyTorch module's file or factory; None for an ONNX model.

    ``model.pt2`` is an exported program; ``package.module:factory`` a function, where there is no
    file of that name.
    """
    if text.endswith(".pt2"):
        return Path(text).stem
    words = text.replace(":", ".").split(".")
    factory = text.count(":") == 1 and all(word.isidentifier() for word in words)
    return words[-1] if factory and not os.path.lexists(text) else None
