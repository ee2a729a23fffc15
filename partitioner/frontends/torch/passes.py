"""A forward and a backward pass of one graph: their order, and what one knows of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.ir.graph import Node
from partitioner.ir.ops import row_of
from partitioner.ir.types import TensorType

#: Uses of stored values between the point where one may be sent for and its own first use. Two,
#: since the one between a pair of matrix products is often a small one (a norm's weight).
AHEAD = 2


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

    def __post_init__(self) -> None:
        self.made = {value: node for node in self.forward for value in node.writes}
        self.derived = self._derived()
        self.renamed: dict[str, str] = {}
        self.out: list[Node] = []

    def run(self) -> tuple[list[Node], frozenset[str]]:
        """The nodes of the backward pass, aliases among them, and the names of optional ones."""
        for node in self.backward:
            stays = node.inputs[1:] if node.op == "partitioner::update" else ()
            for value in node.reads:
                if value in self.made and value not in stays:
                    self._bring(value)
            self.out.append(reading(node, self.renamed, stays))
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


def reading(node: Node, names: Mapping[str, str], stays: Sequence[str] = ()) -> Node:
    """The node with operands renamed, but for those that stay."""
    if not any(value in names for value in node.reads):
        return node
    inputs = tuple(v if v in stays else names.get(v, v) for v in node.inputs)
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


def fetched_early(nodes: list[Node], stored: Iterable[str] = ()) -> Iterator[Node]:
    """Stored values and their aliases, `AHEAD` uses of such values before their own first one.

    What a plan gathers of them can so be on its way before it is used. Bytes are held from there.

    Args:
        nodes: Of one pass.
        stored: Stored values that another pass has.
    """
    names = {*stored, *(node.outputs[0] for node in nodes if node.op == "partitioner::state")}
    early: dict[str, Node] = {}
    for node in nodes:
        aliases = node.op == "partitioner::alias" and node.inputs[0] in names
        if node.op == "partitioner::state" or aliases:
            names.add(node.outputs[0])
            early[node.outputs[0]] = node
    rest = [node for node in nodes if node.outputs[0] not in early]
    read, used = _first_reads(rest, early.values()), _first_uses(rest, early.values())
    own = {value: used.get(value, read.get(value, 0)) for value in early}
    uses = sorted(set(own.values()))
    turn = {use: uses[max(0, index - AHEAD)] for index, use in enumerate(uses)}
    placed: dict[int, list[Node]] = {}
    for value in sorted(early, key=own.__getitem__):
        place = min(turn[own[value]], read.get(value, 0))
        placed.setdefault(place, []).append(early[value])
    for index, node in enumerate(rest):
        yield from placed.get(index, ())
        yield node


def _first_reads(nodes: list[Node], aliases: Iterable[Node]) -> dict[str, int]:
    """Position of the first node that reads a value or an alias of it."""
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for value in node.reads:
            found.setdefault(value, index)
    return _through(aliases, found)


def _first_uses(nodes: list[Node], aliases: Iterable[Node]) -> dict[str, int]:
    """Position of the first node that computes with a value, a view or an alias of it."""
    found: dict[str, int] = {}
    views = []
    for index, node in enumerate(nodes):
        row = row_of(node)
        if row is not None and row.view:
            views.append(node)
            continue
        for value in node.reads:
            found.setdefault(value, index)
    return _through(aliases, _through(views, found))


def _through(renamed: Iterable[Node], first: Mapping[str, int]) -> dict[str, int]:
    """Positions of values that are read under other names, too."""
    found = dict(first)
    for node in reversed(list(renamed)):
        places = [found[value] for value in (*node.inputs[:1], *node.writes) if value in found]
        if places and node.inputs:
            found[node.inputs[0]] = min(places)
    return found
