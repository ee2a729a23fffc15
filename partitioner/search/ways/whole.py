"""The whole batch: at once, with offers to compute again if memory binds, or parts in blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.search.blocks.find_blocks import PARTS_IN_BLOCKS, BlockSearch
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import NoCheaper, Outcome, stopped_refusal
from partitioner.search.request import Budget, Request, StageClock
from partitioner.search.spaces.one_device import shortage
from partitioner.search.ways.way import Change
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.derive import Rules

#: With offers, the search of the graph without them may take one such part of the steps, and that
#: with them one such part of the rest: what is left is for going on with the first.
FIRST_PART, OFFERS_PART = 1.5, 2
#: The part of the seconds that the search without offers may take where memory may forbid plans.
FIRST_CLOCK = 2
#: What is said of a plan of a graph that was not searched with its offers.
KEEPS_ALL = "plans that keep all values for the backward pass"


@dataclass(frozen=True)
class WholeBatch:
    """The plans of a form of a graph."""

    graph: Graph  #: The form.
    cluster: Cluster
    request: Request  #: The request; called after `Request.over`.
    clock: StageClock  #: Times the stages.
    #: Gives the graph that offers to compute values again, or None; called where no plan of `graph`
    #: fits or memory forbids a cheaper one. None if nothing may be offered.
    offers: Callable[[], Graph | None] | None = None
    #: The graph of the whole batch that one device would run; None for `graph`.
    at_once: Graph | None = None

    def search(self, budget: Budget) -> Outcome:
        """The best plan, of the graph or of that with offers.

        Raises:
            PartitionerError: As `find_plan`.
        """
        request = self.request.on(self.graph)
        with self.clock("deriving strategies"):
            rules = Rules.of(self.graph)
        with self.clock("searching"):
            outcome = None
            try:
                if self.offers is not None:
                    outcome = self._with_offers(rules, request, budget)
                if outcome is None:
                    outcome = find_plan(self.graph, self.cluster, request, budget, rules)
            except Infeasible as error:
                raise stopped_refusal(error, budget.work) from None
        return self._named(outcome, request)

    def _named(self, outcome: Outcome, request: Request) -> Outcome:
        """An outcome with its request, and with the name of what was searched."""
        more = outcome.more

        def go_on(budget: Budget) -> Outcome:
            assert more is not None
            with self.clock("searching"):
                return self._named(more(budget), request)

        if self.offers is not None and outcome.of is self.graph:
            outcome = outcome.certified(space=f"{outcome.certificate.space}: {KEEPS_ALL}")
        return replace(
            outcome,
            whole=self.at_once or self.graph,
            request=outcome.request or request,
            more=None if more is None else go_on,
        )

    def _with_offers(self, rules: Rules, request: Request, budget: Budget) -> Outcome | None:
        """The better plan of the graph and of the same graph with offers, where memory binds.

        Where the offers gain nothing, the search of the graph, which was cut short, has the work
        that is left. None if there are no offers.
        """
        assert self.offers is not None
        outcome, note = None, "no plan that keeps all values for the backward pass was found to fit"
        one, all_ = shortage(self.graph, self.cluster)
        graph = self.offers() if all_ else None
        if graph is None:
            work = budget.work.share(FIRST_PART).of_the_clock(FIRST_CLOCK if one else 1)
            first = replace(budget, work=work, defers_memory=True)
            with suppress(Infeasible):
                outcome = find_plan(self.graph, self.cluster, request, first, rules)
            if outcome is not None and not outcome.memory_binds:
                # the seconds that were for offers are for the spaces that it did not reach
                more = outcome.more if work.stopped and not budget.work.late else None
                return outcome if more is None else more(budget)
            if outcome is not None:
                note = "memory forbids the cheapest plan that keeps all values"
            graph = self.offers()
            if graph is None:
                return None if outcome is None else self._in_full(outcome, rules, budget)
        budget.say("allowing values to be computed again")
        request = self.request.on(graph)
        if outcome is None:
            return find_plan(graph, self.cluster, request, budget).noted(note)
        best = outcome.evaluation.cost(request.objective)
        cheaper = None
        if not budget.work.over:
            with suppress(Infeasible, NoCheaper):
                share = replace(budget.share(OFFERS_PART), best_s=best)
                cheaper = find_plan(graph, self.cluster, request, share)
        if cheaper is not None and cheaper.evaluation.cost(request.objective) < best:
            return cheaper.noted(note)
        if budget.work.late:
            return outcome.stopped().noted(note)
        return self._in_full(outcome, rules, budget)

    def _in_full(self, known: Outcome, rules: Rules, budget: Budget) -> Outcome:
        """The best plan of the graph, of which a search that was cut short has found one."""
        with suppress(Infeasible, NoCheaper):
            return find_plan(self.graph, self.cluster, self.request.on(self.graph), budget, rules)
        return known


@dataclass
class InBlocks:
    """The plans of a graph that run stretches of it in blocks."""

    graph: Graph  #: The graph, as of `ModelGraphs.uncut`.
    cluster: Cluster
    request: Request
    clock: StageClock  #: Times the search.

    @cached_property
    def _blocks(self) -> BlockSearch:
        """The search; nodes of a training that are placed whole lie in stages of one device."""
        placed = bool(self.graph.backward) and self.request.strategy == "inter"
        if placed and len(self.cluster) > 1:
            return BlockSearch(self.graph, self.cluster, self.request, 1, (1,))
        return BlockSearch(self.graph, self.cluster, self.request)

    def search(self, budget: Budget) -> Outcome:
        """The best plan."""
        with self.clock("searching"):
            found = self._blocks.plan(budget)
        if found is None:
            searched = self._blocks.searched
            why = f"within the limit given, none in blocks was found (searched: {searched})"
            raise Infeasible(why, proven=False)
        note = f"the model as a whole does not fit: {PARTS_IN_BLOCKS}"
        if self.graph.backward and len(self.cluster) > 1 and not found.plan.pipeline:
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
