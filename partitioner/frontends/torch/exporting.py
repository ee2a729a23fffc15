"""Replacements that hold while a module is exported for a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch


def writing() -> Any:
    """The mode that writes an exported graph; None where none is written."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return _get_dispatch_mode_pre_dispatch(proxy)  # type: ignore[no-untyped-call]


@contextmanager
def replaced(replacements: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of classes and modules, by (owner, name), inside of the block."""
    with ExitStack() as stack:
        for (owner, name), replacement in replacements.items():
            stack.enter_context(_one_replaced(owner, name, replacement))
        yield


@contextmanager
def _one_replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute; one that a class inherits is inherited again after it."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
