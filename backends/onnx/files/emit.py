"""Rank programs -> one ONNX file a rank.

A file holds the rank's nodes and constants, and its communications as nodes of our own domain.
>>> emit(programs, graph, Path("out"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from partitioner.backends.errors import BackendError
from partitioner.backends.header import Origin
from partitioner.backends.onnx.files.communications import comm_node, slice_nodes, stub
from partitioner.backends.onnx.files.messages import (
    BLOCK_KEY,
    DOMAIN,
    ORIGIN_KEY,
    PHASE_KEY,
    PLAIN_KEY,
    node_proto,
    tensor_proto,
    value_info,
    write_header,
)
from partitioner.backends.onnx.files.weights import Store, WeightFile, inline_tensor
from partitioner.backends.regions import cut
from partitioner.ir.errors import naming
from partitioner.ir.graph import Graph
from partitioner.ir.pieces.batch_parts import BatchParts
from partitioner.ir.program import Comm, CommKind, Compute, Programs, RankProgram

#: The newest that ONNX Runtime 1.31 reads without multi-device annotations.
IR_VERSION = 10
_NO_ORIGIN = Origin()


def emit(
    programs: Programs,
    graph: Graph,
    directory: Path,
    origin: Origin = _NO_ORIGIN,
    parts: BatchParts | None = None,
) -> None:
    """Write `rank0.onnx`, ... and, for ranks with large constants, `rank0.weights`, ...

    Constants of the graph are read one at a time. If the graph is of a micro-batch, `parts` has
    the requests that it is a part of.

    Raises:
        ProgramError: The programs would deadlock or read a value before it is made.
        BackendError: A program cannot be written.
    """
    programs.check()
    for program in programs.ranks:
        with closing(WeightFile(directory / f"rank{program.rank}.weights")) as weights:
            model = _build(program, programs, graph, weights.tensor, origin, parts)
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
        if block is not None:
            for node in body.node[first:]:
                node.metadata_props.add(key=BLOCK_KEY, value=str(block))
        if isinstance(step, Compute) and block in programs.plain:
            for node in body.node[first:]:
                if node.op_type == "Conv":
                    node.metadata_props.add(key=PLAIN_KEY, value="1")
    body.input.extend(value_info(name, program.types[name]) for name in program.inputs)
    body.output.extend(_outputs(body, program))
    body.value_info.extend(_inner_values(body, program))
    if not body.node:  # stock ONNX Runtime does not load a file without any
        idle = tensor_proto("", np.zeros((), np.int64), "int64")
        name = f"{DOMAIN}.idle"
        body.node.append(helper.make_node("Constant", [], [name], name=name, value=idle))
        body.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, ()))
    comms = [node for node in body.node if node.domain == DOMAIN]
    functions = {node.op_type: node for node in comms}
    opsets = sorted(graph.opsets.items()) + ([(DOMAIN, 1)] if comms else [])
    model = helper.make_model(
        body,
        producer_name=DOMAIN,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(*pair) for pair in opsets],
        functions=[stub(name, node, opset) for name, node in sorted(functions.items())],
    )
    write_header(model, program, programs, len(comms), origin, parts)
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
        if array.shape != type_.shape:
            raise BackendError(
                f"rank {program.rank}: {name!r} is {type_}, "
                f"but its part of {part.whole!r} has shape {array.shape}"
            )
        yield store(name, type_, array)


def _add_step(body: GraphProto, step: Compute | Comm, program: RankProgram, opset: int) -> None:
    if isinstance(step, Compute):
        what = f"rank {program.rank}: node {step.node.name!r} ({step.node.op})"
        with naming(what, BackendError):
            node = node_proto(step.node, dict(step.renames))
        # Operands and results have local names; `renames` is for the bodies inside only.
        node.input[:] = step.node.inputs
        node.output[:] = step.node.outputs
        _add_node(body, node, step.phase, step.origin)
    elif step.kind is CommKind.SLICE:
        nodes, literals = slice_nodes(step, program, opset)
        body.initializer.extend(literals)
        for node in nodes:
            _add_node(body, node, step.phase, step.why)
    elif program.rank in step.sources() | step.targets():
        body.node.append(comm_node(step, program, opset))


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


def _inner_values(body: GraphProto, program: RankProgram) -> Iterator[ValueInfoProto]:
    outer = {value.name for value in body.output}
    for node in body.node:
        for name in node.output:
            if name and name not in outer and name in program.types:
                yield value_info(name, program.types[name])
