"""What the stretches of a backward pass compute again of the stretches of the forward pass.

A stretch of the forward pass that runs in blocks keeps only what is read behind it: its *border*.
Its other values, the *inner* ones, are never whole. So a stretch of the backward pass that reads
them has copies of their nodes, which lead back to borders and to stored values, and whose blocks
are those of the stretch: each block computes the part again that it reads, halo included. The
result is a graph in which stretches need nothing but what is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.ir.blocks import Blocks, Stretch
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.types import TensorType
from partitioner.strategies.free_names import free_name
from partitioner.strategies.stretch_layout import BlockError, lay_out, span_of

_ALIAS = "partitioner::alias"


def computing_again(graph: Graph, blocks: Blocks) -> tuple[Graph, Blocks]:
    """A training graph whose stretches read no inner values of others, and its stretches.

    Stretches of the backward pass begin with the copies; a graph without one is as it was.

    Raises:
        BlockError: A stretch is none of the graph's or cannot run so, two overlap, or one is in
            both passes.
    """
    if not graph.backward:
        return graph, blocks
    return _Copier(graph, blocks).run()


@dataclass
class _Copier:
    graph: Graph
    blocks: Blocks
    types: dict[str, TensorType] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def run(self) -> tuple[Graph, Blocks]:
        graph = self.graph
        self.types.update(graph.types)
        self.twins.update(graph.twins)
        self.taken = {*graph.types, *graph.by_name}
        nodes: list[Node] = []
        stretches, at = [], 0
        for stretch, (first, last) in self.spans.items():
            nodes += self._kept(graph.nodes[at:first])
            run = self._kept(graph.nodes[first : last + 1])
            if stretch in self.later:
                run = self._with_copies(run)
            nodes += run
            names = (run[0].name, run[-1].name) if run else (stretch.first, stretch.last)
            stretches.append(Stretch(*names, stretch.chunks))
            at = last + 1
        nodes += self._kept(graph.nodes[at:])
        new = {node.name for node in nodes} - graph.by_name.keys()
        made = {*graph.inputs, *graph.constants, *(v for node in nodes for v in node.writes)}
        copied = replace(
            graph,
            nodes=tuple(nodes),
            types={value: type_ for value, type_ in self.types.items() if value in made},
            backward=(graph.backward | new) & {node.name for node in nodes},
            twins={name: twin for name, twin in self.twins.items() if name in new | graph.backward},
        )
        return copied, Blocks(tuple(stretches))

    @cached_property
    def spans(self) -> dict[Stretch, tuple[int, int]]:
        """Positions of the first and last node of each stretch."""
        spans, at = {}, 0
        for stretch in self.blocks.stretches:
            first, last = spans[stretch] = span_of(self.graph, stretch)
            if first < at:
                raise BlockError(f"blocks: {stretch.first!r} is in two stretches")
            at = last + 1
            if len({node.name in self.graph.backward for node in self._nodes(first, last)}) > 1:
                raise BlockError(f"blocks: {stretch.first!r} to {stretch.last!r} is in both passes")
        return spans

    @cached_property
    def later(self) -> frozenset[Stretch]:
        """The stretches of the backward pass that are cut."""
        return frozenset(s for s in self.spans if s.chunks and s.first in self.graph.backward)

    @cached_property
    def stretch_of(self) -> dict[str, Stretch]:
        """The cut stretch of a node, by its name."""
        return {
            node.name: stretch
            for stretch, span in self.spans.items()
            if stretch.chunks
            for node in self._nodes(*span)
        }

    @cached_property
    def stored(self) -> frozenset[str]:
        """Stored values, their aliases, and views and casts of them."""
        stored: set[str] = set()
        for node in self.graph.nodes:
            row = row_of(node)
            is_view = row is not None and (row.view or node.op == "aten::_to_copy")
            same = is_view and bool(node.reads) and stored.issuperset(node.reads)
            if (row is not None and row.stored) or same:
                stored.update(node.writes)
        return frozenset(stored)

    @cached_property
    def inner(self) -> dict[str, Node]:
        """The nodes of the values that no node reads as a whole, by value."""
        inner = {}
        for stretch in self.spans:
            if not stretch.chunks or stretch in self.later:
                continue
            for value, at in lay_out(self.graph, stretch).made.items():
                is_cut = any(dim.axes for dim in at.dims)  # else the blocks combine it
                if is_cut and self._is_inner(value, stretch):
                    inner[value] = self.graph.producers[value]
        return inner

    def _is_inner(self, value: str, stretch: Stretch) -> bool:
        """Whether only its own stretch reads a value, and cut ones of the backward pass."""
        if value in self.graph.outputs:
            return False
        readers = list(self.graph.consumers[value])
        for reader in readers:
            if reader.op == _ALIAS and reader.name in self.graph.backward:
                if reader.outputs[0] in self.graph.outputs:
                    return False
                readers += self.graph.consumers[reader.outputs[0]]
            elif (of := self.stretch_of.get(reader.name)) is not stretch and of not in self.later:
                return False
        return True

    def _nodes(self, first: int, last: int) -> Sequence[Node]:
        return self.graph.nodes[first : last + 1]

    def _kept(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes without the backward pass's aliases of inner values."""
        return [node for node in nodes if node.op != _ALIAS or node.inputs[0] not in self.inner]

    def _with_copies(self, run: Sequence[Node]) -> list[Node]:
        """The nodes of a stretch of the backward pass behind the copies that they read."""
        read = {value: self._aliased(value) for node in run for value in node.reads}
        wanted = {value for value in read.values() if value in self.inner}
        for node in reversed(self.graph.nodes):
            if any(value in wanted for value in node.writes if value in self.inner):
                wanted.update(value for value in node.reads if value in self.inner)
        names: dict[str, str] = {}
        copies: list[Node] = []
        for node in self.graph.nodes:
            if any(value in wanted for value in node.writes):
                self._copy(node, names, copies)
        names.update((value, names[inner]) for value, inner in read.items() if inner in self.inner)
        return [*copies, *(_reading(node, names) for node in run)]

    def _aliased(self, value: str) -> str:
        """The value that a backward pass's alias stands for; others are themselves."""
        node = self.graph.producers.get(value)
        is_alias = node is not None and node.op == _ALIAS and node.name in self.graph.backward
        return node.inputs[0] if node is not None and is_alias else value

    def _copy(self, node: Node, names: dict[str, str], copies: list[Node]) -> None:
        """Add a copy of a node, behind copies or aliases of what it reads."""
        for value in node.reads:
            if value in names or value not in self.graph.producers:
                continue  # an input or a constant is the same in both passes
            maker = self.graph.producers[value]
            row = row_of(maker)
            if value in self.stored and maker.reads and not (row is not None and row.stored):
                self._copy(maker, names, copies)  # a view of a stored value
            else:
                names[value] = self._free(f"{value}.again")
                self.types[names[value]] = self.types[value]
                path = f"{maker.name}/again"
                alias = Node(self._free(path), _ALIAS, (value,), (names[value],))
                copies.append(alias)
        outputs = []
        for value in node.outputs:
            name = self._free(f"{value}.again") if value else ""
            outputs.append(name)
            if value:
                names[value], self.types[name] = name, self.types[value]
        copied = replace(
            _reading(node, names), name=self._free(f"{node.name}/again"), outputs=tuple(outputs)
        )
        self.twins[copied.name] = node.name
        copies.append(copied)

    def _free(self, name: str) -> str:
        """The name, or with a number that makes it free; it is then taken."""
        return free_name(name, self.taken)


def _reading(node: Node, names: dict[str, str]) -> Node:
    """The node with its operands renamed."""
    if not any(value in names for value in node.reads):
        return node
    return replace(
        node,
        inputs=tuple(names.get(value, value) for value in node.inputs),
        captures=tuple(names.get(value, value) for value in node.captures),
    )
