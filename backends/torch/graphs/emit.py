"""The graph module of a phase of a rank (see `ir.phases`).

Graphs hold local tensors, ATen operators and functional collectives. Values that are stored
from step to step (parameters, written buffers) are arguments; weights that are not trained and
small constants are buffers of the graph module.

What passes from a phase of one rank to a phase of another is one message (see `messages`): the
phase that sends returns it, and the phase that receives it is called with it. Communications inside
of a phase are collectives in its graph.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, fx

from partitioner.backends.regions import cut
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.graphs.buckets import bucket
from partitioner.backends.torch.graphs.calls import add_argument, add_call, hold
from partitioner.backends.torch.graphs.comms import (
    COLLECTIVES,
    Arrival,
    Message,
    RankComm,
    message_name,
    wait_for_unread,
)
from partitioner.backends.torch.graphs.notes import COMM, Task, note_tasks, note_values
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.ops.aten.state import ALIAS, EITHER, REST, STATE
from partitioner.ir.program import UPDATES, Comm, CommKind, Compute, PhaseSteps, RankProgram, Steps
from partitioner.ir.types import numpy_dtype

ALIASES = ALIAS, EITHER

#: Note at a call whose result may lie where its first operand lies.
IN_PLACE = "in place"

#: Name of the result of a pass that has none: a tensor without elements.
NO_VALUE = ""


@dataclass(frozen=True)
class PassGraph:
    """Steps of a rank that run together."""

    module: fx.GraphModule  #: The graph; takes the arguments and returns the results, in order.
    arguments: tuple[str, ...]  #: Names of local values and messages.
    #: Names of local values and messages; of a pass without any, `NO_VALUE` alone.
    results: tuple[str, ...]
    receives: tuple[Message, ...] = ()  #: The messages among the arguments.
    sends: tuple[Message, ...] = ()  #: The messages among the results.
    #: The local constant that each buffer of the graph holds.
    constants: Mapping[str, str] = field(default_factory=dict)


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
        part = program.constants[name]
        if part.zero:
            array = np.zeros(tensor_type.shape, numpy_dtype(tensor_type.dtype))
        else:
            array = graph.constants[part.whole].load()
            array = array if part.region is None else np.array(cut(array, part.region), order="C")
    return from_numpy(array, tensor_type.dtype).to(device)


@dataclass
class PassWriter:
    """Writes the graph of a phase, step after step."""

    program: RankProgram
    device: torch.device
    phase: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    #: Has the constants and branches that the graph names.
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    #: Node of each local value, or what adds it when it is read.
    known: dict[str, fx.Node | Arrival] = field(default_factory=dict)
    #: Task of each value that is added when it is read.
    pending: dict[str, Task] = field(default_factory=dict)
    #: The messages that it receives, by name.
    messages: dict[str, Message] = field(default_factory=dict)
    #: What each communication has brought, by its number and by source, as it is carried.
    arrived: dict[int, dict[int, fx.Node]] = field(default_factory=dict)
    #: Communications with what they send, as it is carried, by name of the message.
    departing: dict[str, list[tuple[Comm, fx.Node]]] = field(default_factory=dict)
    #: The messages that it sends, each added when it is packed.
    leaving: list[Message] = field(default_factory=list)

    def write(
        self, piece: PhaseSteps, results: tuple[str, ...], constant: Callable[[str], Tensor]
    ) -> PassGraph:
        """The graph of the phase, which returns some local `results` beside messages."""
        steps = piece.steps
        outside = piece.outside | (set(results) - piece.written)
        outside |= {*map(rest_argument, self.at_rest(steps))}
        constants = outside & {*self.program.constants, *self.program.literals}
        self._receive(steps)
        arguments = (*sorted(outside - constants), *self.messages)
        for name in arguments:
            self.known[name] = add_argument(self.graph, _identifier(name))
        buffers: dict[str, str] = {}
        for name in sorted(constants):
            key = hold(self.root, _identifier(name), constant(name))
            buffers[key] = name
            self.known[name] = self.graph.get_attr(key)
        for step in steps:
            task: Task = step.seq if isinstance(step, Comm) else step.origin
            with self.noting(task):
                if isinstance(step, Comm):
                    self.communicate(step)
                else:
                    self.compute(step.node, task)
        results = (*results, *self.departing)
        returned = tuple(self.value(name) for name in results)
        wait_for_unread(self.graph)
        if not results:  # PyTorch saves no program without results
            zeros = torch.ops.aten.zeros.default
            empty = self.graph.call_function(zeros, ([0],), {"device": self.device})
            returned, results = (empty,), (NO_VALUE,)
        self.graph.output(returned)
        note_values(self.known)
        bucket(self.graph)
        self.graph.lint()
        module = fx.GraphModule(self.root, self.graph, f"Rank{self.program.rank}")
        messages = tuple(self.messages.values()), tuple(self.leaving)
        return PassGraph(module, arguments, results, *messages, buffers)

    def at_rest(self, steps: Steps) -> Iterator[str]:
        """Names of values that arguments hold between steps; the pass brings them up to date."""
        stored = {*stored_values(self.program.steps)}
        for node in (step.node for step in self.program.steps if isinstance(step, Compute)):
            if node.op == ALIAS and node.inputs[0] in stored:
                stored.update(node.outputs)
        for node in (step.node for step in steps if isinstance(step, Compute)):
            if node.op == REST and node.inputs[0] not in stored:
                yield node.outputs[0]

    def _receive(self, steps: Steps) -> None:
        rank = self.program.rank
        by_sender: dict[tuple[int, int], list[Comm]] = {}
        for step in steps:
            if isinstance(step, Comm) and self._arrives(step):
                for source in sorted({t.source for t in step.transfers if t.target == rank}):
                    by_sender.setdefault((step.phase, source), []).append(step)
        messages = (Message.of(comms, source, rank) for (_, source), comms in by_sender.items())
        self.messages = {message.name: message for message in messages}

    def _arrives(self, comm: Comm) -> bool:
        passes = comm.phase != comm.target_phase
        is_target = self.program.rank in comm.targets()
        return passes and comm.target_phase == self.phase and is_target

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
        while (node := node.next) is not self.graph._root:
            yield node

    def compute(self, node: Node, task: Task) -> None:
        """Add a node of the program, which is of a task."""
        if node.op == STATE:
            return
        views = (row_of(node).view or node.op == REST) and len(node.outputs) == 1
        # what only renames or reshapes a value on its way need not wait for it
        is_late = views and not isinstance(self.known[node.inputs[0]], fx.Node)
        if is_late or self._rests(node):
            self.known[node.outputs[0]] = lambda: self._late(node)
            self.pending[node.outputs[0]] = task
        elif node.op in (*ALIASES, *UPDATES, REST):
            self.known[node.outputs[0]] = self.known[node.inputs[0]]
            if node.inputs[0] in self.pending:
                self.pending[node.outputs[0]] = self.pending[node.inputs[0]]
        else:
            self._call(node)

    def _rests(self, node: Node) -> bool:
        """Test whether a node's value is held by an argument between steps."""
        return node.op == REST and rest_argument(node.outputs[0]) in self.known

    def _late(self, node: Node) -> fx.Node:
        if node.op not in (REST, *ALIASES, *UPDATES):
            self._call(node)
            return self.value(node.outputs[0])
        value = self.value(node.inputs[0])
        if not self._rests(node):
            return value
        held = self.value(rest_argument(node.outputs[0]))  # it is brought up to date
        return self.graph.call_function(torch.ops.aten.copy_.default, (held, value))

    def _call(self, node: Node) -> None:
        name = _identifier(node.outputs[0] or node.name)
        calls = add_call(self.graph, self.root, node, self.value, self.device, name)
        self.known.update(calls)
        for result in self.program.in_place.intersection(calls):
            calls[result].meta[IN_PLACE] = True

    def communicate(self, comm: Comm) -> None:
        """Start a collective, noted for errors that name it, or pack or unpack messages."""
        if comm.phase != comm.target_phase:
            if self._arrives(comm):
                own = self.part_in(comm, sends=False)
                self.known[comm.target] = own.unpacked(self._unpacked(comm))
            else:
                self._send(comm)
            return
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

    def _unpacked(self, comm: Comm) -> Mapping[int, fx.Node]:
        """Take all messages apart, once, into views; returns what a communication has brought."""
        for message in () if self.arrived else self.messages.values():
            parts = message.unpacked(self.graph, self.value(message.name))
            for number, part in parts.items():
                self.arrived.setdefault(number, {})[message.source] = part
        return self.arrived[comm.seq]

    def _send(self, comm: Comm) -> None:
        """Add what a communication sends to the messages that carry it."""
        rank, own = self.program.rank, self.part_in(comm, sends=True)
        for target in sorted({t.target for t in comm.transfers if t.source == rank}):
            name = message_name(comm.phase, rank, comm.target_phase, target)
            if name not in self.departing:
                self.departing[name] = []
                self.known[name] = partial(self._packed, name, target)
                self.pending[name] = comm.seq
            self.departing[name].append((comm, own.packed(target)))

    def _packed(self, name: str, target: int) -> fx.Node:
        """A message that leaves, when all that it carries is there."""
        departing = self.departing[name]
        message = Message.of((comm for comm, _ in departing), self.program.rank, target)
        self.leaving.append(message)
        return message.packed(self.graph, {comm.seq: node for comm, node in departing})

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
