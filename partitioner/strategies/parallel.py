"""Well-known kinds of parallelism as constraints on a module's graph.

    dp      data parallel: the batch is cut, parameters are stored and used whole
    zero1   dp with optimizer states cut; here gradients are always cut as parameters are, so it
            is zero2
    zero2   dp with parameters, gradients and optimizer states cut at rest; parameters are gathered
            once a step
    zero3   zero2 with parameters gathered for each pass and freed after their use
    tp      tensor parallel: the batch is whole, every weight matrix is stored and used cut
    dp+tp   and so on: both, each over its axis
    pp      pipeline parallel: stages on devices of their own, which `search.pipelines` cuts

Inputs, parameters and uses of parameters are bound; the rest is solved. Where the batch is all that
is cut, parameters are stored as rows if they can be: parts of rows are gathered without a copy. The
batch is cut over axis "dp", weights for tensor parallelism over axis "tp".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import Constraints, Pin
from partitioner.strategies.spaces import SearchError

#: Kinds that cut the batch: whether parameters are cut at rest, and in a pass until their use.
DATA = {"dp": (False, False), "zero1": (True, False), "zero2": (True, False), "zero3": (True, True)}
TENSOR = "tp"
#: Stages, each on devices of its own; the others are then inside of a stage.
PIPELINE = "pp"


def parallel_mesh(kind: str, devices: int, mesh: Mapping[str, int] | None) -> Mapping[str, int]:
    """Axes of a kind of parallelism: the mesh, or all devices on its only axis.

    Raises:
        SearchError: There is no such kind, or its axes are not the mesh's.
    """
    words = kind.split("+")
    if not words or len(set(words)) != len(words) or set(words) - {*DATA, TENSOR}:
        known = ", ".join((*DATA, TENSOR, PIPELINE))
        raise SearchError(f"parallel {kind!r} is not one of {known}, or several joined by +")
    wanted = ["tp" if word == TENSOR else "dp" for word in words]
    if len(set(wanted)) != len(wanted):
        raise SearchError(f"parallel {kind!r} cuts the batch twice")
    if mesh is None and len(wanted) == 1:
        return {wanted[0]: devices}
    if mesh is None or set(mesh) != set(wanted):
        axes = "none" if mesh is None else ", ".join(mesh)
        raise SearchError(
            f"parallel {kind!r} wants a mesh of axes {' and '.join(sorted(wanted))}; "
            f"the mesh given has {axes}"
        )
    return mesh


def parallel_constraints(
    kind: str, graph: Graph, batch: tuple[str, ...], mesh: Mapping[str, int]
) -> Constraints:
    """Pins of a kind of parallelism that `parallel_mesh` accepts.

    `batch` are the graph inputs whose first dim is the batch's; `mesh` has the sizes of the axes.
    """
    pins: list[Pin] = []
    busy: dict[str, frozenset[str]] = {}
    for word in kind.split("+"):
        axis = "tp" if word == TENSOR else "dp"
        rows = kind == word
        constraints = axis_constraints(word, graph, batch, axis, mesh[axis], rows=rows)
        pins += constraints.pins
        busy.update(constraints.busy)
    return Constraints(tuple(pins), busy=busy)


def axis_constraints(
    word: str, graph: Graph, batch: tuple[str, ...], axis: str, size: int, *, rows: bool = False
) -> Constraints:
    """Pins of one kind of parallelism, a key of `DATA` or "tp", over an axis of a size.

    `rows`: whether parameters are cut at rest along their first dim where it is divisible.
    """
    if word == TENSOR:
        return Constraints(tuple(_tensor(graph, batch, axis, size)))
    busy = {axis: frozenset(_depending(graph, batch))}
    return Constraints(tuple(_data(word, graph, batch, axis, size, rows=rows)), busy=busy)


def batch_inputs(graph: Graph) -> tuple[str, ...]:
    """The inputs whose first dim is the batch's: of the size that most of them have."""
    sizes = {name: graph.types[name].shape[0] for name in graph.inputs if graph.types[name].rank}
    all_sizes = list(sizes.values())
    batch_size = max(set(all_sizes), key=all_sizes.count, default=0)
    return tuple(name for name, size in sizes.items() if size == batch_size)


def _depending(graph: Graph, batch: tuple[str, ...]) -> Iterator[str]:
    """Nodes that depend on the batch, except those that compute nothing.

    Those write to where a value is stored, or are the value in the other pass: what is reduced once
    serves both passes.
    """
    known = set(batch)
    for node in graph.nodes:
        row = row_of(node)
        if known.intersection(node.reads) and (row is None or row.in_place is None):
            known.update(node.writes)
            if row is None or not row.again:
                yield node.name


def _data(
    word: str, graph: Graph, batch: tuple[str, ...], axis: str, size: int, *, rows: bool
) -> Iterator[Pin]:
    at_rest, until_use = DATA[word]
    for value in batch:
        yield Pin(f"parallel {word}: batch of {value!r}", tensor=value, dim=0, axis=axis)
    for value, uses in _uses(graph).items():
        cut = at_rest and _can_cut(graph, value, size)
        text = f"parallel {word}: parameter {value!r}"
        shape = graph.types[value].shape
        dim = 0 if cut and rows and shape[0] % size == 0 else None
        yield Pin(text, tensor=value, axis=axis, side="made", **_stored(cut, dim))
        for name in uses:
            if graph.producers[name].op == "partitioner::alias":
                kept = cut and until_use
                yield Pin(text, tensor=name, axis=axis, side="made", **_stored(kept, dim))
            yield Pin(text, tensor=name, axis=axis, side="read", replicate=True)


def _stored(cut: bool, dim: int | None) -> dict[str, Any]:
    """What a pin demands of a value that is cut, along a dim if that is given, or else is whole."""
    if not cut:
        return {"replicate": True}
    return {"cut": True} if dim is None else {"dim": dim}


def _tensor(graph: Graph, batch: tuple[str, ...], axis: str, size: int) -> Iterator[Pin]:
    for value in batch:
        yield Pin(f"parallel tp: batch of {value!r}", tensor=value, axis=axis, replicate=True)
    for value, uses in _uses(graph).items():
        if graph.types[value].rank < 2 or not _can_cut(graph, value, size):
            continue
        if any(_is_read_whole(graph, use) for use in uses):
            continue
        text = f"parallel tp: parameter {value!r}"
        yield Pin(text, tensor=value, axis=axis, side="made", cut=True)
        for name in uses:
            yield Pin(text, tensor=name, axis=axis, side="read", cut=True)


def _uses(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """The values of each trained parameter in the passes, and the views of them."""
    by_parameter: dict[str, list[str]] = {}
    root: dict[str, str] = {}
    trained = {n.inputs[1] for n in graph.nodes if n.attrs.get("role") == "gradient"}
    for node in graph.nodes:
        row = row_of(node)
        if row is not None and row.stored and node.outputs[0] in trained:
            by_parameter[node.outputs[0]] = []
            root[node.outputs[0]] = node.outputs[0]
        elif row is not None and row.view and row.in_place is None and node.inputs[0] in root:
            parameter = root[node.inputs[0]]
            root.update(dict.fromkeys(node.writes, parameter))
            by_parameter[parameter] += node.writes
    for parameter, uses in by_parameter.items():
        if not any(graph.producers[use].op == "partitioner::alias" for use in uses):
            uses.append(parameter)
    return {parameter: tuple(uses) for parameter, uses in by_parameter.items()}


def _is_read_whole(graph: Graph, value: str) -> bool:
    """Whether a node, such as a `torch.cond`, needs the value whole on every device."""
    for node in graph.consumers[value]:
        rule = rule_of(graph, node)
        if not isinstance(rule, Rule):
            return True
        if any(v == value and d is None for v, d in zip(node.inputs, rule.operands, strict=True)):
            return True
    return False


def _can_cut(graph: Graph, value: str, parts: int) -> bool:
    return any(size % parts == 0 for size in graph.types[value].shape)
