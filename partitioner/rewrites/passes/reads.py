"""Gives each pass its own names of what it reads of the forward pass, or of what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, STATE, UPDATE
from partitioner.rewrites.graph_writer import GraphWriter, reading
from partitioner.rewrites.passes.ordering import passes_of, shared_states


class Access(Enum):
    """The ways in which the backward pass reads a value of the forward pass."""

    ALIAS = auto()  #: Through an alias.
    REPEATED = auto()  #: From a repetition of the node that makes it.
    TAKEN = auto()  #: Through a node that takes either of several operands, here of one.
    OFFERED = auto()  #: Through a node that takes either the value or a clone of it.


def stored_values(nodes: Sequence[Node]) -> frozenset[str]:
    """Stored values, their aliases, and views and casts of them."""
    stored: set[str] = set()
    for node in nodes:
        gives_same = is_view(node) or node.op == "aten::_to_copy"
        same = gives_same and bool(node.reads) and stored.issuperset(node.reads)
        if is_stored(node) or same:
            stored.update(node.writes)
    return frozenset(stored)


def plain_access(graph: Graph) -> dict[str, Access]:
    """The access that keeps all values: views and casts of stored ones are repeated."""
    forward, _ = passes_of(graph)
    stored = stored_values(forward)
    return {
        value: Access.REPEATED if value in stored and not is_stored(node) else Access.ALIAS
        for node in forward
        for value in node.writes
    }


def backward_apart(graph: Graph, access: Mapping[str, Access]) -> Graph:
    """The graph whose backward pass has names of its own of what the forward pass makes.

    A node that gives a value such a name stands before the first reader of the value.
    """
    forward, backward = passes_of(graph)
    made = {value: node for node in forward for value in node.writes}
    writer = GraphWriter(source=graph, mark="_", nodes=forward)
    names = _BackwardNames(made, access, writer)
    for node in backward:
        stays = node.inputs[1:] if node.op in (UPDATE, KEEP) else ()
        for value in node.reads:
            if value in made and value not in stays:
                names.rename(value)
        writer.nodes.append(reading(node, names.renamed, stays))
    writer.backward.update({node.name for node in writer.nodes} - graph.by_name.keys())
    return writer.graph()


@dataclass(frozen=True)
class _BackwardNames:
    """Gives values of the forward pass names in the backward pass."""

    made: Mapping[str, Node]  #: The node of the forward pass that makes each value.
    access: Mapping[str, Access]
    writer: GraphWriter
    #: The backward pass's name of each value.
    renamed: dict[str, str] = field(default_factory=dict)
    #: The value of the clone of a node by the value of the node.
    clones: dict[str, str] = field(default_factory=dict)

    def rename(self, value: str) -> None:
        """Rename a value, after the values that its repeated or cloned node reads."""
        waiting = [value]
        while waiting:
            value = waiting[-1]
            missing: list[str] = []
            if self.access[value] in (Access.REPEATED, Access.OFFERED):
                reads = self.made[value].reads
                missing = [read for read in reads if read in self.made and read not in self.renamed]
            if value not in self.renamed and missing:
                waiting += missing
            else:
                waiting.pop()
                if value not in self.renamed:
                    self._write_access(value)

    def _write_access(self, value: str) -> None:
        node, access, writer = self.made[value], self.access[value], self.writer
        if access is Access.REPEATED:
            writer.nodes.append(writer.again(node, self.renamed, "backward"))
            return
        inputs: tuple[str, ...] = (value,)
        name, op = f"{node.name}/taken", EITHER
        if access is Access.ALIAS:
            path = path_of(value) if node.op == STATE else node.name
            name, op = f"{path}/backward", ALIAS
        elif access is Access.OFFERED:
            if value not in self.clones:
                copy = writer.again(node, dict(self.renamed))
                pairs = zip(node.outputs, copy.outputs, strict=True)
                self.clones.update((old, new) for old, new in pairs if old)
                writer.nodes.append(copy)
            inputs = (value, self.clones[value])
        self.renamed[value] = writer.copied(value, "backward")
        writer.add(name, op, inputs, made=(self.renamed[value],))


def forward_aliases(graph: Graph) -> Graph:
    """The graph with an alias for the forward pass of each stored value that both passes read.

    It stands before its first reader.
    """
    forward, backward = passes_of(graph)
    again = {value for node in backward for value in node.reads}.intersection(shared_states(graph))
    writer, aliases = GraphWriter(source=graph, mark="_"), dict[str, str]()
    for node in forward:
        if node.op == UPDATE:
            writer.nodes.append(node)
            continue
        for value in node.reads:
            if value in again and value not in aliases:
                aliases[value] = writer.copied(value, "forward")
                writer.add(f"{path_of(value)}/forward", ALIAS, (value,), made=(aliases[value],))
        writer.nodes.append(reading(node, aliases))
    writer.nodes += backward
    return writer.graph()


def path_of(value: str) -> str:
    """The name of the node of a stored value."""
    return "/" + value.replace(".", "/")
