"""The graphs of an ONNX model by the way that it runs, and what is compiled of a plan of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.frontends.model import OnnxInput
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.report.findings.notes import border_notes, profile_notes
from partitioner.rewrites.micro_batch_graph import batch_size, even_counts
from partitioner.rewrites.same_in_parts import Difference
from partitioner.search.outcome import Candidate, Outcome
from partitioner.search.request import Request
from partitioner.search.ways.stage_clock import StageClock


@dataclass(frozen=True)
class OnnxGraphs:
    """See `ModelGraphs`: micro-batches are cut from the graph, and are proven to compute the same.

    Attributes:
        clock: Times what is read and made.
    """

    opened: OnnxInput
    cluster: Cluster
    request: Request
    clock: StageClock
    _parts: dict[int, OnnxModel] = field(default_factory=dict)
    pins_reach_forms = True

    @cached_property
    def model(self) -> OnnxModel:
        """The model that runs as a whole, in the form of the plan that is kept, if one is."""
        opened = self.opened
        with self.clock("reading the model"):
            model = OnnxModel.of(opened.model, opened.traced, opened.dims, opened.shapes)
        kept = self.request.constraints.plan
        return model if kept is None else model.of_form(kept.graph_digest)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the front end, and on where seconds come from."""
        measured = profile_notes(self.cluster, _backend, measures_gpus=False)
        return (*self.model.traced.notes, *measured, *border_notes(self.cluster))

    @cached_property
    def forms(self) -> tuple[Graph, ...]:
        """See `ModelGraphs.forms`; of a plan in blocks that is kept, the graph of all blocks."""
        kept = self.request.constraints.plan
        if kept is not None and kept.blocks:
            return (self.model.in_blocks(kept.blocks).graph,)
        return tuple(form.graph for form in self.model.forms)

    @property
    def offered(self) -> None:
        """See `ModelGraphs.offered`: inference computes nothing again."""
        return

    @property
    def uncut(self) -> Graph:
        """See `ModelGraphs.uncut`."""
        return self.model.graph

    @property
    def whole(self) -> Graph:
        """See `ModelGraphs.whole`."""
        return self.model.graph

    def batch_size(self, count: int = 1) -> int:  # noqa: ARG002 - any number is cut or refused later
        """See `ModelGraphs.batch_size`."""
        return batch_size(self.model.graph)

    def even_counts(self) -> tuple[int, ...]:
        """See `ModelGraphs.even_counts`."""
        return even_counts(self.model.graph)

    def in_micro_batches(self, count: int) -> Graph:
        """See `ModelGraphs.in_micro_batches`."""
        return self._part(count).graph

    def offered_in(self, count: int) -> None:
        """See `ModelGraphs.offered_in`."""

    def changes(self, count: int) -> Difference:
        """See `ModelGraphs.changes`: there are no micro-batches but those that change nothing."""
        self._part(count)
        return Difference(())

    def _part(self, count: int) -> OnnxModel:
        if count not in self._parts:
            with self.clock("cutting the batch"):
                self._parts[count] = self.model.in_micro_batches(count)
        return self._parts[count]

    def compiled(self, candidate: Candidate) -> Compiled:
        """The program of a plan, without a summary."""
        model = self._model_of(candidate.plan, candidate.graph)
        return Compiled.of(model, self.cluster, candidate.plan, candidate.evaluation, {})

    def planned(self, search: Callable[[], tuple[Outcome, Mapping[str, Any]]]) -> Compiled:
        """The program of the plan that a search finds."""
        outcome, summary = search()
        model = self._model_of(outcome.plan, outcome.graph)
        figures, seconds = outcome.evaluation, self.clock.seconds
        return Compiled.of(model, self.cluster, outcome.plan, figures, summary, seconds)

    def _model_of(self, plan: Plan, graph: Graph) -> OnnxModel:
        if plan.micro_batches is not None:
            return self._part(plan.micro_batches).of_form(graph.digest)
        return self.model.in_blocks(plan.blocks).of_form(graph.digest)


def _backend() -> str:
    from partitioner.backends.onnx.measuring.timing import NAME

    return NAME
