"""A lower bound with prices on memory, and choices read off it.

For prices y >= 0 of the memory rows no feasible choice costs less than

    min over choices of (cost + sum_t y_t * usage_t)  -  sum_t y_t * capacity_t

and the sweeps of `Messages` bound the minimum from below. Both ascend together: each sweep is
followed by a step of the prices along the usage above capacity (Polyak's step length with a target
a little above the best bound), halfway between that of the choice read off the messages and that
of the strategies weighted by how near they are to each node's best. Of each run of short rows only
the worst gets a price: neighbours in time are alike, and prices on thousands overshoot.

A choice is read off by decimation: fix a node, pass messages, repeat. Where many nodes of equal
layers share a neighbour, its strategies are often as good as each other in the messages, but only
if all layers follow. So nodes with most neighbours are fixed first, each to its best, and a few
sweeps follow before the next. While fixing costs nothing, more nodes are fixed at a time (Mezard,
Parisi and Zecchina, Science 297, 2002). Prices move on all the while, and strategies that no longer
fit into memory go.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from partitioner.solver.pairwise.bounding.messages import Messages, decode
from partitioner.solver.pairwise.model import Model, peaks, restrict
from partitioner.solver.pairwise.problem import Flags, Floats, Ints
from partitioner.solver.pairwise.reducing.relax import prune
from partitioner.solver.work import now_s

#: The target is this much above the best bound, relative.
TARGET = 0.05
#: Sweeps before prices move, and sweeps without a better bound after which steps shrink.
WARM_UP = 5
PATIENCE = 3
SHRINK = 0.8
#: Sweeps without a better bound after which prices return to the best, with half the step that led
#: there.
RETURN = 24
#: A strategy's weight falls by e for each this share of the bound, spread over the nodes.
TEMPERATURE = 0.01
#: Sweeps at the best prices before strategies are priced out.
SETTLE = 40


class Dual:
    """Prices and messages of a model.

    Attributes:
        messages: Their state; `messages.chosen` is the choice of the last sweep.
        bound: The best bound so far.
        price: Price of each memory row at the best bound; (rows,).
        met: Rows that were the worst of a run of short ones at some sweep: only these have prices;
            (rows,).
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.messages = Messages(model.graph)
        self.bound = -math.inf
        self.price = np.zeros(len(model.rows.capacity))
        self.met = np.zeros(len(self.price), dtype=np.bool_)
        self._now = self.price
        self._step = self._good = 1.0
        self._stalled = 0
        self._swept = 0

    def inherit(self, former: Dual) -> None:
        """Go on from the prices and messages of another model of the same problem."""
        number, former_number = self.model.rows.number, former.model.rows.number
        shared = np.isin(number, former_number)
        place = np.searchsorted(former_number, number[shared])
        self._now = np.zeros(len(number))
        self._now[shared] = former.price[place]
        self.met[shared] = former.met[place]
        self.price, self._swept = self._now, former._swept
        self._step = self._good = former._good
        self.messages.inherit(former.messages, self.model.labels, former.model.labels)

    def copy(self) -> Dual:
        """A copy that can be swept while this one ascends."""
        other = copy.copy(self)
        other.met = self.met.copy()
        other.messages = self.messages.copy()
        return other

    def decide(self) -> Ints:
        """A choice read off at the best prices at once; one strategy a node."""
        self._offer(self.price)
        return decode(self.messages, self.model.priced(self.price))

    def ascend(self, sweeps: int, until: float = math.inf) -> None:
        """Raise the bound, at most until this second of `now_s`."""
        for _ in range(sweeps):
            if now_s() > until:
                return
            bound = self._offer(self._now)
            self._swept += 1
            if len(self.price) and self._swept > WARM_UP:
                self._move(bound, self.model.priced(self._now))
            if self._stalled >= RETURN:
                self._good, self._stalled = self._good / 2, 0
                self._now, self._step = self.price, self._good

    def dear(self, cutoff: float) -> Flags:
        """Strategies that no choice of at most this cost takes; (strategies,)."""
        price = self.price
        for _ in range(SETTLE):
            bound = self._offer(price)
        surplus = self.messages.surplus(self.model.priced(price))
        return bound + surplus > cutoff + 1e-6 + 1e-9 * abs(cutoff)

    def _offer(self, price: Floats) -> float:
        """Sweep at these prices; the bound."""
        priced = self.model.priced(price)
        bound = self.messages.sweep(priced) - float(price @ self.model.rows.capacity)
        self._stalled += 1
        if bound > self.bound:
            self.bound, self.price, self._stalled = bound, price, 0
            self._good = self._step
        elif self._stalled % PATIENCE == 0:
            self._step *= SHRINK
        return bound

    def _move(self, bound: float, costs: Floats) -> None:
        """Step the prices along the usage above capacity."""
        # usage of each node, halfway between decided and weighted; (nodes,)
        graph, usage = self.model.graph, self.model.usage
        first = graph.offsets[:-1]
        belief = self.messages.costs(costs)
        above = belief - np.repeat(np.minimum.reduceat(belief, first), graph.sizes)
        width = TEMPERATURE * max(abs(self.bound), 1.0) / len(first)
        weight = np.exp(-np.minimum(above / width, 50.0))
        soft = np.add.reduceat(weight * usage, first) / np.add.reduceat(weight, first)
        mean: Floats = (soft + usage[first + self.messages.chosen]) / 2
        over = self.model.rows.load(mean) - self.model.rows.capacity
        self.met[peaks(over)] = True
        over = np.where(self.met & ((self._now > 0) | (over > 0)), over, 0.0)
        square = float(over @ over)
        if square > 0:
            climb = max(TARGET * abs(self.bound), self.bound - bound)
            self._now = np.maximum(0.0, self._now + self._step * climb / square * over)


#: Sweeps after each step.
SWEEPS = 5
#: Nodes fixed first, of how many; twice as many each time that costs less than `FREE` of the bound.
FIRST = 1000
FREE = 1e-4


def dive(dual: Dual, keep: Flags, noise: Floats, until: float = math.inf) -> Ints | None:
    """A choice; one strategy a node. Where nothing allowed is left, a forbidden pair is taken.

    Only strategies flagged in `keep` are chosen; `noise` is by how much the neighbours of each node
    count more. The dual does not change. None if the kept strategies contradict each other or
    exceed memory, or if it is later than the second `until` of `now_s`.
    """
    start = _pruned(dual.model, keep)
    if start is None:
        return None
    rest, batch = _within(dual, start), 1
    while (undecided := np.flatnonzero(rest.model.graph.sizes > 1)).size:
        if now_s() > until:
            return None
        degree = (np.diff(rest.model.graph.starts) * (1 + noise))[undecided]
        hubs = undecided[np.argsort(-degree, kind="stable")]  # most neighbours first
        count = max(batch, batch * len(undecided) // FIRST)
        smaller = _fixed(rest, hubs[:count])
        if smaller is None and count > 1:
            batch, smaller = 1, _fixed(rest, hubs[:1])
        if smaller is None:
            smaller = _fixed(rest, hubs[:1], forbid=True)
        if smaller is None:
            chosen = decode(rest.messages, rest.model.priced(rest.price))
            return dual.model.within(rest.model.original(chosen))
        after = _within(rest, smaller)
        batch = 2 * batch if after.bound - rest.bound < FREE * abs(rest.bound) else 1
        rest = after
    chosen = np.zeros(rest.model.graph.nodes, dtype=np.int64)
    return dual.model.within(rest.model.original(chosen))


def _within(dual: Dual, smaller: Model) -> Dual:
    """The dual of a smaller model, a few sweeps after it took over the larger one's."""
    inner = Dual(smaller)
    inner.inherit(dual)
    inner.ascend(SWEEPS)
    return inner


def _fixed(dual: Dual, nodes: Ints, *, forbid: bool = False) -> Model | None:
    """The model once some nodes take their best (or may not); None if that cannot be."""
    graph, belief = dual.model.graph, dual.messages.costs(dual.model.priced(dual.price))
    keep = np.ones(len(belief), dtype=np.bool_)
    for v in nodes:
        first, last = graph.offsets[v : v + 2]
        keep[first:last] = forbid
        keep[first + belief[first:last].argmin()] = not forbid
    return _pruned(dual.model, keep)


def _pruned(model: Model, keep: Flags) -> Model | None:
    smaller = prune(restrict(model, keep))
    return None if smaller is None or (smaller.rows.capacity < 0).any() else smaller
