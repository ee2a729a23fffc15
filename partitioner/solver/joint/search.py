"""A search of the joint problem: its progress, and the problem laid out for its methods."""

from __future__ import annotations

from functools import cached_property

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.placement.fleet import Fleet, fleet
from partitioner.solver.progress import Progress


class Search(Progress):
    """The progress, with layouts of the problem that are made when first needed."""

    @cached_property
    def eliminator(self) -> Eliminator:
        """The problem laid out for elimination."""
        return Eliminator(self.problem, self.work)

    @cached_property
    def fleet(self) -> Fleet | None:
        """The devices, if each is a group of its own."""
        return fleet(self.problem)
