"""The graphs of a PyTorch module by the way that it runs, and the program of a plan of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from partitioner.api.compiled.module import ModuleModel, ModuleProgram
from partitioner.api.compiled.ranks import agreement_on, plan_together
from partitioner.api.compiled.target_counts import unlike_counts
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.tried import untried
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.model import ModuleInput
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.report.findings.delivery import delivery_notes
from partitioner.report.findings.moved_each_step import moved_notes
from partitioner.report.text.profile_notes import profile_notes
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.same_in_parts import Difference, difference
from partitioner.search.outcome import Candidate, Outcome
from partitioner.search.request import Request
from partitioner.search.ways.stage_clock import StageClock


@dataclass(frozen=True)
class ModuleGraphs:
    """See `ModelGraphs`: each number of micro-batches is a trace of its own, and once."""

    opened: ModuleInput
    cluster: Cluster
    request: Request
    clock: StageClock  #: Times the traces.
    _traced: dict[int, TracedModule] = field(default_factory=dict)
    _changes: dict[int, Difference] = field(default_factory=dict)

    @property
    def pins_reach_forms(self) -> bool:
        """See `ModelGraphs.pins_reach_forms`: users name the nodes of their module."""
        return not self.request.constraints.bound

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the release of PyTorch, and on where seconds come from."""
        measured = profile_notes(self.cluster, _backend, training=self.opened.training)
        return (*filter(None, [untried()]), *measured)

    @cached_property
    def traced(self) -> TracedModule:
        """The trace of the whole batch, with the graph that is planned first."""
        with self.clock("tracing the module"):
            return _first_graph(self.opened.traced, self.request)

    @property
    def forms(self) -> tuple[Graph, ...]:
        """See `ModelGraphs.forms`; of a plan in blocks that is kept, the graph of all blocks."""
        kept = self.request.constraints.plan
        if kept is not None and kept.blocks:
            return (block_graph(self.uncut, kept.blocks),)
        return self.traced.traced.forms

    @cached_property
    def offered(self) -> Graph | None:
        """See `ModelGraphs.offered`: in training, unless the request says what is computed."""
        if not self._may_offer:
            return None
        graph = self.traced.traced.offered
        return graph if graph.optional else None

    @property
    def _may_offer(self) -> bool:
        is_open = self.request.recompute == "auto" and self.request.constraints.plan is None
        return self.opened.training and is_open

    @property
    def uncut(self) -> Graph:
        """See `ModelGraphs.uncut`."""
        return self.traced.traced.uncut

    @property
    def whole(self) -> Graph | None:
        """See `ModelGraphs.whole`: it keeps all values."""
        whole = self._whole_if_any
        return None if isinstance(whole, str) else whole.graph

    @cached_property
    def _whole_if_any(self) -> TracedModule | str:
        """The trace of the whole batch, or why it has none."""
        if 1 in self._traced:
            return self._traced[1]
        try:
            with self.clock("tracing the module"):
                return self.opened.traced
        except (BackendError, FrontendError) as error:
            return str(error)

    def batch_size(self, count: int = 1) -> int:
        """See `ModelGraphs.batch_size`."""
        return self.opened.batch_size(count)

    def even_counts(self) -> tuple[int, ...]:
        """See `ModelGraphs.even_counts`."""
        return self.opened.even_counts()

    def in_micro_batches(self, count: int) -> Graph:
        """See `ModelGraphs.in_micro_batches`."""
        return _first_graph(self._part(count), self.request).graph

    def offered_in(self, count: int) -> Graph | None:
        """See `ModelGraphs.offered_in`."""
        return self._part(count).traced.offered if self._may_offer else None

    def changes(self, count: int) -> Difference:
        """See `ModelGraphs.changes`.

        Means over targets are compared with the numbers of targets in the example inputs.
        """
        if count not in self._changes:
            self._changes[count] = self._changes_in(count)
        return self._changes[count]

    def _changes_in(self, count: int) -> Difference:
        part = self._part(count)
        assert part.micro is not None
        if part.rest is not None:
            return Difference(("the last micro-batch is smaller than the others",))
        whole = self._whole_if_any
        if isinstance(whole, str):
            return Difference((f"the whole batch has no trace: {whole}",))
        found = difference(
            whole.graph,
            part.graph,
            part.micro.split,
            tuple(filter(None, whole.traced.call.results)),
            count,
            whole.traced.call.seed,
        )
        if found.counted and (value := unlike_counts(part, found.counted)):
            node = part.graph.producers[value].name
            counts = f"{node} counts unlike numbers of targets in the micro-batches of the example"
            return replace(found, reasons=(*found.reasons, counts), redrawn=False)
        return found

    def _part(self, count: int) -> TracedModule:
        if count not in self._traced:
            with self.clock("tracing the module"):
                self._traced[count] = self.opened.in_micro_batches(count)
        return self._traced[count]

    def compiled(self, candidate: Candidate) -> ModuleProgram:
        """The program of a plan, without a summary."""
        module = self._trace_of(candidate.plan).on(candidate.graph)
        model = ModuleModel(module, self.opened.source)
        return ModuleProgram.of(model, self.cluster, candidate.plan, candidate.evaluation, {})

    def planned(self, search: Callable[[], tuple[Outcome, Mapping[str, Any]]]) -> ModuleProgram:
        """The program of the plan that a search finds; that of rank 0, if ranks plan together."""
        agreement = agreement_on(len(self.cluster))
        first = self._first(agreement)
        module, plan, evaluation, summary = plan_together(
            agreement, first, self.cluster, self.request, search, self._trace_of
        )
        model = ModuleModel(module, self.opened.source)
        devices = len(self.cluster)
        gathers = delivery_notes(model.graph, plan, evaluation, model.delivered, devices)
        notes = [*summary["notes"], *gathers, *moved_notes(model.graph, plan)]
        summary, seconds = {**summary, "notes": notes}, self.clock.seconds
        return ModuleProgram.of(model, self.cluster, plan, evaluation, summary, seconds)

    def _first(self, agreement: Agreement) -> TracedModule:
        """The trace that ranks compare before rank 0 searches."""
        with agreement.together("compile()"):
            if not self.request.is_pipelined:
                return self.traced
            count = self.request.micro_batch_count or 1
            self.batch_size(count)  # refuses one that cannot be cut
            return self._part(count)

    def _trace_of(self, plan: Plan) -> TracedModule:
        if plan.blocks:
            return self.traced.on(block_graph(self.traced.traced.uncut, plan.blocks))
        if plan.pipeline is None:
            return self.traced.of(plan.nodes)
        return self._part(plan.pipeline.micro_batches).of(plan.nodes)


def _first_graph(module: TracedModule, request: Request) -> TracedModule:
    """The module with the graph that is planned first."""
    plan = request.constraints.plan
    if plan is None:
        return module.on(module.traced.offered) if request.recompute is True else module
    same = module.of(plan.nodes)
    return same if same.graph.digest == plan.graph_digest else module


def _backend() -> str:
    from partitioner.backends.torch.measuring.timing import NAME

    return NAME
