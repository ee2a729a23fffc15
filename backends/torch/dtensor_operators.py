"""Operators on DTensors that PyTorch (2.13) computes otherwise than on the whole tensor.

A number that is read of a pending sum (`p.norm().item()`, `float(p.sum())`) is that of the rank's
own part. Here it is the whole tensor's, for which all ranks that have parts of it must read it.

A whole tensor that is copied into one in parts gives each rank its part, and so does a matrix that
PyTorch makes in its memory (`torch.nn.init.eye_`). A row or a slice along a cut dim is a copy, to
which a write (`p[3] = 0.`, `p[3].mul_(2)`) would be lost: it is refused.

Random numbers that are drawn into a tensor on the CPU are the next ones of each process. So parts
repeat each other, a generator that is given is not asked, and where parts are of unlike sizes the
ranks' generators go apart: what is whole on all of them would no longer be alike. On accelerators
PyTorch draws as for the whole tensor, and so it is here: each rank draws all and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


#: Views of a tensor that PyTorch copies where they need another layout than the tensor has.
_VIEWING = (
    *(_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default),
    *(_aten.unbind.int, _aten.view.default, _aten.unfold.default, _aten.diagonal.default),
)
#: Methods of tensors whose names end as those of writes do.
_NO_WRITES = frozenset({"requires_grad_", "detach_", "rename_"})


class _Copy(DTensor):
    """What PyTorch copied of a DTensor, where a plain tensor would give a view of its memory."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse to write to it; what shares its memory is a copy as well.

        Raises:
            BackendError: The function writes to it.
        """
        options = kwargs or {}
        name = func.__name__
        is_written = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
        if is_written or name.startswith("__i") or name in ("__setitem__", "__set__"):
            _check_are_no_copies(args[0])
        _check_are_no_copies(options.get("out"))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **options)
        own = {_memory(one) for one in args if isinstance(one, _Copy)}
        for one in _tensors(result):
            if isinstance(one, DTensor) and _memory(one) in own:
                one.__class__ = _Copy
        return result


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
    for operator in (_aten.zero_.default, _aten.fill_.Scalar):
        handlers.setdefault(operator, _emptied)
    for operator in _VIEWING:
        handlers.setdefault(operator, _viewed)


def _viewed(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """As PyTorch does; what it copied is marked, because writes to it would be lost."""
    result = _by_pytorch(operator, args, kwargs)
    tensor: DTensor = args[0]
    for one in _tensors(result):
        if isinstance(one, DTensor) and _memory(one) != _memory(tensor):
            one.__class__ = _Copy
    return result


def _tensors(result: Any) -> Sequence[Any]:
    """The tensors of a result: itself, or its members."""
    return result if isinstance(result, list | tuple) else (result,)


def _memory(tensor: DTensor) -> int:
    """The address of the memory of the rank's part."""
    return tensor._local_tensor.untyped_storage().data_ptr()


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
    if operator in _WRITING:
        _check_are_no_copies(tensor)
    if operator in _READING:
        with torch.no_grad():
            wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in args]
    else:
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        wholes = [whole, *args[1:]]
    drawn = operator(*wholes, **kwargs)
    for formal, one, contents in zip(operator._schema.arguments, args, wholes, strict=False):
        if formal.alias_info is not None and isinstance(one, DTensor):
            one._local_tensor.copy_(_part(one, contents))
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
    _check_are_no_copies(tensor)
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor) or _is_sum(tensor):
        by_pytorch: Tensor = _by_pytorch(operator, args, kwargs)
        return by_pytorch
    whole = source.expand(tensor.shape)
    if tensor.device_mesh.get_coordinate() is not None:
        tensor._local_tensor.copy_(_part(tensor, whole), *args[2:], **kwargs)
    return tensor


def _filled(_: torch._ops.OpOverload, args: tuple[Any, ...], __: Mapping[str, Any]) -> DTensor:
    """With a number."""
    tensor, number = args
    _check_are_no_copies(tensor)
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


def _emptied(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """As PyTorch does, if the tensor is no copy."""
    _check_are_no_copies(args[0])
    filled: DTensor = _by_pytorch(operator, args, kwargs)
    return filled


def _is_sum(tensor: DTensor) -> bool:
    """Whether ranks have terms of it, which are still to be added up."""
    return any(placement.is_partial() for placement in tensor.placements)


def _check_are_no_copies(written: Any) -> None:
    """Refuse to write to what PyTorch copied where it should be a view: the write would be lost.

    Functions of Python are refused by `_Copy`; an assignment calls operators on a part that it
    takes itself.

    Args:
        written: A tensor, several, or something else.

    Raises:
        BackendError: There is a copy.
    """
    if any(isinstance(one, _Copy) for one in _tensors(written)):
        raise BackendError(
            "a part of a tensor that is cut over ranks cannot be written to where it is cut: "
            "change the whole one, as by w = p.detach().full_tensor(); w[3] = 0.0; p.copy_(w)"
        )


def _is_drawn_here(operator: torch._ops.OpOverload, tensor: DTensor) -> bool:
    """Whether it lies on the CPU, and this rank has a part of it that follows from its place.

    PyTorch refuses to draw into the terms of a sum.
    """
    kinds = (Shard, Replicate) if operator in _WRITING else (Shard, Replicate, Partial)
    is_here = tensor.device_mesh.get_coordinate() is not None
    is_known = all(isinstance(placement, kinds) for placement in tensor.placements)
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
    part = _part(tensor, whole).clone() if is_alike else whole  # no view, which keeps the whole
    made: DTensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _part(tensor: DTensor, whole: Tensor) -> Tensor:
    """A view of this rank's part of a tensor of these sizes."""
    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole
