"""The problem with memory limited at a few times only, reduced and folded.

Leaving rows out is a relaxation: its bounds bound the problem. Most nodes are live in none of
the rows that matter, and without memory most of those go exactly. Rows that a choice breaks are
added later (Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman
problem", 1954, did so with cuts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from partitioner.solver.pairwise.model import Model
from partitioner.solver.pairwise.problem import Flags, Floats, Ints
from partitioner.solver.pairwise.reducing.fold import Folded, fold
from partitioner.solver.pairwise.reducing.reduce import reduce


@dataclass(frozen=True)
class Relaxation:
    """A smaller model whose least cost is not above that of the whole."""

    whole: Model
    before: Model  #: The whole with the kept rows only, reduced.
    folded: Folded  #: That, nodes of few neighbours eliminated.
    model: Model  #: That, reduced once more: the model that is searched.

    def lift(self, chosen: Ints) -> Ints:
        """A choice of the whole model from one of the small one, of the same cost."""
        middle = self.folded.lift(self.before.within(self.model.original(chosen)))
        return self.whole.within(self.before.original(middle))

    def lower(self, chosen: Ints) -> Ints:
        """A choice of the small model; -1 where it has not the strategy; (nodes,)."""
        return self.model.within(self.whole.original(chosen))

    def price(self, price: Floats) -> Floats:
        """Prices of the small model's rows as prices of the whole model's; (whole rows,)."""
        full = np.zeros(len(self.whole.rows.capacity))
        full[np.searchsorted(self.whole.rows.number, self.model.rows.number)] = price
        return full


def relax(whole: Model, keep: Flags) -> Relaxation | None:
    """The relaxation to the flagged rows; None if even that has no choice."""
    before = reduce(replace(whole, rows=whole.rows.only(keep)))
    if before is None:
        return None
    folded = fold(before)
    model = reduce(folded.model)
    return None if model is None else Relaxation(whole, before, folded, model)
