"""The graph module of some steps of a rank.

Graphs hold local tensors, ATen operators and functional collectives. Values that are stored
from step to step (parameters, written buffers) are arguments; weights that are not trained and
small constants are buffers of the graph module.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from partitioner.backends.regions import cut
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.graphs.buckets import bucket
from partitioner.backends.torch.graphs.calls import add_argument, add_call, hold
from partitioner.backends.torch.graphs.comms import COLLECTIVES, Arrival, RankComm, wait_for_unread
from partitioner.backends.torch.graphs.notes import COMM, Task, note_tasks, note_values
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, REST, STATE, UPDATE
from partitioner.ir.program import Comm, CommKind, Compute, Part, RankProgram
from partitioner.ir.types import TensorType, numpy_dtype

#: Nodes that take a value to where it is stored.
UPDATES = UPDATE, KEEP
ALIASES = ALIAS, EITHER

#: Note at a call whose result may lie where its first operand lies.
IN_PLACE = "in place"

#: Name of the result of a pass that has none: a tensor without elements.
NO_VALUE = ""

Steps = Sequence[Compute | Comm]


@dataclass(frozen=True)
class PassGraph:
    """Steps of a rank that run together.

    Attributes:
        module: The graph; takes the arguments and returns the results, in order.
        arguments: Names of local values.
        results: Names of local values; of a pass without any, `NO_VALUE` alone.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]


def stored_values(steps: Steps) -> tuple[str, ...]:
    """Local names of the stored values that steps read."""
    return tuple(
        step.node.outputs[0]
        for step in steps
        if isinstance(step, Compute) and step.node.op == STATE
    )


def rest_argument(name: str) -> str:
    """Name of the argument that holds the value of a `REST` node between steps."""
    return f"{name} at rest"


def constant_of(program: RankProgram, graph: Graph, device: torch.device, name: str) -> Tensor:
    """Contents of a local constant or literal."""
    tensor_type = program.types[name]
    array = program.literals.get(name)
    if array is None:
        array = _part(graph, program.constants[name], tensor_type)
    return from_numpy(array, tensor_type.dtype).to(device)


def _part(graph: Graph, part: Part, tensor_type: TensorType) -> np.ndarray:
    if part.zero:
        return np.zeros(tensor_type.shape, numpy_dtype(tensor_type.dtype))
    whole = graph.constants[part.whole].load()
    return whole if part.region is None else np.array(cut(whole, part.region), order="C")


def emit_pass(
    writer: PassWriter,
    steps: Steps,
    results: tuple[str, ...],
    *,
    constant: Callable[[str], Tensor],
) -> PassGraph:
    """The graph of some steps of a rank.

    Args:
        writer: Writes it.
        steps: The steps.
        results: Local values that it returns.
        constant: Gives the contents of a constant or literal.
    """
    program, rank = writer.program, writer.program.rank
    outside = writer.outside(steps) | (set(results) - writer.written(steps))
    outside |= {*writer.at_rest(steps)}
    constants = outside & {*program.constants, *program.literals}
    arguments = (*sorted(outside - constants), *writer.received(steps))
    for name in arguments:
        writer.known[name] = add_argument(writer.graph, _identifier(name))
    for name in sorted(constants):
        key = hold(writer.root, _identifier(name), constant(name))
        writer.known[name] = writer.graph.get_attr(key)
    for step in steps:
        task: Task = step.seq if isinstance(step, Comm) else step.origin
        with writer.noting(task):
            if isinstance(step, Comm):
                writer.communicate(step)
            else:
                writer.compute(step.node, task)
    graph, results = writer.graph, (*results, *writer.sent)
    returned = tuple(writer.value(name) for name in results)
    wait_for_unread(graph)
    if not results:  # PyTorch saves no program without results
        zeros = torch.ops.aten.zeros.default
        empty = graph.call_function(zeros, ([0],), {"device": writer.device})
        returned, results = (empty,), (NO_VALUE,)
    graph.output(returned)
    note_values(writer.known)
    bucket(graph)
    graph.lint()
    return PassGraph(fx.GraphModule(writer.root, graph, f"Rank{rank}"), arguments, results)


@dataclass
class PassWriter:
    """Writes the graph of a pass, step after step.

    Attributes:
        root: Has the constants and branches that the graph names.
        known: Node of each local value, or what adds it when it is read.
        pending: Task of each value that is added when it is read.
        sent: Names of what the pass returns for other ranks, beside its results.
        keeps: Whether values at rest are arguments, which the pass brings up to date; else it makes
            them anew.
    """

    program: RankProgram
    device: torch.device
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    known: dict[str, fx.Node | Arrival] = field(default_factory=dict)
    pending: dict[str, Task] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    keeps: bool = False

    def at_rest(self, steps: Steps) -> Iterator[str]:
        """Names of the arguments that hold values between steps, apart from stored ones."""
        if not self.keeps:
            return
        stored = {*stored_values(self.program.steps)}
        for node in (step.node for step in self.program.steps if isinstance(step, Compute)):
            if node.op == ALIAS and node.inputs[0] in stored:
                stored.update(node.outputs)
        for node in (step.node for step in steps if isinstance(step, Compute)):
            if node.op == REST and node.inputs[0] not in stored:
                yield rest_argument(node.outputs[0])

    def received(self, steps: Steps) -> tuple[str, ...]:
        """Names of what the pass is called with from other ranks; here none."""
        del steps
        return ()

    def touched(self, step: Compute | Comm) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a step reads and makes; those that an update writes over count not."""
        if isinstance(step, Comm):
            return step.touched(self.program.rank)
        reads, writes = step.touched
        return step.node.inputs[:1] if step.node.op in UPDATES else reads, writes

    def written(self, steps: Steps) -> set[str]:
        """Local values that steps make."""
        return {name for step in steps for name in self.touched(step)[1]}

    def outside(self, steps: Steps) -> set[str]:
        """Values that steps read and do not make."""
        made: set[str] = set()
        outside: set[str] = set()
        for step in steps:
            reads, writes = self.touched(step)
            outside.update(set(reads) - made)
            made.update(writes)
        return outside

    def value(self, name: str) -> fx.Node:
        """The node of a value; a communication that brings it is waited for."""
        node = self.known[name]
        if isinstance(node, fx.Node):
            return node
        with self.noting(self.pending[name]):
            arrived = self.known[name] = node()
        return arrived

    @contextmanager
    def noting(self, task: Task) -> Iterator[None]:
        """Note at the nodes that are added inside that they are of a task, if they are of none."""
        last = self.graph._root.prev
        yield
        note_tasks(self._behind(last), [task])

    def _behind(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes of the graph behind one."""
        while (node := node.next) is not self.graph._root:
            yield node

    def compute(self, node: Node, task: Task) -> None:
        """Add a node of the program, which is of a task."""
        if node.op == STATE:
            return
        if self._is_late(node) or self._rests(node):
            self.known[node.outputs[0]] = lambda: self._late(node)
            self.pending[node.outputs[0]] = task
        elif node.op in (*ALIASES, *UPDATES, REST):
            self.known[node.outputs[0]] = self.known[node.inputs[0]]
            if node.inputs[0] in self.pending:
                self.pending[node.outputs[0]] = self.pending[node.inputs[0]]
        else:
            self._call(node)

    def _is_late(self, node: Node) -> bool:
        """Test whether a node only renames or reshapes a value on its way: no need to wait."""
        row = row_of(node)
        views = row is not None and (row.view or node.op == REST) and len(node.outputs) == 1
        return views and not isinstance(self.known[node.inputs[0]], fx.Node)

    def _rests(self, node: Node) -> bool:
        """Test whether a node's value is held by an argument between steps."""
        return node.op == REST and rest_argument(node.outputs[0]) in self.known

    def _refreshed(self, node: Node) -> fx.Node:
        """The argument that holds a value between steps, once the value has arrived in it."""
        value = self.value(node.inputs[0])
        if not self._rests(node):
            return value
        held = self.value(rest_argument(node.outputs[0]))
        return self.graph.call_function(torch.ops.aten.copy_.default, (held, value))

    def _late(self, node: Node) -> fx.Node:
        if node.op == REST:
            return self._refreshed(node)
        if node.op in (*ALIASES, *UPDATES):
            return self.value(node.inputs[0])
        self._call(node)
        return self.value(node.outputs[0])

    def _call(self, node: Node) -> None:
        name = _identifier(node.outputs[0] or node.name)
        calls = add_call(self.graph, self.root, node, self.value, self.device, name)
        self.known.update(calls)
        for result in self.program.in_place.intersection(calls):
            calls[result].meta[IN_PLACE] = True

    def communicate(self, comm: Comm) -> None:
        """Start a communication; its collective is noted for errors that name it.

        A part of what is on its way is taken once it is read: nothing waits for it here.
        """
        if comm.kind is CommKind.SLICE and not isinstance(self.known[comm.source], fx.Node):
            self.known[comm.target] = lambda: self._late_slice(comm)
            self.pending[comm.target] = comm.seq
            return
        own = self.part_in(comm, sends=self.program.rank in comm.sources())
        last = self.graph._root.prev
        arrival = own.start()
        for node in self._behind(last):
            node.meta["arranges"] = True
            if node.target in COLLECTIVES:
                node.meta[COMM] = (comm,)
        if arrival is not None:
            self.known[comm.target] = arrival
            self.pending[comm.target] = comm.seq

    def _late_slice(self, comm: Comm) -> fx.Node:
        """A part of what has arrived, in memory of its own: the rest is freed."""
        arrival = self.part_in(comm, sends=True).start()
        assert arrival is not None
        dense: dict[str, fx.node.Argument] = {"memory_format": torch.contiguous_format}
        return self.graph.call_function(torch.ops.aten.clone.default, (arrival(),), dense)

    def part_in(self, comm: Comm, *, sends: bool) -> RankComm:
        """The rank's part in a communication; what it `sends` is waited for."""
        rank, types = self.program.rank, self.program.types
        return RankComm(
            self.graph,
            comm,
            rank,
            self.value(comm.source) if sends else None,
            types[comm.source].shape if sends else (),
            types[comm.target].shape if rank in comm.targets() else (),
            self.device,
        )


def _identifier(name: str) -> str:
    """A Python name for a value; `self` is the graph module in the graph's code."""
    word = re.sub(r"\W+", "_", name).strip("_")
    is_free = word.isidentifier() and word != "self" and not keyword.iskeyword(word)
    return word if is_free else f"v_{word}"
