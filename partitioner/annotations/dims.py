"""The dims of a sharding spec against the tensor's shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from onnx import ShardedDimProto, ShardingSpecProto

Shape = tuple[int | str | None, ...]  #: Sizes; a symbol or None where a size is not known.


def shard_count(spec: ShardingSpecProto) -> int:
    """Shards of a tensor: the product over all its cut dims."""
    return math.prod(part.num_shards for dim in spec.sharded_dim for part in dim.simple_sharding)


def dim_problems(spec: ShardingSpecProto, shape: Shape | None) -> Iterator[str]:
    """What is wrong with the cut dims.

    Args:
        spec: Of one tensor.
        shape: Of the tensor; None if it is not known, which leaves sizes and ranks unchecked.
    """
    rank = None if shape is None else len(shape)
    axes: Counter[int] = Counter()
    for dim in spec.sharded_dim:
        if not dim.HasField("axis"):  # [onnx.proto] MUST be present
            yield "a sharded dim has no axis"
            continue
        if rank is not None and not -rank <= dim.axis < rank:  # [onnx.proto]
            yield f"axis {dim.axis} is not in {-rank} .. {rank - 1}"
            continue
        axis = dim.axis + (rank or 0) if dim.axis < 0 else dim.axis
        axes[axis] += 1
        size = shape[axis] if shape is not None else None
        yield from (f"axis {dim.axis}: {what}" for what in _dim(dim, size))
    for axis in sorted(axis for axis, count in axes.items() if count > 1):
        yield f"axis {axis} is given {axes[axis]} times"


def _dim(dim: ShardedDimProto, size: int | str | None) -> Iterator[str]:
    parts = list(dim.simple_sharding)
    if not parts:
        yield "has no simple_sharding"
    for part in parts:
        if part.num_shards < 1:  # [onnx.proto] MUST be present
            yield f"is cut into {part.num_shards} shards; at least 1 is needed"
        elif part.WhichOneof("dim") == "dim_value" and part.num_shards > part.dim_value:
            yield f"is {part.num_shards} shards of {part.dim_value} elements"
    yield from _sizes(dim, size)


def _sizes(dim: ShardedDimProto, size: int | str | None) -> Iterator[str]:
    kinds = [part.WhichOneof("dim") for part in dim.simple_sharding]
    if len(kinds) > 1 and None in kinds:
        yield "has several parts, of which each must give its size"
    if not isinstance(size, int) or not kinds:
        return
    if "dim_param" in kinds:
        name = next(p.dim_param for p in dim.simple_sharding if p.WhichOneof("dim") == "dim_param")
        yield f"is called {name!r}, but its size is {size}"
    elif None not in kinds:
        given = math.prod(part.dim_value for part in dim.simple_sharding)
        if given != size:
            yield f"has {given} elements in the spec and {size} in the tensor"
    elif (shards := math.prod(part.num_shards for part in dim.simple_sharding)) > size:
        yield f"is {shards} shards of {size} elements"
