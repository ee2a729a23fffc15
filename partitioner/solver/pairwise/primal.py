"""The search for good choices: read one off the bound, make it fit, cross it with the best."""

from __future__ import annotations

import numpy as np

from partitioner.solver.pairwise.dive import dive
from partitioner.solver.pairwise.dual import Dual
from partitioner.solver.pairwise.model import CONFLICT, Flags, Floats, Model
from partitioner.solver.pairwise.moves import Mover
from partitioner.solver.pairwise.problem import Ints
from partitioner.solver.pairwise.progress import PairwiseHunt
from partitioner.solver.pairwise.relax import Relaxation
from partitioner.solver.pairwise.rows import peaks

#: Sizes of the balls, in nodes; as many balls as cover the graph about once.
BALLS = (30, 300)
#: Nodes drawn for each node that stays, in moves of nearly all nodes, one move each.
TOURNAMENTS = (1, 2, 4, 8)
#: The price of memory rises by this factor where it is shortest, this often, to make a choice fit.
RAISE, RAISES = 1.5, 12
#: Least price of a row that is short: this share of the cost for all its capacity.
LEAST = 0.001
#: Multiples of the price of memory at which the best choice is improved.
PRICES = (1.0, 0.5, 0.0)


class Primal:
    """A fresh choice every round, and the best so far to cross it with."""

    def __init__(self, model: Model, seed: int, known: tuple[int, ...] = ()) -> None:
        """Args: the model, the seed, and a feasible choice of the problem's strategies, if any."""
        within = model.within(known) if known else np.full(model.graph.nodes, -1)
        start = np.maximum(within, 0)
        self._model = model
        self._fresh, self._best = Mover(model, start, 2 * seed), Mover(model, start, 2 * seed + 1)
        self._done = 0
        # presolve may have dropped a strategy of the choice
        self._found = bool((within >= 0).all()) and _feasible(self._best)
        self._draw = np.random.default_rng(seed)

    def round(self, relaxation: Relaxation, dual: Dual, hunt: PairwiseHunt) -> Ints:
        """Take from a choice read off the bound what makes the best better.

        Returns:
            The rows that the choice broke before it was made to fit, the worst of each run.
        """
        fresh, best, plain = self._fresh, self._best, self._model.graph.unary
        fresh.restart(self._choice(relaxation, dual, hunt))
        if _feasible(fresh):
            hunt.offer(self._model, fresh.chosen, "decimation")
        price = relaxation.price(dual.price)
        broken = peaks(fresh.over())
        self._fit(fresh, price, hunt)
        self._improve(fresh, plain, hunt, TOURNAMENTS)
        good = _feasible(fresh)
        if good:
            hunt.offer(self._model, fresh.chosen, "decimation")
        if not self._found or (good and fresh.cost() < best.cost()):
            former = best.chosen
            best.restart(fresh.chosen)
            if self._found:
                best.cross(former, plain)
            self._found = self._found or good
        else:
            best.cross(fresh.chosen, plain)
        for factor in PRICES if self._found else ():
            self._improve(best, self._priced(price * factor), hunt, TOURNAMENTS)
        if _feasible(best):
            self._found = True
            hunt.offer(self._model, best.chosen, "local search")
        return broken

    def _choice(self, relaxation: Relaxation, dual: Dual, hunt: PairwiseHunt) -> Ints:
        """A choice of the whole model: by a dive, at once, by a dive in a part of the best."""
        nodes, kind = self._model.graph.nodes, self._done % 3
        self._done += 1
        if kind == 1:
            return relaxation.lift(dual.decide())
        keep = np.ones(len(dual.model.usage), dtype=np.bool_)
        noise = np.zeros(nodes) if self._done == 1 else self._draw.random(nodes)
        if kind == 2:
            keep = self._region(relaxation)
        chosen = dive(dual, keep, noise, hunt.deadline)
        return self._best.chosen if chosen is None else relaxation.lift(chosen)

    def _region(self, relaxation: Relaxation) -> Flags:
        """Strategies of the small model when all but a ball of nodes keep the best choice's."""
        model, known = relaxation.model, relaxation.lower(self._best.chosen)
        first, sizes = model.graph.offsets[:-1], np.diff(model.graph.offsets)
        undecided = np.flatnonzero(sizes > 1)
        keep = np.ones(len(model.usage), dtype=np.bool_)
        if len(undecided):
            centre = int(undecided[self._draw.integers(len(undecided))])
            ball = Mover(model, np.maximum(known, 0), self._done).around(
                centre, len(undecided) // 2
            )
            known[ball] = -1
        fixed = known >= 0
        keep[np.repeat(fixed, sizes)] = False
        keep[(first + known)[fixed]] = True
        return keep

    def _priced(self, price: Floats) -> Floats:
        each = np.repeat(self._model.rows.prices(price), np.diff(self._model.graph.offsets))
        priced: Floats = self._model.graph.unary + self._model.usage * each
        return priced

    def _fit(self, fresh: Mover, price: Floats, hunt: PairwiseHunt) -> None:
        """Raise the price of memory where it is shortest, until it is not."""
        if fresh.excess <= 0:
            return
        least = LEAST * fresh.cost() / np.maximum(self._model.rows.capacity, 1.0)
        for _ in range(RAISES):
            if fresh.excess <= 0 or not hunt.left_s:
                return
            worst = peaks(fresh.over())
            price = price.copy()
            price[worst] = np.maximum(RAISE * price[worst], least[worst])
            self._improve(fresh, self._priced(price), hunt, TOURNAMENTS[-1:], free=True)

    def _improve(
        self,
        mover: Mover,
        priced: Floats,
        hunt: PairwiseHunt,
        tournaments: tuple[int, ...],
        *,
        free: bool = False,
    ) -> None:
        for tournament in tournaments:
            if hunt.left_s:
                mover.widen(priced, tournament, free=free)
        for ball in BALLS:
            if hunt.left_s:
                mover.improve(priced, max(1, self._model.graph.nodes // ball), ball, free=free)


def _feasible(mover: Mover) -> bool:
    return mover.excess <= 0 and mover.cost() < CONFLICT
