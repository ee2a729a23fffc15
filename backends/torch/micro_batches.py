"""The micro-batches of a module's call, and their results as those of the call.

A tensor argument is split along its first dim if that is the batch: as long as the first dim of the
first tensor argument that has one. Others go to every micro-batch whole. Results whose first dim is
the micro-batch are put together; the loss, and other floating scalars, are means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.signature import Signature
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a call.

    Attributes:
        count: Number of them, of equal sizes.
        split: Graph inputs that are split.
        joined: Results that are put together; the others are means.
    """

    count: int
    split: frozenset[str]
    joined: frozenset[str]

    @classmethod
    def of(
        cls, count: int, batch: int, whole: Signature, types: Mapping[str, TensorType]
    ) -> MicroBatches:
        """The micro-batches of a module.

        Args:
            count: Number of them.
            batch: Size of the whole batch.
            whole: The signature of a call with the whole batch.
            types: Types of the results of one micro-batch.

        Raises:
            BackendError: A result has no batch dim, and is no floating scalar.
        """
        size = batch // count
        inputs = zip(whole.inputs, whole.example, strict=True)
        split = frozenset(name for name, example in inputs if name and _length(example) == batch)
        joined = set()
        for name in filter(None, whole.results):
            shape, dtype = types[name].shape, types[name].dtype
            if shape and shape[0] == size:
                joined.add(name)
            elif shape or not dtype.startswith(("float", "bfloat")):
                raise BackendError(
                    f"micro_batches={count}: the module's result {name!r} is {types[name]}, "
                    f"neither as long as a micro-batch ({size}) nor a floating scalar, whose mean "
                    "is taken: return other results, or give micro_batches=1"
                )
        return cls(count, split, frozenset(joined))

    def parts(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Graph inputs of each micro-batch."""
        return [
            {
                name: value.chunk(self.count)[index] if name in self.split else value
                for name, value in inputs.items()
            }
            for index in range(self.count)
        ]

    def whole(self, results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Results of a call, of those of each micro-batch."""
        return {
            name: torch.cat([one[name] for one in results])
            if name in self.joined
            else torch.stack([one[name] for one in results]).mean(0)
            for name in results[0]
        }


def batch_size(arguments: Any, count: int) -> int:
    """Size of the batch of a call.

    Raises:
        BackendError: There is no batch, or it cannot be cut into `count` equal parts.
    """
    lengths = [length for leaf in pytree.tree_leaves(arguments) if (length := _length(leaf))]
    if not lengths:
        raise BackendError(f"micro_batches={count}: no argument of the call has a batch dim")
    if lengths[0] % count:
        raise BackendError(
            f"micro_batches={count}: the batch of {lengths[0]} cannot be cut into as many equal "
            "parts"
        )
    return lengths[0]


def usual_counts(batch: int, devices: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth a try: about one, two and four for each device."""
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    wanted = (devices, 2 * devices, 4 * devices)
    nearest = (min(divisors, key=lambda n: (abs(n - count), n)) for count in wanted)
    return tuple(sorted(set(nearest)))


def first_part(arguments: Any, batch: int, count: int) -> Any:
    """The arguments of a call with the first micro-batch."""

    def part(leaf: Any) -> Any:
        return leaf[: batch // count] if _length(leaf) == batch else leaf

    return pytree.tree_map(part, arguments)


def _length(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, Tensor) and value.dim() else 0
