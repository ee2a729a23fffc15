"""Rank programs of the IR, of which the graphs of PyTorch's ranks are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from partitioner.api.verify.symbolic.held import Facts, Held
from partitioner.api.verify.symbolic.nodes import LocalNode
from partitioner.api.verify.symbolic.parts import region_of
from partitioner.api.verify.symbolic.program import Program
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import prove
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.ops import is_stored
from partitioner.ir.program import Comm, Compute, Programs, RankProgram
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class _Side:
    """A rank's side of a communication."""

    comm: Comm
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    target: TensorType | None


def prove_programs(graph: Graph, programs: Programs) -> Proof:
    """Prove that programs compute a graph: of one micro-batch, if they run in several."""
    proof = prove(graph, programs_of(programs, graph))
    if programs.order.is_whole:
        return proof
    return replace(proof, notes=("of one micro-batch, as the program of one device computes it",))


def programs_of(programs: Programs, graph: Graph) -> tuple[Program, ...]:
    """The programs of all ranks, which are of this graph; they are checked before."""
    programs.check()
    shared: dict[int, LocalNode] = {}
    return tuple(_program(program, programs, graph, shared) for program in programs.ranks)


def _program(
    program: RankProgram, programs: Programs, graph: Graph, shared: dict[int, LocalNode]
) -> Program:
    """The program of a rank; local nodes are `shared` by ranks that share steps."""
    stored = {node.name: _stored(node, program, programs) for node in graph.nodes if not node.reads}
    computes = (step for step in program.steps if isinstance(step, Compute))
    return Program(
        program.rank,
        tuple(
            _side(step, program)
            if isinstance(step, Comm)
            else _local_node(step, stored.get(step.node.name, ()), shared)
            for step in program.steps
        ),
        program.types,
        program.inputs,
        program.outputs,
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
        delivers_all=True,
        cuts_constants=True,
    )


def _side(comm: Comm, program: RankProgram) -> _Side:
    reads, writes = comm.touched(program.rank)
    return _Side(comm, reads, writes, program.types[comm.target] if writes else None)


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


def _local_node(step: Compute, stored: Facts, shared: dict[int, LocalNode]) -> LocalNode:
    if not stored and id(step) in shared:
        return shared[id(step)]
    node = step.node
    local = LocalNode(
        node.name,
        node.op,
        node.inputs,
        node.outputs,
        node.captures,
        step.origin,
        partial(_is_like, node.attrs),
        lambda *_: stored,
    )
    return local if stored else shared.setdefault(id(step), local)


def _is_like(attrs: Mapping[str, Attr], node: Node) -> bool:
    return attrs.keys() == node.attrs.keys() and all(
        _equal(value, node.attrs[key]) for key, value in attrs.items()
    )


def _equal(one: Attr, other: Attr) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, Graph) and isinstance(other, Graph):
        return one.digest == other.digest
    return type(one) is type(other) and one == other
