"""The op table, and the two questions that the rest of the compiler asks of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from partitioner.ir.graph import Graph, Node, once_a_graph
from partitioner.ir.ops import aten, onnx
from partitioner.ir.ops.aten.branches import COND, cond_row
from partitioner.ir.ops.signature import OpaqueError
from partitioner.ir.ops.table import OpRow, OpView, merged
from partitioner.ir.rule import Rule


def row_of(node: Node) -> OpRow:
    """The node's row; `UNKNOWN` if it has none."""
    return ROWS.get(node.op, UNKNOWN)


def is_stored(node: Node) -> bool:
    """Tell whether a node declares what is stored from step to step."""
    return row_of(node).stored


def is_view(node: Node) -> bool:
    """Tell whether a node's result is its first operand's memory, under another shape or not."""
    return row_of(node).view


def writes_stored(node: Node) -> bool:
    """Tell whether a node writes to where a value is stored."""
    return row_of(node).in_place is not None


@dataclass(frozen=True)
class _Known:
    """The rules of a graph that were asked for; equal ones are one object."""

    by_node: dict[str, Rule | str] = field(default_factory=dict)
    by_form: dict[Hashable, Rule] = field(default_factory=dict)
    distinct: dict[Hashable, Rule] = field(default_factory=dict)


_KNOWN: WeakKeyDictionary[Graph, _Known] = WeakKeyDictionary()


def rule_of(graph: Graph, node: Node) -> Rule | str:
    """The rule of a node, computed once for a graph, or why it has none: the report's clause."""
    known = _KNOWN.setdefault(graph, _Known())
    if node.name not in known.by_node:
        form = _form(graph, node)
        rule: Rule | str | None = known.by_form.get(form)
        if rule is None:
            try:
                rule = row_of(node).rule(OpView(node, graph))
            except OpaqueError as error:
                rule = str(error)
        if isinstance(rule, Rule):
            rule = known.distinct.setdefault(rule.key, rule)
            if form is not None:
                known.by_form[form] = rule
        known.by_node[node.name] = rule
    return known.by_node[node.name]


def _form(graph: Graph, node: Node) -> Hashable:
    """All that a row sees of a node but names; None if contents of constants or bodies steer it."""
    if any(value in graph.constants and not graph.constants[value].weight for value in node.inputs):
        return None
    if not all(isinstance(value, int | float | str | tuple) for value in node.attrs.values()):
        return None
    places = tuple(map(node.inputs.index, node.inputs))
    types = tuple(graph.types.get(value) for value in (*node.inputs, *node.outputs))
    return node.op, repr(sorted(node.attrs.items())), places, len(node.captures), types


def inherit_rules(graph: Graph, source: Graph) -> None:
    """Take over known rules of nodes of another graph, of equal values and constants."""
    known = _KNOWN.get(source)
    if known is None:
        return
    shared = (n.name for n in graph.nodes if source.by_name.get(n.name) is n)
    by_node = {name: known.by_node[name] for name in shared if name in known.by_node}
    _KNOWN[graph] = _Known(by_node, known.by_form, known.distinct)


@once_a_graph
def rules_of(graph: Graph) -> Mapping[str, Rule | str]:
    """`rule_of` every node, by name."""
    return {node.name: rule_of(graph, node) for node in graph.nodes}


def _no_rule(view: OpView) -> Rule:
    raise OpaqueError(f"op {view.node.op!r} has no row in the op table")


UNKNOWN = OpRow(_no_rule)
#: Every row, by the op key of `Node.op`.
ROWS: Mapping[str, OpRow] = {**merged(aten, onnx), COND: cond_row(rule_of)}
