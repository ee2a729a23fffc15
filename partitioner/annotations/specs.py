"""A placement as ONNX says it: ShardingSpecProto (IR 11), or why it cannot be said.

The standard cuts a dim evenly: into `num_shards` blocks of equal size or, if the dim is several
factors fused (major first), each factor so. Shards are numbered row-major over the cut dims and
their factors; shard i lies on `device[i]`, a device or, below 0, a group of devices that all hold
it. There is no word for a pending sum, and a cut that is not even is the backend's affair.
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
from partitioner.ir.types import Dim, TensorType

Pieces = tuple[Interval, ...]


class NotInStandardError(PartitionerError, ValueError):
    """A placement for which the standard has no words; the message says why."""


@dataclass(frozen=True)
class Factor:
    """One fused factor of a dim: its size, and the equal blocks that it is cut into."""

    size: int
    shards: int


def sharding_spec(tensor: str, kind: TensorType, at: Placement) -> ShardingSpecProto:
    """How a tensor lies on its devices.

    Args:
        tensor: Name that the node has for it.
        kind: Type of the whole tensor.
        at: Where it lies.

    Raises:
        NotInStandardError: A pending reduction, or a cut that is not even.
    """
    if at.sharding.partial:
        pending = ", ".join(f"{reduce} over {axis}" for axis, reduce in at.sharding.partial)
        raise NotInStandardError(f"a pending {pending}")
    factors = [_factors(dim, at.mesh, kind.dims[i].size) for i, dim in enumerate(at.sharding.dims)]
    spec = ShardingSpecProto(tensor_name=tensor)
    _add_devices(spec, _holders(at, factors))
    for axis, parts in enumerate(factors):
        if any(part.shards > 1 for part in parts):
            _add_dim(spec, axis, parts, kind.dims[axis])
    return spec


def _add_dim(spec: ShardingSpecProto, axis: int, parts: Sequence[Factor], dim: Dim) -> None:
    sharded = spec.sharded_dim.add(axis=axis)
    for part in parts:
        simple = sharded.simple_sharding.add(num_shards=part.shards)
        if len(parts) == 1 and dim.symbol is not None:
            simple.dim_param = dim.symbol
        else:
            simple.dim_value = part.size


def _add_devices(spec: ShardingSpecProto, holders: Sequence[Sequence[int]]) -> None:
    """A shard on one device names it; a shard on several names a group, numbered -1, -2, ..."""
    keys: dict[tuple[int, ...], int] = {}
    for devices in map(tuple, holders):
        if len(devices) == 1:
            spec.device.append(devices[0])
            continue
        if devices not in keys:
            keys[devices] = -1 - len(keys)
            spec.index_to_device_group_map.add(key=keys[devices], value=devices)
        spec.device.append(keys[devices])


def _holders(at: Placement, factors: Sequence[Sequence[Factor]]) -> list[list[int]]:
    """Devices of each shard, in the standard's order."""
    blocks = [list(_blocks(parts)) for parts in factors]
    where: dict[tuple[Pieces, ...], list[int]] = defaultdict(list)
    for device, pieces in at.parts():
        where[pieces].append(device)
    return [where[shard] for shard in itertools.product(*blocks)]


def _factors(layout: DimLayout, mesh: DeviceMesh, size: int) -> tuple[Factor, ...]:
    """At most two factors of a dim whose blocks are exactly the parts of the layout."""
    if not layout.axes:
        return (Factor(size, 1),)
    wanted = {layout.pieces(mesh, point) for _, point in mesh.coords()}
    for factors in _candidates(layout, mesh.size(layout.axes)):
        blocks = list(_blocks(factors))
        if len(wanted) == len(blocks) and wanted == set(blocks):
            return factors
    raise NotInStandardError(f"cut {layout} of a dim of {size}: not in equal blocks")


def _candidates(layout: DimLayout, shards: int) -> Iterator[tuple[Factor, ...]]:
    """Even cuts of the dim, then of a major and a minor factor, one of them or both.

    A factor of n under a cut of its major factor into k makes n - k + 1 segments.
    """
    divisors = [n for n in range(1, shards + 1) if shards % n == 0]
    majors = {1, *(len(layout.segments) + n - 1 for n in divisors)}
    for major, outer in itertools.product(sorted(majors), divisors):
        minor, inner = layout.size // major, shards // outer
        if layout.size % major == 0 and major % outer == 0 and minor % inner == 0:
            pair = (Factor(major, outer), Factor(minor, inner))
            yield tuple(part for part in pair if part.size > 1)


def _blocks(factors: Sequence[Factor]) -> Iterator[Pieces]:
    """Elements of each shard of a dim, row-major over its factors."""
    major, minor = (Factor(1, 1), *factors)[-2:]
    rows, width = major.size // major.shards, minor.size // minor.shards
    for outer, inner in itertools.product(range(major.shards), range(minor.shards)):
        lines = range(outer * rows, (outer + 1) * rows)
        yield _merged([(line * minor.size + inner * width, width) for line in lines])


def _merged(runs: Sequence[Interval]) -> Pieces:
    found: list[Interval] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((start, length))
    return tuple(found)
