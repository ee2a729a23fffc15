"""The search for good choices: read one off the bound, descend, cross it with the best."""

from __future__ import annotations

import numpy as np

from partitioner.solver.pairwise.dual import Dual
from partitioner.solver.pairwise.hunt import PairwiseHunt
from partitioner.solver.pairwise.model import CONFLICT, Floats, Model
from partitioner.solver.pairwise.moves import Mover

#: Sizes of the balls, in nodes; as many balls as cover the graph about once.
BALLS = (30, 300)
#: Moves of all nodes at once, to settle a fresh choice.
WHOLE = 3
#: Doublings of the price of memory, where it is short, to make a choice fit.
DOUBLINGS = 12
#: The price of memory rises by this factor while no choice that fits is known.
RAISE = 4.0
#: Multiples of the price of memory at which the best choice is improved.
PRICES = (1.0, 0.5, 0.0)


class Primal:
    """A fresh choice every round, and the best so far to cross it with."""

    def __init__(self, model: Model, seed: int) -> None:
        start = Dual(model).messages.chosen
        self._model = model
        self._fresh, self._best = Mover(model, start, 2 * seed), Mover(model, start, 2 * seed + 1)
        self._found = False
        self._factor, self._extra = 1.0, np.zeros(len(model.rows.capacity))

    def round(self, dual: Dual, hunt: PairwiseHunt) -> None:
        """Settle the choice of the last sweep, and take from it what makes the best better."""
        fresh, best, plain = self._fresh, self._best, self._model.graph.unary
        self._settle(dual, hunt)
        good = _feasible(fresh)
        if not self._found or (good and fresh.cost() < best.cost()):
            former = best.chosen
            best.restart(fresh.chosen)
            if self._found:
                best.cross(former, plain)
            self._found = self._found or good
        else:
            best.cross(fresh.chosen, plain)
        for factor in PRICES:
            self._improve(best, dual.priced(dual.price * factor), hunt)
        if _feasible(best):
            self._found = True
            hunt.offer(self._model, best.chosen, "local search")

    def _settle(self, dual: Dual, hunt: PairwiseHunt) -> None:
        """Read a choice off, descend, make it fit, fill up what room is left.

        Until a choice is found that fits, they are read off at prices that rise where memory stays
        short; then at the best prices.
        """
        fresh, plain = self._fresh, self._model.graph.unary
        price = dual.price if self._found else dual.price * self._factor + self._extra
        fresh.restart(dual.decide(price))
        priced = dual.priced(price)
        free = fresh.excess > 0
        fresh.improve(priced, WHOLE, self._model.graph.nodes, free=free)
        self._improve(fresh, priced, hunt, free=free)
        for ball in BALLS:
            fresh.mend(priced, ball)
        self._fit(fresh, dual, hunt)
        short = fresh.over() > 0
        if not self._found and short.any():
            self._factor *= RAISE
            self._extra = np.where(short, RAISE * self._extra + price.mean(), self._extra)
        self._improve(fresh, plain, hunt)

    def _fit(self, fresh: Mover, dual: Dual, hunt: PairwiseHunt) -> None:
        """Double the price of memory where it is short, until it is not."""
        price = dual.price
        least = max(float(price.mean()) if len(price) else 0.0, 1e-12)
        for _ in range(DOUBLINGS):
            if fresh.excess <= 0 or hunt.over:
                return
            price = np.where(fresh.over() > 0, np.maximum(2 * price, least), price)
            self._improve(fresh, dual.priced(price), hunt, free=True)

    def _improve(
        self, mover: Mover, priced: Floats, hunt: PairwiseHunt, *, free: bool = False
    ) -> None:
        for ball in BALLS:
            if hunt.left_s:
                mover.improve(priced, max(1, self._model.graph.nodes // ball), ball, free=free)


def _feasible(mover: Mover) -> bool:
    return mover.excess <= 0 and mover.cost() < CONFLICT
