"""The abstract problem: which choice does each node take, so that devices are used best.

It is plain data and knows no operator, graph or framework. A node takes exactly one of its
choices. A choice loads devices; an edge between two nodes and a hold of one node trigger
items; an item is paid and held once, however many of its triggers are chosen.

Seconds are `_s`, bytes are per device, positions are node indices in the global order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from partitioner.ir.errors import PartitionerError

Pair = tuple[int, int]  #: (out class, in class) of an edge.


class SolverError(PartitionerError, ValueError):
    """A problem or a request to the solver that breaks its own rules."""


@dataclass(frozen=True)
class Choice:
    """One way to run a node.

    Attributes:
        load_s: Seconds on each device.
        group: Id of the device group that runs it.
        label: For people.
    """

    load_s: tuple[float, ...]
    group: int
    label: str


@dataclass(frozen=True, slots=True)
class Item:
    """Paid and held once if any trigger is chosen: a reshard, a copy, a weight, a value.

    Attributes:
        load_s: Seconds on each device.
        bytes: Bytes on each device.
        first: First position at which the bytes are held.
        last: Last position at which the bytes are held, inclusive.
    """

    load_s: tuple[float, ...]
    bytes: tuple[float, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Edge:
    """Node `u` makes a value that node `v` reads.

    Attributes:
        u: Producer.
        v: Consumer, later in the order.
        out_class: For each choice of `u` the placement in which it leaves the value.
        in_class: For each choice of `v` the placement that it wants.
        items: Items triggered by a pair of placements; an absent pair costs nothing.
        forbidden: Pairs that no plan may take.
    """

    u: int
    v: int
    out_class: tuple[int, ...]
    in_class: tuple[int, ...]
    items: Mapping[Pair, tuple[int, ...]]
    forbidden: frozenset[Pair] = frozenset()


@dataclass(frozen=True)
class Hold:
    """Items triggered by the choice of one node alone: its weights, the values it makes.

    Attributes:
        node: The node.
        items: For each of its choices the items triggered.
    """

    node: int
    items: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Problem:
    """The whole question. Node indices are positions in the global order.

    Attributes:
        devices: How many devices there are.
        limit_bytes: Memory of each device; `math.inf` where there is no limit.
        nodes: The choices of each node.
        names: The name of each node.
        edges: Values between nodes.
        holds: Items of single nodes.
        items: All items.
        interchangeable: Sets of group ids that can be permuted among themselves, with their
            devices, without changing the problem. Group `a`'s i-th choice of a node stands for
            group `b`'s i-th. Groups whose choices differ (a pin, say) are left out by the solver.
    """

    devices: int
    limit_bytes: tuple[float, ...]
    nodes: tuple[tuple[Choice, ...], ...]
    names: tuple[str, ...]
    edges: tuple[Edge, ...]
    holds: tuple[Hold, ...]
    items: tuple[Item, ...]
    interchangeable: tuple[tuple[int, ...], ...] = ()

    @property
    def limited(self) -> bool:
        """Whether any device has a memory limit."""
        return any(math.isfinite(limit) for limit in self.limit_bytes)


def validate(problem: Problem) -> None:
    """Check shapes and references.

    Raises:
        SolverError: The first fault found, with its values.
    """
    for fault in _faults(problem):
        raise SolverError(fault)


def _faults(problem: Problem) -> Iterator[str]:
    if problem.devices < 1:
        yield f"{problem.devices} devices: at least one is needed"
    if len(problem.limit_bytes) != problem.devices:
        yield f"{len(problem.limit_bytes)} memory limits for {problem.devices} devices"
    if len(problem.names) != len(problem.nodes):
        yield f"{len(problem.names)} names for {len(problem.nodes)} nodes"
    yield from _node_faults(problem)
    yield from _item_faults(problem)
    yield from _edge_faults(problem)
    yield from _hold_faults(problem)


def _node_faults(problem: Problem) -> Iterator[str]:
    for name, choices in zip(problem.names, problem.nodes, strict=True):
        if not choices:
            yield f"node {name!r} has no choice"
        for choice in choices:
            if bad := _vector_fault(choice.load_s, problem.devices):
                yield f"load of choice {choice.label!r} of node {name!r} {bad}"


def _item_faults(problem: Problem) -> Iterator[str]:
    last = len(problem.nodes) - 1
    fine: set[tuple[float, ...]] = set()  # most items are like many others
    for index, item in enumerate(problem.items):
        for what, vector in (("load", item.load_s), ("bytes", item.bytes)):
            if vector in fine:
                continue
            if bad := _vector_fault(vector, problem.devices):
                yield f"{what} of item {index} {bad}"
            else:
                fine.add(vector)
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
