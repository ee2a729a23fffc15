"""Whose a source file is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import partitioner
from partitioner.backends.torch.agreeing.source_files import is_of_torch, is_of_user

PACKAGES = Path(torch.__file__).parents[1]
OURS = Path(partitioner.__file__).parents[1]
STANDARD = Path(contextlib.__file__).parent


@pytest.mark.parametrize(
    "file",
    [
        PACKAGES / "torchvision/ops/boxes.py",
        PACKAGES / "torch.py",
        OURS / "partitioner-x/train.py",
        OURS / "partitioner_models.py",
        OURS / "tests/train.py",
        "torch_models/net.py",
        "torchtrain.py",
        STANDARD.with_name(f"{STANDARD.name}-mine") / "train.py",
        STANDARD / "site-packages/theirs/net.py",
        STANDARD / "dist-packages/theirs/net.py",
        "/home/torch/train.py",
    ],
)
def test_files_beside_packages_are_the_users(file: Path | str) -> None:
    assert is_of_user(str(file))
    assert not is_of_torch(str(file))


@pytest.mark.parametrize(
    "file", [torch.__file__, PACKAGES / "torch/nn/modules/linear.py", "torch/nn/functional.py"]
)
def test_files_of_torch(file: Path | str) -> None:
    assert is_of_torch(str(file))
    assert not is_of_user(str(file))


@pytest.mark.parametrize(
    "file",
    [partitioner.__file__, is_of_user.__code__.co_filename, contextlib.__file__, "<string>"],
)
def test_files_of_nobody_else(file: str) -> None:
    assert not is_of_user(file)
    assert not is_of_torch(file)
