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

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float64]
Answer = tuple[tuple[int, ...], float] | None  #: A plan and its value; None: too wide.


@dataclass(frozen=True)
class Room:
    """The largest table, in entries, that elimination may make, and all of them together."""

    table: int
    work: int


#: 8 MB, some tenths of a second.
SMALL = Room(1_000_000, 10_000_000)
#: 256 MB, some seconds.
LARGE = Room(32_000_000, 600_000_000)
#: numpy arrays have at most 64 axes; more two-way nodes than this exceed any room anyway.
MAX_SCOPE = 25


@dataclass(frozen=True)
class Factor:
    """A cost for every combination of choices of the nodes in `scope` (ascending)."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True)
class _Step:
    """How a node's choice follows from its neighbours' once theirs are known."""

    node: int
    scope: tuple[int, ...]
    best: npt.NDArray[np.intp]


def spread(table: npt.NDArray[T], own: Sequence[int], scope: Sequence[int]) -> npt.NDArray[T]:
    """The table with an axis of size 1 for each node of the scope that it does not mention."""
    sizes = dict(zip(own, table.shape, strict=True))
    return table.reshape([sizes.get(node, 1) for node in scope])


def _squeezed(factor: Factor, sizes: Sequence[int]) -> Factor:
    """The factor without the nodes that have no choice to make."""
    kept = [axis for axis, node in enumerate(factor.scope) if sizes[node] > 1]
    shape = [factor.table.shape[axis] for axis in kept]
    return Factor(tuple(factor.scope[axis] for axis in kept), factor.table.reshape(shape))


def eliminate(factors: Sequence[Factor], sizes: Sequence[int], room: Room = SMALL) -> Answer:
    """The least sum of the factors, exactly.

    Args:
        factors: Tables over nodes; infinite entries are forbidden.
        sizes: How many choices each node has.
        room: Where to give up.
    """
    touching: dict[int, set[int]] = {n: set() for n, size in enumerate(sizes) if size > 1}
    squeezed = [_squeezed(factor, sizes) for factor in factors]
    pool = {index: factor for index, factor in enumerate(squeezed) if factor.scope}
    for index, factor in pool.items():
        for node in factor.scope:
            touching[node].add(index)
    steps: list[_Step] = []
    work = 0
    constant = float(sum(factor.table for factor in squeezed if not factor.scope))
    queue = _Queue(touching, pool, sizes)
    while touching:
        node, scope = queue.cheapest()
        shape = [sizes[n] for n in scope]
        work += math.prod(shape)
        if math.prod(shape) > room.table or work > room.work or len(scope) > MAX_SCOPE:
            return None
        total = np.zeros(shape)
        for index in sorted(touching.pop(node)):
            factor = pool.pop(index)
            total += spread(factor.table, factor.scope, scope)
            for other in factor.scope:
                if other != node:
                    touching[other].discard(index)
        axis = scope.index(node)
        rest = scope[:axis] + scope[axis + 1 :]
        steps.append(_Step(node, rest, total.argmin(axis=axis)))
        least = total.min(axis=axis)
        if not rest:
            constant += float(least)
            continue
        index = len(factors) + len(steps)
        pool[index] = Factor(rest, least)
        for other in rest:
            touching[other].add(index)
        queue.update(rest)
    return _decode(steps, len(sizes)), constant


class _Queue:
    """Nodes by the table that their elimination makes, the smallest first."""

    def __init__(
        self, touching: dict[int, set[int]], pool: dict[int, Factor], sizes: Sequence[int]
    ) -> None:
        self.touching, self.pool, self.sizes = touching, pool, sizes
        self.size = {node: self._size(node) for node in touching}
        self.heap = [(size, node) for node, size in self.size.items()]
        heapq.heapify(self.heap)

    def cheapest(self) -> tuple[int, tuple[int, ...]]:
        """The node whose elimination makes the smallest table, with that table's scope."""
        while True:
            size, node = heapq.heappop(self.heap)
            if node in self.touching and self.size[node] == size:
                return node, tuple(sorted(self._scope(node)))

    def update(self, nodes: Iterable[int]) -> None:
        """Look again at nodes whose neighbours changed."""
        for node in nodes:
            size = self._size(node)
            if size != self.size[node]:
                self.size[node] = size
                heapq.heappush(self.heap, (size, node))

    def _scope(self, node: int) -> set[int]:
        return {node}.union(*(self.pool[index].scope for index in self.touching[node]))

    def _size(self, node: int) -> int:
        return math.prod(self.sizes[n] for n in self._scope(node))


def _decode(steps: Sequence[_Step], count: int) -> tuple[int, ...]:
    chosen = [0] * count
    for step in reversed(steps):
        chosen[step.node] = int(step.best[tuple(chosen[node] for node in step.scope)])
    return tuple(chosen)
