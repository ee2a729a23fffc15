"""The micro-batches of a module's call, and their results as those of the call.

A tensor argument is split along its first dim if that is the batch: as long as the first dim of the
first tensor argument that has one. Others go to every micro-batch whole. Micro-batches have equal
sizes but the last, which may be smaller, as `torch.chunk` makes them. Results whose first dim is
the micro-batch are put together; the loss, and other floating scalars, are means over the batch.
Results of one micro-batch are those of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.ir.layout import Interval
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a call."""

    sizes: tuple[int, ...]  #: Their sizes; all but the last are equal.
    split: frozenset[str]  #: Graph inputs that are split.
    joined: frozenset[str]  #: Results that are put together; others of several are means.

    @property
    def count(self) -> int:
        """Number of micro-batches."""
        return len(self.sizes)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each micro-batch in the loss of the call."""
        return tuple(size / sum(self.sizes) for size in self.sizes)

    @property
    def rows(self) -> Mapping[str, tuple[Interval, ...]]:
        """Start and length of the rows that each has of every input and result that is split."""
        ends = tuple(accumulate(self.sizes, initial=0))
        rows = tuple(zip(ends, self.sizes, strict=False))
        return dict.fromkeys(sorted(self.split | self.joined), rows)

    @property
    def rest(self) -> int:
        """Size of the last micro-batch if it is smaller than the others; else 0."""
        return self.sizes[-1] if self.sizes[-1] < self.sizes[0] else 0

    @classmethod
    def of(
        cls, sizes: tuple[int, ...], whole: Signature, types: Mapping[str, TensorType]
    ) -> MicroBatches:
        """Micro-batches of a call with the `whole` batch; `types` are the first one's results."""
        inputs = zip(whole.inputs, whole.example, strict=True)
        split = frozenset(
            name for name, example in inputs if name and _length(example) == sum(sizes)
        )
        joined = set()
        for name in filter(None, whole.results):
            shape, dtype = types[name].shape, types[name].dtype
            if shape and shape[0] == sizes[0]:
                joined.add(name)
            elif len(sizes) > 1 and (shape or not dtype.startswith(("float", "bfloat"))):
                raise BackendError(
                    f"micro_batches={len(sizes)}: the module's result {name!r} is {types[name]}, "
                    f"neither as long as a micro-batch ({sizes[0]}) nor a floating scalar, whose "
                    "mean is taken: return other results, or give micro_batches=1"
                )
        return cls(sizes, split, frozenset(joined))

    def parts(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Graph inputs of each micro-batch; those of a rank's part of the batch are parts, too."""
        if self.count == 1:
            return [dict(inputs)]
        ends = [sum(self.sizes[: index + 1]) for index in range(self.count)]
        cut = {
            name: value.tensor_split([len(value) * end // ends[-1] for end in ends[:-1]])
            if name in self.split
            else [value] * self.count
            for name, value in inputs.items()
        }
        return [{name: of[index] for name, of in cut.items()} for index in range(self.count)]

    def inputs(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The inverse of `parts`, for inputs of the whole batch."""
        return {
            name: torch.cat([one[name] for one in parts]) if name in self.split else value
            for name, value in parts[0].items()
        }

    def whole(
        self,
        results: Sequence[Mapping[str, Tensor]],
        there: Mapping[str, Tensor | None] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Results of a call, of those of each micro-batch; some may be `there` already."""
        if len(results) == 1:
            return dict(results[0])
        whole = {}
        for name in results[0]:
            parts = [one[name] for one in results]
            if name in self.joined:
                own = there.get(name)
                whole[name] = torch.cat(parts) if own is None else own
            elif self.rest:
                shares = zip(parts, self.shares, strict=True)
                whole[name] = torch.stack([x * share for x, share in shares]).sum(0)
            else:
                whole[name] = torch.stack(parts).mean(0)
        return whole


#: A call that runs as a whole.
WHOLE_BATCH = MicroBatches((1,), frozenset(), frozenset())


def micro_batch_sizes(arguments: Any, count: int) -> tuple[int, ...]:
    """Sizes of the micro-batches of a call: at most `count`, and fewer if some would be empty."""
    lengths = [length for leaf in pytree.tree_leaves(arguments) if (length := _length(leaf))]
    if not lengths:
        raise BackendError(f"micro_batches={count}: no argument of the call has a batch dim")
    size = -(-lengths[0] // count)
    whole, rest = divmod(lengths[0], size)
    return (size,) * whole + ((rest,) if rest else ())


def part(arguments: Any, batch: int, rows: slice) -> Any:
    """The arguments of a call with some rows of its batch."""

    def of(leaf: Any) -> Any:
        return leaf[rows] if _length(leaf) == batch else leaf

    return pytree.tree_map(of, arguments)


def _length(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, Tensor) and value.dim() else 0
