"""Operators that read whole tensors: each rank keeps its part of what they write or return.

They are those that PyTorch has no rule for (`p.triu_()`, `torch.poisson(p)`), and those whose rule
gives something else than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.backends.torch.dtensors.copies import marked
from partitioner.backends.torch.dtensors.parts import in_parts, outline_of, part_of_whole, whole_of
from partitioner.backends.torch.dtensors.plain import note_plain
from partitioner.backends.torch.dtensors.schemas import written_tensors

#: Computes a call of an operator, with its arguments by position and by name.
Handler: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
#: The meshes of ranks' modules. Meshes are equal if they have the same ranks and names of axes.
MESHES: set[DeviceMesh] = set()


def on_wholes(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator on whole tensors; each rank has its part of what it writes and returns."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    note_plain(next(tensors).device_mesh, operator, args, kwargs)
    compute = partial(_parts_of_results, operator, args, kwargs)
    return marked(compute, args[0]) if operator._schema._is_view_op() else compute()


def _parts_of_results(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    first = next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor))
    is_here = first.device_mesh.get_coordinate() is not None
    with torch.no_grad():
        wholes = {
            key: whole_of(one) if is_here else outline_of(one) for key, one in tensors.items()
        }
        results = operator(
            *pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], args),
            **pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], dict(kwargs)),
        )
    written = {id(wholes[id(one)]): one for one in written_tensors(operator, args, kwargs)}
    for one in written.values() if is_here else ():
        if isinstance(one, DTensor):
            one._local_tensor.copy_(part_of_whole(one._spec, wholes[id(one)]))

    def returned(result: Tensor) -> Tensor:
        if id(result) in written:
            return written[id(result)]
        return in_parts(first, result)

    return pytree.tree_map_only(Tensor, returned, results)


def by_pytorch(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator as PyTorch computes it on DTensors."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def on_our_meshes(ours: Handler, pytorchs: Handler | None) -> Handler:
    """A handler that asks ours of tensors on the meshes of ranks' modules, and PyTorch of others.

    Args:
        pytorchs: PyTorch's own, if it has one.
    """

    def computed(
        operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        handler = ours if _mesh_in((*args, *kwargs.values())) in MESHES else pytorchs or by_pytorch
        return handler(operator, args, kwargs)

    return computed


def _mesh_in(arguments: Iterable[Any]) -> DeviceMesh | None:
    """That of the first DTensor of a call; None if there is none."""
    for argument in arguments:
        if isinstance(argument, DTensor):
            return argument.device_mesh
        if isinstance(argument, list | tuple) and (mesh := _mesh_in(argument)) is not None:
            return mesh
    return None


#: PyTorch's handlers of these are of images whose last dim is cut.
HANDLERS: Mapping[Any, Handler] = {
    torch.ops.aten.convolution.default: on_wholes,
    torch.ops.aten.convolution_backward.default: on_wholes,
}
