"""What stretches compute again, so that they need nothing but what is whole.

A stretch of the forward pass that runs in blocks keeps only what is read behind it: its *border*.
Its other values, the *inner* ones, are never whole. So a stretch of the backward pass that reads
them has copies of their nodes, which lead back to borders and to stored values, and whose blocks
are those of the stretch: each block computes the part again that it reads, halo included.

Where the blocks of a stretch read what they combine, the stretch becomes several, its *rounds*:
each reads what the blocks of earlier ones combined, and computes their inner values again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, row_of
from partitioner.ir.ops.aten.state import ALIAS
from partitioner.ir.pieces.blocks import Blocks, Chunk, Stretch
from partitioner.rewrites.graph_writer import GraphWriter, reading
from partitioner.rewrites.passes import stored_values
from partitioner.rewrites.stretch_layout import BlockError, Round, rounds_of, span_of


def computing_again(graph: Graph, blocks: Blocks) -> tuple[Graph, Blocks]:
    """A graph whose stretches read no inner values of others and nothing that they combine.

    Stretches begin with the copies. The graph is as it was if it has no backward pass, and each
    stretch has one round.
    """
    copier = _Copier(graph, blocks, GraphWriter(source=graph))
    if not graph.backward and all(len(rounds) == 1 for rounds in copier.rounds.values()):
        return graph, blocks
    return copier.run()


@dataclass
class _Copier:
    graph: Graph
    blocks: Blocks
    writer: GraphWriter

    def run(self) -> tuple[Graph, Blocks]:
        graph, nodes, later = self.graph, self.writer.nodes, self.writer.backward
        stretches, at = [], 0
        for stretch, (first, last) in self.spans.items():
            nodes += self._kept(graph.nodes[at:first])
            for run, chunks in self._runs(stretch):
                nodes += run
                names = (run[0].name, run[-1].name) if run else (stretch.first, stretch.last)
                stretches.append(Stretch(*names, chunks))
                if stretch in self.later:
                    later.update(node.name for node in run)
            at = last + 1
        nodes += self._kept(graph.nodes[at:])
        return self.writer.graph({node.name for node in nodes}), Blocks(tuple(stretches))

    def _runs(self, stretch: Stretch) -> Iterator[tuple[list[Node], tuple[Chunk, ...]]]:
        """The nodes of each stretch that a stretch becomes, with the dims that are cut."""
        rounds = self.rounds[stretch]
        for one in rounds:
            names: dict[str, str] = {}
            run = self._kept(one.nodes)
            if len(rounds) > 1:
                run = self._read(run)
            if stretch in self.later or len(rounds) > 1:
                run = self._with_copies(run, names, is_later=stretch in self.later)
            if len(rounds) == 1:
                yield run, stretch.chunks
                continue
            cut = {name for value, name in names.items() if value in self.inner}
            for nodes in _connected(run, cut.union(*one.dims)):
                made, chunks = {value for node in nodes for value in node.writes}, list[Chunk]()
                for chunk, of in zip(stretch.chunks, one.dims, strict=True):
                    named = ((names.get(value, value), dim) for value, dim in of.items())
                    seed = next(((value, dim) for value, dim in named if value in made), None)
                    if seed is None:
                        last = nodes[-1]
                        raise BlockError(
                            f"blocks: {last.name!r} ({last.op}) combines what is kept whole"
                        )
                    chunks.append(Chunk(*seed, chunk.parts))
                yield nodes, tuple(chunks)

    @cached_property
    def spans(self) -> dict[Stretch, tuple[int, int]]:
        spans, at = {}, 0
        for stretch in self.blocks.stretches:
            first, last = spans[stretch] = span_of(self.graph, stretch)
            if first < at:
                raise BlockError(f"blocks: {stretch.first!r} is in two stretches")
            at = last + 1
            nodes = self.graph.nodes[first : last + 1]
            if len({node.name in self.graph.backward for node in nodes}) > 1:
                raise BlockError(f"blocks: {stretch.first!r} to {stretch.last!r} is in both passes")
        return spans

    @cached_property
    def later(self) -> frozenset[Stretch]:
        return frozenset(s for s in self.spans if s.chunks and s.first in self.graph.backward)

    @cached_property
    def rounds(self) -> Mapping[Stretch, tuple[Round, ...]]:
        """The rounds of each stretch; one that is not cut has one."""
        return {
            stretch: rounds_of(self.graph, stretch)
            if stretch.chunks
            else (Round(self.graph.nodes[first : last + 1], frozenset(), ()),)
            for stretch, (first, last) in self.spans.items()
        }

    @cached_property
    def stretch_of(self) -> dict[str, Stretch]:
        """The cut stretch of a node, by its name."""
        return {
            node.name: stretch
            for stretch, (first, last) in self.spans.items()
            if stretch.chunks
            for node in self.graph.nodes[first : last + 1]
        }

    @cached_property
    def stored(self) -> frozenset[str]:
        return stored_values(self.graph.nodes)

    @cached_property
    def inner(self) -> dict[str, Node]:
        """The nodes of the values that no node reads as a whole, by value."""
        return {
            value: self.graph.producers[value]
            for stretch, rounds in self.rounds.items()
            for one in rounds
            for value in one.inner
            if self._is_inner(value, stretch)
        }

    def _is_inner(self, value: str, stretch: Stretch) -> bool:
        """Tell whether only its own stretch reads a value, and cut ones of the backward pass."""
        if value in self.graph.outputs:
            return False
        again = frozenset({stretch}) if stretch in self.later else self.later | {stretch}
        readers = list(self.graph.consumers[value])
        for reader in readers:
            if reader.op == ALIAS and reader.name in self.graph.backward:
                if reader.outputs[0] in self.graph.outputs:
                    return False
                readers += self.graph.consumers[reader.outputs[0]]
            elif self.stretch_of.get(reader.name) not in again:
                return False
        return True

    def _kept(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if not self._is_alias(node, self.inner)]

    def _is_alias(self, node: Node, of: Collection[str]) -> bool:
        return node.op == ALIAS and node.name in self.graph.backward and node.inputs[0] in of

    def _read(self, run: Sequence[Node]) -> list[Node]:
        """The nodes of a round without those that only later ones read, which have copies."""
        read: set[str] = set()
        kept = []
        for node in reversed(run):
            if any(value in read or value not in self.inner for value in node.writes):
                kept.append(node)
                read.update(node.reads)
        return kept[::-1]

    def _with_copies(
        self, run: Sequence[Node], names: dict[str, str], *, is_later: bool
    ) -> list[Node]:
        """The nodes of a round behind the copies that they read, whose names are noted."""
        here = {value for node in run for value in node.writes}
        read = {value: self._aliased(value) for node in run for value in node.reads}
        wanted = {value for value in read.values() if value in self.inner and value not in here}
        for node in reversed(self.graph.nodes):
            if any(value in wanted for value in node.writes):
                wanted.update(v for v in map(self._aliased, node.reads) if v in self.inner)
        copies: list[Node] = []
        for node in self.graph.nodes:
            if any(value in wanted for value in node.writes):
                self._copy(node, names, copies, is_later=is_later)
        names.update((value, names[inner]) for value, inner in read.items() if inner in wanted)
        return [*copies, *(reading(node, names, _written(node)) for node in run)]

    def _aliased(self, value: str) -> str:
        """The inner value that a backward pass's alias stands for; others are themselves."""
        node = self.graph.producers.get(value)
        return node.inputs[0] if node is not None and self._is_alias(node, self.inner) else value

    def _copy(
        self, node: Node, names: dict[str, str], copies: list[Node], *, is_later: bool
    ) -> None:
        """Add a copy of a node, behind copies of what it reads, or aliases of the other pass's."""
        later = self.graph.backward
        for value in node.reads:
            if (inner := self._aliased(value)) in names:
                names[value] = names[inner]
            if value in names or value not in self.graph.producers:
                continue  # an input or a constant is the same in both passes
            maker = self.graph.producers[value]
            if is_later is (maker.name in later):
                continue
            is_alias = maker.op == ALIAS
            is_computed = bool(maker.reads) and not is_stored(maker) and not is_alias
            if value in self.stored and is_computed:
                self._copy(maker, names, copies, is_later=is_later)  # a view of a stored value
            else:
                names[value] = self.writer.copied(value, "again")
                path, of = f"{maker.name}/again", maker.inputs[0] if is_alias else value
                alias = Node(self.writer.free(path), ALIAS, (of,), (names[value],))
                copies.append(alias)
        if is_later and self._is_alias(node, names):
            names[node.outputs[0]] = names[node.inputs[0]]
        else:
            copies.append(self.writer.again(node, names))


def _written(node: Node) -> tuple[str, ...]:
    """The stored value that a node writes, which it reads under the name that it is stored by."""
    slot = row_of(node).in_place
    return () if slot is None else (node.inputs[slot],)


def _connected(nodes: Sequence[Node], cut: Collection[str]) -> list[list[Node]]:
    """The nodes of a round by what connects them: the values in parts that they make and read."""
    made = {value for node in nodes for value in node.writes if value in cut}
    linked: nx.Graph[str] = nx.Graph()
    linked.add_nodes_from(made)
    parts_of = [[v for v in (*node.reads, *node.writes) if v in made] for node in nodes]
    for parts in parts_of:
        nx.add_path(linked, parts)
    component = {v: at for at, of in enumerate(nx.connected_components(linked)) for v in of}
    numbers: dict[int, int] = {}  # by component
    number_of: dict[str, int] = {}  # by value
    groups: list[list[Node]] = []
    for node, parts in zip(nodes, parts_of, strict=True):
        if any(value in made for value in node.writes):
            at = numbers.setdefault(component[parts[0]], len(numbers))
        else:
            # in no block: with the first, or with the last whose results it reads
            at = max((number_of[value] for value in node.reads if value in number_of), default=0)
        number_of.update(dict.fromkeys(node.writes, at))
        groups += [[] for _ in range(at + 1 - len(groups))]
        groups[at].append(node)
    return [group for group in groups if group]
