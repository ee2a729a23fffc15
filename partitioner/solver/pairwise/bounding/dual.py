"""A lower bound with prices on memory, and choices read off it.

For prices y >= 0 of the memory rows no feasible choice costs less than

    min over choices of (cost + sum_t y_t * usage_t)  -  sum_t y_t * capacity_t

and the sweeps of `Messages` bound the minimum from below. Both ascend together: each sweep is
followed by a step of the prices along the usage above capacity (Polyak's step length with a target
a little above the best bound), halfway between that of the choice read off the messages and that
of the strategies weighted by how near they are to each node's best. Of each run of short rows only
the worst gets a price: neighbours in time are alike, and prices on thousands overshoot.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from partitioner.solver.pairwise.bounding.messages import Messages, decode
from partitioner.solver.pairwise.model import Model, peaks
from partitioner.solver.pairwise.problem import Flags, Floats, Ints
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
