"""The inputs and outputs of a model's micro-batches as parts of those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.exchange import Region
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class BatchParts:
    """The parts of a request that its micro-batches take and give."""

    count: int  #: Number of micro-batches, at least 1.
    types: Mapping[str, TensorType]  #: Types of the whole batch's inputs and outputs, by name.
    #: The part of each micro-batch in a whole input or output, by name. An input that is not here
    #: goes whole to every micro-batch; such an output is the same in all of them.
    regions: Mapping[str, tuple[Region, ...]]
