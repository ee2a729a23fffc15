"""The search for good choices: read one off the bound, descend, cross it with the best."""

from __future__ import annotations

from partitioner.solver.pairwise.dual import Dual
from partitioner.solver.pairwise.hunt import PairwiseHunt
from partitioner.solver.pairwise.model import CONFLICT, Floats, Model
from partitioner.solver.pairwise.moves import Mover

#: Sizes of the balls, in nodes; as many balls as cover the graph about once.
BALLS = (30, 300)
#: Moves of all nodes at once, to settle a fresh choice.
WHOLE = 3
#: Doublings of the price of memory until a choice fits.
DOUBLINGS = 8
#: Multiples of the price of memory at which the best choice is improved.
PRICES = (1.0, 0.5, 0.0)


class Primal:
    """A fresh choice every round, and the best so far to cross it with."""

    def __init__(self, model: Model, seed: int) -> None:
        start = Dual(model).messages.chosen
        self._model = model
        self._fresh, self._best = Mover(model, start, 2 * seed), Mover(model, start, 2 * seed + 1)
        self._found = False

    def round(self, dual: Dual, hunt: PairwiseHunt) -> None:
        """Settle the choice of the last sweep, and take from it what makes the best better."""
        fresh, best, plain = self._fresh, self._best, self._model.graph.unary
        fresh.restart(dual.messages.chosen)
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
            self._improve(best, dual.priced(factor), hunt)
        if _feasible(best):
            self._found = True
            hunt.offer(self._model, best.chosen)

    def _settle(self, dual: Dual, hunt: PairwiseHunt) -> None:
        fresh = self._fresh
        priced = dual.priced()
        fresh.improve(priced, WHOLE, self._model.graph.nodes)
        self._improve(fresh, priced, hunt)
        for power in range(1, DOUBLINGS + 1):
            if fresh.excess <= 0 or hunt.over:
                break
            self._improve(fresh, dual.priced(2.0**power), hunt)
        self._improve(fresh, self._model.graph.unary, hunt)

    def _improve(self, mover: Mover, priced: Floats, hunt: PairwiseHunt) -> None:
        for ball in BALLS:
            if hunt.left_s:
                mover.improve(priced, max(1, self._model.graph.nodes // ball), ball)


def _feasible(mover: Mover) -> bool:
    return mover.excess <= 0 and mover.cost() < CONFLICT
