"""Hooks that all modules have."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

#: Where PyTorch keeps them.
_TABLES = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def global_hooks() -> Iterator[str]:
    """The names of the hooks of all modules that are not PyTorch's own."""
    for table in _TABLES:
        for hook in vars(nn.modules.module)[table].values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                yield getattr(hook, "__qualname__", repr(hook))
