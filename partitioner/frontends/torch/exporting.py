"""Replacements that hold while a module is exported for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import _get_dispatch_mode_pre_dispatch

from partitioner.frontends.errors import FrontendError


def writing() -> Any:
    """The mode that writes an exported graph; None where none is written."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return _get_dispatch_mode_pre_dispatch(proxy)  # type: ignore[no-untyped-call]


def is_writing() -> bool:
    """Tell whether an exported graph is written."""
    return writing() is not None


def refused(
    function: Callable[..., Any], why: str, where: Callable[[], bool] = is_writing
) -> Callable[..., Any]:
    """The function, whose calls are refused while a graph is written."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if where():
            raise FrontendError(why)
        return function(*args, **kwargs)

    return call


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def replaced(replacements: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of classes and modules, by (owner, name), inside of the block."""
    with ExitStack() as stack:
        for (owner, name), replacement in replacements.items():
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:  # what a class inherits is inherited again after it
                stack.callback(delattr, owner, name)
            setattr(owner, name, replacement)
        yield
