"""The way of a call of an operator on DTensors: to PyTorch, to one of ours, or to whole tensors.

A plain tensor beside one in parts (`p.mul_(mask)`, `mean.lerp_(p, 0.1)`) is whole, and all ranks
have the same one. An operator that writes to a plain tensor reads whole tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OutputSharding

from partitioner.backends.torch.dtensors import draws, lists, scalars, views, wholes, writes
from partitioner.backends.torch.dtensors.addresses import correct_addresses
from partitioner.backends.torch.dtensors.data import correct_data
from partitioner.backends.torch.dtensors.parts import check_is_here, whole_spec
from partitioner.backends.torch.dtensors.plain import (
    Ranks,
    note_here,
    note_plain,
    noted_already,
    noted_names,
    taken_notes,
)
from partitioner.backends.torch.dtensors.rules import allow_anomaly_detection, differs_from_whole
from partitioner.backends.torch.dtensors.schemas import written_tensors
from partitioner.backends.torch.dtensors.wholes import (
    MESHES,
    Handler,
    by_pytorch,
    handlers_here,
    mesh_in,
    on_our_meshes,
    on_wholes,
)

#: Whether the user allows plain tensors beside all DTensors, in each thread.
_ALLOWED = local()


def correct_operators(meshes: Iterable[DeviceMesh]) -> None:
    """Compute these operators on DTensors as on whole tensors from now on.

    Args:
        meshes: Those of DTensors beside which plain tensors are whole.
    """
    MESHES.update(meshes)
    note_here()
    _correct_operators()
    torch._C._clear_DTensor_sharding_propagator_cache()  # what this thread did without them


@cache
def _correct_operators() -> None:
    allow_anomaly_detection()
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    for table in (
        draws.HANDLERS,
        scalars.HANDLERS,
        views.HANDLERS,
        wholes.HANDLERS,
        writes.HANDLERS,
    ):
        for operator, handler in table.items():
            handlers[operator] = on_our_meshes(handler, handlers.get(operator))
    _ALLOWED.by_user = dispatcher._allow_implicit_replication
    dispatcher.__class__ = _Dispatcher
    correct_addresses()
    correct_data()


#: Operators of which all calls are looked at for plain tensors.
_WATCHED: set[torch._ops.OpOverload] = set()


def _watch(operator: torch._ops.OpOverload) -> None:
    """Note the plain tensors of all calls of an operator from now on.

    PyTorch's C++ asks once for all tensors of the same sizes and cuts, and ranks may come to such
    tensors in unlike orders.
    """
    handlers = _all_handlers()
    if operator not in handlers:
        _WATCHED.add(operator)
        handlers[operator] = on_our_meshes(_noted, None)


def _all_handlers() -> dict[Any, Any]:
    """Return the handlers of all operators, also of those that this thread runs `by_pytorch`."""
    handlers: dict[Any, Any] = vars(DTensor._op_dispatcher)["_custom_op_handlers"]
    return handlers


def _noted(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    mesh = mesh_in((*args, *kwargs.values()))
    assert mesh is not None
    note_plain(mesh, operator, args, kwargs)
    with noted_already():
        return by_pytorch(operator, args, kwargs)


def _in_turn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Write to one tensor of a list after the other.

    All plain tensors are noted together, as where the operator is watched, which it may be on other
    ranks alone.
    """
    mesh = mesh_in((*args, *kwargs.values()))
    assert mesh is not None
    if note_plain(mesh, operator, args, kwargs):
        _watch(operator)
    with noted_already():
        lists.written_in_turn(operator, args, kwargs)


def compared_notes(meshes: Collection[Ranks]) -> dict[str, int]:
    """The `taken_notes` of plain tensors; operators without any are watched no longer."""
    watched = [*_WATCHED]  # before the names: other threads may add some to both
    names = noted_names()
    notes = taken_notes(meshes)
    for operator in watched:
        if operator._schema.name.partition("::")[2] in names:
            continue
        _WATCHED.discard(operator)
        _all_handlers().pop(operator, None)
    return notes


class _Dispatcher(OpDispatcher):
    """PyTorch's, which takes plain tensors beside those of ranks' modules for whole.

    PyTorch's C++ remembers by layouts how an operator is computed, and a plain tensor has the
    layout of a DTensor that is whole. So an operator that it remembers of such DTensors is computed
    of plain tensors without a question, on all meshes.
    """

    @property
    def _allow_implicit_replication(self) -> bool:
        """Tell whether the user is in PyTorch's `implicit_replication()`."""
        return getattr(_ALLOWED, "by_user", False)

    @_allow_implicit_replication.setter
    def _allow_implicit_replication(self, is_allowed: bool) -> None:
        _ALLOWED.by_user = is_allowed

    @property
    def _custom_op_handlers(self) -> dict[Any, Any]:
        """The handlers of operators, by operator.

        PyTorch's C++ reads them for each operator, and then a flag of its thread that allows plain
        tensors: so the flag is set here, whatever thread an operator is called in.
        """
        torch._C._set_dtensor_allow_implicit_replication(True)
        return handlers_here(vars(self)["_custom_op_handlers"])

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[Any, Any]) -> None:
        vars(self)["_custom_op_handlers"] = handlers

    def _try_replicate_spec_for_scalar_tensor(
        self, op_call: torch._ops.OpOverload, tensor_arg: Tensor, compute_mesh: DeviceMesh
    ) -> DTensorSpec:
        if compute_mesh in MESHES:
            return whole_spec(compute_mesh, tensor_arg)
        replicate = super()._try_replicate_spec_for_scalar_tensor
        return replicate(op_call, tensor_arg, compute_mesh)

    def _propagate_op_sharding_dispatch_slow_path(
        self,
        op_call: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        op_info: OpInfo,
        try_cache: bool,
    ) -> Any:
        """Derive how parts of results follow from parts of tensors; or else the results."""
        rule = super()._propagate_op_sharding_dispatch_slow_path
        if op_info.compute_mesh not in MESHES:
            return rule(op_call, args, kwargs, op_info, try_cache)
        is_of_list = op_call in lists.WRITING
        computed: Handler = on_wholes
        if is_of_list:
            computed = _in_turn if len(args[0]) > 1 else lists.written_on_wholes
        written = written_tensors(op_call, args, kwargs)
        if not all(isinstance(tensor, DTensor) for tensor in written):
            check_is_here(op_info.compute_mesh, "a plain one is computed of: compute it")
            return computed(op_call, args, kwargs)
        try:
            sharding = rule(op_call, args, kwargs, op_info, try_cache)
        except (NotImplementedError, RuntimeError):
            return computed(op_call, args, kwargs)
        if isinstance(sharding, OutputSharding):
            if differs_from_whole(sharding, op_info, args, written):
                return computed(op_call, args, kwargs)
            if is_of_list and len(args[0]) > 1 and sharding.needs_redistribute:
                return computed(op_call, args, kwargs)
        if note_plain(op_info.compute_mesh, op_call, args, kwargs):
            _watch(op_call)
        return sharding

    def _dispatch_fast_path_python_tail(
        self,
        op_call: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute_mesh: DeviceMesh,
        *details: Any,
    ) -> Any:
        """A plain tensor that was written to as a DTensor that is whole; else as PyTorch does.

        Writes to lists are counted.

        PyTorch's C++ keeps the method that it finds first. If it was another class's, it raises a
        bare AssertionError in place of this, after the tensor was written to.
        """
        if op_call in lists.WRITING and compute_mesh in MESHES:
            lists.count_writes(args[0])
        first = args[0] if args else None
        is_plain = isinstance(first, Tensor) and not isinstance(first, DTensor)
        if is_plain and any(one is first for one in written_tensors(op_call, args, {})):
            return first
        tail = super()._dispatch_fast_path_python_tail
        return tail(op_call, args, kwargs, compute_mesh, *details)
