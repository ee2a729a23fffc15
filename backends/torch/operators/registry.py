"""Registration of operators under ``torch.ops.partitioner``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Kept alive: PyTorch drops a library's operators with the library.
LIBRARY: Any = torch.library.Library("partitioner", "DEF")  # type: ignore[no-untyped-call]

Kernel = Callable[..., Any]

#: The kernel of each operator, by its only overload; it takes the operator's arguments.
KERNELS: dict[torch._ops.OpOverload, Kernel] = {}


def operator(schema: str, fake: Kernel) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as an operator, for every device.

    Args:
        schema: ``"name(Tensor x, ...) -> Tensor"``.
        fake: Takes the same arguments and returns empty results with the sizes, strides and types
            of the operator's.
    """

    def register(kernel: Kernel) -> Kernel:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partitioner::{name}", fake, lib=LIBRARY)
        KERNELS[getattr(torch.ops.partitioner, name).default] = kernel
        return kernel

    return register


def gradient(name: str, backward: Kernel, setup_context: Kernel) -> None:
    """Register an operator's gradient, in the form of `torch.library.register_autograd`."""
    torch.library.register_autograd(
        f"partitioner::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )
