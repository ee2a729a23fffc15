"""A rank's program as graph modules: one for the forward pass and, in training, one for the other.

The graphs hold local tensors, ATen operators and functional collectives. What is stored from step
to step (parameters, written buffers) comes in as arguments; weights that are not trained and small
constants are buffers of the graph module.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import fx

from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.buckets import bucket
from partitioner.backends.torch.calls import ALIAS, add_argument, add_call
from partitioner.backends.torch.comms import COLLECTIVES, Arrival, start, wait_for_unread
from partitioner.backends.torch.faults import COMM
from partitioner.backends.torch.values import note_values
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.program import Comm, CommKind, Compute, Output, Part, Programs, RankProgram
from partitioner.ir.types import TensorType, numpy_dtype

WAIT = torch.ops._c10d_functional.wait_tensor.default
STATE, UPDATE = "partitioner::state", "partitioner::update"
ALIASES = ALIAS, "partitioner::either"

#: Names that every graph module has already.
_TAKEN = frozenset(dir(fx.GraphModule({}, fx.Graph())))


@dataclass(frozen=True)
class PassGraph:
    """One pass of a rank.

    Attributes:
        module: The graph; called with the arguments in order, it returns the results in order.
        arguments: Local values that it takes.
        results: Local values that it returns.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class RankGraphs:
    """What a rank runs.

    Attributes:
        rank: The rank.
        forward: Takes stored values and inputs; returns the forward outputs, then what is saved.
        backward: Takes what is saved, stored values and inputs; returns gradients. None for
            inference.
        stored: Local values of stored values that the rank has.
        inputs: Part of an input by local value.
        outputs: Parts of outputs that the forward pass returns, then those of the other.
        types: Type of every local value.
    """

    rank: int
    forward: PassGraph
    backward: PassGraph | None
    stored: tuple[str, ...]
    inputs: Mapping[str, Part]
    outputs: tuple[Output, ...]
    types: Mapping[str, TensorType]


def emit_rank(programs: Programs, rank: int, graph: Graph, device: torch.device) -> RankGraphs:
    """Graph modules of a rank.

    Args:
        programs: The programs of all ranks.
        rank: The rank.
        graph: The whole model: its constants' contents are read.
        device: Where the rank's tensors are.

    Raises:
        BackendError: PyTorch has no operator of a name in the program, or a constant's type is
            none of its types.
    """
    return _Emitter(programs.ranks[rank], graph, device, programs.is_spmd).run()


@dataclass
class _Emitter:
    program: RankProgram
    graph: Graph
    device: torch.device
    alike: bool
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> RankGraphs:
        program = self.program
        steps = program.steps
        turn = len(steps) if program.backward is None else program.backward
        first, second = steps[:turn], steps[turn:]
        made = {name for step in first for name in _writes(step, program.rank)}
        made |= self._returned
        early = [o for o in program.outputs if o.value in made]
        late = [o for o in program.outputs if o.value not in made]
        needed = set(_outside(second, late, program.rank))
        source = {*program.inputs, *program.constants, *program.literals, *self._states}
        saved = sorted(needed - source)
        forward = self._pass(first, [*(o.value for o in early), *saved])
        backward = None
        if program.backward is not None:
            backward = self._pass(second, [o.value for o in late])
        return RankGraphs(
            program.rank,
            forward,
            backward,
            self._states,
            program.inputs,
            (*early, *late),
            program.types,
        )

    @cached_property
    def _states(self) -> tuple[str, ...]:
        return tuple(
            step.node.outputs[0]
            for step in self.program.steps
            if isinstance(step, Compute) and step.node.op == STATE
        )

    @cached_property
    def _returned(self) -> set[str]:
        """Constants that are results as they are, as are parts without elements."""
        last = {
            n for node in self.graph.nodes if node.name in self.graph.backward for n in node.writes
        }
        held = {*self.program.constants, *self.program.literals}
        return {o.value for o in self.program.outputs if o.whole not in last} & held

    def _pass(self, steps: Sequence[Compute | Comm], results: Sequence[str]) -> PassGraph:
        return _Pass(self, steps, tuple(results)).run()

    def constant(self, name: str) -> torch.Tensor:
        """Contents of a local constant or literal."""
        if name not in self.held:
            program = self.program
            if name in program.literals:
                array = program.literals[name]
            else:
                array = _part(self.graph, program.constants[name], program.types[name])
            self.held[name] = from_numpy(array, program.types[name].dtype).to(self.device)
        return self.held[name]


@dataclass
class _Pass:
    owner: _Emitter
    steps: Sequence[Compute | Comm]
    results: tuple[str, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)
    known: dict[str, fx.Node | Arrival] = field(default_factory=dict)
    attributes: dict[str, torch.Tensor | fx.GraphModule] = field(default_factory=dict)
    at: int = 0  # the step that is being added
    made: dict[str, int] = field(default_factory=dict)  # step that makes a value; -1 if none does

    def run(self) -> PassGraph:
        program = self.owner.program
        rank = program.rank
        made = {name for step in self.steps for name in _writes(step, rank)}
        states = {
            step.node.outputs[0]
            for step in self.steps
            if isinstance(step, Compute) and step.node.op == STATE
        }
        outside = _outside(self.steps, (), rank) | (set(self.results) - made) | states
        taken = []
        held = {name for name in outside if name in program.constants or name in program.literals}
        for name in sorted(outside - held):
            self.known[name] = add_argument(self.graph, _identifier(name))
            taken.append(name)
        for name in sorted(held):
            self.known[name] = self._attribute(name)
        for at, step in enumerate(self.steps):
            self.at = at
            if isinstance(step, Comm):
                self._comm(step)
            else:
                self._compute(step)
        self.at = len(self.steps)
        results = tuple(self._value(name) for name in self.results)
        wait_for_unread(self.graph)
        self.graph.output(results)
        note_values(self.known)
        if self.owner.alike:
            bucket(self.graph)
        self.graph.lint()
        module = fx.GraphModule(_Root(self.attributes), self.graph, f"Rank{rank}")
        return PassGraph(module, tuple(taken), self.results)

    def _attribute(self, name: str) -> fx.Node:
        return self.graph.get_attr(self._hold(_identifier(name), self.owner.constant(name)))

    def _value(self, name: str) -> fx.Node:
        """The node of a value; one on its way is waited for."""
        found = self.known[name]
        if not isinstance(found, fx.Node):
            with self._adding() as added:
                found = self.known[name] = found()
            for node in added:
                if node.target is WAIT:
                    node.meta.setdefault("due", self.at)
            self.made.setdefault(name, self.at)
        return found

    @contextmanager
    def _adding(self) -> Iterator[list[fx.Node]]:
        """The nodes that are added inside, known when it ends."""
        added: list[fx.Node] = []
        before = self.graph._root.prev
        yield added
        node = before.next
        while node is not self.graph._root:
            added.append(node)
            node = node.next

    def _compute(self, step: Compute) -> None:
        node = step.node
        if node.op == STATE:
            return
        if self._is_late(node):
            self.known[node.outputs[0]] = lambda: self._late(node)
            return
        if node.op in (*ALIASES, UPDATE):
            self.known[node.outputs[0]] = self.known[node.inputs[0]]
            self.made[node.outputs[0]] = self.made.get(node.inputs[0], -1)
            return
        self.made.update(dict.fromkeys(node.writes, self.at))
        self._call(node)

    def _is_late(self, node: Node) -> bool:
        """Whether a node gives another name or shape to what is on its way: no need to wait."""
        row = row_of(node)
        views = row is not None and row.view and len(node.outputs) == 1
        return views and not isinstance(self.known[node.inputs[0]], fx.Node)

    def _late(self, node: Node) -> fx.Node:
        if node.op in (*ALIASES, UPDATE):
            return self._value(node.inputs[0])
        self._call(node)
        return self._value(node.outputs[0])

    def _call(self, node: Node) -> None:
        name = _identifier(node.outputs[0] or node.name)
        made = add_call(self.graph, node, self._value, self.owner.device, self._hold, name)
        self.known.update(made)

    def _hold(self, key: str, held: torch.Tensor | fx.GraphModule) -> str:
        """Keep what the graph module holds, under a name that nothing else has."""
        while key in self.attributes or key in _TAKEN:
            key += "_"
        self.attributes[key] = held
        return key

    def _comm(self, comm: Comm) -> None:
        rank, types = self.owner.program.rank, self.owner.program.types
        sends, gets = rank in comm.sources(), rank in comm.targets()
        source = self._value(comm.source) if sends else None
        with self._adding() as added:
            arrival = start(
                self.graph,
                comm,
                rank,
                source,
                types[comm.source].shape if sends else (),
                types[comm.target].shape if gets else (),
                self.owner.device,
            )
        for node in added:
            node.meta["arranges"] = True
            node.meta["ready"] = self.made.get(comm.source, -1)
        if comm.kind is not CommKind.SLICE:
            self._note(comm)
        if arrival is not None:
            self.known[comm.target] = arrival

    def _note(self, comm: Comm) -> None:
        """Errors name the communication that a collective belongs to."""
        for node in reversed(self.graph.nodes):
            if node.target in COLLECTIVES:
                node.meta[COMM] = (comm,)
                return


class _Root(torch.nn.Module):
    """Holds the constants and branches of a graph."""

    def __init__(self, held: Mapping[str, torch.Tensor | fx.GraphModule]) -> None:
        super().__init__()
        for name, one in held.items():
            if isinstance(one, torch.Tensor):
                self.register_buffer(name, one)
            else:
                self.add_module(name, one)


def _reads(step: Compute | Comm, rank: int) -> tuple[str, ...]:
    if isinstance(step, Compute):
        # what an update writes over is not read
        return step.node.inputs[:1] if step.node.op == UPDATE else step.node.reads
    return (step.source,) if rank in step.sources() else ()


def _writes(step: Compute | Comm, rank: int) -> tuple[str, ...]:
    if isinstance(step, Compute):
        return step.node.writes
    return (step.target,) if rank in step.targets() else ()


def _outside(steps: Sequence[Compute | Comm], outputs: Sequence[Output], rank: int) -> set[str]:
    """Values that steps read and do not make."""
    made: set[str] = set()
    found: set[str] = set()
    for step in steps:
        found.update(set(_reads(step, rank)) - made)
        made.update(_writes(step, rank))
    return found | ({o.value for o in outputs} - made)


def _part(graph: Graph, part: Part, kind: TensorType) -> np.ndarray:
    if part.zero:
        return np.zeros(kind.shape, numpy_dtype(kind.dtype))
    whole = graph.constants[part.whole].load()
    if part.region is None:
        return whole
    index = [
        np.concatenate([np.arange(start, start + length) for start, length in intervals])
        for intervals in part.region
    ]
    return np.ascontiguousarray(whole[np.ix_(*index)])


def _identifier(name: str) -> str:
    """A Python name for a value; `self` is the graph module in the graph's code."""
    found = re.sub(r"\W+", "_", name).strip("_")
    free = found.isidentifier() and found != "self" and not keyword.iskeyword(found)
    return found if free else f"v_{found}"
