"""Data parallelism: the batch is cut, and what is stored is whole or cut; uses of parameters.

Parameters and uses of parameters are bound, and so are nodes that depend on the batch; the rest is
solved. Where no other kind is asked for, parameters that are cut are stored as rows if they can be:
parts of rows are gathered without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_stored, row_of, rule_of, rules_of
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import ConstraintError, Constraints, Pin
from partitioner.strategies.kinds.batch import Followed
from partitioner.strategies.kinds.kind import Asked, whole_operators


@dataclass(frozen=True)
class DataParallel:
    """The values that a kind that cuts the batch stores in parts."""

    word: str  #: The word of the kind, for messages.
    #: Whether what the optimizer works on is cut. (`partitioner::rest` nodes hold parameters
    #: between steps in zero1 and zero2.)
    at_rest: bool
    until_use: bool  #: Whether parameters are cut in a pass too, until their use.

    def constraints(self, asked: Asked) -> Constraints:
        """Pins of parameters and of their uses; nodes that depend on the batch are cut along it."""
        graph, batch, size, word = asked.graph, asked.batch, asked.size, self.word
        if not batch.inputs:
            shapes = ", ".join(f"{name} {graph.types[name]}" for name in graph.inputs)
            raise ConstraintError(
                f"parallel {word}: no input has a batch that can be cut: {shapes}"
            )
        if batch.size(graph) < size:
            dims = " and ".join(f"dim {dim} of {name!r}" for name, dim in batch.inputs.items())
            raise ConstraintError(
                f"parallel {word}: the batch ({dims}) has {batch.size(graph)} elements, "
                f"fewer than {size} devices"
            )
        caches = (graph.producers[name].name for name in batch.inputs if name in graph.producers)
        dependent = (*depending(graph, batch), *caches)
        busy = {asked.axis: {name: batch.factors.get(name, frozenset()) for name in dependent}}
        return Constraints(tuple(stored_pins(asked, batch, self)), busy=busy)

    def notes(self, asked: Asked, plan: Plan) -> tuple[str, ...]:
        """Where the batch lies unless it is dim 0 throughout, and what cannot be cut with it."""
        graph, batch, axis, word = asked.graph, asked.batch, asked.axis, self.word
        notes = list[str]()
        if not any(axis in mesh.names for mesh in plan.groups):
            return ()
        if word in ("zero1", "zero2") and not asked.alone:
            notes.append(
                f"parallel {word}: joined with another kind, it keeps parameters and gradients in "
                "parts between steps too"
            )
        shaped = [name for name in graph.inputs if graph.types[name].rank]
        if any(batch.inputs.get(name) != 0 for name in shaped):
            fed = [name for name in batch.inputs if name not in graph.producers]
            dims = ", ".join(f"dim {batch.inputs[name]} of {name!r}" for name in fed)
            others = [repr(name) for name in shaped if name not in batch.inputs]
            without = f"; {', '.join(others)} without it" if others else ""
            notes.append(f"parallel {word}: the batch is {dims}{without}")
        if whole := whole_operators(graph, plan, axis, dict.fromkeys(batch.factors)):
            notes.append(
                f"parallel {word}: {whole} cannot be cut with the batch, and each device of an "
                f"axis {axis} computes all of it"
            )
        return tuple(notes)


def depending(graph: Graph, batch: Followed) -> Iterator[str]:
    """Nodes that depend on the batch, except those that compute nothing.

    Those write to where a value is stored, or are the value in the other pass: what is reduced once
    serves both passes. What comes of sums over the batch (statistics of a norm, a loss) no longer
    depends on it where it needs whole sums, until it meets what has the batch again.
    """
    known, sums, rules = set(batch.inputs), set[str](), rules_of(graph)
    for node in graph.nodes:
        row = row_of(node)
        has_batch = node.name in graph.backward and batch.values.intersection(node.reads)
        depends = has_batch or known.intersection(node.reads)
        # a node of pending sums gives pending sums, as a view of a gradient does
        rule, read = rules[node.name], [i for i, value in enumerate(node.inputs) if value in sums]
        passes = read and isinstance(rule, Rule) and rule.linear.issuperset(read)
        if not (depends or passes):
            continue
        if row.in_place is None:
            is_sum = batch.factors.get(node.name) and not batch.values.intersection(node.writes)
            (sums if is_sum or not depends else known).update(node.writes)
            if not row.again:
                yield node.name


def stored_pins(asked: Asked, batch: Followed, data: DataParallel) -> Iterator[Pin]:
    """Pins of weights that lack the dim that is cut, of parameters and of their uses."""
    graph, axis, size, word = asked.graph, asked.axis, asked.size, data.word
    for value in graph.constants:
        if value not in batch.values and graph.types[value].rank:
            text = f"parallel {word}: weight {value!r}"
            yield Pin(text, tensor=value, axis=axis, replicate=True)
    for value, uses in parameter_uses(graph).items():
        if value in batch.inputs:  # a cache
            continue
        others = asked.others if graph.types[value].rank > 1 else ()
        cut = data.at_rest and can_cut(graph, value, size, *others)
        text = f"parallel {word}: parameter {value!r}"
        shape = graph.types[value].shape
        dim = 0 if cut and asked.alone and shape[0] % size == 0 else None
        yield Pin(text, tensor=value, axis=axis, side="made", **_stored(cut, dim))
        for name in uses:
            if is_again(graph, name):
                kept = cut and (data.until_use or is_stored_again(graph, name))
                yield Pin(text, tensor=name, axis=axis, side="made", **_stored(kept, dim))
            yield Pin(text, tensor=name, axis=axis, side="read", replicate=True)


def _stored(cut: bool, dim: int | None) -> dict[str, Any]:
    if not cut:
        return {"replicate": True}
    return {"cut": True} if dim is None else {"dim": dim}


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
        if row.in_place is not None:
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
    return row_of(graph.producers[value]).again


def is_stored_again(graph: Graph, value: str) -> bool:
    """Test whether a value is gathered for where it lies at rest."""
    return any(map(is_stored, graph.consumers[value]))


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
