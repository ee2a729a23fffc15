"""PyTorch's rules that give something else than the operator of whole tensors.

Such are those of means over parts of unlike sizes (`F.mse_loss(p, q)`), which PyTorch takes for the
mean of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.utils import _pytree as pytree

#: The value of an operator's `reduction` that asks for the mean.
_MEAN = 1
#: Operators that add up elements of a tensor.
_ADDING = frozenset({torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList})


def differs_from_whole(
    sharding: OutputSharding, info: OpInfo, args: tuple[Any, ...], written: Iterable[Tensor]
) -> bool:
    """Test whether PyTorch computes of parts what the operator does not give of whole tensors."""
    assert info.schema is not None
    reads = sharding.redistribute_schema or info.schema
    operator = info.schema.op
    return (
        _is_mean_of_parts(sharding, reads, args)
        or _cuts_anew(sharding, operator, written)
        or _is_known_without_out(info.schema)
        or _is_masked(sharding)
        or _is_over_no_dims(info.schema.op, args)
        or _misreads_terms(info.schema, reads)
    )


def _misreads_terms(schema: OpSchema, reads: OpSchema) -> bool:
    """Test whether PyTorch computes with ranks' terms what does not follow from them.

    It adds up terms of norms as if they were those of sums, takes those of `any` for numbers,
    divides whole numbers into terms that are none, makes terms of norms of negative numbers, and
    fails to make terms of one kind of those of another one, or of a product.

    Args:
        schema: The tensors that the operator is called with.
        reads: Those that PyTorch makes of them for it.
    """
    for given, read in zip(_specs(schema), _specs(reads), strict=True):
        terms = [place for place in given.placements if place.is_partial()]
        assert given.tensor_meta is not None
        dtype = given.tensor_meta.dtype
        is_norm = any(isinstance(place, _NormPartial) for place in terms)
        is_product = any(place.is_partial("product") for place in terms)
        if is_product or (terms and dtype is torch.bool) or (is_norm and schema.op in _ADDING):
            return True
        for one, other in zip(given.placements, read.placements, strict=True):
            is_made = other.is_partial() and other != one
            is_divided = not (one.is_partial() or isinstance(other, _NormPartial))
            if is_made and not (is_divided and dtype.is_floating_point):
                return True
    return False


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves(schema.args_schema)
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _is_over_no_dims(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Test whether a list of dims is empty: all dims by the schema, none in PyTorch's rule."""
    formals = operator._schema.arguments
    return any(
        formal.name == "dim" and isinstance(actual, list | tuple) and not actual
        for formal, actual in zip(formals, args, strict=False)
    )


def _is_masked(sharding: OutputSharding) -> bool:
    """Test whether results are terms to be masked, as of an embedding: PyTorch often fails to."""
    specs = [spec for spec in pytree.tree_leaves(sharding.output_spec) if spec is not None]
    return any(isinstance(place, _MaskPartial) for spec in specs for place in spec.placements)


def _is_known_without_out(schema: OpSchema) -> bool:
    """Test whether PyTorch caches what it does without a look at the tensor of the results."""
    keys = schema.schema_info.static_kwargkey if schema.schema_info is not None else None
    outs = [formal.name for formal in schema.op._schema.arguments if formal.is_out]
    return not set(outs) <= set(keys or ())


def _cuts_anew(
    sharding: OutputSharding, operator: torch._ops.OpOverload, written: Iterable[Tensor]
) -> bool:
    """Test whether PyTorch takes parts that an operator writes to for those of another cut."""
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
    """Test whether PyTorch counts the elements of a part where the whole tensor's are meant.

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


def allow_anomaly_detection() -> None:
    """Give DTensor a rule for the check that `torch.autograd.set_detect_anomaly` makes.

    It asks of every gradient whether any element is NaN; with this rule each rank asks it of the
    whole gradient, so that all of them raise.
    """
    whole = [([Replicate()], [Replicate()])]
    register_sharding(torch.ops.aten._is_any_true.default)(lambda _: whole)
