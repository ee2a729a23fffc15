"""The search for good choices: read one off the bound, make it fit, cross it with the best."""

from __future__ import annotations

import numpy as np

from partitioner.solver.pairwise.bounding.dive import dive
from partitioner.solver.pairwise.bounding.dual import Dual
from partitioner.solver.pairwise.model import Model, peaks
from partitioner.solver.pairwise.moving.moves import Mover
from partitioner.solver.pairwise.problem import Floats, Ints
from partitioner.solver.pairwise.progress import Progress
from partitioner.solver.pairwise.reducing.relax import Relaxation

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
        """Start from a feasible choice of the problem's strategies, if one is known."""
        within = model.within(known) if known else np.full(model.graph.nodes, -1)
        start = np.maximum(within, 0)
        self._model = model
        self._fresh, self._best = Mover(model, start, 2 * seed), Mover(model, start, 2 * seed + 1)
        self._rounds = 0
        # presolve may have dropped a strategy of the choice
        self._any = bool((within >= 0).all()) and self._best.feasible
        self._draw = np.random.default_rng(seed)

    def round(self, relaxation: Relaxation, dual: Dual, progress: Progress) -> Ints:
        """Improve the best choice with parts of one that is read off the bound.

        Returns:
            The rows that the fresh choice broke before it was made to fit, the worst of each run.
        """
        model, fresh, best = self._model, self._fresh, self._best
        plain = model.graph.unary
        fresh.restart(self._choice(relaxation, dual, progress))
        if fresh.feasible:
            progress.offer(model, fresh.chosen, "decimation")
        price = relaxation.price(dual.price)
        broken = peaks(model.over(fresh.chosen))
        self._fit(fresh, price, progress)
        self._improve(fresh, plain, progress, TOURNAMENTS)
        good = fresh.feasible
        if good:
            progress.offer(model, fresh.chosen, "decimation")
        if not self._any or (good and fresh.cost() < best.cost()):
            former = best.chosen
            best.restart(fresh.chosen)
            if self._any:
                best.cross(former, plain)
            self._any = self._any or good
        else:
            best.cross(fresh.chosen, plain)
        for factor in PRICES if self._any else ():
            self._improve(best, model.priced(price * factor), progress, TOURNAMENTS)
        if best.feasible:
            self._any = True
            progress.offer(model, best.chosen, "local search")
        return broken

    def _choice(self, relaxation: Relaxation, dual: Dual, progress: Progress) -> Ints:
        """A choice of the whole model: by a dive, at once, by a dive in a part of the best."""
        nodes, turn = self._model.graph.nodes, self._rounds % 3
        self._rounds += 1
        if turn == 1:
            return relaxation.lift(dual.decide())
        keep = np.ones(len(dual.model.usage), dtype=np.bool_)
        noise = np.zeros(nodes) if self._rounds == 1 else self._draw.random(nodes)
        if turn == 2:
            # strategies of the small model when all but a ball of nodes keep the best choice's
            model, known = relaxation.model, relaxation.lower(self._best.chosen)
            sizes = model.graph.sizes
            undecided = np.flatnonzero(sizes > 1)
            if len(undecided):
                centre = int(undecided[self._draw.integers(len(undecided))])
                mover = Mover(model, np.maximum(known, 0), self._rounds)
                known[mover.around(centre, len(undecided) // 2)] = -1
            fixed = known >= 0
            keep = np.repeat(~fixed, sizes)
            keep[(model.graph.offsets[:-1] + known)[fixed]] = True
        chosen = dive(dual, keep, noise, progress.deadline)
        return self._best.chosen if chosen is None else relaxation.lift(chosen)

    def _fit(self, fresh: Mover, price: Floats, progress: Progress) -> None:
        """Raise the price of memory where it is shortest, until it is not."""
        if fresh.excess <= 0:
            return
        least = LEAST * fresh.cost() / np.maximum(self._model.rows.capacity, 1.0)
        for _ in range(RAISES):
            if fresh.excess <= 0 or not progress.left_s:
                return
            worst = peaks(self._model.over(fresh.chosen))
            price = price.copy()
            price[worst] = np.maximum(RAISE * price[worst], least[worst])
            self._improve(fresh, self._model.priced(price), progress, TOURNAMENTS[-1:], free=True)

    def _improve(
        self,
        mover: Mover,
        priced: Floats,
        progress: Progress,
        tournaments: tuple[int, ...],
        *,
        free: bool = False,
    ) -> None:
        for tournament in tournaments:
            if progress.left_s:
                mover.widen(priced, tournament, free=free)
        for ball in BALLS:
            if progress.left_s:
                mover.improve(priced, max(1, self._model.graph.nodes // ball), ball, free=free)
