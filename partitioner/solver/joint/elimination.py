"""Exact minimum of a weighted sum of the loads by eliminating nodes one by one.

    min over plans of  sum_d weight_d * load_d,     memory left aside

is a sum of tables: one a node, one an edge, one for the items that several edges or holds of
the same nodes share. Eliminating node v adds the tables that mention v, takes the minimum over
v's choices, and leaves a table over v's neighbours (bucket elimination: Dechter, Artificial
Intelligence 113, 1999). The node whose elimination makes the smallest table goes next (the
min-weight ordering); a heap finds it, so that a chain of n nodes takes n log n steps. Model graphs
are narrow, so the tables stay small; when they do not, the caller is told to use the MILP instead.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Edge, Problem, Site, item_sites
from partitioner.solver.work import Work

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


Ints = npt.NDArray[np.intp]

#: Graphs with an item that depends on more combinations of choices than this are too wide.
MAX_SHARED = 4096
#: Steps of laying a problem out, for each item.
LAYOUT_STEPS = 8
#: Steps of an elimination, for each item and each node.
ITEM_STEPS, NODE_STEPS = 15, 400
#: Steps of finding that a problem is too wide, for each item and each node.
ITEM_LOOKS, NODE_LOOKS = 1, 15
#: Problems of more items are wide: so many come of meshes with several axes.
MAX_ITEMS = 20_000


@dataclass(frozen=True)
class _EdgeCosts:
    """Items that an edge triggers: `items[k]`, ascending, is paid at flat pair `cells[k]`."""

    edge: Edge
    shape: tuple[int, int]  #: Classes of the two ends.
    cells: Ints
    items: Ints

    def table(self, prices: Floats) -> Floats:
        """The cost of the edge, by the choices of its ends."""
        size = self.shape[0] * self.shape[1]
        flat = np.bincount(self.cells, weights=prices[self.items], minlength=size)
        by_class: Floats = flat.astype(np.float64).reshape(self.shape)  # counts if there are none
        for pair in self.edge.forbidden:
            by_class[pair] = math.inf
        return by_class[np.ix_(self.edge.out_class, self.edge.in_class)]

    def among(self, wanted: npt.NDArray[np.bool_]) -> _EdgeCosts:
        kept = wanted[self.items]
        return replace(self, cells=self.cells[kept], items=self.items[kept])


@dataclass(frozen=True)
class _Shared:
    """Items that several edges or holds of the same nodes trigger, with when each is on."""

    scope: tuple[int, ...]
    items: Ints
    on: tuple[npt.NDArray[np.bool_], ...]


class _Tables(NamedTuple):
    """The costs of a problem by the nodes that they depend on."""

    edges: list[_EdgeCosts]
    shared: list[_Shared]
    wide: Ints  #: Items of too many nodes for one table.


class Eliminator:
    """A problem laid out for elimination, so that it can be solved at many prices."""

    def __init__(self, problem: Problem, work: Work | None = None) -> None:
        self.problem = problem
        self.work = work or Work()  #: Pays for every elimination.
        self.sizes = [len(choices) for choices in problem.nodes]
        self.loads = [np.array([choice.load_s for choice in each]) for each in problem.nodes]
        shape = (len(problem.items), problem.devices)
        self.item_load = np.array([item.load_s for item in problem.items]).reshape(shape)
        self.item_bytes = (
            np.array([item.bytes for item in problem.items]).reshape(shape).sum(axis=1)
        )
        self.spans = np.array([(item.first, item.last) for item in problem.items]).reshape(-1, 2)
        #: Whether the graph is known to be too wide.
        self.too_wide = problem.devices == 1 and len(problem.items) > MAX_ITEMS
        self._known: dict[bytes, Answer] = {}

    @cached_property
    def tables(self) -> _Tables:
        """The costs that are added up."""
        self.work.spend(LAYOUT_STEPS * len(self.problem.items))
        costs = [_edge_costs(edge) for edge in self.problem.edges]
        private = _private(self.problem, costs)
        costs = [edge_costs.among(private) for edge_costs in costs]
        sites = item_sites(self.problem, set(np.flatnonzero(~private).tolist()))
        kept = [c for c in costs if c.items.size or c.edge.forbidden]
        return _Tables(kept, *_shared(self.problem, sites, self.sizes))

    def min_sum(self, weights: Sequence[float], byte_price: float = 0.0) -> Answer:
        """The plan of least weighted load and its value; None if the graph is too wide.

        The value is infinite if every plan takes a forbidden pair. With a `byte_price` (per byte
        held during the whole order) plans that hold less are preferred; the value includes it.
        """
        return self._solve(np.array(weights), self._prices(weights, byte_price))

    def min_near(self, weights: Sequence[float], byte_price: float = 0.0) -> Answer:
        """Minimise as `min_sum`, but what many nodes decide is free: a lower value."""
        if self.too_wide:
            return None
        prices = self._prices(weights, byte_price)
        prices[self.tables.wide] = 0.0
        answer = self._minimise(np.array(weights), prices)
        self.too_wide = answer is None  # at any prices: these tables are among all others
        return answer

    def _prices(self, weights: Sequence[float], byte_price: float) -> Floats:
        share = (self.spans[:, 1] - self.spans[:, 0] + 1) / len(self.sizes)
        prices: Floats = self.item_load @ np.array(weights) + byte_price * self.item_bytes * share
        return prices

    def min_bytes(self, position: int) -> Answer:
        """The plan that holds least at one position, and the mean of its bytes over the devices.

        The mean is a lower bound on the largest peak; None and infinite as of `min_sum`.
        """
        live = (self.spans[:, 0] <= position) & (position <= self.spans[:, 1])
        devices = self.problem.devices
        return self._solve(np.zeros(devices), np.where(live, self.item_bytes / devices, 0.0))

    def _solve(self, weights: Floats, prices: Floats) -> Answer:
        key = weights.tobytes() + prices.tobytes()
        if key not in self._known:
            self._known[key] = None if self.too_wide else self._minimise(weights, prices)
        return self._known[key]

    def _minimise(self, weights: Floats, prices: Floats) -> Answer:
        answer = self._eliminated(weights, prices)
        item, node = (ITEM_LOOKS, NODE_LOOKS) if answer is None else (ITEM_STEPS, NODE_STEPS)
        self.work.spend(item * len(self.problem.items) + node * len(self.sizes))
        return answer

    def _eliminated(self, weights: Floats, prices: Floats) -> Answer:
        tables = self.tables
        if prices[tables.wide].any():
            return None
        factors = [Factor((node,), loads @ weights) for node, loads in enumerate(self.loads)]
        factors += [Factor((e.edge.u, e.edge.v), e.table(prices)) for e in tables.edges]
        for shared in tables.shared:
            table = np.zeros([self.sizes[node] for node in shared.scope])
            for price, on in zip(prices[shared.items], shared.on, strict=True):
                if price:
                    table += price * on
            factors.append(Factor(shared.scope, table))
        return eliminate(factors, self.sizes)


def _edge_costs(edge: Edge) -> _EdgeCosts:
    """All items of an edge, each once a pair."""
    shape = _shape(edge)
    width = shape[0] * shape[1]
    paid = edge.items.values()
    pairs = np.fromiter((o * shape[1] + i for o, i in edge.items), np.intp, len(paid))
    flat = np.fromiter(itertools.chain.from_iterable(paid), np.intp)
    counts = np.fromiter(map(len, paid), np.intp, len(paid))
    entries = np.unique(flat * width + np.repeat(pairs, counts))
    return _EdgeCosts(edge, shape, entries % width, entries // width)


def _private(problem: Problem, costs: Sequence[_EdgeCosts]) -> npt.NDArray[np.bool_]:
    """Tell which items one edge alone triggers."""
    uses = np.zeros(len(problem.items), dtype=np.intp)
    for edge_costs in costs:
        uses[np.unique(edge_costs.items)] += 1
    private: npt.NDArray[np.bool_] = uses == 1
    for hold in problem.holds:
        private[[item for items in hold.items for item in items]] = False
    return private


def _shared(
    problem: Problem, sites: Sequence[tuple[Site, ...]], sizes: Sequence[int]
) -> tuple[list[_Shared], Ints]:
    """The items of holds, and of several sites: by the nodes that they depend on, or wide."""
    by_scope: dict[tuple[int, ...], dict[int, npt.NDArray[np.bool_]]] = {}
    wide = []
    for item, triggers in enumerate(sites):
        if not triggers:
            continue
        nodes = {node for site in triggers for node in _nodes(problem, site)}
        scope = tuple(sorted(node for node in nodes if sizes[node] > 1))
        if math.prod(sizes[node] for node in scope) > MAX_SHARED:
            wide.append(item)
            continue
        on = np.zeros([1] * len(scope), dtype=bool)
        for site in triggers:
            on = on | expanded(_site_table(problem, site), _nodes(problem, site), scope)
        by_scope.setdefault(scope, {})[item] = on
    shared = [
        _Shared(scope, np.array(list(items), dtype=np.intp), tuple(items.values()))
        for scope, items in by_scope.items()
    ]
    return shared, np.array(wide, dtype=np.intp)


def _nodes(problem: Problem, site: Site) -> tuple[int, ...]:
    if site.edge is not None:
        return problem.edges[site.edge].u, problem.edges[site.edge].v
    assert site.hold is not None
    return (problem.holds[site.hold].node,)


def _site_table(problem: Problem, site: Site) -> npt.NDArray[np.bool_]:
    """Tell which choices of the site's nodes trigger it."""
    if site.edge is None:
        (node,) = _nodes(problem, site)
        on = np.zeros(len(problem.nodes[node]), dtype=bool)
        on[list(site.choices)] = True
        return on
    edge = problem.edges[site.edge]
    by_class = np.zeros(_shape(edge), dtype=bool)
    by_class[tuple(zip(*site.pairs, strict=True))] = True
    return by_class[np.ix_(edge.out_class, edge.in_class)]


def _shape(edge: Edge) -> tuple[int, int]:
    """Room for all classes, those that no choice takes too."""
    outs, ins = zip(*edge.items, *edge.forbidden, (0, 0), strict=True)
    return max(*edge.out_class, *outs) + 1, max(*edge.in_class, *ins) + 1
