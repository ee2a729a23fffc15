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
#: Passes over what is wrong with a fresh choice, each with balls of all sizes.
MENDINGS = 3
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
            hunt.offer(self._model, best.chosen)

    def _settle(self, dual: Dual, hunt: PairwiseHunt) -> None:
        """Read a choice off, descend, mend what is wrong, fill up what room is left.

        Where memory stays short the next choice is read off at higher prices.
        """
        fresh, plain = self._fresh, self._model.graph.unary
        price = dual.price * self._factor + self._extra
        fresh.restart(dual.decide(price))
        priced = dual.priced(price)
        fresh.improve(priced, WHOLE, self._model.graph.nodes, free=fresh.excess > 0)
        self._improve(fresh, priced, hunt, free=fresh.excess > 0)
        for _ in range(MENDINGS):
            wrong = 0
            for ball in (*BALLS, 10 * max(BALLS)):
                wrong = fresh.mend(priced, ball) if hunt.left_s else 0
            if not wrong:
                break
        short = fresh.over() > 0
        if short.any():
            self._factor = min(self._factor * 1.5, 100.0)
            self._extra = np.where(short, 2 * self._extra + price.mean(), self._extra)
        else:
            self._factor, self._extra = max(1.0, self._factor * 0.8), self._extra * 0.5
        self._improve(fresh, plain, hunt)

    def _improve(
        self, mover: Mover, priced: Floats, hunt: PairwiseHunt, *, free: bool = False
    ) -> None:
        for ball in BALLS:
            if hunt.left_s:
                mover.improve(priced, max(1, self._model.graph.nodes // ball), ball, free=free)


def _feasible(mover: Mover) -> bool:
    return mover.excess <= 0 and mover.cost() < CONFLICT
