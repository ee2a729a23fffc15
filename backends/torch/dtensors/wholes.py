"""Operators that read whole tensors: each rank keeps its part of what they write or return.

They are those that PyTorch has no rule for (`p.triu_()`, `torch.poisson(p)`), and those whose rule
gives something else than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import local
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.backends.torch.dtensors.copies import marked, parts_of_results
from partitioner.backends.torch.dtensors.plain import note_plain

#: Computes a call of an operator, with its arguments by position and by name.
Handler: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
#: The meshes of ranks' modules. Meshes are equal if they have the same ranks and names of axes.
MESHES: set[DeviceMesh] = set()
#: In each thread: the handlers that it asks, if those are not all.
_HERE = local()


def on_wholes(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator on whole tensors; each rank has its part of what it writes and returns."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    note_plain(next(tensors).device_mesh, operator, args, kwargs)
    compute = partial(parts_of_results, operator, args, kwargs)
    is_view = operator._schema._is_view_op()
    return marked(compute, operator, args, kwargs) if is_view else compute()


def by_pytorch(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator as PyTorch computes it on DTensors."""
    outer = getattr(_HERE, "handlers", None)
    handlers = DTensor._op_dispatcher._custom_op_handlers.copy()
    handlers.pop(operator, None)  # another thread may watch it no longer
    _HERE.handlers = handlers
    try:
        return operator(*args, **kwargs)
    finally:
        _HERE.handlers = outer


def handlers_here(handlers: dict[Any, Handler]) -> dict[Any, Handler]:
    """The handlers that this thread asks: not those of operators that it is in `by_pytorch` of."""
    return getattr(_HERE, "handlers", None) or handlers


def on_our_meshes(ours: Handler, pytorchs: Handler | None) -> Handler:
    """A handler that asks ours of tensors on the meshes of ranks' modules, and PyTorch of others.

    Args:
        pytorchs: PyTorch's own, if it has one.
    """

    def computed(
        operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        handler = ours if mesh_in((*args, *kwargs.values())) in MESHES else pytorchs or by_pytorch
        return handler(operator, args, kwargs)

    return computed


def mesh_in(arguments: Iterable[Any]) -> DeviceMesh | None:
    """Return the mesh of the first DTensor of a call; None if there is none."""
    for argument in arguments:
        if isinstance(argument, DTensor):
            return argument.device_mesh
        if isinstance(argument, list | tuple) and (mesh := mesh_in(argument)) is not None:
            return mesh
    return None


#: PyTorch's handlers of these are of images whose last dim is cut.
HANDLERS: Mapping[Any, Handler] = {
    torch.ops.aten.convolution.default: on_wholes,
    torch.ops.aten.convolution_backward.default: on_wholes,
}
