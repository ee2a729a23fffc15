"""Orders the nodes of a forward and a backward pass, and gives each its own names of values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from partitioner.frontends.torch.building.calls import Scope
from partitioner.ir.graph import Node
from partitioner.ir.ops import row_of

#: Uses of stored values between the point where one may be sent for and its own first use. Two,
#: since the one between a pair of matmuls is often a small one (a norm's weight).
AHEAD = 2


#: Nodes that declare what is stored, and those that write to it.
STATE, REST = "partitioner::state", "partitioner::rest"
UPDATE, KEEP = "partitioner::update", "partitioner::keep"


class Access(Enum):
    """The ways in which the backward pass reads a value of the forward pass."""

    ALIAS = auto()  #: Through an alias.
    REPEATED = auto()  #: From a repetition of the node that makes it.
    TAKEN = auto()  #: Through a node that takes either of several operands, here of one.
    OFFERED = auto()  #: Through a node that takes either the value or a clone of it.


def plain_access(forward: Iterable[Node]) -> dict[str, Access]:
    """The access that keeps all values: views and casts of stored ones are repeated."""
    access: dict[str, Access] = {}
    stored: set[str] = set()
    for node in forward:
        row = row_of(node)
        is_view = row is not None and (row.view or node.op == "aten::_to_copy")
        repeated = is_view and bool(node.reads) and stored.issuperset(node.reads)
        if repeated or node.op in (STATE, REST):
            stored.update(node.writes)
        access.update(dict.fromkeys(node.writes, Access.REPEATED if repeated else Access.ALIAS))
    return access


def backward_pass(
    forward: Iterable[Node], backward: Iterable[Node], access: Mapping[str, Access], scope: Scope
) -> list[Node]:
    """The backward pass with names of its own, new in the scope, of what the forward pass makes.

    A node that gives a value such a name stands before the first reader of the value.
    """
    made = {value: node for node in forward for value in node.writes}
    writer = _BackwardWriter(made=made, access=access, scope=scope)
    for node in backward:
        stays = node.inputs[1:] if node.op in (UPDATE, KEEP) else ()
        for value in node.reads:
            if value in made and value not in stays:
                writer.rename(value)
        writer.nodes.append(_reading(node, writer.renamed, stays))
    return writer.nodes


@dataclass(kw_only=True)
class _BackwardWriter:
    """Writes the nodes that give values of the forward pass names in the backward pass.

    Attributes:
        made: The node of the forward pass that makes each value.
        renamed: The backward pass's name of each value.
        clones: The value of the clone of a node by the value of the node.
    """

    made: Mapping[str, Node]
    access: Mapping[str, Access]
    scope: Scope
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
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
        node, access = self.made[value], self.access[value]
        if access is Access.REPEATED:
            self.renamed.update(self._repeat(node, "backward"))
            return
        inputs: tuple[str, ...] = (value,)
        name, op = f"{node.name}/taken", "partitioner::either"
        if access is Access.ALIAS:
            path = "/" + value.replace(".", "/") if node.op == STATE else node.name
            name, op = f"{path}/backward", "partitioner::alias"
        elif access is Access.OFFERED:
            if value not in self.clones:
                self.clones.update(self._repeat(node, "again"))
            inputs = (value, self.clones[value])
        self.renamed[value] = self.scope.copy_value(value, "backward")
        self.nodes.append(Node(self.scope.node_name(name), op, inputs, (self.renamed[value],)))

    def _repeat(self, node: Node, suffix: str) -> dict[str, str]:
        """Write a node of the forward pass again; returns its new values by the old ones."""
        copies = {value: self.scope.copy_value(value, suffix) for value in node.writes}
        outputs = tuple(copies.get(value, "") for value in node.outputs)
        name = self.scope.node_name(f"{node.name}/again")
        self.scope.repeats[name] = node.name
        self.nodes.append(replace(_reading(node, self.renamed), name=name, outputs=outputs))
        return copies


def _reading(node: Node, names: Mapping[str, str], stays: Collection[str] = ()) -> Node:
    """The node with its operands renamed, but for those that stay."""
    if not any(value in names for value in node.reads):
        return node
    inputs = tuple(v if v in stays else names.get(v, v) for v in node.inputs)
    return replace(node, inputs=inputs)


def forward_aliases(forward: Iterable[Node], stored: Collection[str], scope: Scope) -> list[Node]:
    """The forward pass with an alias of each of these stored values before its first reader."""
    aliases: dict[str, str] = {}
    nodes: list[Node] = []
    for node in forward:
        if node.op == UPDATE:
            nodes.append(node)
            continue
        for value in node.reads:
            if value in stored and value not in aliases:
                aliases[value] = scope.copy_value(value, "forward")
                name = scope.node_name("/" + value.replace(".", "/") + "/forward")
                nodes.append(Node(name, "partitioner::alias", (value,), (aliases[value],)))
        nodes.append(_reading(node, aliases))
    return nodes


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


def fetched_early(nodes: Sequence[Node], stored: Iterable[str] = ()) -> Iterator[Node]:
    """The nodes of a pass, stored values and aliases `AHEAD` uses of such values before their own.

    So a plan may gather a value while others are computed with; it takes memory from there on.
    `stored` are the values that another pass declares.
    """
    names = {*stored, *(node.outputs[0] for node in nodes if node.op == STATE)}
    early: dict[str, Node] = {}
    for node in nodes:
        alias = node.op in ("partitioner::alias", REST) and node.inputs[0] in names
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
        row = row_of(node)
        if through_views and row is not None and row.view:
            renaming.append(node)
            continue
        for value in node.reads:
            first.setdefault(value, index)
    for node in reversed(renaming):
        reads = [first[value] for value in (*node.inputs[:1], *node.writes) if value in first]
        if reads and node.inputs:
            first[node.inputs[0]] = min(reads)
    return first
