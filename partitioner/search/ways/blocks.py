"""Runs of layers in blocks, one after the other, where the whole batch fits no plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.search.blocks.find_blocks import BlockSearch
from partitioner.search.outcome import Outcome
from partitioner.search.request import Budget, Request
from partitioner.search.ways.stage_clock import StageClock
from partitioner.search.what_would_fit import Change
from partitioner.solver import Infeasible


@dataclass
class InBlocks:
    """The plans of a graph that run stretches of it in blocks."""

    graph: Graph  #: The graph, as of `ModelGraphs.uncut`.
    cluster: Cluster
    request: Request
    clock: StageClock  #: Times the search.

    @cached_property
    def _blocks(self) -> BlockSearch:
        return BlockSearch(self.graph, self.cluster, self.request)

    def search(self, budget: Budget) -> Outcome:
        """The best plan.

        Raises:
            Infeasible: None was found that fits.
        """
        with self.clock("searching"):
            found = self._blocks.plan(budget)
        if found is None:
            searched = self._blocks.searched
            why = f"within the limit given, none in blocks was found (searched: {searched})"
            raise Infeasible(why, proven=False)
        note = "the model as a whole does not fit: parts of it run in blocks, one after the other"
        if self.graph.backward and len(self.cluster) > 1:
            space = found.candidates[0].space.name
            note += f", of which each device has its part ({space})"
        return replace(found, whole=self.graph).noted(note)

    def would_fit(self, budget: Budget, _refusal: Infeasible) -> tuple[Change, ...]:
        """A larger limit of memory within which a plan in blocks is known, but not the whole."""
        if not self._blocks.searched or budget.work.late:
            return ()
        graph, cluster = self.graph, self.cluster
        limit = self._blocks.least_limit(budget)
        device, alone = best_single(graph, cluster, self.request.objective)
        if limit is None or limit >= alone.needed_bytes[device]:
            return ()
        text = f"in blocks with --memory {limit} ({units.size(limit)})"
        return (Change(text, memory_bytes=limit),)
