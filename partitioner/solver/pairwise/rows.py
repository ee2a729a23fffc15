"""When memory can bind: the maximal cliques of the interval graph.

Between two times at which a node dies nothing is gained by looking at any time but the last one at
which a node is born: all that is live before is live then. These are the maximal cliques of the
interval graph, in order of time, and a node is live in consecutive ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from partitioner.solver.pairwise.problem import Flags, Floats, Ints, offsets_of


@dataclass(frozen=True)
class Rows:
    """Memory rows: sum of usage over the nodes live in a row is at most its capacity."""

    first: Ints  #: First row in which each node is live; (nodes,).
    last: Ints  #: One past its last row; not above `first` where it is in none; (nodes,).
    capacity: Floats  #: Room for usages above each node's least; (rows,).
    number: Ints  #: Index of each row among the problem's maximal cliques, ascending; (rows,).

    def only(self, keep: Flags) -> Rows:
        """The flagged rows: a relaxation, as if memory were unlimited at all other times."""
        place = offsets_of(keep)
        return Rows(place[self.first], place[self.last], self.capacity[keep], self.number[keep])

    def load(self, usage: Floats) -> Floats:
        """Usage in each row, of one usage a node."""
        change = np.zeros(len(self.capacity) + 1)
        live = self.last > self.first
        np.add.at(change, self.first[live], usage[live])
        np.add.at(change, self.last[live], -usage[live])
        return np.cumsum(change)[:-1]

    def less(self, least: Floats, usage: Floats, offsets: Ints) -> Rows:
        """The rows once each node's least usage is set aside; rows that cannot bind are gone."""
        if not len(self.capacity):
            return self
        capacity = self.capacity - self.load(least)
        binds = self.load(np.maximum.reduceat(usage, offsets[:-1])) > capacity
        return replace(self, capacity=capacity).only(binds)

    def room(self) -> Floats:
        """The least capacity of the rows of each node; infinite where it is in none; (nodes,)."""
        table = [self.capacity]  # table[k][r]: the least of the 2^k rows from r on
        while 2 ** len(table) <= len(self.capacity):
            half = 2 ** (len(table) - 1)
            table.append(np.minimum(table[-1][:-half], table[-1][half:]))
        span = self.last - self.first
        room = np.full(len(span), np.inf)
        for power, least in enumerate(table):
            v = np.flatnonzero((span >= 2**power) & (span < 2 ** (power + 1)))
            room[v] = np.minimum(least[self.first[v]], least[self.last[v] - 2**power])
        return room

    def prices(self, price: Floats) -> Floats:
        """Sum of the rows' prices over the rows of each node; (nodes,)."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        live = self.last > self.first
        return np.where(live, total[self.last] - total[self.first], 0.0)


def memory_rows(intervals: Ints, limit: int | None) -> Rows:
    """Make a row for each maximal clique; none without a limit."""
    live = intervals[:, 1] > intervals[:, 0]
    if limit is None or not live.any():
        none = np.zeros(len(intervals), dtype=np.int64)
        return Rows(none, none, np.zeros(0), none[:0])
    births = np.unique(intervals[live, 0])
    deaths = np.unique(intervals[live, 1])
    # a birth is the last before some death if a death lies between it and the next birth
    following = deaths[np.searchsorted(deaths, births, side="right")]
    times = births[np.append(following[:-1] <= births[1:], True)]
    first, last = (np.where(live, np.searchsorted(times, ends), 0) for ends in intervals.T)
    return Rows(first, last, np.full(len(times), float(limit)), np.arange(len(times)))


def peaks(over: Floats) -> Ints:
    """The worst row of each run of rows in which usage is above capacity."""
    short = np.concatenate([[False], over > 0, [False]])
    bounds = np.flatnonzero(short[1:] != short[:-1]).reshape(-1, 2)
    return np.array([a + int(over[a:b].argmax()) for a, b in bounds], dtype=np.int64)
