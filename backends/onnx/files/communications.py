"""Communications as nodes of a rank file, and the functions that stand in for them.

A function gives the true output type and shape, so that checkers accept a rank file and stock
ONNX Runtime loads it; what it computes is one rank's view (its own tensor, or zeros). A local slice
is no communication: it is standard nodes, a Slice per piece and a Concat of the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.messages import DOMAIN, dump_transfers
from partitioner.backends.regions import is_whole
from partitioner.ir.layout import Interval
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.ir.program import Comm, CommKind, RankProgram

#: First operator sets with ConstantOfShape, and where Slice takes its bounds as operands.
_CONSTANT_OF_SHAPE, _SLICE_OPERANDS = 9, 10
_ATTRIBUTES = (
    "seq", "kind", "ranks", "active", "uniform", "dtype", "reduce", "phase", "target_phase",
    "transfers", "source_shape", "target_shape", "old_shape", "old_numel", "why",
)  # fmt: skip


def comm_node(comm: Comm, program: RankProgram, opset: int) -> NodeProto:
    """The node of a communication in a file of a rank that takes part.

    The node's result is the value that the rank writes or, if it only sends, the tensor that
    leaves, under a name that none of the program's values has.
    """
    reads, writes = program.rank in comm.sources(), program.rank in comm.targets()
    local = tuple(t for t in comm.transfers if program.rank in (t.source, t.target))
    result = comm.target if writes else f"{DOMAIN}.sent{comm.seq}"
    while not writes and result in program.types:
        result += "'"
    attributes: dict[str, Any] = {
        "seq": comm.seq,
        "kind": comm.kind.value,
        "ranks": list(comm.ranks),
        "active": sorted(comm.sources() | comm.targets()),
        "uniform": int(_uniform(comm)),
        "dtype": onnx_dtype(comm.dtype),
        "reduce": comm.reduce,
        "phase": comm.phase,
        "target_phase": comm.target_phase,
        "transfers": dump_transfers(local),
        "why": comm.why,
    }
    if reads:
        attributes["source_shape"] = _sizes(program.types[comm.source].shape)
    if writes:
        target = program.types[comm.target]
        attributes["target_shape"] = _sizes(target.shape)
        if opset < _CONSTANT_OF_SHAPE:
            attributes["old_shape"] = _sizes(target.shape, np.float64)
            attributes["old_numel"] = _sizes((target.numel,), np.float64)
    return helper.make_node(
        _stub_name(comm.kind, reads, writes),
        [comm.source] if reads else [],
        [result],
        name=f"{DOMAIN}.comm{comm.seq}",
        domain=DOMAIN,
        **attributes,
    )


def _uniform(comm: Comm) -> bool:
    """Test whether a broadcast or an all-gather is regular: equal parts, each to every rank.

    Only the emitter sees the transfers of all ranks, and all ranks must agree.
    """
    moved = [t for t in comm.transfers if t.numel]
    reads = {(t.source, t.read) for t in moved}
    if comm.kind is CommKind.BROADCAST:
        return len(reads) == 1
    if comm.kind is not CommKind.ALL_GATHER:
        return False
    ranks = comm.sources() | comm.targets()
    pairs = {(t.source, t.target) for t in moved}
    one_part = len(reads) == len(ranks) and len(moved) == len(pairs) == len(ranks) ** 2
    return one_part and len({t.numel for t in moved}) == 1


def _stub_name(kind: CommKind, reads: bool, writes: bool) -> str:
    """Operator and function name of a rank's side: "CommAllReduce", "CommSend", "CommScatterRecv".

    Never a name that ONNX has too: an optimization of ONNX Runtime looks at the name `Gather`
    without its domain, and aborts the process.
    """
    camel = "".join(word.capitalize() for word in kind.split("_"))
    side = "" if reads and writes else "Send" if reads else "Recv"
    return f"Comm{side if kind is CommKind.SEND and side else camel + side}"


def stub(name: str, node: NodeProto, opset: int) -> FunctionProto:
    """The function behind communication nodes of this name, of which `node` is one.

    A function must import the model's own version of the default domain, `opset`.
    """
    sends_only = all(attribute.name != "target_shape" for attribute in node.attribute)
    if sends_only or name == _stub_name(CommKind.ALL_REDUCE, reads=True, writes=True):
        body = [helper.make_node("Identity", ["X"], ["Y"])]
    else:
        body = _zeros(opset)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(
        DOMAIN, name, ["X"] * len(node.input), ["Y"], body, opsets, attributes=list(_ATTRIBUTES)
    )


def _zeros(opset: int) -> list[NodeProto]:
    cast = _referring("Cast", ["zeros"], "Y", "to", "dtype", AttributeProto.INT)
    if opset < _CONSTANT_OF_SHAPE:  # constants are floating-point numbers only
        zero = numpy_helper.from_array(np.zeros(1, np.float32))
        nodes = [helper.make_node("Constant", [], ["zero"], value=zero)]
        for name in ("old_shape", "old_numel"):
            nodes.append(_referring("Constant", [], name, "value", name, AttributeProto.TENSOR))
            nodes.append(helper.make_node("Cast", [name], [f"{name}_"], to=TensorProto.INT64))
        nodes.append(helper.make_node("Tile", ["zero", "old_numel_"], ["flat"]))
        nodes.append(helper.make_node("Reshape", ["flat", "old_shape_"], ["zeros"]))
        return [*nodes, cast]
    shape = _referring("Constant", [], "shape", "value", "target_shape", AttributeProto.TENSOR)
    return [shape, helper.make_node("ConstantOfShape", ["shape"], ["zeros"]), cast]


def _referring(
    op: str, inputs: list[str], output: str, attribute: str, refers_to: str, type_: int
) -> NodeProto:
    node = helper.make_node(op, inputs, [output])
    node.attribute.append(
        AttributeProto(name=attribute, ref_attr_name=refers_to, type=type_)  # type: ignore[arg-type]
    )
    return node


def _sizes(shape: tuple[int, ...], dtype: type = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(shape, dtype))


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
    local = [t for t in comm.transfers if program.rank in (t.source, t.target)]
    what, target = f"slice {comm.seq} on rank {program.rank}", program.types[comm.target]
    if len(local) != 1 or local[0].source != local[0].target:
        raise BackendError(f"{what} must be one transfer to itself, not {len(local)} transfers")
    if not is_whole(local[0].write, target.shape):
        raise BackendError(f"{what} fills only a part of {comm.target!r}, which is {target}")
    build = _Builder(f"{DOMAIN}.slice{comm.seq}", opset)
    shape = program.types[comm.source].shape
    read = [
        tuple(interval for interval in intervals if interval[1]) or ((0, 0),)
        for intervals in local[0].read
    ]
    several = {dim: kept for dim, kept in enumerate(read) if len(kept) > 1}
    single = {
        dim: kept[0]
        for dim, (kept, size) in enumerate(zip(read, shape, strict=True))
        if len(kept) == 1 and kept[0] != (0, size)
    }
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
