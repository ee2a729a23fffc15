"""A forward and a backward pass of one graph: their order, and what one knows of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from partitioner.ir.graph import Node
from partitioner.ir.ops import row_of
from partitioner.ir.types import TensorType


@dataclass
class Passes:
    """Gives the backward pass its own aliases of what the forward pass made.

    Attributes:
        types: Of all values; those that are made are added.
        free: Makes a wish for a node's name one that no node has.
        forward: Nodes of the forward pass.
        backward: Nodes of the backward pass.
    """

    types: dict[str, TensorType]
    free: Callable[[str], str]
    forward: list[Node]
    backward: list[Node]

    def run(self) -> list[Node]:
        """The nodes of the backward pass, aliases among them."""
        self.made = {value: node for node in self.forward for value in node.writes}
        self.derived = self._derived()
        self.renamed: dict[str, str] = {}
        self.out: list[Node] = []
        for node in self.backward:
            stays = node.inputs[1:] if node.op == "partitioner::update" else ()
            for value in node.reads:
                if value in self.made and value not in stays:
                    self._bring(value)
            names = {k: v for k, v in self.renamed.items() if k not in stays}
            self.out.append(reading(node, names))
        return self.out

    def _derived(self) -> set[str]:
        """Stored values and views of them."""
        found: set[str] = set()
        for node in self.forward:
            row = row_of(node)
            views = row is not None and (row.view or node.op == "aten::_to_copy")
            if node.op == "partitioner::state" or (
                views and node.reads and all(value in found for value in node.reads)
            ):
                found.update(node.writes)
        return found

    def _bring(self, value: str) -> None:
        """Make a value of the forward pass known to the backward pass under a name of its own."""
        if value in self.renamed:
            return
        node = self.made[value]
        if value in self.derived and node.op != "partitioner::state":
            for read in node.reads:
                self._bring(read)
            fresh = {name: self._name(name) for name in node.writes}
            self.renamed.update(fresh)
            again = reading(node, self.renamed)
            outputs = tuple(fresh.get(name, name) for name in node.outputs)
            self.out.append(replace(again, name=self.free(f"{node.name}/again"), outputs=outputs))
            return
        new = self._name(value)
        self.renamed[value] = new
        path = "/" + value.replace(".", "/") if node.op == "partitioner::state" else node.name
        self.out.append(Node(self.free(f"{path}/backward"), "partitioner::alias", (value,), (new,)))

    def _name(self, value: str) -> str:
        new = f"{value}.backward"
        self.types[new] = self.types[value]
        return new


def reading(node: Node, names: Mapping[str, str]) -> Node:
    """The node with operands renamed."""
    if not any(value in names for value in node.reads):
        return node
    inputs = tuple(names.get(value, value) for value in node.inputs)
    return replace(node, inputs=inputs)


def needed(nodes: list[Node], wanted: Iterable[str]) -> list[Node]:
    """The nodes that these values depend on, in order."""
    live = set(wanted)
    kept = []
    for node in reversed(nodes):
        if live.intersection(node.writes):
            live.update(node.reads)
            kept.append(node)
    return kept[::-1]


def early_updates(nodes: list[Node]) -> Iterator[Node]:
    """What is written is taken to where it is stored as soon as it is made."""
    made = {value for node in nodes for value in node.writes}
    waiting: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "partitioner::update" and node.inputs[0] in made:
            waiting.setdefault(node.inputs[0], []).append(node)
    moved = {node.name for updates in waiting.values() for node in updates}
    for node in nodes:
        if node.name not in moved:
            yield node
            for value in node.writes:
                yield from waiting.get(value, ())


def late_states(nodes: list[Node]) -> Iterator[Node]:
    """Stored values right before their first use."""
    states = {n.outputs[0]: n for n in nodes if n.op == "partitioner::state"}
    for node in nodes:
        if node.op == "partitioner::state":
            continue
        for value in node.reads:
            if value in states:
                yield states.pop(value)
        yield node
    yield from states.values()
