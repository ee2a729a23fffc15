"""The tensors of a call that an operator's schema says something of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def writes_to_a_list(schema: Any) -> bool:
    """Test whether the first argument is a list of tensors that the operator writes to."""
    first = schema.arguments[0] if schema.arguments else None
    if first is None or not isinstance(first.type, torch.ListType):
        return False
    is_of_tensors = isinstance(first.type.getElementType(), torch.TensorType)
    return is_of_tensors and first.alias_info is not None and bool(first.alias_info.is_write)


def calls_in_turn(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments for each tensor of a list: of other lists, and rows of numbers, its own."""

    def own(argument: Any, index: int) -> Any:
        is_row = isinstance(argument, Tensor) and argument.ndim == 1
        is_list = isinstance(argument, list | tuple) or is_row
        return argument[index : index + 1] if is_list else argument

    for index in range(len(args[0])):
        named = {name: own(argument, index) for name, argument in kwargs.items()}
        yield tuple(own(argument, index) for argument in args), named
