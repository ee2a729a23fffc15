"""Well-known kinds of parallelism as constraints on a module's graph.

    dp      data parallel: the batch is cut, parameters are stored and used whole
    zero1   dp with optimizer state cut; parameters and gradients are whole at rest, and what a
            step has changed of parameters is gathered at the begin of the next one
    zero2   zero1 with gradients cut too
    zero3   parameters, gradients and optimizer state are cut at rest, and parameters gathered for
            each pass and freed after their use
    tp      tensor parallel: the batch is whole, every weight matrix is stored and used cut
    spatial what works on images is cut along height, width or depth (`spatial_parallel`)
    dp+tp   and so on: both, each over its axis
    pp      pipeline parallel: stages on devices of their own, which `search.pipelines` cuts

Inputs, parameters and uses of parameters are bound; the rest is solved. Where the batch is all that
is cut, parameters are stored as rows if they can be: parts of rows are gathered without a copy. The
batch is cut over axis "dp", weights for tensor parallelism over axis "tp".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.strategies.batch import Followed, batch_of
from partitioner.strategies.constraints import ConstraintError, Constraints, Pin
from partitioner.strategies.spaces import SearchError
from partitioner.strategies.spatial_parallel import AXES, spatial_constraints, spatial_notes

#: Kinds that cut the batch: whether what the optimizer works on is cut, and, in a pass, parameters
#: until their use. (`partitioner::rest` nodes hold parameters between steps in zero1 and zero2.)
DATA = {"dp": (False, False), "zero1": (True, False), "zero2": (True, False), "zero3": (True, True)}
TENSOR = "tp"
SPATIAL = "spatial"
#: Stages, each on devices of its own; the others are then inside of a stage.
PIPELINE = "pp"


def parallel_mesh(kind: str, devices: int, mesh: Mapping[str, int] | None) -> Mapping[str, int]:
    """Axes of a kind of parallelism: the mesh, or all devices on its only axis.

    Raises:
        SearchError: There is no such kind, or its axes are not the mesh's.
    """
    words = kind.split("+")
    if not words or len(set(words)) != len(words) or set(words) - {*DATA, TENSOR, SPATIAL}:
        known = ", ".join((*DATA, TENSOR, SPATIAL, PIPELINE))
        raise SearchError(f"parallel {kind!r} is not one of {known}, or several joined by +")
    wanted = ["tp" if word == TENSOR else "dp" for word in words if word != SPATIAL]
    if SPATIAL in words:
        wanted += [axis for axis in AXES if axis in (mesh or {})] or [AXES[0]]
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
    kind: str, graph: Graph, batch: Followed, mesh: Mapping[str, int]
) -> Constraints:
    """Pins of a kind of parallelism that `parallel_mesh` accepts; `mesh` has the sizes of axes.

    Raises:
        ConstraintError: The batch is to be cut, and there is none, or it has too few elements.
    """
    pins: list[Pin] = []
    busy: dict[str, Mapping[str, frozenset[str]]] = {}
    for word in kind.split("+"):
        if word == SPATIAL:
            axes = {axis: size for axis, size in mesh.items() if axis in AXES}
            busy.update(spatial_constraints(graph, axes).busy)
            continue
        axis = "tp" if word == TENSOR else "dp"
        rows = kind == word
        constraints = axis_constraints(word, graph, batch, axis, mesh[axis], rows=rows)
        pins += constraints.pins
        busy.update(constraints.busy)
    return Constraints(tuple(pins), busy=busy)


def axis_constraints(
    word: str, graph: Graph, batch: Followed, axis: str, size: int, *, rows: bool = False
) -> Constraints:
    """Pins of one kind of parallelism, a key of `DATA` or "tp", over an axis of a size.

    `rows`: whether parameters are cut at rest along their first dim where it is divisible.

    Raises:
        ConstraintError: The batch is to be cut, and there is none, or it has too few elements.
    """
    if word == TENSOR:
        return Constraints(tuple(_tensor(graph, batch, axis, size)))
    _check_batch(word, graph, batch, size)
    busy = {axis: {name: batch.factors.get(name, frozenset()) for name in _depending(graph, batch)}}
    return Constraints(tuple(_data(word, graph, batch, axis, size, rows=rows)), busy=busy)


def parallel_notes(kind: str | None, graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Where the batch of a kind of parallelism lies, unless it is dim 0 throughout; what is whole.

    Of a plan of the graph; without a kind that cuts the batch, nothing is noted.
    """
    words = (kind or "").split("+")
    axes = {axis: size for group in plan.groups for axis, size in group.axes if axis in AXES}
    spatial = tuple(spatial_notes(graph, axes, plan)) if SPATIAL in words and axes else ()
    word = next((word for word in words if word in DATA), None)
    return (*spatial, *(_batch_notes(kind or "", word, graph, plan) if word else ()))


def _batch_notes(kind: str, word: str, graph: Graph, plan: Plan) -> tuple[str, ...]:
    axis = "dp"
    if not any(axis in mesh.names for mesh in plan.groups):
        return ()
    batch, notes = batch_of(graph), list[str]()
    if word in ("zero1", "zero2") and word != kind:
        notes.append(
            f"parallel {kind}: joined with another kind, {word} keeps parameters and gradients in "
            "parts between steps too"
        )
    shaped = [name for name in graph.inputs if graph.types[name].rank]
    if any(batch.inputs.get(name) != 0 for name in shaped):
        dims = ", ".join(f"dim {dim} of {name!r}" for name, dim in batch.inputs.items())
        others = [repr(name) for name in shaped if name not in batch.inputs]
        without = f"; {', '.join(others)} without it" if others else ""
        notes.append(f"parallel {word}: the batch is {dims}{without}")
    whole = [
        f"{node.name} ({node.op.rpartition('::')[2]})"
        for node in graph.nodes
        if node.name in batch.factors and node.name not in graph.backward
        if axis in plan.groups[plan.nodes[node.name].group].names
        if not any(axis in cut.axes for cut in plan.nodes[node.name].cuts.values())
    ]
    if whole:
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        notes.append(
            f"parallel {word}: {', '.join(whole[:3])}{more} cannot be cut with the batch, and "
            f"each device of an axis {axis} computes all of it"
        )
    return tuple(notes)


def _check_batch(word: str, graph: Graph, batch: Followed, size: int) -> None:
    if not batch.inputs:
        shapes = ", ".join(f"{name} {graph.types[name]}" for name in graph.inputs)
        raise ConstraintError(f"parallel {word}: no input has a batch that can be cut: {shapes}")
    if batch.size(graph) < size:
        dims = " and ".join(f"dim {dim} of {name!r}" for name, dim in batch.inputs.items())
        raise ConstraintError(
            f"parallel {word}: the batch ({dims}) has {batch.size(graph)} elements, "
            f"fewer than {size} devices"
        )


def _depending(graph: Graph, batch: Followed) -> Iterator[str]:
    """Nodes that depend on the batch, except those that compute nothing.

    Those write to where a value is stored, or are the value in the other pass: what is reduced once
    serves both passes.
    """
    known = set(batch.inputs)
    for node in graph.nodes:
        row = row_of(node)
        if known.intersection(node.reads) and (row is None or row.in_place is None):
            known.update(node.writes)
            if row is None or not row.again:
                yield node.name


def _data(
    word: str, graph: Graph, batch: Followed, axis: str, size: int, *, rows: bool
) -> Iterator[Pin]:
    at_rest, until_use = DATA[word]
    for value in graph.constants:
        if value not in batch.values and graph.types[value].rank:
            text = f"parallel {word}: weight {value!r}"
            yield Pin(text, tensor=value, axis=axis, replicate=True)
    for value, uses in _uses(graph).items():
        cut = at_rest and _can_cut(graph, value, size)
        text = f"parallel {word}: parameter {value!r}"
        shape = graph.types[value].shape
        dim = 0 if cut and rows and shape[0] % size == 0 else None
        yield Pin(text, tensor=value, axis=axis, side="made", **_stored(cut, dim))
        for name in uses:
            if _is_again(graph, name):
                kept = cut and (until_use or _is_stored_again(graph, name))
                yield Pin(text, tensor=name, axis=axis, side="made", **_stored(kept, dim))
            yield Pin(text, tensor=name, axis=axis, side="read", replicate=True)


def _stored(cut: bool, dim: int | None) -> dict[str, Any]:
    """What a pin demands of a value that is cut, along a dim if that is given, or else is whole."""
    if not cut:
        return {"replicate": True}
    return {"cut": True} if dim is None else {"dim": dim}


def _tensor(graph: Graph, batch: Followed, axis: str, size: int) -> Iterator[Pin]:
    for value in batch.inputs:
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
    for value, weight in _matrices(graph).items():
        if max(graph.types[value].shape) >= size and not _is_read_whole(graph, value):
            text = f"parallel tp: weight {weight!r}"
            yield Pin(text, tensor=value, axis=axis, side="read", cut=True)


def _uses(graph: Graph) -> Mapping[str, tuple[str, ...]]:
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
        if not any(_is_again(graph, use) for use in uses):
            uses.append(parameter)
    return {parameter: tuple(uses) for parameter, uses in by_parameter.items()}


def _origin(graph: Graph, value: str) -> str:
    """The value of which a value at rest is another name."""
    while inputs := graph.producers[value].inputs:
        value = inputs[0]
    return value


def _is_again(graph: Graph, value: str) -> bool:
    """Whether a value is another one, in a pass or at rest."""
    row = row_of(graph.producers[value])
    return row is not None and row.again


def _is_stored_again(graph: Graph, value: str) -> bool:
    """Whether a value is gathered for where it lies at rest."""
    rows = map(row_of, graph.consumers[value])
    return any(row is not None and row.stored for row in rows)


def _matrices(graph: Graph) -> Mapping[str, str]:
    """The values of constants, as they are or computed from them alone, that only products read.

    Each with the name of the constant.
    """
    origin = {name: name for name in graph.constants if graph.types[name].rank}
    for node in graph.nodes:
        if node.reads and origin.keys() >= set(node.reads):
            origin.update(dict.fromkeys(node.writes, origin[node.reads[0]]))
    return {
        value: weight
        for value, weight in origin.items()
        if graph.types[value].rank >= 2
        and (readers := graph.consumers[value])
        and all(_is_factor(graph, node, value) for node in readers)
    }


def _is_factor(graph: Graph, node: Node, value: str) -> bool:
    """Whether a node multiplies matrices, and a value is one of them."""
    rule = rule_of(graph, node)
    if not isinstance(rule, Rule) or not rule.is_product:
        return False
    return all(index not in rule.addends for index, v in enumerate(node.inputs) if v == value)


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
