"""Local slices as standard ONNX nodes: Slice per piece, Concat of the pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.header import DOMAIN
from partitioner.backends.regions import is_whole
from partitioner.ir.exchange import Transfer
from partitioner.ir.layout import Interval
from partitioner.ir.program import Comm, RankProgram

#: First operator set where Slice takes its bounds as operands.
_SLICE_OPERANDS = 10


@dataclass
class _Builder:
    """Nodes and literals of one slice, named after its `seq`."""

    prefix: str
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    literals: list[TensorProto] = field(default_factory=list)
    names: int = 0

    def fresh(self) -> str:
        self.names += 1
        return f"{self.prefix}.{self.names}"

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        name = f"{self.prefix}.{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def literal(self, values: list[int]) -> str:
        name = self.fresh()
        self.literals.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def slice(self, value: str, output: str, cuts: dict[int, Interval]) -> str:
        axes, starts = list(cuts), [start for start, _ in cuts.values()]
        ends = [start + length for start, length in cuts.values()]
        if self.opset < _SLICE_OPERANDS:
            return self.add("Slice", [value], output, axes=axes, starts=starts, ends=ends)
        operands = [self.literal(starts), self.literal(ends), self.literal(axes)]
        return self.add("Slice", [value, *operands], output)


def slice_nodes(
    comm: Comm, program: RankProgram, opset: int
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes and literals that make `comm.target` from `comm.source` on one rank.

    Raises:
        BackendError: The slice reads a part of another rank, or not one part that fills the target.
    """
    transfer = _local_transfer(comm, program)
    build = _Builder(f"{DOMAIN}.slice{comm.seq}", opset)
    single, several = _split(transfer, program.types[comm.source].shape)
    value, left = comm.source, len(several) + bool(single)
    if single:
        left -= 1
        value = build.slice(value, build.fresh() if left else comm.target, single)
    for dim, intervals in several.items():
        left -= 1
        pieces = [build.slice(value, build.fresh(), {dim: interval}) for interval in intervals]
        value = build.add("Concat", pieces, build.fresh() if left else comm.target, axis=dim)
    if value != comm.target:
        build.add("Identity", [value], comm.target)
    return build.nodes, build.literals


def _local_transfer(comm: Comm, program: RankProgram) -> Transfer:
    local = [t for t in comm.transfers if program.rank in (t.source, t.target)]
    if len(local) != 1 or local[0].source != local[0].target:
        raise BackendError(
            f"slice {comm.seq} on rank {program.rank} must be one transfer to itself,"
            f" not {len(local)} transfers"
        )
    target = program.types[comm.target]
    if not is_whole(local[0].write, target.shape):
        raise BackendError(
            f"slice {comm.seq} on rank {program.rank} fills only a part of {comm.target!r},"
            f" which is {target}"
        )
    return local[0]


def _split(
    transfer: Transfer, shape: tuple[int, ...]
) -> tuple[dict[int, Interval], dict[int, tuple[Interval, ...]]]:
    single: dict[int, Interval] = {}
    several: dict[int, tuple[Interval, ...]] = {}
    for dim, (intervals, size) in enumerate(zip(transfer.read, shape, strict=True)):
        kept = tuple(interval for interval in intervals if interval[1]) or ((0, 0),)
        if len(kept) > 1:
            several[dim] = kept
        elif kept[0] != (0, size):
            single[dim] = kept[0]
    return single, several
