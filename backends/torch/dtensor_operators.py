"""Operators on DTensors that PyTorch (2.13) computes otherwise than on the whole tensor.

A number that is read of a pending sum (`p.norm().item()`, `float(p.sum())`) is that of the rank's
own part. Here it is the whole tensor's, for which all ranks that have parts of it must read it.

A whole tensor that is copied into one in parts gives each rank its part, and so does a matrix that
PyTorch makes in its memory (`torch.nn.init.eye_`). A row or a slice along a cut dim is a copy, into
which a write (`p[3] = 0.`, `p[3] += 1`) would be lost: it is refused.

Random numbers that are drawn into a tensor on the CPU are the next ones of each process. So parts
repeat each other, a generator that is given is not asked, and where parts are of unlike sizes the
ranks' generators go apart: what is whole on all of them would no longer be alike. On accelerators
PyTorch draws as for the whole tensor, and so it is here: each rank draws all and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.faults import named

_aten = torch.ops.aten

#: Operators whose results follow from a tensor's sizes and type alone: those that write into it,
#: and those that make another one. And operators that read it.
_WRITING = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float),
    *(_aten.exponential_.default, _aten.log_normal_.default),
    *(_aten.geometric_.default, _aten.cauchy_.default),
)
_MAKING = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)
_READING = (
    *(_aten.bernoulli.default, _aten.native_dropout.default),
    *(_aten.multinomial.default, _aten.rrelu_with_noise.default),
)
#: Views that PyTorch computes of another cut of the tensor where its own allows none.
VIEWING = (
    *(_aten.diagonal.default, _aten.expand.default, _aten.select.int, _aten.slice.Tensor),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.view.default),
    *(_aten.view.dtype, _aten.view_as_complex.default, _aten.view_as_real.default),
)


@cache
def correct_operators() -> None:
    """From now on, compute these operators on DTensors as on whole tensors."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(_aten._local_scalar_dense.default, _number)
    for operator in (*_WRITING, *_MAKING, *_READING):
        handlers.setdefault(operator, _drawn)
    handlers.setdefault(_aten.copy_.default, _copied)
    handlers.setdefault(_aten.fill_.Tensor, _filled)
    handlers.setdefault(_aten.eye.m_out, _made_in)
    handlers.setdefault(_aten.index_put_.default, _placed)
    for operator in VIEWING:
        handlers.setdefault(operator, _viewed)


def _number(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], _: Mapping[str, Any]
) -> bool | complex:
    tensor: DTensor = args[0]
    whole = tensor._local_tensor
    if tensor.device_mesh.get_coordinate() is None:
        ranks = named(tensor.device_mesh.mesh.flatten().tolist())
        raise BackendError(
            f"rank {dist.get_rank()} has no part of the tensor that a number is read of: read it "
            f"on {ranks}"
        )
    if not all(placement.is_replicate() for placement in tensor.placements):
        with torch.no_grad():
            whole = tensor.full_tensor()
    number: bool | complex = operator(whole)
    return number


def _drawn(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor | tuple[DTensor, ...]:
    tensor: DTensor = args[0]
    if not _is_drawn_here(operator, tensor):
        by_pytorch: DTensor = _by_pytorch(operator, args, kwargs)
        return by_pytorch
    if operator in _READING:
        with torch.no_grad():
            wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in args]
    else:
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        wholes = [whole, *args[1:]]
    drawn = operator(*wholes, **kwargs)
    for formal, one, contents in zip(operator._schema.arguments, args, wholes, strict=False):
        if formal.alias_info is not None and isinstance(one, DTensor):
            one._local_tensor.copy_(_part(one._spec, contents))
    if operator in _WRITING:
        return tensor
    if isinstance(drawn, Tensor):
        return _in_parts(tensor, drawn)
    return tuple(_in_parts(tensor, one) for one in drawn)


def _by_pytorch(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator as PyTorch computes it on DTensors."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def _copied(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Of a plain tensor, which is whole, its part."""
    tensor, source = args[:2]
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor) or _is_sum(tensor):
        by_pytorch: Tensor = _by_pytorch(operator, args, kwargs)
        return by_pytorch
    whole = source.expand(tensor.shape)
    if tensor.device_mesh.get_coordinate() is not None:
        tensor._local_tensor.copy_(_part(tensor._spec, whole), *args[2:], **kwargs)
    return tensor


def _filled(_: torch._ops.OpOverload, args: tuple[Any, ...], __: Mapping[str, Any]) -> DTensor:
    """With a number."""
    tensor, number = args
    if _is_sum(tensor):
        raise BackendError("a number cannot be written into the terms of a sum over ranks")
    tensor._local_tensor.fill_(number.full_tensor() if isinstance(number, DTensor) else number)
    filled: DTensor = tensor
    return filled


def _made_in(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """Of a matrix that is made in the memory of a tensor, its part."""
    tensor: DTensor = kwargs["out"]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor.copy_(operator(*args, **{**kwargs, "out": whole}))
    return tensor


def _placed(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Values at places of the whole tensor, of which each rank takes its part (`p[mask] = 0.`)."""
    tensor = args[0]
    if not isinstance(tensor, DTensor) or _is_sum(tensor):
        by_pytorch: Tensor = _by_pytorch(operator, args, kwargs)
        return by_pytorch
    if tensor.device_mesh.get_coordinate() is not None:
        with torch.no_grad():
            wholes = pytree.tree_map_only(DTensor, DTensor.full_tensor, args)
        tensor._local_tensor.copy_(_part(tensor._spec, operator(*wholes, **kwargs)))
    return tensor


def _viewed(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """As PyTorch does; what lies in other memory than the tensor is marked as a copy."""
    tensor: DTensor = args[0]
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    try:
        views = _by_pytorch(operator, args, kwargs)
    except RuntimeError as error:
        if is_whole or "Sharding propagation failed" not in str(error):
            raise
        # PyTorch has no rule for this view of what is cut
        with torch.no_grad():
            whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        views = operator(whole, *args[1:], **kwargs)
    if tensor.device_mesh.get_coordinate() is None:  # there is nothing of it here
        return views
    memory = _memory(tensor)
    return pytree.tree_map_only(
        DTensor, lambda view: view if _memory(view) == memory else _Copy.of(view), views
    )


def _memory(tensor: DTensor) -> int:
    """Where this rank's part lies, even if it has no elements."""
    memory: int = tensor._local_tensor.untyped_storage()._cdata
    return memory


class _Copy(DTensor):
    """A copy that PyTorch made where a view of a tensor was asked for: it may only be read.

    What is computed of it is as of any DTensor, but for its views, which are copies too. So no
    other tensor is looked at before it is written to.
    """

    @classmethod
    def of(cls, tensor: DTensor) -> _Copy:
        """The same, marked as a copy."""
        return cls(tensor._local_tensor, tensor._spec, requires_grad=False)

    def unmarked(self) -> DTensor:
        """The same, as PyTorch made it."""
        made: DTensor = DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares it without its class
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator that does not write to a copy.

        Raises:
            BackendError: It does, and the write would be lost.
        """
        kwargs = kwargs or {}
        formals = func._schema.arguments
        for formal, actual in [
            *zip(formals, args, strict=False),
            *((formal, kwargs.get(formal.name)) for formal in formals),
        ]:
            is_written = formal.alias_info is not None and formal.alias_info.is_write
            if is_written and pytree.tree_any(lambda leaf: isinstance(leaf, cls), actual):
                raise BackendError(
                    "a part of a tensor that is cut over ranks cannot be written to where it is "
                    "cut: change the whole one under torch.no_grad(), as by "
                    "w = p.detach().full_tensor(); w[3] = 0.0; p.copy_(w)"
                )
        args, kwargs = pytree.tree_map_only(cls, cls.unmarked, (args, kwargs))
        results = func(*args, **kwargs)
        if func._schema._is_view_op():
            return pytree.tree_map_only(DTensor, cls.of, results)
        return results


def _is_sum(tensor: DTensor) -> bool:
    """Whether ranks have terms of it, which are still to be added up."""
    return any(placement.is_partial() for placement in tensor.placements)


def _is_drawn_here(operator: torch._ops.OpOverload, tensor: DTensor) -> bool:
    """Whether it lies on the CPU, and this rank has a part of it that follows from its place.

    PyTorch refuses to draw into the terms of a sum.
    """
    is_here = tensor.device_mesh.get_coordinate() is not None
    is_known = operator not in _WRITING or not _is_sum(tensor)
    return tensor.device.type == "cpu" and is_here and is_known


def _in_parts(tensor: DTensor, whole: Tensor) -> DTensor:
    """A whole tensor cut as another one, which may be a sum to be added up.

    One of other sizes is whole on every rank.
    """
    is_alike = whole.shape == tensor.shape
    placements = tuple(
        p if is_alike and not p.is_partial() else Replicate() for p in tensor.placements
    )
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(tensor.device_mesh, placements, meta)
    part = _part(spec, whole).clone() if is_alike else whole  # no view, which keeps the whole
    made: DTensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _part(spec: DTensorSpec, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut so, which may be a view of it."""
    with torch.no_grad():
        replicated = DTensor.from_local(
            whole, spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False
        )
        return replicated.redistribute(placements=spec.placements)._local_tensor
