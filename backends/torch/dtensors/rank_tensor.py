"""Tensors of a rank's module that ranks have in parts: parameters, buffers, gradients, state.

They are DTensors, with which training loops do what is right of a part: operators that compute each
element by itself, numbers of a whole tensor (norms, sums), whole tensors that are copied in, random
draws. All else is refused. What is whole on every rank of its mesh is computed as on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import named
from partitioner.backends.torch.dtensors.uneven_shard import has_uneven

aten = torch.ops.aten
#: Computes a call of an operator, with its arguments by position and by name.
Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class RankTensor(DTensor):
    """A tensor of which a rank has a part, or the whole."""

    #: Messages between the ranks of a module of which each holds some parameters only; None if all
    #: ranks hold all.
    agreement: Agreement | None = None

    @classmethod
    def of(cls, part: Tensor, spec: DTensorSpec, agreement: Agreement | None = None) -> RankTensor:
        """Make one of this rank's part; `DTensor.from_local` takes ten times as long."""
        made: Any = cls.__new__(cls, part, spec, requires_grad=False)
        if agreement is not None:
            made.agreement = agreement
        one: RankTensor = made
        return one

    def like(self, part: Tensor, order: torch.memory_format | None = None) -> RankTensor:
        """Make one of the same sizes and cut, of this rank's part, in this or another order."""
        spec, meta = self._spec, self._spec.tensor_meta
        assert meta is not None
        stride = meta.stride
        if order not in (None, torch.preserve_format):
            stride = torch.empty(meta.shape, memory_format=order, device="meta").stride()
        if part.dtype != meta.dtype or stride != meta.stride:
            spec = replace(spec, tensor_meta=TensorMeta(meta.shape, stride, part.dtype))
        return RankTensor.of(part, spec, self.agreement)

    def on_all(self, whole: Tensor) -> RankTensor:
        """Make one that is whole on all ranks of the mesh."""
        places = (Replicate(),) * self._spec.mesh.ndim
        return RankTensor.of(whole, _spec_of(self._spec.mesh, places, whole), self.agreement)

    @property
    def is_here(self) -> bool:
        """Tell whether this rank has a part."""
        return self._spec.mesh.get_coordinate() is not None

    def data_ptr(self) -> int:
        """Return 0, as of tensors without memory: that of the part would be no address."""
        return 0

    @property
    def data(self) -> Tensor:
        """A tensor of the same part; writes to it count as writes to this one."""
        with torch.inference_mode(self.is_inference()):  # else PyTorch makes no view of it
            return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        if not isinstance(data, RankTensor) or not is_cut_alike(self, data):
            raise BackendError(
                "the .data of a tensor that is cut over ranks was set to a tensor that is not cut "
                "so: write it in place under torch.no_grad(), as by p.copy_(w)"
            )
        if data.dtype != self.dtype:
            raise BackendError(
                f"the .data of a tensor of {self.dtype} that ranks have in parts was set to one of "
                f"{data.dtype}: convert it before, as by w.to(p.dtype)"
            )
        self._local_tensor = data._local_tensor
        if not self.is_inference():
            increment_version([self])

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Gather it; the gradient that comes back is cut as this tensor is."""
        if grad_placements is None and torch.is_grad_enabled() and self.requires_grad:
            whole: Tensor = _Gathered.apply(self)  # type: ignore[no-untyped-call]
            return whole
        return super().full_tensor(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """Cut it otherwise, as PyTorch does, or gather it; parts of any sizes are only gathered."""
        if has_uneven(self.placements) and not all(one.is_replicate() for one in placements or ()):
            refuse("redistribute")
        return super().redistribute(device_mesh, placements, **options)

    def share_memory_(self) -> NoReturn:
        """Refuse it: PyTorch would read memory that this tensor has none of."""
        refuse("share_memory_")

    def __dlpack__(self, **_: Any) -> NoReturn:
        """Refuse it: others would read memory that this tensor has none of."""
        refuse("__dlpack__")

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        """A tensor with memory of its own, and its gradient."""
        if id(self) in memo:
            known: RankTensor = memo[id(self)]
            return known
        made: Any = self.detach().clone()
        made = nn.Parameter(made) if isinstance(self, nn.Parameter) else made
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        copied: RankTensor = made
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as PyTorch's DTensor, without the memory around the part."""
        part = self._local_tensor.detach()
        part = part if part.nbytes == part.untyped_storage().nbytes() else part.clone()
        made = DTensor.__new__(DTensor, part, self._spec, requires_grad=self.requires_grad)
        at, ranks = self._spec.mesh.get_coordinate(), self._spec.mesh.mesh
        rank = None if at is None else int(ranks[tuple(at)])  # also when the group has ended
        return loaded_part, (rank, made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares it without its class
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator; refuse one that is another one of parts than of the whole."""
        kwargs = kwargs or {}
        rule = _RULES.get(func) or _rule_of(func)
        if rule not in (_copied, _norms, _of_lists, _unscaled):
            tensors = list(_parts_in((*args, *kwargs.values())))
            mesh = tensors[0]._spec.mesh
            is_here = mesh.get_coordinate() is not None
            if is_here and all(_is_whole(one) and one._spec.mesh == mesh for one in tensors):
                rule = _as_on_one_device
        if rule is None or torch.Tag.inplace_view in func.tags:
            refuse(func)
        return rule(func, args, kwargs)


def loaded_part(rank: int | None, part: DTensor) -> DTensor:
    """Give a part that was pickled on a rank, as by `torch.save`; other ranks have other parts.

    Args:
        rank: That rank; None for one that has no part of the tensor.
        part: Its part.

    Raises:
        BackendError: Another rank loads it.
    """
    if not dist.is_initialized():
        return part
    own = dist.get_rank()
    if rank != (own if own in part.device_mesh.mesh else None):
        saver = "a rank without one" if rank is None else f"rank {rank}"
        raise BackendError(
            f"rank {own} loads a part of a tensor that {saver} saved: each rank saves and loads "
            "a file of its own, or all use torch.distributed.checkpoint"
        )
    return part


torch.serialization.add_safe_globals([loaded_part])


def refuse(what: Any) -> NoReturn:
    """Refuse an operator, or a method of that name."""
    name = what if isinstance(what, str) else _name(what)
    raise BackendError(
        f"{name}() is not computed of a tensor that is cut over ranks: compute it of "
        "p.full_tensor(), which all ranks must call, and write what comes of it by p.copy_(w)"
    )


def whole_of(tensor: Tensor) -> Tensor:
    """Gather a tensor, of which this rank has a part; all ranks of its mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise BackendError(
            f"rank {dist.get_rank()} has no part of the tensor that is read on "
            f"{named(mesh.mesh.flatten().tolist())}: read it there"
        )
    with torch.no_grad():
        return DTensor.__new__(
            DTensor, tensor._local_tensor, tensor._spec, requires_grad=False
        ).full_tensor()


def part_of_whole(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """Cut this rank's part out of a whole tensor: a view, if it can be."""
    places = (Replicate(),) * spec.mesh.ndim
    with torch.no_grad():
        part: Tensor = redistribute_local_tensor(whole, _spec_of(spec.mesh, places, whole), spec)
    return part


class _Gathered(torch.autograd.Function):
    """The whole of a tensor; its gradient is in memory of its own, which is written in place."""

    @staticmethod
    def forward(ctx: Any, tensor: RankTensor) -> Tensor:
        ctx.like = tensor.detach()
        return whole_of(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> RankTensor:
        """Cut this rank's part out of a gradient, which all ranks have."""
        like: RankTensor = ctx.like
        part = part_of_whole(whole_of(gradient), like._spec)
        return like.like(torch.empty_like(like._local_tensor).copy_(part))


def _spec_of(mesh: Any, places: tuple[Any, ...], whole: Tensor) -> DTensorSpec:
    return DTensorSpec(mesh, places, TensorMeta(whole.shape, whole.stride(), whole.dtype))


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _parts_in(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parts_in(value)


def _is_whole(tensor: DTensor) -> bool:
    return all(place.is_replicate() for place in tensor._spec.placements)


def is_cut_alike(one: DTensor, other: DTensor) -> bool:
    """Test whether two tensors of the same sizes have the same cut on the same ranks."""
    spec, wanted = other._spec, one._spec
    return spec is wanted or (
        spec.placements == wanted.placements
        and spec.shape == wanted.shape
        and spec.mesh == wanted.mesh
    )


# Element by element ------------------------------------------------------------------------------


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute each element of a part by itself."""
    first = _cut_in((*args, *kwargs.values()))
    written = kwargs.get("out", args[0]) if func._schema.is_mutable else first
    whole = _written_whole(written)
    first = first if whole is None else whole
    if not isinstance(written, DTensor) or not is_cut_alike(first, written):
        refuse(func)

    def local(value: Any) -> Any:
        return _local(func, first, value) if isinstance(value, Tensor) else value

    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        return written
    if isinstance(result, Tensor):
        return first.like(result, kwargs.get("memory_format"))
    return pytree.tree_map_only(Tensor, first.like, result)


def _cut_in(values: Iterable[Any]) -> RankTensor:
    """Find the tensor whose cut the results have."""
    tensors = list(_parts_in(values))
    first = next((one for one in tensors if not _is_whole(one)), tensors[0])
    if isinstance(first, RankTensor):
        return first
    known = next(one for one in tensors if isinstance(one, RankTensor))
    return RankTensor.of(first._local_tensor, first._spec, known.agreement)


def _written_whole(written: Any) -> RankTensor | None:
    """Return a tensor that is whole, as the gradient of a sum: parts beside it are gathered."""
    return written if isinstance(written, RankTensor) and _is_whole(written) else None


def _local(func: Any, first: RankTensor, tensor: Tensor) -> Tensor:
    """Take what stands beside the part of a tensor: the part of another one, or a number."""
    if isinstance(tensor, DTensor):
        if is_cut_alike(first, tensor):
            return tensor._local_tensor
        if tensor._spec.mesh != first._spec.mesh:
            refuse(func)
        if not _is_whole(tensor) and not _is_whole(first):
            refuse(func)
        tensor = tensor._local_tensor if _is_whole(tensor) else whole_of(tensor)
    elif tensor.numel() != 1:
        refuse(func)
    if tensor.ndim == 0 or not first.is_here:
        return tensor
    try:
        return part_of_whole(tensor.expand(first.shape), first._spec)
    except RuntimeError:  # the result is larger
        refuse(func)


def _of_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator of lists of tensors, each element by itself."""
    count = next(len(one) for one in args if isinstance(one, list | tuple))
    lists = [one for one in (*args, *kwargs.values()) if _is_list_of(one, count)]
    is_fused, is_written = _name(func).startswith("_fused"), func._schema.is_mutable

    def first_of(row: tuple[Any, ...]) -> RankTensor | None:
        if not any(isinstance(one, RankTensor) for one in row):
            return None
        whole = _written_whole(row[0]) if is_written and not is_fused else None
        return _cut_in(row) if whole is None else whole

    firsts = list(map(first_of, zip(*lists, strict=True)))
    if is_written:
        written = lists if is_fused else lists[:1]
        for first, row in zip(firsts, zip(*written, strict=True), strict=True):
            if first is not None and not all(  # lie alike, or are numbers beside what is written
                (one.ndim == 0 and one is not row[0])
                or (isinstance(one, DTensor) and is_cut_alike(first, one))
                for one in row
            ):
                refuse(func)

    def local(value: Any) -> Any:
        if isinstance(value, DTensor):
            return whole_of(value)
        if not _is_list_of(value, count):
            return value
        return [
            _local(func, first, one) if first is not None and isinstance(one, Tensor) else one
            for first, one in zip(firsts, value, strict=True)
        ]

    results = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if is_written:
        # PyTorch counts no writes to lists of DTensors
        increment_version([x for value in written for x in value if isinstance(x, RankTensor)])
        return None
    return [
        one if first is None else first.like(one)
        for first, one in zip(firsts, results, strict=True)
    ]


def _is_list_of(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _copied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Copy a whole tensor, or one on the same mesh, into a part; a plain tensor gets the whole."""
    tensor, source = args[:2]
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole_of(source), *args[2:], **kwargs)
        plain: Tensor = tensor
        return plain
    if not isinstance(tensor, RankTensor):
        refuse(func)
    if isinstance(source, DTensor) and not is_cut_alike(tensor, source):
        if source._spec.mesh != tensor._spec.mesh or source.shape != tensor.shape:
            refuse(func)
        if has_uneven((*source.placements, *tensor.placements)):
            source = RankTensor.of(part_of_whole(whole_of(source), tensor._spec), tensor._spec)
        else:
            source = source.redistribute(placements=tensor._spec.placements)
    if isinstance(source, DTensor):
        part = source._local_tensor
    elif tensor.is_here:
        part = part_of_whole(source.expand(tensor.shape), tensor._spec)
    else:
        return tensor
    tensor._local_tensor.copy_(part, *args[2:], **kwargs)
    return tensor


def _unscaled(func: Any, args: Sequence[Any], _: Mapping[str, Any]) -> None:
    """Unscale gradients; all ranks hear of infinite ones, so that all leave out a step."""
    gradients, found, scale = args
    local = [one._local_tensor if isinstance(one, DTensor) else one for one in gradients]
    func(local, found, scale)
    first = next(_parts_in(gradients))
    agreement = first.agreement if isinstance(first, RankTensor) else None
    if agreement is not None:
        found.fill_(agreement.check("scaled gradients", asks=bool(found)))
        return
    worst = [Partial("max")] * first.device_mesh.ndim
    found.copy_(DTensor.from_local(found, first.device_mesh, worst, run_check=False).full_tensor())


# Whole tensors -----------------------------------------------------------------------------------


def _as_on_one_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator of tensors that are whole on all ranks of one mesh."""
    tensors = list(_parts_in((*args, *kwargs.values())))
    first = next(one for one in tensors if isinstance(one, RankTensor))
    if first.agreement is not None and func in _JOINING:
        raise BackendError(_JOINING[func])
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    local = [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    given = dict(zip(map(id, local), leaves, strict=True))
    local_args, local_kwargs = pytree.tree_unflatten(local, tree)
    results = func(*local_args, **local_kwargs)
    for leaf in leaves if func._schema.is_mutable else ():
        if isinstance(leaf, DTensor) and leaf._local_tensor.shape != leaf.shape:
            leaf._local_tensor.resize_(leaf.shape)
            refuse(func)
    return pytree.tree_map_only(
        Tensor, lambda one: given[id(one)] if id(one) in given else first.on_all(one), results
    )


def _number(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a number of a whole tensor from those of its parts."""
    tensor: RankTensor = args[0]
    if not tensor.is_here:
        raise BackendError(_OWN_LAYERS)
    summed, divisor = (aten.sum.dim_IntList, tensor.numel()) if func in _MEANS else (func, 1)
    if func is aten.mean.default:
        summed = aten.sum.default
    dtype = kwargs.get("dtype") or tensor.dtype
    is_short = func in _SUMS and dtype in (torch.float16, torch.bfloat16)
    options = {**kwargs, "dtype": torch.float32} if is_short else kwargs  # as PyTorch adds them
    order = args[1:2] if func is aten.linalg_vector_norm.default else ()
    part = tensor._local_tensor
    if order and not part.numel():  # it has no largest element
        part = part.new_zeros((1,) * part.ndim)
    if func in _MEANS and not (dtype.is_floating_point or dtype.is_complex):
        return func(part, *args[1:], **kwargs)  # PyTorch raises
    number = summed(part, *args[1:], **options)
    if number.ndim or (order and order[0] <= 0):
        return _of_wholes(func, args, kwargs)
    places = [Shard(0) if place.is_shard() else Replicate() for place in tensor.placements]
    of_parts = DTensor.from_local(
        number.reshape(1), tensor.device_mesh, places, run_check=False
    ).full_tensor()
    combined = _NUMBERS[func](of_parts, *order).to(number.dtype)
    combined = combined / divisor if divisor != 1 else combined
    return tensor.on_all(combined.to(dtype) if is_short else combined)


def _of_wholes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator of whole tensors, which are gathered for it: all ranks have the results.

    A plain tensor may be another one on each rank.
    """
    given = tuple(args), dict(kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    if any(leaf.numel() != 1 and not isinstance(leaf, DTensor) for leaf in leaves):
        refuse(func)
    first = next(leaf for leaf in leaves if isinstance(leaf, RankTensor))
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, whole_of, given)
    return pytree.tree_map_only(Tensor, first.on_all, func(*whole_args, **whole_kwargs))


def _norms(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    tensors, *options = args
    return [torch.linalg.vector_norm(one, *options, **kwargs) for one in tensors]


def _drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RankTensor:
    """Draw a whole tensor, as on one device, and keep this rank's part."""
    tensor: RankTensor = args[0]
    shape = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor._local_tensor.device
    )
    drawn = func(shape, *args[1:], **kwargs)
    part = part_of_whole(drawn, tensor._spec) if tensor.is_here else tensor._local_tensor
    if not func._schema.is_mutable:
        return tensor.like(part.clone(), kwargs.get("memory_format"))
    tensor._local_tensor.copy_(part)
    return tensor


#: Operators of which each element of the results follows from those at its place, beside those that
#: PyTorch marks so.
_ALSO_ELEMENTWISE = (
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.empty_like.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor),
    *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten._conj.default),
)
#: Operators that reduce a whole tensor to a number, and how those of parts make up the whole's.
_NUMBERS: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), torch.sum),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), torch.sum),
    **dict.fromkeys((aten.any.default, aten._is_any_true.default), torch.any),
    **dict.fromkeys((aten.all.default, aten._is_all_true.default), torch.all),
    aten.linalg_vector_norm.default: torch.linalg.vector_norm,
}
_MEANS = frozenset({aten.mean.default, aten.mean.dim})
_SUMS = _MEANS | {aten.sum.default, aten.sum.dim_IntList}
#: Draws that follow from a tensor's sizes and type alone.
_DRAWS = (
    *(aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float),
    *(aten.exponential_.default, aten.rand_like.default, aten.randn_like.default),
)
#: Why the norms of several gradients are not joined.
_OWN_LAYERS = (
    "this rank's gradients are those of its own layers only, so their norm is not that of the "
    "model: call module.clip_grad_norm_() in place of PyTorch's"
)
#: Operators that join several tensors, or numbers of them as `torch.nn.utils.get_total_norm` does.
_JOINING = {
    aten.stack.default: _OWN_LAYERS,
    aten._foreach_norm.Scalar: _OWN_LAYERS,
    aten.cat.default: (
        "this rank's tensors are those of its own layers only, and joined they are not the "
        "model's: join those of module.full_state_dict()"
    ),
}
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ALSO_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_DRAWS, _drawn),
    aten.copy_.default: _copied,
    aten._foreach_norm.Scalar: _norms,
    aten.equal.default: _of_wholes,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
#: Operators of lists that reduce each tensor, or multiply matrices.
_NOT_ELEMENTWISE = frozenset({"_foreach_max", "_foreach_powsum", "_foreach_mm"})


#: Operators whose schemas do not say that they write statistics.
_WRITE_UNSAID = frozenset(
    {
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    }
)


def _rule_of(func: Any) -> Rule | None:
    """Find the rule of an operator that has none of its own; None if it is refused."""
    name, schema = _name(func), func._schema
    if name in _WRITE_UNSAID or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")) and name not in _NOT_ELEMENTWISE:
        return _of_lists
    if torch.Tag.pointwise in func.tags:
        return _elementwise
    return None if schema.is_mutable or schema._is_view_op() else _of_wholes
