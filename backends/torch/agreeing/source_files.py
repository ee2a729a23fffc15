"""Whose a source file is: PyTorch's, this package's, Python's or the user's."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent
_PARTITIONER = next(folder for folder in Path(__file__).parents if folder.name == "partitioner")
_STANDARD = Path(sysconfig.get_path("stdlib"))
#: Folders in that of the standard library that hold other packages.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_of_torch(file: str) -> bool:
    """Test whether a file is PyTorch's, which names some of its files from its own folder on."""
    path = Path(file)
    return path.is_relative_to(_TORCH) or path.is_relative_to(_TORCH.name)


def is_of_user(file: str) -> bool:
    """Test whether a file is the user's, or of another package that the user calls.

    Code objects have the name of it. Code without a file, such as "<string>", is nobody's.
    """
    path = Path(file)
    is_standard = path.is_relative_to(_STANDARD) and not _INSTALLED & {*path.parts}
    is_ours = path.is_relative_to(_PARTITIONER)
    return not (file.startswith("<") or is_standard or is_ours or is_of_torch(file))
