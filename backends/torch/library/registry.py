"""The library that holds our own PyTorch operators, ``torch.ops.partitioner``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Kept alive: PyTorch drops what a library registered when the library goes.
LIBRARY = torch.library.Library("partitioner", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator that has one form for every device.

    Args:
        schema: ``"name(Tensor x) -> Tensor"``.
        run: What it does.
        fake: Results of the same shapes, strides and types without contents.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"partitioner::{name}", fake, lib=LIBRARY)


def define_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register an operator's gradient, in the form of `torch.library.register_autograd`."""
    torch.library.register_autograd(
        f"partitioner::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )
