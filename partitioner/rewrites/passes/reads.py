"""Orders both passes for what is stored, and gives each its own names of what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, REST, STATE, UPDATE
from partitioner.rewrites.graph_writer import GraphWriter, reading

#: Uses of stored values between the point where one may be sent for and its own first use. Two,
#: since the one between a pair of matmuls is often a small one (a norm's weight).
AHEAD = 2


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


def passes_of(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The nodes of the forward pass and those of the backward pass."""
    forward = [node for node in graph.nodes if node.name not in graph.backward]
    return forward, [node for node in graph.nodes if node.name in graph.backward]


def shared_states(graph: Graph) -> list[str]:
    """Stored values that both passes read where they are stored."""
    states = (node for node in graph.nodes if node.op == STATE)
    return [node.outputs[0] for node in states if not node.attrs.get("apart")]


def early_updates(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes, each update right behind the node that makes its new value."""
    made = {value for node in nodes for value in node.writes}
    updates: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op in (UPDATE, KEEP) and node.inputs[0] in made:
            updates.setdefault(node.inputs[0], []).append(node)
    moved = {node.name for group in updates.values() for node in group}
    for node in nodes:
        waiting = [] if node.name in moved else [node]
        while waiting:
            node = waiting.pop(0)
            yield node
            waiting += [update for value in node.writes for update in updates.get(value, ())]


def fetched_early(graph: Graph) -> Graph:
    """The graph with stored values and aliases `AHEAD` uses of such values before their own.

    So a plan may gather a value while others are computed with; it takes memory from there on.
    """
    forward, backward = passes_of(graph)
    nodes = (*_fetched_early(forward, ()), *_fetched_early(backward, shared_states(graph)))
    return replace(graph, nodes=nodes)


def _fetched_early(nodes: Sequence[Node], stored: Iterable[str]) -> Iterator[Node]:
    """The nodes of a pass; `stored` are the values that the other pass declares."""
    names = {*stored, *(node.outputs[0] for node in nodes if node.op == STATE)}
    early: dict[str, Node] = {}
    for node in nodes:
        alias = node.op in (ALIAS, REST) and node.inputs[0] in names
        if node.op == STATE or alias:
            names.add(node.outputs[0])
            early[node.outputs[0]] = node
    rest = [node for node in nodes if node.outputs[0] not in early]
    read = _first_reads(rest, early.values(), through_views=False)
    used = _first_reads(rest, early.values(), through_views=True)
    first_use = {value: used.get(value, read.get(value, 0)) for value in early}
    uses = sorted(set(first_use.values()))
    fetch = {use: uses[max(0, index - AHEAD)] for index, use in enumerate(uses)}
    placed: dict[int, list[Node]] = {}
    for value in sorted(early, key=first_use.__getitem__):
        place = min(fetch[first_use[value]], read.get(value, 0))
        placed.setdefault(place, []).append(early[value])
    for index, node in enumerate(rest):
        yield from placed.get(index, ())
        yield node


def _first_reads(
    nodes: Sequence[Node], aliases: Iterable[Node], *, through_views: bool
) -> dict[str, int]:
    """Position of the first node that reads a value or an alias of it.

    Through views, a view is no reader, and its readers read what it is a view of.
    """
    first: dict[str, int] = {}
    renaming = list(aliases)
    for index, node in enumerate(nodes):
        if through_views and is_view(node):
            renaming.append(node)
            continue
        for value in node.reads:
            first.setdefault(value, index)
    for node in reversed(renaming):
        reads = [first[value] for value in (*node.inputs[:1], *node.writes) if value in first]
        if reads and node.inputs:
            first[node.inputs[0]] = min(reads)
    return first
