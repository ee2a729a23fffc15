"""Rules of problems: shapes fit each other, references exist, figures are finite."""

import itertools
import math
from collections.abc import Iterable, Iterator

from partitioner.solver.problem import Problem, SolverError


def validate(problem: Problem) -> None:
    """Check shapes and references."""
    for fault in _faults(problem):
        raise SolverError(fault)


def _faults(problem: Problem) -> Iterator[str]:
    if problem.devices < 1:
        yield f"{problem.devices} devices: at least one is needed"
    if len(problem.limit_bytes) != problem.devices:
        yield f"{len(problem.limit_bytes)} memory limits for {problem.devices} devices"
    if len(problem.names) != len(problem.nodes):
        yield f"{len(problem.names)} names for {len(problem.nodes)} nodes"
    in_layers = sorted(itertools.chain(*problem.layers))
    if problem.layers and in_layers != list(range(len(problem.nodes))):
        yield f"layers have {len(in_layers)} nodes: each of the {len(problem.nodes)} is in one"
    for name, choices in zip(problem.names, problem.nodes, strict=True):
        if not choices:
            yield f"node {name!r} has no choice"
        for number, choice in enumerate(choices):
            if fault := _vector_fault(choice.load_s, problem.devices):
                yield f"load of choice {number} of node {name!r} {fault}"
    yield from _item_faults(problem)
    yield from _edge_faults(problem)
    yield from _hold_faults(problem)


def _item_faults(problem: Problem) -> Iterator[str]:
    last = len(problem.nodes) - 1
    valid: set[tuple[float, ...]] = set()  # many items share a few vectors
    for index, item in enumerate(problem.items):
        for quantity, vector in (("load", item.load_s), ("bytes", item.bytes)):
            if vector in valid:
                continue
            if fault := _vector_fault(vector, problem.devices):
                yield f"{quantity} of item {index} {fault}"
            else:
                valid.add(vector)
        if not 0 <= item.first <= item.last <= last:
            yield f"item {index} lives from {item.first} to {item.last}, not within 0 to {last}"


def _vector_fault(vector: tuple[float, ...], devices: int) -> str:
    if len(vector) != devices:
        return f"has {len(vector)} entries for {devices} devices"
    if min(vector) < 0 or not math.isfinite(sum(vector)):
        return f"is {vector}: entries must be finite and not negative"
    return ""


def _edge_faults(problem: Problem) -> Iterator[str]:
    count = len(problem.nodes)
    for edge in problem.edges:
        if not 0 <= edge.u < edge.v < count:
            yield f"edge from {edge.u} to {edge.v} does not go forward within {count} nodes"
            continue
        for node, classes in ((edge.u, edge.out_class), (edge.v, edge.in_class)):
            if len(classes) != len(problem.nodes[node]):
                yield (
                    f"edge from {edge.u} to {edge.v} has {len(classes)} classes for "
                    f"{len(problem.nodes[node])} choices of node {problem.names[node]!r}"
                )
        yield from _reference_faults(problem, edge.items.values())


def _hold_faults(problem: Problem) -> Iterator[str]:
    for hold in problem.holds:
        if not 0 <= hold.node < len(problem.nodes):
            yield f"hold of node {hold.node}, not within {len(problem.nodes)} nodes"
        elif len(hold.items) != len(problem.nodes[hold.node]):
            yield (
                f"hold of node {problem.names[hold.node]!r} has {len(hold.items)} entries for "
                f"{len(problem.nodes[hold.node])} choices"
            )
        yield from _reference_faults(problem, hold.items)


def _reference_faults(problem: Problem, groups: Iterable[tuple[int, ...]]) -> Iterator[str]:
    for item in itertools.chain.from_iterable(groups):
        if not 0 <= item < len(problem.items):
            yield f"item {item} is not within {len(problem.items)} items"
