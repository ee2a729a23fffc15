"""Where the parameters of a graph are read, and whether they can be cut."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.rule import Rule


def parameter_uses(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """The values of each stored parameter in the passes, and the views of them.

    In training, of those that are trained.
    """
    by_parameter: dict[str, list[str]] = {}
    root: dict[str, str] = {}
    updated = (n.inputs[1] for n in graph.nodes if n.attrs.get("role") == "gradient")
    trained = {_origin(graph, value) for value in updated}
    for node in graph.nodes:
        row = row_of(node)
        if row is None or row.in_place is not None:
            continue
        if row.stored and not node.inputs and (node.outputs[0] in trained or not graph.backward):
            by_parameter[node.outputs[0]] = []
            root[node.outputs[0]] = node.outputs[0]
        elif node.inputs and (row.view or row.again) and node.inputs[0] in root:
            parameter = root[node.inputs[0]]
            root.update(dict.fromkeys(node.writes, parameter))
            by_parameter[parameter] += node.writes
    for parameter, uses in by_parameter.items():
        if not any(is_again(graph, use) for use in uses):
            uses.append(parameter)
    return {parameter: tuple(uses) for parameter, uses in by_parameter.items()}


def _origin(graph: Graph, value: str) -> str:
    while inputs := graph.producers[value].inputs:
        value = inputs[0]
    return value


def is_again(graph: Graph, value: str) -> bool:
    """Test whether a value is another one, in a pass or at rest."""
    row = row_of(graph.producers[value])
    return row is not None and row.again


def is_stored_again(graph: Graph, value: str) -> bool:
    """Test whether a value is gathered for where it lies at rest."""
    rows = map(row_of, graph.consumers[value])
    return any(row is not None and row.stored for row in rows)


def is_read_whole(graph: Graph, value: str) -> bool:
    """Test whether a node, such as a `torch.cond`, needs the value whole on every device."""
    for node in graph.consumers[value]:
        rule = rule_of(graph, node)
        if not isinstance(rule, Rule):
            return True
        if any(v == value and d is None for v, d in zip(node.inputs, rule.operands, strict=True)):
            return True
    return False


def can_cut(graph: Graph, value: str, *parts: int) -> bool:
    """Tell whether a value has elements, and for each number a dim of so many equal parts.

    A dim that is cut for one number has that many fewer elements for the next.
    """
    return 0 not in graph.types[value].shape and _divisible(graph.types[value].shape, parts)


def _divisible(shape: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    if not parts:
        return True
    first, *others = parts
    return any(
        _divisible((*shape[:dim], size // first, *shape[dim + 1 :]), tuple(others))
        for dim, size in enumerate(shape)
        if size % first == 0
    )
