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

    def run(self) -> tuple[list[Node], frozenset[str]]:
        """The nodes of the backward pass, aliases among them, and the names of optional ones."""
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
        return self.out, frozenset()

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
        waiting = [value]
        while waiting:
            value = waiting[-1]
            missing = [read for read in self._before(value) if read not in self.renamed]
            if value not in self.renamed and missing:
                waiting += missing
            else:
                waiting.pop()
                if value not in self.renamed:
                    self._emit(value)

    def _before(self, value: str) -> list[str]:
        """Values of the forward pass that must be brought before this one."""
        return list(self.made[value].reads) if self._again(value) else []

    def _again(self, value: str) -> bool:
        """Whether the node that makes a value is one of the backward pass too, for nothing."""
        return value in self.derived and self.made[value].op != "partitioner::state"

    def _emit(self, value: str) -> None:
        node = self.made[value]
        if self._again(value):
            fresh = {name: self._name(name) for name in node.writes}
            self._repeat(node, fresh)
            self.renamed.update(fresh)
            return
        path = "/" + value.replace(".", "/") if node.op == "partitioner::state" else node.name
        self._take(f"{path}/backward", "partitioner::alias", value, (value,))

    def _repeat(self, node: Node, fresh: Mapping[str, str]) -> None:
        """A node of the forward pass again, with results of other names."""
        again = reading(node, self.renamed)
        outputs = tuple(fresh.get(name, name) for name in node.outputs)
        self.out.append(replace(again, name=self.free(f"{node.name}/again"), outputs=outputs))

    def _take(self, path: str, op: str, value: str, inputs: tuple[str, ...]) -> None:
        """The backward pass's own name of a value."""
        self.renamed[value] = self._name(value)
        self.out.append(Node(self.free(path), op, inputs, (self.renamed[value],)))

    def _name(self, value: str, word: str = "backward") -> str:
        new = f"{value}.{word}"
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
