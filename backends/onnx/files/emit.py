"""Rank programs -> one ONNX file a rank.

A file holds the rank's nodes and constants, and its communications as nodes of our own domain.
Functions stand in for these: a function gives the true output type and shape, so that checkers
accept a rank file and stock ONNX Runtime loads it; what it computes is one rank's view (its own
tensor, or zeros). A local slice is standard nodes, a Slice per piece and a Concat of the pieces.
>>> emit(programs, graph, Path("out"))  # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from partitioner.backends.errors import BackendError
from partitioner.backends.header import Origin, constant_parts, header_data
from partitioner.backends.onnx.files.messages import (
    BLOCK_KEY,
    DOMAIN,
    FORMAT_VERSION,
    ORIGIN_KEY,
    PHASE_KEY,
    PLAIN_KEY,
    PROGRAM_KEY,
    VERSION_KEY,
    dump_transfers,
    node_proto,
    tensor_proto,
    value_info,
)
from partitioner.backends.onnx.files.weights import Store, WeightFile, inline_tensor
from partitioner.backends.regions import cut, is_whole
from partitioner.ir.errors import naming
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Interval
from partitioner.ir.ops.onnx.feeding import FEED
from partitioner.ir.program import BatchParts, Comm, CommKind, Compute, Programs, RankProgram
from partitioner.ir.types import onnx_dtype

#: The newest that ONNX Runtime 1.31 reads without multi-device annotations.
IR_VERSION = 10
#: The node and the value of a rank that computes nothing.
IDLE = f"{DOMAIN}.idle"
_NO_ORIGIN = Origin()
_NONE: Mapping[str, str] = MappingProxyType({})
#: First operator sets with ConstantOfShape, and where Slice takes its bounds as operands.
_CONSTANT_OF_SHAPE, _SLICE_OPERANDS = 9, 10
_ATTRIBUTES = (
    "seq", "kind", "ranks", "active", "uniform", "dtype", "reduce", "phase", "target_phase",
    "transfers", "source_shape", "target_shape", "old_shape", "old_numel", "why",
)  # fmt: skip


def emit(
    programs: Programs,
    graph: Graph,
    directory: Path,
    origin: Origin = _NO_ORIGIN,
    parts: BatchParts | None = None,
    metadata: Mapping[str, str] = _NONE,
) -> None:
    """Write `rank0.onnx`, ... and, for ranks with large constants, `rank0.weights`, ...

    Constants of the graph are read one at a time. If the graph is of a micro-batch, `parts` has
    the requests that it is a part of. Rank files keep the model's own `metadata`.

    Raises:
        ProgramError: The programs would deadlock or read a value before it is made.
        BackendError: A program cannot be written.
    """
    programs.check()
    for program in programs.ranks:
        with closing(WeightFile(directory / f"rank{program.rank}.weights")) as weights:
            model = _build(program, programs, graph, weights.tensor, origin, parts)
            for key, text in metadata.items():
                if not key.startswith(f"{DOMAIN}."):
                    model.metadata_props.add(key=key, value=text)
        (directory / f"rank{program.rank}.onnx").write_bytes(weights.sealed(model))


def emit_models(programs: Programs, graph: Graph) -> tuple[ModelProto, ...]:
    """The rank files as messages with all constants inside: small models, without a folder."""
    programs.check()
    return tuple(
        _build(program, programs, graph, inline_tensor, _NO_ORIGIN, None)
        for program in programs.ranks
    )


def _build(
    program: RankProgram,
    programs: Programs,
    graph: Graph,
    store: Store,
    origin: Origin,
    parts: BatchParts | None,
) -> ModelProto:
    opset = graph.opsets[""]
    body = GraphProto(name=f"{graph.name or 'model'}.rank{program.rank}")
    body.initializer.extend(_constants(program, graph, store))
    for step in program.steps:
        first = len(body.node)
        _add_step(body, step, program, opset)
        block = graph.blocks.get(step.origin) if isinstance(step, Compute) else None
        is_plain = isinstance(step, Compute) and block in programs.plain
        for node in body.node[first:]:
            if block is not None:
                node.metadata_props.add(key=BLOCK_KEY, value=str(block))
            if is_plain and node.op_type == "Conv":
                node.metadata_props.add(key=PLAIN_KEY, value="1")
    body.input.extend(value_info(name, program.types[name]) for name in program.inputs)
    body.output.extend(_outputs(body, program))
    outer = {value.name for value in body.output}
    made = [name for node in body.node for name in node.output if name not in outer]
    body.value_info.extend(value_info(n, program.types[n]) for n in made if n in program.types)
    if not body.node:  # stock ONNX Runtime does not load a file without any
        idle = tensor_proto("", np.zeros((), np.int64), "int64")
        body.node.append(helper.make_node("Constant", [], [IDLE], name=IDLE, value=idle))
        body.output.append(helper.make_tensor_value_info(IDLE, TensorProto.INT64, ()))
    comms = [node for node in body.node if node.domain == DOMAIN]
    functions = {node.op_type: node for node in comms}
    opsets = sorted(graph.opsets.items()) + ([(DOMAIN, 1)] if comms else [])
    model = helper.make_model(
        body,
        producer_name=DOMAIN,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(*pair) for pair in opsets],
        functions=[_stub(name, node, opset) for name, node in sorted(functions.items())],
    )
    constants = constant_parts(program, graph)
    data = header_data(program, programs, len(comms), origin, constants, parts)
    header = json.dumps(data, separators=(",", ":"))
    for key, text in ((VERSION_KEY, str(FORMAT_VERSION)), (PROGRAM_KEY, header)):
        model.metadata_props.add(key=key, value=text)
    return model


def _constants(program: RankProgram, graph: Graph, store: Store) -> Iterator[TensorProto]:
    for name, array in program.literals.items():
        yield tensor_proto(name, np.asarray(array), program.types[name].dtype)
    for name, part in program.constants.items():
        type_ = program.types[name]
        if part.zero:
            yield store(name, type_, None)
            continue
        array = cut(graph.constants[part.whole].load(), part.region)
        assert array.shape == type_.shape, (name, type_, array.shape)
        yield store(name, type_, array)


def _add_step(body: GraphProto, step: Compute | Comm, program: RankProgram, opset: int) -> None:
    if isinstance(step, Compute):
        what = f"rank {program.rank}: node {step.node.name!r} ({step.node.op})"
        with naming(what, BackendError):
            if step.node.op == FEED:  # where its result is, is all that it says
                held = replace(step.node, op="Identity", inputs=step.node.inputs[:1])
                step = replace(step, node=held)
            node = node_proto(step.node, dict(step.renames))
        _add_node(body, node, step.phase, step.origin)
    elif step.kind is CommKind.SLICE:
        nodes, literals = _slice_nodes(step, program, opset)
        body.initializer.extend(literals)
        for node in nodes:
            _add_node(body, node, step.phase, step.why)
    elif program.rank in step.sources() | step.targets():
        body.node.append(_comm_node(step, program, opset))


def _add_node(body: GraphProto, node: NodeProto, phase: int, origin: str) -> None:
    if phase:
        node.metadata_props.add(key=PHASE_KEY, value=str(phase))
    if origin and origin != node.name:
        node.metadata_props.add(key=ORIGIN_KEY, value=origin)
    body.node.append(node)


def _outputs(body: GraphProto, program: RankProgram) -> list[ValueInfoProto]:
    """Values that are delivered or sent; on a rank that does neither, those that no node reads."""
    types = {output.value: program.types[output.value] for output in program.outputs}
    for node in body.node:
        if node.domain == DOMAIN and node.output[0] not in program.types:
            types[node.output[0]] = program.types[node.input[0]]
    if not types:
        read = {name for node in body.node for name in node.input}
        made = [name for node in body.node for name in node.output]
        types = {n: program.types[n] for n in made if n in program.types and n not in read}
    return [value_info(name, type_) for name, type_ in types.items()]


def _comm_node(comm: Comm, program: RankProgram, opset: int) -> NodeProto:
    """The node of a communication in a file of a rank that takes part.

    Its result is the value that the rank writes or, under a name of its own, only sends.
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
    """Test whether a broadcast or an all-gather is regular: equal parts, each to every rank."""
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


def _stub(name: str, node: NodeProto, opset: int) -> FunctionProto:
    """The function behind communication nodes of this name, of which `node` is one."""
    sends_only = all(attribute.name != "target_shape" for attribute in node.attribute)
    if sends_only or name == _stub_name(CommKind.ALL_REDUCE, reads=True, writes=True):
        body = [helper.make_node("Identity", ["X"], ["Y"])]
    else:
        body = _zeros(opset)
    opsets = [helper.make_opsetid("", opset)]  # a function must import the model's own version
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
class Builder:
    """Nodes and literals of one slice, named after a prefix."""

    prefix: str
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    literals: list[TensorProto] = field(default_factory=list)
    names: int = 0

    def fresh(self) -> str:
        """A new name."""
        self.names += 1
        return f"{self.prefix}.{self.names}"

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node; its result."""
        name = f"{self.prefix}.{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def literal(self, values: list[int]) -> str:
        """A constant of whole numbers."""
        name = self.fresh()
        self.literals.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def slice(self, value: str, output: str, cuts: Mapping[int, Interval]) -> str:
        """Cut a value along dims, each to an interval."""
        axes, starts = list(cuts), [start for start, _ in cuts.values()]
        ends = [start + length for start, length in cuts.values()]
        if self.opset < _SLICE_OPERANDS:
            return self.add("Slice", [value], output, axes=axes, starts=starts, ends=ends)
        operands = [self.literal(starts), self.literal(ends), self.literal(axes)]
        return self.add("Slice", [value, *operands], output)


def _slice_nodes(
    comm: Comm, program: RankProgram, opset: int
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes and literals that make `comm.target` from `comm.source` on one rank."""
    local = [t for t in comm.transfers if program.rank in (t.source, t.target)]
    (own,), target = local, program.types[comm.target]
    assert own.source == own.target, comm
    assert is_whole(own.write, target.shape), comm
    build = Builder(f"{DOMAIN}.slice{comm.seq}", opset)
    shape = program.types[comm.source].shape
    read = [
        tuple(interval for interval in intervals if interval[1]) or ((0, 0),)
        for intervals in own.read
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
