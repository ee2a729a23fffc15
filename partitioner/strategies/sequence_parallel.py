"""Sequence parallelism (`parallel="cp"`) as constraints: the sequence is cut, weights are whole.

The sequence is a dim of inputs, followed through the graph as the batch is. Nodes that take it as
it lies are cut along it. Attention does not: it may be cut along its rows, with keys and values
gathered, or along its heads, to which and from which an all-to-all leads. That is left to the
search, as is everything that the sequence does not reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.parts import Parts
from partitioner.ir.plan import Plan
from partitioner.ir.ring import STEP, ring
from partitioner.ir.rule import Rule
from partitioner.strategies.batch import Followed, sequence_of
from partitioner.strategies.constraints import ConstraintError

#: The kind, and the one that allows of the forms of attention the ring alone (`ir.ring`).
SEQUENCE, RING = "cp", "ring"


def forms(
    kind: str | None, graph: Graph, mesh: Mapping[str, int] | None, *, free: bool
) -> tuple[Graph, ...]:
    """The graphs to be planned: with attention as it is and, if that is `free`, with rings.

    A user's constraints are on the graph as it is; it may be of rings already, by a given plan.

    Raises:
        ConstraintError: Ring attention is asked for, and no attention allows it.
    """
    words, size = (kind or "").split("+"), (mesh or {}).get(SEQUENCE, 1)
    if size == 1 or not {SEQUENCE, RING}.intersection(words):
        return (graph,)
    if any(node.op == STEP for node in graph.nodes):
        return (graph,)
    rounds = ring(graph, size)
    if RING not in words:
        return (graph, rounds) if free and rounds is not graph else (graph,)
    if rounds is graph:
        raise ConstraintError(
            f"parallel {RING}: no attention of at least {2 * size} positions, as many rows as keys "
            "and no mask but a causal one"
        )
    return (rounds,)


def checked_sequence(word: str, graph: Graph, size: int) -> Followed:
    """The sequence of a graph, long enough for an axis of a size.

    Raises:
        ConstraintError: There is none, or it has too few elements; or a ring is asked of a graph
            that has none.
    """
    if word == RING and not any(node.op == STEP for node in graph.nodes):
        raise ConstraintError(f"parallel {RING} is for plans that compile makes: give {SEQUENCE}")
    sequence = sequence_of(graph)
    if not sequence.inputs:
        shapes = ", ".join(f"{name} {graph.types[name]}" for name in graph.inputs)
        raise ConstraintError(
            f"parallel {SEQUENCE}: no input has a dim beside the batch that can be cut: {shapes}"
        )
    if sequence.size(graph) < size:
        raise ConstraintError(
            f"parallel {SEQUENCE}: the sequence ({_dims(sequence)}) has {sequence.size(graph)} "
            f"elements, fewer than {size} devices"
        )
    return sequence


def sequence_factors(
    graph: Graph, sequence: Followed, nodes: Iterator[str]
) -> Mapping[str, frozenset[str]]:
    """Factors to be cut of each of these nodes; none, which are any, where the sequence breaks.

    Of nodes that work on a sequence in parts, those are cut.
    """
    factors = {}
    for name in nodes:
        rule = rule_of(graph, graph.by_name[name])
        windows = rule.windows.items() if isinstance(rule, Rule) else ()
        parts = frozenset(factor for (_, factor), at in windows if isinstance(at, Parts))
        whole = frozenset() if name in sequence.broken else sequence.factors.get(name, frozenset())
        factors[name] = parts or whole
    return factors


def sequence_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The inputs that are cut along the sequence and those that are not; operators that are whole.

    Of a plan of the graph.
    """
    sequence = sequence_of(graph)
    others = [
        repr(name)
        for name in graph.inputs
        if graph.types[name].rank and name not in sequence.inputs
    ]
    without = f"; {', '.join(others)} without it" if others else ""
    notes = [f"parallel {SEQUENCE}: the sequence is {_dims(sequence)}{without}"]
    whole = [
        f"{node.name} ({node.op.rpartition('::')[2]})"
        for node in graph.nodes
        if node.name in sequence.factors and node.name not in graph.backward
        if (row := row_of(node)) is None or not row.stored
        if SEQUENCE in plan.groups[plan.nodes[node.name].group].names
        if not any(SEQUENCE in cut.axes for cut in plan.nodes[node.name].cuts.values())
    ]
    if whole:
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        notes.append(
            f"parallel {SEQUENCE}: {', '.join(whole[:3])}{more} cannot be cut with the sequence, "
            f"and each device of an axis {SEQUENCE} computes all of it"
        )
    return tuple(notes)


def _dims(sequence: Followed) -> str:
    return " and ".join(f"dim {dim} of {name!r}" for name, dim in sequence.inputs.items())
