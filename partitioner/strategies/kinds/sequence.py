"""Sequence parallelism (`parallel="cp"`) as constraints: the sequence is cut, weights are whole.

The sequence is a dim of inputs, followed through the graph as the batch is. Nodes that take it as
it lies are cut along it. Attention does not: it may be cut along its rows, with keys and values
gathered, or along its heads, to which and from which an all-to-all leads. That is left to the
search, as is everything that the sequence does not reach. Attention of few queries over a cache is
in parts (`rewrites.keys`): the sequence is the cache's, and these are cut along it.
"""

from __future__ import annotations

from partitioner.ir.graph import Graph
from partitioner.ir.loops.windows import Parts
from partitioner.ir.ops import is_stored, row_of, rule_of, writes_stored
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.rewrites.ring import STEP, ring
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.kinds.batch import Followed, sequence_of
from partitioner.strategies.kinds.data import DataParallel, depending, stored_pins
from partitioner.strategies.kinds.kind import Asked, whole_operators

#: The kind, and the one that allows of the forms of attention the ring alone (`rewrites.ring`).
SEQUENCE, RING = "cp", "ring"


def ring_forms(graph: Graph, size: int, *, only: bool, free: bool) -> tuple[Graph, ...]:
    """The graphs to be planned over an axis of a size: with attention as it is and with rings.

    With rings `only` (a ConstraintError if no attention allows one), or with rings too if that is
    `free`. A graph of a given plan may have rings already.
    """
    if size == 1 or any(node.op == STEP for node in graph.nodes):
        return (graph,)
    rounds = ring(graph, size)
    if not only:
        return (graph, rounds) if free and rounds is not graph else (graph,)
    if rounds is graph:
        raise ConstraintError(
            f"parallel {RING}: no attention of at least {2 * size} positions, as many rows as keys"
        )
    return (rounds,)


def sequence_constraints(asked: Asked) -> Constraints:
    """Pins of parameters, which are whole; nodes that depend on the sequence are cut along it."""
    sequence = sequence_of(asked.graph)
    if not sequence.inputs:
        shapes = ", ".join(f"{name} {asked.graph.types[name]}" for name in asked.graph.inputs)
        raise ConstraintError(
            f"parallel {SEQUENCE}: no input has a dim beside the batch that can be cut: {shapes}"
        )
    # new keys beside those of a cache are a part of the sequence
    longest = max(asked.graph.types[value].shape[dim] for value, dim in sequence.inputs.items())
    if longest < asked.size:
        raise ConstraintError(
            f"parallel {SEQUENCE}: the sequence ({_dims(sequence)}) has {longest} elements, fewer "
            f"than {asked.size} devices"
        )
    reached = (n for n in depending(asked.graph, sequence) if n in sequence.factors)
    kept = (asked.graph.producers[n].name for n in sequence.inputs if n in asked.graph.producers)
    # factors to be cut of each of these nodes; none, which are any, where the sequence breaks
    nodes: dict[str, frozenset[str]] = {}
    for name in (*reached, *kept):
        rule = rule_of(asked.graph, asked.graph.by_name[name])
        windows = rule.windows.items() if isinstance(rule, Rule) else ()
        parts = frozenset(factor for (_, factor), at in windows if isinstance(at, Parts))
        own = frozenset() if name in sequence.broken else sequence.factors.get(name, frozenset())
        nodes[name] = parts or own
    for node in asked.graph.nodes:  # what is sent round a ring lies in parts, as an alias too
        maker = asked.graph.producers.get(node.reads[0]) if node.reads else None
        if row_of(node).ahead and maker is not None and maker.name not in nodes:
            nodes[maker.name] = frozenset({"d2"})
    whole = DataParallel(SEQUENCE, at_rest=False, until_use=False)
    return Constraints(tuple(stored_pins(asked, sequence, whole)), busy={asked.axis: nodes})


def ring_constraints(asked: Asked) -> Constraints:
    """The constraints of a sequence on a graph of rings; ConstraintError also if it has none."""
    if asked.size > 1 and not any(node.op == STEP for node in asked.graph.nodes):
        raise ConstraintError(f"parallel {RING} is for plans that compile makes: give {SEQUENCE}")
    return sequence_constraints(asked)


def sequence_notes(asked: Asked, plan: Plan) -> tuple[str, ...]:
    """The inputs that are cut along the sequence and those that are not; operators that are whole.

    Of a plan of the graph.
    """
    graph, axis = asked.graph, asked.axis
    if not any(axis in mesh.names for mesh in plan.groups):
        return ()
    sequence = sequence_of(graph)
    others = [
        repr(name)
        for name in graph.inputs
        if graph.types[name].rank and name not in sequence.inputs
    ]
    without = f"; {', '.join(others)} without it" if others else ""
    notes = [f"parallel {SEQUENCE}: the sequence is {_dims(sequence)}{without}"]
    nodes = (graph.by_name[name] for name in sequence.factors)
    reached = dict.fromkeys(n.name for n in nodes if not (is_stored(n) or writes_stored(n)))
    if whole := whole_operators(graph, plan, axis, reached):
        notes.append(
            f"parallel {SEQUENCE}: {whole} cannot be cut with the sequence, and each device of an "
            f"axis {axis} computes all of it"
        )
    return tuple(notes)


def _dims(sequence: Followed) -> str:
    return " and ".join(f"dim {dim} of {name!r}" for name, dim in sequence.inputs.items())
