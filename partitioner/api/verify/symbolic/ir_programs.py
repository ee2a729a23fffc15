"""Rank programs of the IR, of which the graphs of PyTorch's ranks are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from partitioner.api.verify.symbolic.held import Facts, Held
from partitioner.api.verify.symbolic.micro_batches import Rows, Runs, added, said, sum_of
from partitioner.api.verify.symbolic.nodes import LocalNode
from partitioner.api.verify.symbolic.parts import region_of
from partitioner.api.verify.symbolic.program import Program, Step
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import follow_body, prove
from partitioner.api.verify.symbolic.sent_rows import Sending
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.ops import is_stored
from partitioner.ir.ops.aten.state import ALIAS
from partitioner.ir.ops.onnx.feeding import FEED
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.program import (
    Comm,
    Compute,
    Output,
    Part,
    Programs,
    RankProgram,
    added_up,
    made_by_phase,
    steps_by_phase,
)
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class _Side:
    """A rank's side of a communication."""

    comm: Comm
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    target: TensorType | None


def prove_programs(
    graph: Graph, programs: Programs, rows: Rows | None = None, own: Sequence[int] | None = None
) -> Proof:
    """Prove that programs compute a graph; the other arguments as of `programs_of`."""
    proof, order = prove(graph, programs_of(programs, graph, rows, own)), programs.order
    if order.is_whole:
        return proof
    note = said(order.table.micro_batches, rows, trains=bool(graph.backward))
    return replace(proof, notes=(note,))


def programs_of(
    programs: Programs, graph: Graph, rows: Rows | None = None, own: Sequence[int] | None = None
) -> tuple[Program, ...]:
    """The programs of all ranks, which are of this graph; they are checked before.

    Args:
        programs: The programs.
        graph: The model, of a micro-batch if they run in such.
        rows: What micro-batches have of the batch; None if that is not to be compared.
        own: The micro-batches that the programs are of; None for all but a smaller last one.
    """
    programs.check()
    shared: dict[object, LocalNode] = {}
    count = programs.order.table.micro_batches
    rows = Rows(count, {}, ()) if rows is None else rows
    own = rows.alike if own is None else tuple(own)
    return tuple(
        _program(program, programs, graph, shared, _runs(program, programs, graph, rows, own))
        for program in programs.ranks
    )


def _runs(
    program: RankProgram, programs: Programs, graph: Graph, rows: Rows, own: tuple[int, ...]
) -> Runs | None:
    """How a rank runs its phases; None for a batch that runs as a whole."""
    order, rank = programs.order, program.rank
    if order.is_whole:
        return None
    written = (value for n in graph.nodes if n.name in graph.backward for value in n.writes)
    backward = {graph.output_names.get(value, value) for value in written}
    pieces, phases = steps_by_phase(program, order.phases), order.phases
    messages = [
        (comm, (comm.seq, transfer.source, transfer.target))
        for comm in program.comms
        if comm.phase != comm.target_phase
        for transfer in comm.transfers
    ]
    return Runs(
        phases,
        rows,
        own,
        order.runs(rank),
        {n: phase for phase, of in made_by_phase(pieces, backward).items() for n in of},
        {phase: frozenset(piece.outside) for phase, piece in pieces.items() if piece.steps},
        frozenset(program.inputs),
        added_up(order, pieces, backward),
        {name: comm.phase for comm, name in messages if name[1] == rank},
        {name: comm.target_phase for comm, name in messages if name[2] == rank},
        frozenset((step.phase, ranks) for step in program.steps if (ranks := step.meeting)),
    )


def _program(
    program: RankProgram,
    programs: Programs,
    graph: Graph,
    shared: dict[object, LocalNode],
    runs: Runs | None,
) -> Program:
    """The program of a rank; local nodes are `shared` by ranks that share steps."""
    stored = {node.name: _stored(node, program, programs) for node in graph.nodes if not node.reads}
    computes = (step for step in program.steps if isinstance(step, Compute))
    steps, outputs = _steps(program, stored, shared, runs)
    summed = frozenset[str]() if runs is None else runs.summed
    types = {sum_of(name): program.types[name] for name in summed}
    return Program(
        program.rank,
        steps,
        {**program.types, **types} if types else program.types,
        program.inputs,
        outputs,
        frozenset((*program.constants, *program.literals)),
        program.constants,
        partial(_contents, program, graph),
        graph.opsets,
        None,
        programs.copies,
        tuple(step.node.outputs[0] for step in computes if stored.get(step.node.name)),
        {
            **{
                name: (part.whole, part.region, part.zero)
                for name, part in program.constants.items()
            },
            **{name: id(array) for name, array in program.literals.items()},
        },
        unnamed=frozenset({ALIAS, FEED} & {node.op for node in graph.nodes}),
        delivers_all=programs.delivers_all,
        fed=programs.fed,
        cuts_constants=True,
        runs=runs,
    )


def _steps(
    program: RankProgram,
    stored: Mapping[str, Facts],
    shared: dict[object, LocalNode],
    runs: Runs | None,
) -> tuple[tuple[Step, ...], tuple[Output, ...]]:
    """The steps of a rank, sums over micro-batches among them, and what it delivers."""
    steps, sums, met = list[Step](), dict[str, str](), Counter[tuple[int, ...]]()
    summed = frozenset[str]() if runs is None else runs.summed

    def summing(name: str) -> str:
        if name not in summed:
            return name
        if name not in sums:
            sums[name] = sum_of(name)
            steps.append(shared.setdefault(("sum", name), added(name)))
        return sums[name]

    for step in program.steps:
        is_late = runs is not None and runs.phases.of(step.phase)[0] is StepPart.REDUCE
        own = summing if is_late else str
        if isinstance(step, Comm):
            reads, writes = step.touched(program.rank)
            target = program.types[step.target] if writes else None
            steps.append(_Side(step, tuple(map(own, reads)), writes, target))
        else:
            inputs = tuple(own(name) if name else "" for name in step.node.inputs)
            captures = tuple(map(own, step.node.captures))
            of = stored.get(step.node.name, ())
            local = _local_node(step, inputs, captures, of, shared)
            among = step.meeting
            steps.append(Sending(local, among, met[among]) if among else local)
            met[among] += 1
    outputs = tuple(replace(out, value=summing(out.value)) for out in program.outputs)
    return tuple(steps), outputs


def _contents(program: RankProgram, graph: Graph, name: str) -> np.ndarray | None:
    """A literal, zeros, or the elements of a whole constant."""
    if name in program.literals:
        return np.asarray(program.literals[name])
    part = program.constants.get(name)
    if part is None or part.region is not None:
        return None
    if part.zero:
        return np.zeros(program.types[name].shape)
    try:
        return graph.constant(part.whole)
    except PartitionerError:  # a fake tensor has no elements
        return None


def _stored(node: Node, program: RankProgram, programs: Programs) -> Facts:
    """The part of a value that is stored from step to step which is laid on a rank."""
    if not is_stored(node):
        return ()
    value = node.outputs[0]
    at = programs.homes[value].placement
    if program.rank not in at.mesh.devices:
        return ()
    shape = programs.homes[value].placement.sharding.shape
    return (Held(value, region_of(at.region(at.mesh.coord(program.rank)), shape)),)


def _local_node(
    step: Compute,
    inputs: tuple[str, ...],
    captures: tuple[str, ...],
    stored: Facts,
    shared: dict[object, LocalNode],
) -> LocalNode:
    key = id(step), inputs, captures
    if not stored and key in shared:
        return shared[key]
    node = step.node
    local = LocalNode(
        node.name,
        node.op,
        inputs,
        node.outputs,
        captures,
        step.origin,
        partial(_is_like, node.attrs),
        lambda *_: stored,
        bodies={
            name: partial(follow_body, _body(graph))
            for name, graph in node.attrs.items()
            if isinstance(graph, Graph)
        },
    )
    return local if stored else shared.setdefault(key, local)


def _body(graph: Graph) -> Program:
    """A body as the program of one rank."""
    steps, shared = [Compute(node, node.name) for node in graph.nodes], dict[object, LocalNode]()
    return Program(
        0,
        tuple(_local_node(s, s.node.inputs, s.node.captures, (), shared) for s in steps),
        graph.types,
        {name: Part(name, None) for name in graph.inputs},
        tuple(Output(value, value, None) for value in graph.outputs),
        frozenset(graph.constants),
        {name: Part(name, None) for name in graph.constants},
        graph.constant,
        graph.opsets,
        unnamed=frozenset({ALIAS} & {node.op for node in graph.nodes}),
    )


def _is_like(attrs: Mapping[str, Attr], node: Node) -> bool:
    return attrs.keys() == node.attrs.keys() and all(
        _equal(value, node.attrs[key]) for key, value in attrs.items()
    )


def _equal(one: Attr, other: Attr) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, Graph) and isinstance(other, Graph):
        return True  # bodies are followed
    return type(one) is type(other) and one == other
