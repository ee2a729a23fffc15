"""The layers that repeat in an exported program, and the program with few of them.

Tracing takes as long as a model is deep, and the layers of most models are calls of the same
operators on tensors of the same types. A program of which only few of these layers are left is
traced in their place (see `joint`), and its trace is extended by the others (see `unrolled_trace`).

Layers are consecutive stretches of the program's calls, of equal length. Each has the calls of the
one before, with the same arguments, but for operands: these are results of the same or the
previous layer, its own weights, or what all layers read. What follows reads the last layer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from partitioner.ir.pieces.repeats import held, numbered, repetitions

#: Layers that are traced: the first, the last and two in the middle may be unlike one another, and
#: each of two more is compared with the one before.
KEPT = 6
#: Calls that are left out, at least: fewer take no time.
LEAST = 100


class IrregularError(Exception):
    """Layers are not equal, or something reads them in another way than neighbours do."""


@dataclass
class Chain:
    """Things of which each layer has its own, found by comparing each layer with the one before."""

    rows: list[list[Hashable]]  #: Of each layer its things, in the order in which calls use them.
    #: The layer of each thing, and its number there.
    place: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    #: Things that two layers use at the same place.
    shared: set[Hashable] = field(default_factory=set)

    @classmethod
    def of(cls, layers: int) -> Chain:
        """Make a chain of so many layers, without things."""
        return cls([[] for _ in range(layers)])

    def links(self, layer: int, before: Hashable, thing: Hashable) -> bool:
        """Test whether a thing can be a layer's at whose place the layer before has another."""
        if before == thing:
            self.shared.add(thing)
            return True
        if layer == 1 and before not in self.place:
            self._add(0, before)
        row, number = self.place.get(before, (-1, -1))
        if row != layer - 1:
            return False
        if thing not in self.place and number == len(self.rows[layer]):
            self._add(layer, thing)
        return self.place.get(thing) == (layer, number)

    def _add(self, layer: int, thing: Hashable) -> None:
        self.place[thing] = layer, len(self.rows[layer])
        self.rows[layer].append(thing)

    @property
    def is_apart(self) -> bool:
        """Test whether all layers have as many things, none of which is shared."""
        even = len({len(row) for row in self.rows}) == 1
        return even and self.shared.isdisjoint(self.place)

    def moved(self, thing: Hashable, layers: int) -> Hashable:
        """The thing at the same place so many layers later; itself if it is of no layer."""
        if thing not in self.place:
            return thing
        layer, number = self.place[thing]
        if not 0 <= layer + layers < len(self.rows):
            raise IrregularError
        return self.rows[layer + layers][number]


@dataclass(frozen=True)
class RepeatedLayers:
    """The layers of a program, and its graph with `KEPT` of them."""

    #: The graph: the first layers are left, and what follows reads the last of them.
    graph: fx.Graph
    left_out: int  #: Number of the other layers.
    #: The layer of each call of the graph that is of one, by the call's name.
    layer_of: Mapping[str, int]
    weights: Chain  #: Full names of the weights of all layers, those left out included.
    modules: Chain  #: Entries of `nn_module_stack` of all layers.


def repeated_layers(program: ExportedProgram) -> RepeatedLayers | None:
    """The repeated layers of a program; None if it has none that are proven, or few calls."""
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) <= LEAST:
        return None
    forms = [form(node) for node in calls]
    types = {node: type_of(node.meta.get("val")) for node in program.graph.nodes}
    kinds = numbered(
        (own, types[node], *(types[operand] for operand in operands))
        for node, (own, operands) in zip(calls, forms, strict=True)
    )
    operands = [each for _, each in forms]
    at = {node: index for index, node in enumerate(calls)}
    last = {read: index for index, reads in enumerate(operands) for read in reads}
    crossing = held(((at[read], last[read], 1) for read in last if read in at), len(calls))[:-1]
    stretches = repetitions(kinds, fewest=KEPT + 1, shown=KEPT, hidden=LEAST, crossing=crossing)
    stretch = next(stretches, None)
    if stretch is None:
        return None
    finder = _Finder(program, calls, operands, stretch.start, stretch.period, stretch.count)
    return finder.layers()


@dataclass
class _Finder:
    """Compares the layers of a program: `count`, of `period` calls each, from call `start` on."""

    program: ExportedProgram
    calls: Sequence[fx.Node]
    operands: Sequence[Sequence[fx.Node]]
    start: int
    period: int
    count: int

    def __post_init__(self) -> None:
        self.at = {node: index for index, node in enumerate(self.calls)}
        self.weights = Chain.of(self.count)
        self.modules = Chain.of(self.count)
        signature = self.program.graph_signature
        self.names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }

    def layers(self) -> RepeatedLayers | None:
        stop = self.start + self.count * self.period
        inner = range(self.start + self.period, stop)
        if not (all(map(self._repeats, inner)) and self._are_apart(stop)):
            return None
        kept = self.start + KEPT * self.period
        layer_of = {
            self.calls[index].name: (index - self.start) // self.period
            for index in range(self.start, kept)
        }
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.program.graph.nodes:
            if not kept <= self._at(node) < stop:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            elif (last := self.at[node] - (stop - kept)) >= kept - self.period:
                copies[node] = copies[self.calls[last]]  # what follows reads the last one left
        left_out = self.count - KEPT
        return RepeatedLayers(graph, left_out, layer_of, self.weights, self.modules)

    def _repeats(self, index: int) -> bool:
        layer, before = (index - self.start) // self.period, index - self.period
        pairs = zip(self.operands[before], self.operands[index], strict=True)
        calls = (self.calls[before], self.calls[index])
        stacks = [tuple((call.meta.get("nn_module_stack") or {}).items()) for call in calls]
        return (
            all(self._matches(layer, old, new) for old, new in pairs)
            and len(stacks[0]) == len(stacks[1])
            and all(self.modules.links(layer, old, new) for old, new in zip(*stacks, strict=True))
        )

    def _matches(self, layer: int, before: fx.Node, operand: fx.Node) -> bool:
        if before is operand:  # read by all layers
            name = self.names.get(operand.name)
            if name is not None:
                self.weights.shared.add(name)
            return self._at(operand) < self.start
        if operand in self.at:
            first = self.start + (layer - 1) * self.period
            old, new = self._at(before), self._at(operand)
            enters = layer == 1 and old < self.start and new < first + self.period
            return new >= first and (new - old == self.period or enters)
        names = self.names.get(before.name), self.names.get(operand.name)
        facts = {(type(x), getattr(x, "requires_grad", False)) for x in map(self._tensor, names)}
        if None in names or len(facts) > 1:  # trained or not, parameters or not
            return False
        return self.weights.links(layer, *names)

    def _at(self, node: fx.Node) -> int:
        """Position of a call; -1 for a placeholder."""
        return self.at.get(node, -1)

    def _tensor(self, name: str | None) -> Any:
        state = self.program.state_dict
        return state[name] if name in state else self.program.constants.get(str(name))

    def _are_apart(self, stop: int) -> bool:
        """Test whether all else reads the last layer alone, and no weights of layers."""
        own = self.weights.place.keys()
        outer = [*range(self.start), *range(stop, len(self.calls))]
        read = [operand for index in outer for operand in self.operands[index]]
        results = self.program.graph.output_node().all_input_nodes
        last = stop - self.period
        tensors = [*self.program.state_dict.values(), *self.program.constants.values()]
        uses = Counter(map(id, tensors))
        return (
            self.weights.is_apart
            and self.modules.is_apart
            and not any(self.names.get(operand.name) in own for operand in (*read, *results))
            and not any(self.start <= self._at(operand) < last for operand in read)
            and not any(self.start <= self._at(result) < stop for result in results)
            and all(uses[id(self._tensor(str(name)))] == 1 for name in own)
        )


def form(node: fx.Node) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """A call without the nodes among its arguments, and these nodes."""
    operands: list[fx.Node] = []

    def frozen(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            operands.append(argument)
            return fx.Node
        if isinstance(argument, list | tuple):
            return tuple(map(frozen, argument))
        if isinstance(argument, dict):
            return tuple((name, frozen(value)) for name, value in argument.items())
        if isinstance(argument, slice):
            return slice, *map(frozen, (argument.start, argument.stop, argument.step))
        return type(argument), repr(argument)

    return (node.op, node.target, frozen(node.args), frozen(node.kwargs)), tuple(operands)


def type_of(value: Any) -> Hashable:
    """All that a trace depends on of a fake value."""
    if isinstance(value, list | tuple):
        return tuple(map(type_of, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return type(value), repr(value)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        return "of unknown sizes", id(value)
    return value.dtype, value.device, tuple(value.shape), sizes
