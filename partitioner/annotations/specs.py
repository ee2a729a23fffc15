"""A placement as ONNX's ShardingSpecProto (IR 11), or the reason that it cannot be one.

The standard cuts a dim evenly: into `num_shards` blocks of equal size or, if the dim is several
fused factors (major first), each factor into such blocks. Shards are numbered row-major over the
cut dims and their factors; shard i lies on `device[i]`, a device or, below 0, a group of devices
that all hold it. The standard cannot express a pending sum, and leaves uneven cuts to the backend.
Source: onnx.proto and docs/proposals/ONNXMultiDeviceProposal.md of onnx/onnx.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import ShardingSpecProto

from partitioner.ir.errors import PartitionerError
from partitioner.ir.layout import DimLayout, Interval, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.types import TensorType

Pieces = tuple[Interval, ...]


class NotInStandardError(PartitionerError, ValueError):
    """A placement that the standard cannot express; the message says why."""


@dataclass(frozen=True)
class _Factor:
    """A fused factor of a dim: its size, and the equal blocks that it is cut into."""

    size: int
    shards: int


def sharding_spec(tensor: str, type_: TensorType, at: Placement) -> ShardingSpecProto:
    """The spec of a tensor's placement.

    Args:
        tensor: The node's name of the tensor.
        type_: Type of the whole tensor.
        at: Its placement.

    Raises:
        NotInStandardError: A pending reduction, or a cut that is not even.
    """
    if at.sharding.partial:
        pending = ", ".join(f"{reduce} over {axis}" for axis, reduce in at.sharding.partial)
        raise NotInStandardError(f"a pending {pending}")
    factors = [_factors(dim, at.mesh, type_.dims[i].size) for i, dim in enumerate(at.sharding.dims)]
    spec = ShardingSpecProto(tensor_name=tensor)
    _add_devices(spec, at, factors)
    for axis, (parts, dim) in enumerate(zip(factors, type_.dims, strict=True)):
        if all(part.shards == 1 for part in parts):
            continue
        sharded = spec.sharded_dim.add(axis=axis)
        for part in parts:
            simple = sharded.simple_sharding.add(num_shards=part.shards)
            if len(parts) == 1 and dim.symbol is not None:
                simple.dim_param = dim.symbol
            else:
                simple.dim_value = part.size
    return spec


def _add_devices(
    spec: ShardingSpecProto, at: Placement, factors: Sequence[Sequence[_Factor]]
) -> None:
    """Name each shard's device; several are a group, numbered -1, -2, ... as they appear."""
    holders: dict[tuple[Pieces, ...], list[int]] = defaultdict(list)
    for device, pieces in at.parts():
        holders[pieces].append(device)
    groups: dict[tuple[int, ...], int] = {}
    for shard in itertools.product(*(list(_blocks(parts)) for parts in factors)):
        devices = tuple(holders[shard])
        if len(devices) == 1:
            spec.device.append(devices[0])
            continue
        if devices not in groups:
            groups[devices] = -1 - len(groups)
            spec.index_to_device_group_map.add(key=groups[devices], value=devices)
        spec.device.append(groups[devices])


def _factors(layout: DimLayout, mesh: DeviceMesh, size: int) -> tuple[_Factor, ...]:
    """Find at most two factors of a dim whose blocks are exactly the parts of the layout."""
    if not layout.axes:
        return (_Factor(size, 1),)
    parts = {layout.pieces(mesh, point) for _, point in mesh.coords()}
    for factors in _candidates(layout, mesh.size(layout.axes)):
        blocks = list(_blocks(factors))
        if len(parts) == len(blocks) and parts == set(blocks):
            return factors
    raise NotInStandardError(f"cut {layout} of a dim of {size}: not in equal blocks")


def _candidates(layout: DimLayout, shards: int) -> Iterator[tuple[_Factor, ...]]:
    """Even cuts of the dim, then of a major and a minor factor, one of them or both.

    A factor of n under a cut of its major factor into k makes n - k + 1 segments.
    """
    divisors = [n for n in range(1, shards + 1) if shards % n == 0]
    majors = {1, *(len(layout.segments) + n - 1 for n in divisors)}
    for major, outer in itertools.product(sorted(majors), divisors):
        minor, inner = layout.size // major, shards // outer
        if layout.size % major == 0 and major % outer == 0 and minor % inner == 0:
            pair = (_Factor(major, outer), _Factor(minor, inner))
            yield tuple(part for part in pair if part.size > 1)


def _blocks(factors: Sequence[_Factor]) -> Iterator[Pieces]:
    """The elements of each shard of a dim, row-major over its factors."""
    major, minor = (_Factor(1, 1), *factors)[-2:]
    rows, width = major.size // major.shards, minor.size // minor.shards
    for outer, inner in itertools.product(range(major.shards), range(minor.shards)):
        lines = range(outer * rows, (outer + 1) * rows)
        yield _merged([(line * minor.size + inner * width, width) for line in lines])


def _merged(runs: Sequence[Interval]) -> Pieces:
    merged: list[Interval] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((start, length))
    return tuple(merged)
