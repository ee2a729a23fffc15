"""Bucket elimination of a sum of tables (Dechter, Artificial Intelligence 113, 1999).

The node whose elimination makes the smallest table goes next (the min-weight ordering); a heap
finds it, so that a chain of n nodes takes n log n steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scope = tuple[int, ...]  #: Nodes that a table mentions, ascending.
T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float64]
Answer = tuple[tuple[int, ...], float] | None  #: A plan and its value; None: too wide.


#: The largest table, in entries, that elimination may make (8 MB, some tenths of a second), and all
#: of them together.
MOST_ENTRIES, MOST_IN_ALL = 1_000_000, 10_000_000
#: numpy arrays have at most 64 axes; more two-way nodes than this exceed the room anyway.
MAX_SCOPE = 25


@dataclass(frozen=True)
class Factor:
    """A cost for every combination of choices of the nodes in `scope`."""

    scope: Scope
    table: Floats


@dataclass(frozen=True)
class _Step:
    """A node's choice as it follows from its neighbours' once theirs are known."""

    node: int
    scope: Scope  #: The neighbours.
    best: npt.NDArray[np.intp]


def expanded(table: npt.NDArray[T], nodes: Sequence[int], scope: Sequence[int]) -> npt.NDArray[T]:
    """The table of some nodes with an axis of size 1 for each other node of the scope."""
    sizes = dict(zip(nodes, table.shape, strict=True))
    return table.reshape([sizes.get(node, 1) for node in scope])


def eliminate(factors: Sequence[Factor], sizes: Sequence[int]) -> Answer:
    """The least sum of the factors, exactly, and its choices; None if tables exceed the room.

    Infinite entries are forbidden. `sizes` is how many choices each node has.
    """
    squeezed = []
    for factor in factors:  # without the nodes that have no choice to make
        kept = [axis for axis, node in enumerate(factor.scope) if sizes[node] > 1]
        table = factor.table.reshape([factor.table.shape[axis] for axis in kept])
        squeezed.append(Factor(tuple(factor.scope[axis] for axis in kept), table))
    order = _order([factor.scope for factor in squeezed], sizes)
    if order is None:
        return None
    place = {node: index for index, (node, _) in enumerate(order)}
    buckets: list[list[Factor]] = [[] for _ in order]
    constant = 0.0
    for factor in squeezed:
        if factor.scope:
            buckets[min(place[node] for node in factor.scope)].append(factor)
        else:
            constant += float(factor.table)
    steps: list[_Step] = []
    for (node, scope), bucket in zip(order, buckets, strict=True):
        total = np.zeros([sizes[n] for n in scope])
        for factor in bucket:
            total += expanded(factor.table, factor.scope, scope)
        bucket.clear()
        axis = scope.index(node)
        rest = scope[:axis] + scope[axis + 1 :]
        steps.append(_Step(node, rest, total.argmin(axis=axis)))
        least = total.min(axis=axis)
        if rest:
            buckets[min(place[n] for n in rest)].append(Factor(rest, least))
        else:
            constant += float(least)
    chosen = [0] * len(sizes)
    for step in reversed(steps):
        chosen[step.node] = int(step.best[tuple(chosen[node] for node in step.scope)])
    return tuple(chosen), constant


def _order(scopes: Iterable[Scope], sizes: Sequence[int]) -> list[tuple[int, Scope]] | None:
    """Nodes in order of elimination with the scopes of their tables; None if there is no room."""
    pool = {index: scope for index, scope in enumerate(scopes) if scope}
    touching: dict[int, set[int]] = {n: set() for n, size in enumerate(sizes) if size > 1}
    for index, scope in pool.items():
        for node in scope:
            touching[node].add(index)
    order: list[tuple[int, Scope]] = []
    queue = _Queue(touching, pool, sizes)
    work, fresh = 0, max(pool, default=0) + 1
    while touching:
        node, scope = queue.cheapest()
        entries = math.prod(sizes[n] for n in scope)
        work += entries
        if entries > MOST_ENTRIES or work > MOST_IN_ALL or len(scope) > MAX_SCOPE:
            return None
        order.append((node, scope))
        for index in touching.pop(node):
            for other in pool.pop(index):
                if other != node:
                    touching[other].discard(index)
        rest = tuple(other for other in scope if other != node)
        if rest:
            pool[fresh] = rest
            for other in rest:
                touching[other].add(fresh)
            fresh += 1
            queue.update(rest)
    return order


class _Queue:
    """Nodes by the table that their elimination makes, the smallest first."""

    def __init__(
        self, touching: dict[int, set[int]], pool: dict[int, Scope], sizes: Sequence[int]
    ) -> None:
        self.touching, self.pool, self.sizes = touching, pool, sizes
        self.entries = {node: self._entries(node) for node in touching}
        self.heap = [(entries, node) for node, entries in self.entries.items()]
        heapq.heapify(self.heap)

    def cheapest(self) -> tuple[int, Scope]:
        """The node whose elimination makes the smallest table, with that table's scope."""
        while True:
            entries, node = heapq.heappop(self.heap)
            if node in self.touching and self.entries[node] == entries:
                return node, tuple(sorted(self._scope(node)))

    def update(self, nodes: Iterable[int]) -> None:
        """Look again at nodes whose neighbours changed."""
        for node in nodes:
            if (entries := self._entries(node)) != self.entries[node]:
                self.entries[node] = entries
                heapq.heappush(self.heap, (entries, node))

    def _scope(self, node: int) -> set[int]:
        return {node}.union(*(self.pool[index] for index in self.touching[node]))

    def _entries(self, node: int) -> int:
        return math.prod(self.sizes[n] for n in self._scope(node))
