"""The tensors of a call that an operator's schema says something of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def written_tensors(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that an operator writes to."""
    formals = operator._schema.arguments
    actuals = [
        *zip(formals, args, strict=False),
        *((formal, kwargs.get(formal.name)) for formal in formals),
    ]
    return [
        leaf
        for formal, actual in actuals
        if formal.alias_info is not None and formal.alias_info.is_write
        for leaf in pytree.tree_leaves(actual)
        if isinstance(leaf, Tensor)
    ]
