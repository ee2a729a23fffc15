"""A placement of DTensor's in parts of any sizes, for devices of unlike speed or memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from partitioner.ir.layout import DimLayout


class UnevenShard(Shard):
    """A dim in consecutive parts of these sizes; `Shard` has those of `torch.chunk`.

    PyTorch asks a placement for its rank's size and offset, for the whole of the parts and for a
    part of the whole. It does not ask it for parts of another cut of the same dim, see
    `RankTensor.redistribute`.
    """

    def __init__(self, dim: int, sizes: Sequence[int]) -> None:
        super().__init__(dim)
        self.sizes = tuple(sizes)

    def _local_shard_size_and_offset(
        self,
        curr_local_size: Any,  # noqa: ARG002 - PyTorch's names
        num_chunks: Any,  # noqa: ARG002
        rank: Any,
    ) -> tuple[Any, Any]:
        return self.sizes[rank], sum(self.sizes[:rank])

    def _to_replicate_tensor(
        self,
        local_tensor: Tensor,
        mesh: Any,
        mesh_dim: int,
        current_logical_shape: Any,  # noqa: ARG002 - PyTorch's names
    ) -> Tensor:
        most, dim = max(self.sizes), self.dim
        shape = list(local_tensor.shape)
        shape[dim] = most - shape[dim]
        padded = torch.cat([local_tensor, local_tensor.new_zeros(shape)], dim)
        gathered = all_gather_tensor(padded.contiguous(), dim, (mesh, mesh_dim))
        parts = [gathered.narrow(dim, i * most, size) for i, size in enumerate(self.sizes)]
        return torch.cat(parts, dim)

    def _replicate_to_shard(
        self,
        local_tensor: Tensor,
        mesh: Any,  # noqa: ARG002 - PyTorch's names
        mesh_dim: int,  # noqa: ARG002
        shard_index: Any,
    ) -> Tensor:
        start = [0, *accumulate(self.sizes)][shard_index]
        return local_tensor.narrow(self.dim, start, self.sizes[shard_index]).clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnevenShard):
            return False
        return (self.dim, self.sizes) == (other.dim, other.sizes)

    def __hash__(self) -> int:
        return hash((self.dim, self.sizes))

    def __repr__(self) -> str:
        return f"UnevenShard(dim={self.dim}, sizes={self.sizes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return UnevenShard, (self.dim, self.sizes)


class UnevenSpec(DTensorSpec):
    """A spec with `UnevenShard`s, each of which has a dim of its own: any order of them is right.

    PyTorch would look for a placement equal to `Shard` there, which an `UnevenShard` is not.
    """

    def _verify_shard_order(self, shard_order: Any) -> None:
        pass


def shard_of(dim: int, cut: DimLayout) -> Shard:
    """Give the placement over an axis of a stored value's dim that is cut over it."""
    return Shard(dim) if cut.is_chunked else UnevenShard(dim, cut.sizes())


def has_uneven(placements: Sequence[Any]) -> bool:
    """Test whether any placement is in parts that PyTorch does not know."""
    return any(isinstance(place, UnevenShard) for place in placements)
