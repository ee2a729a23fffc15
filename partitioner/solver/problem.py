"""The abstract problem: choose one way to run each node so that the devices are used best.

It is plain data and knows no operator, graph or framework. A node takes exactly one of its
choices. A choice loads devices; an edge between two nodes and a hold of one node trigger
items; an item is paid and held once, however many of its triggers are chosen.

Seconds are `_s`, bytes are per device, positions are node indices in the global order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.ir.errors import PartitionerError

Pair = tuple[int, int]  #: (out class, in class) of an edge.
Sparse = tuple[tuple[int, float], ...]  #: (device, seconds), zeros left out.
#: An edge to a node, as `Edge`: the other end, both ends' classes, and its items.
Incoming = tuple[int, tuple[int, ...], tuple[int, ...], Mapping[Pair, tuple[int, ...]]]


class SolverError(PartitionerError, ValueError):
    """A problem or a request to the solver that breaks its own rules."""


@dataclass(frozen=True)
class Choice:
    """A way to run a node."""

    load_s: tuple[float, ...]  #: Seconds on each device.
    group: int  #: Id of the device group that runs it.


@dataclass(frozen=True, slots=True)
class Item:
    """Paid and held once if any trigger is chosen: a reshard, a copy, a weight, a value."""

    load_s: tuple[float, ...]  #: Seconds on each device.
    bytes: tuple[float, ...]  #: Bytes on each device.
    first: int  #: First position at which the bytes are held.
    last: int  #: Last position at which the bytes are held, inclusive.


@dataclass(frozen=True)
class Edge:
    """Node `u` makes a value that node `v` reads."""

    u: int
    v: int  #: Later in the order than `u`.
    out_class: tuple[int, ...]  #: The placement in which each choice of `u` leaves the value.
    in_class: tuple[int, ...]  #: The placement that each choice of `v` reads.
    items: Mapping[Pair, tuple[int, ...]]  #: Items that each pair triggers; none if absent.
    forbidden: frozenset[Pair] = frozenset()  #: Pairs that no plan may take.

    def pair(self, chosen: Sequence[int]) -> Pair:
        """The classes that meet on the edge in a plan, one choice a node."""
        return self.out_class[chosen[self.u]], self.in_class[chosen[self.v]]


@dataclass(frozen=True)
class Hold:
    """Items triggered by the choice of one node alone: its weights, the values it makes."""

    node: int
    items: tuple[tuple[int, ...], ...]  #: For each choice of the node the items triggered.


@dataclass(frozen=True)
class Problem:
    """The whole problem. Node indices are positions in the global order."""

    devices: int  #: How many devices there are.
    limit_bytes: tuple[float, ...]  #: Memory of each device; `math.inf` where there is no limit.
    nodes: tuple[tuple[Choice, ...], ...]  #: The choices of each node.
    names: tuple[str, ...]  #: The name of each node.
    edges: tuple[Edge, ...]
    holds: tuple[Hold, ...]
    items: tuple[Item, ...]
    #: Sets of group ids that can be permuted among themselves, with their devices, without changing
    #: the problem. Group `a`'s i-th choice of a node stands for group `b`'s i-th. The solver leaves
    #: out groups whose choices differ (a pin, say).
    interchangeable: tuple[tuple[int, ...], ...] = ()
    #: All nodes in parts that contiguous plans also keep whole, such as a layer's forward and
    #: backward nodes, in an order in which neighbours share most. Empty if none are known.
    layers: tuple[tuple[int, ...], ...] = ()

    @property
    def limited(self) -> bool:
        """Tell whether any device has a memory limit."""
        return any(math.isfinite(limit) for limit in self.limit_bytes)

    @cached_property
    def busy_s(self) -> tuple[tuple[Sparse, ...], ...]:
        """The devices that each choice of each node keeps busy."""
        return tuple(tuple(_sparse(c.load_s) for c in choices) for choices in self.nodes)

    @cached_property
    def items_busy_s(self) -> tuple[Sparse, ...]:
        """The devices that each item keeps busy."""
        return tuple(_sparse(item.load_s) for item in self.items)

    @cached_property
    def busy_holds(self) -> list[Hold]:
        """The holds that may trigger items that take time."""
        busy = {item for item, load in enumerate(self.items_busy_s) if load}
        return [h for h in self.holds if not all(map(busy.isdisjoint, h.items))]

    @cached_property
    def incoming(self) -> tuple[list[Incoming], ...]:
        """The edges that lead to each node."""
        incoming: tuple[list[Incoming], ...] = tuple([] for _ in self.nodes)
        for edge in self.edges:
            incoming[edge.v].append((edge.u, edge.out_class, edge.in_class, edge.items))
        return incoming

    @property
    def groups(self) -> tuple[int, ...]:
        """The ids of all device groups that run a choice, ascending."""
        return tuple(sorted({choice.group for choices in self.nodes for choice in choices}))


def _sparse(load_s: Sequence[float]) -> Sparse:
    return tuple((device, seconds) for device, seconds in enumerate(load_s) if seconds)


T = TypeVar("T")


class Site(NamedTuple):
    """An edge or hold that can trigger an item."""

    edge: int | None = None  #: Index of the edge, or None for a hold.
    hold: int | None = None  #: Index of the hold, or None for an edge.
    pairs: tuple[Pair, ...] = ()  #: The pairs of classes of the edge that trigger it.
    choices: tuple[int, ...] = ()  #: The choices of the hold's node that trigger it.


def item_sites(
    problem: Problem, among: Collection[int] | None = None
) -> tuple[tuple[Site, ...], ...]:
    """List for each item, or for those `among` some, its sites: edges first, then holds."""
    sites: list[list[Site]] = [[] for _ in problem.items]
    for index, edge in enumerate(problem.edges):
        for item, pairs in _triggers(edge.items.items(), among):
            sites[item].append(Site(edge=index, pairs=tuple(sorted(pairs))))
    for index, hold in enumerate(problem.holds):
        for item, choices in _triggers(enumerate(hold.items), among):
            sites[item].append(Site(hold=index, choices=tuple(choices)))
    return tuple(map(tuple, sites))


def _triggers(
    entries: Iterable[tuple[T, Sequence[int]]], among: Collection[int] | None
) -> Iterable[tuple[int, list[T]]]:
    by_item: dict[int, list[T]] = {}
    for trigger, items in entries:
        for item in dict.fromkeys(items):
            if among is None or item in among:
                by_item.setdefault(item, []).append(trigger)
    return by_item.items()


def clique_positions(spans: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Positions whose live sets are maximal: the last ones at which spans begin before one ends.

    >>> clique_positions([(0, 2), (1, 1), (2, 3)]).tolist()
    [1, 2]
    """
    bounds = np.array([*spans], dtype=np.int64).reshape(-1, 2)
    begins, ends = np.unique(bounds[:, 0]), np.unique(bounds[:, 1])
    following = ends[np.searchsorted(ends, begins)]
    is_last: npt.NDArray[np.bool_] = np.append(following[:-1] < begins[1:], True)[: len(begins)]
    return begins[is_last]


def symmetric_groups(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The interchangeable sets, less groups whose choices differ from the others'.

    A pin, or a choice that presolve removed in one group only, breaks the symmetry of a group.
    """
    symmetric = []
    for groups in problem.interchangeable:
        by_signature: dict[object, list[int]] = {}
        for group in groups:
            devices = group_devices(problem, group)
            signature = (
                tuple(sorted(problem.limit_bytes[device] for device in devices)),
                *(
                    tuple(tuple(sorted(c.load_s)) for c in choices if c.group == group)
                    for choices in problem.nodes
                ),
            )
            by_signature.setdefault(signature, []).append(group)
        symmetric += [tuple(members) for members in by_signature.values() if len(members) > 1]
    return tuple(symmetric)


def group_classes(problem: Problem, among: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Sort groups by class: interchangeable ones together, any other by itself."""
    sets = [tuple(g for g in members if g in among) for members in symmetric_groups(problem)]
    classes = tuple(members for members in sets if members)
    joined = {group for members in classes for group in members}
    return (*classes, *((group,) for group in sorted(among) if group not in joined))


def group_devices(problem: Problem, group: int) -> frozenset[int]:
    """The devices that a group's choices load."""
    loads = (c.load_s for choices in problem.nodes for c in choices if c.group == group)
    return frozenset(d for load in loads for d, seconds in enumerate(load) if seconds > 0)


def rank_nodes(problem: Problem) -> list[int]:
    """Nodes by falling least load: the order in which groups are opened."""
    weight = [min(sum(choice.load_s) for choice in choices) for choices in problem.nodes]
    return sorted(range(len(weight)), key=lambda node: (-weight[node], node))


def canonical(problem: Problem, chosen: Sequence[int]) -> tuple[int, ...]:
    """The plan with interchangeable groups renamed in the order in which nodes open them."""
    rename: dict[int, int] = {}
    for groups in symmetric_groups(problem):
        used = [problem.nodes[node][chosen[node]].group for node in rank_nodes(problem)]
        order = list(dict.fromkeys([*(g for g in used if g in groups), *groups]))
        rename.update(zip(order, groups, strict=True))
    plan = []
    for choices, pick in zip(problem.nodes, chosen, strict=True):
        # the choice of the renamed group that stands for this one: the one of the same rank in it
        group = choices[pick].group
        of_group: dict[int, list[int]] = {}
        for index, option in enumerate(choices):
            of_group.setdefault(option.group, []).append(index)
        plan.append(of_group[rename.get(group, group)][of_group[group].index(pick)])
    return tuple(plan)
