"""Operators on DTensors that PyTorch (2.13) computes otherwise than on the whole tensor.

A number that is read of a pending sum (`p.norm().item()`, `float(p.sum())`) is that of the rank's
own part. Here it is the whole tensor's, for which all ranks that have parts of it must read it.

A whole tensor that is copied into one in parts gives each rank its part, and so does a matrix that
PyTorch makes in its memory (`torch.nn.init.eye_`). A row or a slice along a cut dim is a copy, into
which a write (`p[3] = 0.`, `p[3] += 1`) would be lost: it is refused.

A plain tensor beside one in parts (`p.mul_(mask)`, `mean.lerp_(p, 0.1)`) is whole, and all ranks
have the same one. Operators that PyTorch has no rule for (`p.triu_()`, `torch.poisson(p)`) read
whole tensors, and each rank keeps its part of what they write or return. So do operators that write
to a plain tensor, and means over parts of unlike sizes (`F.mse_loss(p, q)`), which PyTorch takes
for the mean of all. This holds on the meshes of ranks' modules: of other DTensors, as those of the
user's own modules, PyTorch refuses what it has no rule for, and to mix them with plain tensors.

Random numbers that are drawn into a tensor on the CPU are the next ones of each process. So parts
repeat each other, a generator that is given is not asked, and where parts are of unlike sizes the
ranks' generators go apart: what is whole on all of them would no longer be alike. On accelerators
PyTorch draws as for the whole tensor, and so it is here: each rank draws all and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from threading import local
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dispatch import OpDispatcher, as_strided_handler
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import _MaskPartial
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
#: The value of an operator's `reduction` that asks for the mean.
_MEAN = 1
#: Views that PyTorch computes of another cut of the tensor where its own allows none.
VIEWING = (
    *(_aten.diagonal.default, _aten.expand.default, _aten.select.int, _aten.slice.Tensor),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.view.default),
    *(_aten.view.dtype, _aten.view_as_complex.default, _aten.view_as_real.default),
)
#: The meshes of ranks' modules. Meshes are equal if they have the same ranks and names of axes.
_MESHES: set[DeviceMesh] = set()
#: Whether the user allows plain tensors beside all DTensors, in each thread.
_ALLOWED = local()


def correct_operators(meshes: Iterable[DeviceMesh]) -> None:
    """From now on, compute these operators on DTensors as on whole tensors.

    Args:
        meshes: Those of DTensors beside which plain tensors are whole.
    """
    _MESHES.update(meshes)
    _correct_operators()
    # a flag of this thread, which PyTorch's C++ reads before it asks the dispatcher
    torch._C._set_dtensor_allow_implicit_replication(True)


@cache
def _correct_operators() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    handlers.setdefault(_aten._local_scalar_dense.default, _number)
    for operator in (*_WRITING, *_MAKING, *_READING):
        handlers.setdefault(operator, _drawn)
    handlers.setdefault(_aten.copy_.default, _copied)
    handlers.setdefault(_aten.empty_like.default, _made_empty)
    for operator in (_aten.fill_.Tensor, _aten.fill_.Scalar):
        handlers.setdefault(operator, _filled)
    handlers.setdefault(_aten.eye.m_out, _made_in)
    handlers.setdefault(_aten.index_put_.default, _placed)
    for operator in VIEWING:
        handlers.setdefault(operator, _viewed)
    handlers[_aten.as_strided.default] = _strided
    for operator in (_aten.convolution.default, _aten.convolution_backward.default):
        handlers[operator] = partial(_convolved, handlers[operator])
    _ALLOWED.by_user = dispatcher._allow_implicit_replication
    dispatcher.__class__ = _Dispatcher


class _Dispatcher(OpDispatcher):
    """PyTorch's, which takes plain tensors beside those of ranks' modules for whole.

    PyTorch's C++ remembers by layouts how an operator is computed, and a plain tensor has the
    layout of a DTensor that is whole. So an operator that it remembers of such DTensors is computed
    of plain tensors without a question, on all meshes.
    """

    @property
    def _allow_implicit_replication(self) -> bool:
        """Whether the user is in PyTorch's `implicit_replication()`."""
        return getattr(_ALLOWED, "by_user", False)

    @_allow_implicit_replication.setter
    def _allow_implicit_replication(self, is_allowed: bool) -> None:
        _ALLOWED.by_user = is_allowed
        torch._C._set_dtensor_allow_implicit_replication(True)

    def _try_replicate_spec_for_scalar_tensor(
        self, op_call: torch._ops.OpOverload, tensor_arg: Tensor, compute_mesh: DeviceMesh
    ) -> DTensorSpec:
        if compute_mesh in _MESHES:
            return _whole_spec(compute_mesh, tensor_arg)
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
        """How parts of the results follow from parts of tensors; or else the results."""
        rule = super()._propagate_op_sharding_dispatch_slow_path
        if op_info.compute_mesh not in _MESHES:
            return rule(op_call, args, kwargs, op_info, try_cache)
        written = _written(op_call, args, kwargs)
        if not all(isinstance(tensor, DTensor) for tensor in written):
            _check_is_here(op_info.compute_mesh, "a plain one is computed of: compute it")
            return _on_wholes(op_call, args, kwargs)
        try:
            sharding = rule(op_call, args, kwargs, op_info, try_cache)
        except (NotImplementedError, RuntimeError):
            if any(map(_is_sum, written)):
                raise
            return _on_wholes(op_call, args, kwargs)
        if isinstance(sharding, OutputSharding) and _differs_from_whole(
            sharding, op_info, args, written
        ):
            return _on_wholes(op_call, args, kwargs)
        return sharding

    def _dispatch_fast_path_python_tail(
        self,
        op_call: torch._ops.OpOverload,
        args: tuple[Any, ...],
        *details: Any,
    ) -> Any:
        """A plain tensor that was written to as a DTensor that is whole; else as PyTorch does.

        PyTorch's C++ keeps the method that it finds first. If it was another class's, it raises a
        bare AssertionError in place of this, after the tensor was written to.
        """
        first = args[0] if args else None
        is_plain = isinstance(first, Tensor) and not isinstance(first, DTensor)
        if is_plain and any(one is first for one in _written(op_call, args, {})):
            return first
        return super()._dispatch_fast_path_python_tail(op_call, args, *details)


def _differs_from_whole(
    sharding: OutputSharding, info: OpInfo, args: tuple[Any, ...], written: Iterable[Tensor]
) -> bool:
    """Whether what PyTorch computes of parts is not what the operator gives of whole tensors."""
    assert info.schema is not None
    reads = sharding.redistribute_schema or info.schema
    operator = info.schema.op
    return (
        _is_mean_of_parts(sharding, reads, args)
        or _cuts_anew(sharding, operator, written)
        or _is_known_without_out(info.schema)
        or _is_masked(sharding)
        or _is_over_no_dims(info.schema.op, args)
    )


def _is_over_no_dims(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a list of dims is empty, which stands for all dims and PyTorch takes for none."""
    formals = operator._schema.arguments
    return any(
        formal.name == "dim" and isinstance(actual, list | tuple) and not actual
        for formal, actual in zip(formals, args, strict=False)
    )


def _is_masked(sharding: OutputSharding) -> bool:
    """Whether results are terms to be masked, as of an embedding, which PyTorch often fails to."""
    specs = [spec for spec in pytree.tree_leaves(sharding.output_spec) if spec is not None]
    return any(isinstance(place, _MaskPartial) for spec in specs for place in spec.placements)


def _is_known_without_out(schema: OpSchema) -> bool:
    """Whether PyTorch remembers what it does whatever tensor the results are written to."""
    keys = schema.schema_info.static_kwargkey if schema.schema_info is not None else None
    outs = [formal.name for formal in schema.op._schema.arguments if formal.is_out]
    return not set(outs) <= set(keys or ())


def _cuts_anew(
    sharding: OutputSharding, operator: torch._ops.OpOverload, written: Iterable[Tensor]
) -> bool:
    """Whether PyTorch takes parts that an operator writes to for those of another cut."""
    specs = pytree.tree_leaves(sharding.output_spec)
    returned = [
        spec
        for formal, spec in zip(operator._schema.returns, specs, strict=False)
        if formal.alias_info is not None and formal.alias_info.is_write
    ]
    return any(
        isinstance(tensor, DTensor)
        and tensor.shape == spec.shape
        and tensor.placements != spec.placements
        for tensor, spec in zip(written, returned, strict=False)
    )


def _is_mean_of_parts(sharding: OutputSharding, reads: OpSchema, args: tuple[Any, ...]) -> bool:
    """Whether PyTorch takes the number of elements of a part for that of the whole tensor.

    So it is where means of parts of unlike sizes are averaged, and in the backward pass of a mean,
    whose results are parts.
    """
    results = [one for one in pytree.tree_leaves(sharding.output_spec) if one is not None]
    if any(place.is_partial("avg") for one in results for place in one.placements):
        return any(map(_has_unlike_parts, reads.args_spec))
    formals = reads.op._schema.arguments
    actuals = (*args, *(formal.default_value for formal in formals[len(args) :]))
    given = dict(zip((formal.name for formal in formals), actuals, strict=True))
    divides = given.get("reduction") == _MEAN and "total_weight" not in given
    return divides and any(place.is_shard() for one in results for place in one.placements)


def _has_unlike_parts(spec: DTensorSpec) -> bool:
    parts = dict.fromkeys(range(spec.ndim), 1)
    for place, ranks in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(place, Shard):
            parts[place.dim] *= ranks
    return any(size % parts[dim] for dim, size in enumerate(spec.shape))


def _on_wholes(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator on whole tensors; each rank has its part of what it writes and returns."""
    tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    first = next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor))
    is_here = first.device_mesh.get_coordinate() is not None
    with torch.no_grad():
        wholes = {key: _whole(one) if is_here else _outline(one) for key, one in tensors.items()}
        results = operator(
            *pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], args),
            **pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], dict(kwargs)),
        )
    written = {id(wholes[id(one)]): one for one in _written(operator, args, kwargs)}
    for one in written.values() if is_here else ():
        if isinstance(one, DTensor):
            one._local_tensor.copy_(_part(one._spec, wholes[id(one)]))

    def returned(result: Tensor) -> Tensor:
        if id(result) in written:
            return written[id(result)]
        made = _in_parts(first, result)
        return _Copy.of(made) if operator._schema._is_view_op() else made

    return pytree.tree_map_only(Tensor, returned, results)


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor with the strides that it has in parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    if whole.stride() == tensor.stride():
        return whole
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=whole.device
    ).copy_(whole)


def _outline(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes without contents."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(
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


def _check_is_here(mesh: DeviceMesh, reading: str) -> None:
    if mesh.get_coordinate() is None:
        ranks = named(mesh.mesh.flatten().tolist())
        raise BackendError(
            f"rank {dist.get_rank()} has no part of the tensor that {reading} on {ranks}"
        )


def _number(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], _: Mapping[str, Any]
) -> bool | complex:
    tensor: DTensor = args[0]
    _check_is_here(tensor.device_mesh, "a number is read of: read it")
    whole = tensor._local_tensor
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
        by_whole: DTensor | tuple[DTensor, ...] = _on_wholes(operator, args, kwargs)
        return by_whole
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    drawn = operator(whole, *args[1:], **kwargs)
    if operator in _MAKING:
        return _in_parts(tensor, drawn)
    tensor._local_tensor.copy_(_part(tensor._spec, whole))
    return tensor


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


def _made_empty(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """Like the terms of a sum, it is whole: what is written to it is no term."""
    tensor: DTensor = args[0]
    if not _is_sum(tensor):
        by_pytorch: DTensor = _by_pytorch(operator, args, kwargs)
        return by_pytorch
    whole = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return _in_parts(tensor, operator(whole, *args[1:], **kwargs))


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
    tensor: Tensor = args[0]
    compute = _by_pytorch if _is_sum(tensor) else _on_wholes
    placed: Tensor = compute(operator, args, kwargs)
    return placed


def _viewed(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """As PyTorch does; what lies in other memory than the tensor is marked as a copy."""
    tensor: DTensor = args[0]
    views = _by_pytorch(operator, args, kwargs)
    if tensor.device_mesh.get_coordinate() is None:  # there is nothing of it here
        return views
    memory = _memory(tensor)
    return pytree.tree_map_only(
        DTensor, lambda view: view if _memory(view) == memory else _Copy.of(view), views
    )


def _strided(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """A view by strides: PyTorch allows that of the tensor as it is."""
    try:
        return as_strided_handler(operator, args, dict(kwargs))
    except RuntimeError:
        return _viewed(operator, args, kwargs)


def _convolved(
    by_pytorch: Callable[..., Any],
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """A convolution of whole tensors: PyTorch's is of images whose last dim is cut."""
    meshes = (leaf.device_mesh for leaf in args if isinstance(leaf, DTensor))
    compute = _on_wholes if next(meshes) in _MESHES else by_pytorch
    return compute(operator, args, kwargs)


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
        if any(isinstance(tensor, cls) for tensor in _written(func, args, kwargs)):
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


def _is_sum(tensor: Tensor) -> bool:
    """Whether ranks have terms of it, which are still to be added up."""
    return isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    )


def _is_drawn_here(operator: torch._ops.OpOverload, tensor: DTensor) -> bool:
    """Whether it lies on the CPU, and this rank has a part of it that follows from its place.

    PyTorch refuses to draw into the terms of a sum.
    """
    is_here = tensor.device_mesh.get_coordinate() is not None
    is_known = operator not in _WRITING or not _is_sum(tensor)
    return tensor.device.type == "cpu" and is_here and is_known


def _whole_spec(mesh: DeviceMesh, tensor: Tensor) -> DTensorSpec:
    """The layout of a plain tensor that all ranks of a mesh have."""
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)


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
    if tensor.device_mesh.get_coordinate() is None:
        part = torch.zeros(() if whole.ndim == 0 else (0,), dtype=whole.dtype)
    else:
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
