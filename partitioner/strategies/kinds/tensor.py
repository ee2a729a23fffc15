"""Tensor parallelism: the batch is whole, every weight matrix is stored and used cut."""

from __future__ import annotations

from collections.abc import Container, Iterator

from partitioner.ir.graph import Graph, Node
from partitioner.ir.loops.factors import FactorKind, names_of
from partitioner.ir.ops import rule_of, writes_stored
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import Constraints, Pin
from partitioner.strategies.kinds.data import can_cut, is_read_whole, parameter_uses
from partitioner.strategies.kinds.kind import Asked


def tensor_constraints(asked: Asked) -> Constraints:
    """Pins that cut every weight matrix over the axis, on any dim, and leave the batch whole."""
    graph, axis, size, pins = asked.graph, asked.axis, asked.size, list[Pin]()
    whole = tuple(value for value in asked.batch.inputs if value not in graph.producers)
    for value in whole:
        text = f"parallel tp: batch of {value!r}"
        pins.append(Pin(text, tensor=value, axis=axis, replicate=True))
    for value, uses in parameter_uses(graph).items():
        if graph.types[value].rank < 2 or not can_cut(graph, value, size):
            continue
        if any(is_read_whole(graph, use) or not _is_cut(graph, use, whole, size) for use in uses):
            continue
        text = f"parallel tp: parameter {value!r}"
        pins.append(Pin(text, tensor=value, axis=axis, side="made", cut=True))
        pins += [Pin(text, tensor=name, axis=axis, side="read", cut=True) for name in uses]
    # values of constants, as they are or computed from them alone, that only products read
    origin = {name: name for name in graph.constants if graph.types[name].rank}
    for node in graph.nodes:
        if node.reads and origin.keys() >= set(node.reads):
            origin.update(dict.fromkeys(node.writes, origin[node.reads[0]]))
    matrices = {
        value: weight
        for value, weight in origin.items()
        if graph.types[value].rank >= 2
        and (readers := graph.consumers[value])
        and all(_is_factor(graph, node, value) for node in readers)
    }
    for value, weight in matrices.items():
        if not is_read_whole(graph, value) and _is_cut(graph, value, whole, size):
            text = f"parallel tp: weight {weight!r}"
            pins.append(Pin(text, tensor=value, axis=axis, side="read", cut=True))
    return Constraints(tuple(pins))


def _is_cut(graph: Graph, value: str, whole: Container[str], size: int) -> bool:
    """Tell whether each reader of a value can be cut along its dim beside whole inputs."""
    return all(
        any(_loops(rule, value, node, whole, size))
        for node in graph.consumers[value]
        if isinstance(rule := rule_of(graph, node), Rule) and not writes_stored(node)
    )


def _loops(rule: Rule, value: str, node: Node, whole: Container[str], size: int) -> Iterator[str]:
    """Loops of a node that cut a value in so many parts, and no operand that is to be whole."""
    operands = list(zip(node.inputs, rule.operands, strict=True))
    kept = {name for other, dims in operands if other in whole for name in names_of([dims])}
    for name in (name for other, dims in operands if other == value for name in names_of([dims])):
        factor = rule.factors[name]
        if factor.kind is not FactorKind.WHOLE and factor.size >= size and name not in kept:
            yield name


def _is_factor(graph: Graph, node: Node, value: str) -> bool:
    """Test whether a node multiplies matrices, and a value is one of them."""
    rule = rule_of(graph, node)
    if not isinstance(rule, Rule) or not rule.is_product:
        return False
    return all(index not in rule.addends for index, v in enumerate(node.inputs) if v == value)
