"""The graphs of a PyTorch module by the way that it runs, and the program of a plan of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.api.compiled.module import ModuleModel, ModuleProgram, check_same_graph
from partitioner.api.compiled.module_ranks import rest_plan
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.errors import BackendError
from partitioner.backends.runtimes import untried
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.running.all_ranks import AllRanks
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.model import ModuleInput
from partitioner.frontends.torch.trace import TracedModule, guessed_micro_batch, sample_graph
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph, needed
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.plan import Plan
from partitioner.report.delivery import Delivery
from partitioner.report.findings.notes import moved_notes, profile_notes
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.graph_writer import GraphWriter
from partitioner.rewrites.same_in_parts import Difference, difference
from partitioner.search.outcome import Candidate, Outcome
from partitioner.search.request import Request, StageClock
from partitioner.solver.outcome import Infeasible


@dataclass(frozen=True)
class ModuleGraphs:
    """See `ModelGraphs`: each number of micro-batches is a trace of its own, and once."""

    opened: ModuleInput
    cluster: Cluster
    request: Request
    clock: StageClock  #: Times the traces.
    _traced: dict[int, TracedModule] = field(default_factory=dict)
    #: Traces of micro-batches that were guessed from others, and the numbers that were so wrongly.
    _guessed: dict[int, TracedModule] = field(default_factory=dict)
    _wrong: set[int] = field(default_factory=set)
    _changes: dict[int, Difference] = field(default_factory=dict)

    @property
    def pins_reach_forms(self) -> bool:
        """See `ModelGraphs.pins_reach_forms`: users name the nodes of their module."""
        return not self.request.constraints.bound

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the release of PyTorch, and on where seconds come from."""

        def backend() -> str:
            from partitioner.backends.torch.measuring.timing import NAME

            return NAME

        measured = profile_notes(self.cluster, backend, training=self.opened.training)
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
        """See `ModelGraphs.in_micro_batches`: it may be guessed from other traces."""
        return _first_graph(self._known_part(count), self.request).graph

    def uncut_in(self, count: int) -> Graph:
        """See `ModelGraphs.uncut_in`: blocks of one micro-batch must be those of all."""
        part = self._known_part(count)
        if part.rest is not None:
            why = (
                f"micro-batches run in blocks if all have one size: the last of {count} is smaller"
            )
            raise Infeasible(why, proven=False)
        return part.traced.uncut

    def offered_in(self, count: int) -> Graph | None:
        """See `ModelGraphs.offered_in`."""
        return self._known_part(count).traced.offered if self._may_offer else None

    def last_in(self, count: int) -> Graph | None:
        """See `ModelGraphs.last_in`."""
        rest = self._known_part(count).rest
        return None if rest is None else rest.traced.offered

    def is_there(self, count: int) -> bool:
        """See `ModelGraphs.is_there`."""
        return count == 1 or count in self._traced or self._guess(count) is not None

    def is_guessed(self, count: int) -> bool:
        """See `ModelGraphs.is_guessed`."""
        return count in self._guessed

    def confirms(self, count: int) -> bool:
        """See `ModelGraphs.confirms`: a guess is compared with a trace."""
        guess = self._guessed.pop(count, None)
        if guess is None:
            return True
        with suppress(PartitionerError):
            if self._part(count).traced.uncut.digest == guess.traced.uncut.digest:
                return True
        self._wrong.add(count)
        self._changes.pop(count, None)
        return False

    def changes(self, count: int) -> Difference:
        """See `ModelGraphs.changes`; means over targets are compared by the example's targets."""
        if count not in self._changes:
            self._changes[count] = self._changes_in(count)
        return self._changes[count]

    def _changes_in(self, count: int) -> Difference:
        part = self._known_part(count)
        assert part.micro is not None
        if part.rest is not None:
            return Difference(("the last micro-batch is smaller than the others",))
        whole = self._whole_if_any
        if isinstance(whole, str):
            return Difference((f"the whole batch has no trace: {whole}",))
        split, call, own = part.micro.split, whole.traced.call, part.traced.call
        if (own.results, own.out_spec) != (call.results, call.out_spec):
            return Difference(("the results of a micro-batch are others than the whole batch's",))
        results = tuple(filter(None, call.results))
        found = difference(whole.graph, part.graph, split, results, count, call.seed)
        fewer = [number for number in self.even_counts() if 1 < number < count]
        if found.sized and fewer and count == sum(part.micro.sizes):  # it may be traced otherwise
            known = [number for number in fewer if number in self._traced] or fewer
            graph = sample_graph(whole, self._part(known[-1]), part)
            if graph is not None:
                found = difference(whole.graph, graph, split, results, count, call.seed)
        if found.counted and (value := _unlike_counts(part, found.counted)):
            node = part.graph.producers[value].name
            counts = f"{node} counts unlike numbers of targets in the micro-batches of the example"
            return replace(found, reasons=(*found.reasons, counts), redrawn=False)
        return found

    def _known_part(self, count: int) -> TracedModule:
        guess = None if count in self._traced else self._guess(count)
        return guess or self._part(count)

    def _guess(self, count: int) -> TracedModule | None:
        """A guess, if others are known; of plans to run there is none, nor after a wrong one."""
        if self._wrong or self.request.tune is not None:
            return None
        if count not in self._guessed:
            whole = self._whole_if_any
            if isinstance(whole, str):
                return None
            for part in [part for number, part in self._traced.items() if number > 1]:
                if guess := guessed_micro_batch(whole, part, count):
                    self._guessed[count] = guess
        return self._guessed.get(count)

    def _part(self, count: int) -> TracedModule:
        if count not in self._traced:
            with self.clock("tracing the module"):
                self._traced[count] = self.opened.in_micro_batches(count)
        return self._traced[count]

    @property
    def _first(self) -> TracedModule:
        """The trace that a request begins with; a BackendError if its batch cannot be cut so."""
        if not self.request.is_pipelined:
            return self.traced
        count = self.request.micro_batch_count or 1
        self.batch_size(count)
        return self._part(count)

    @property
    def identity(self) -> tuple[str, ...]:
        """Words that differ where plans of the module and its inputs do."""
        batch = "" if not self.request.is_pipelined else str(self.batch_size())
        return ("module", self._first.graph.search_digest, batch, repr(self.opened.options))

    def graph_of(self, plan: Plan) -> Graph:
        """The graph of a plan of the module; a PartitionerError if it has none."""
        return self._trace_of(plan).graph

    def compiled(self, candidate: Candidate) -> ModuleProgram:
        """The program of a plan, without a summary."""
        module = self._trace_of(candidate.plan).on(candidate.graph)
        model = ModuleModel(module, self.opened.source)
        return ModuleProgram.of(model, self.cluster, candidate.plan, candidate.evaluation, {})

    def planned(self, search: Callable[[], tuple[Outcome, Mapping[str, Any]]]) -> ModuleProgram:
        """The program of the plan that a search finds; that of rank 0, if ranks plan together.

        Its error is raised on every rank; ranks with other models or options raise a BackendError.
        """
        devices = len(self.cluster)
        is_up = dist.is_available() and dist.is_initialized() and dist.get_world_size() == devices
        agreement = Agreement(devices if is_up else 1, searches=True)
        with agreement.together("compile()"):
            first = self._first
        module, plan, evaluation, summary = self._plan_of(agreement, first, search)
        model = ModuleModel(module, self.opened.source)
        delivery = Delivery.of(model.graph, plan, self.cluster, evaluation)
        notes = [*summary["notes"], *moved_notes(model.graph, plan)]
        facts = {"delivery": dict(vars(delivery))} if delivery else {}
        summary, seconds = {**summary, **facts, "notes": notes}, self.clock.seconds
        return ModuleProgram.of(model, self.cluster, plan, evaluation, summary, seconds)

    def _plan_of(
        self,
        agreement: Agreement,
        module: TracedModule,
        search: Callable[[], tuple[Outcome, Mapping[str, Any]]],
    ) -> tuple[TracedModule, Plan, Evaluation, Mapping[str, Any]]:
        """Rank 0's plan: this rank's trace of its graph, the plan, its figures and its facts.

        The request is compared but for its constraints, and so is the first trace.
        """
        planned: list[tuple[TracedModule, Plan, Evaluation, Mapping[str, Any]]] = []

        def make() -> str:
            outcome, summary = search()
            traced = self._trace_of(outcome.plan).on(outcome.graph)
            rest_plan(traced, outcome.plan)  # refuses what no rank could run
            planned.append((traced, outcome.plan, outcome.evaluation, summary))
            return json.dumps([outcome.plan.to_json(), summary]) if agreement.ranks > 1 else ""

        if agreement.ranks == 1:
            make()
            return planned[0]
        given = {one.name: getattr(self.request, one.name) for one in fields(self.request)}
        said = [f"{name}={value!r}" for name, value in given.items() if name != "constraints"]
        doing = f"compile({', '.join(said)}) on {self.cluster.name}"
        digest = agreement.first(lambda: module.graph.digest, doing)
        with agreement.together(doing):
            check_same_graph(agreement.rank, module.graph.digest, digest)
        text, summary = json.loads(agreement.first(make, "compile()"))
        with agreement.together("compile()"):
            if planned:
                return planned[0]
            plan = Plan.from_json(text)
            traced = self._trace_of(plan)
            check_same_graph(agreement.rank, traced.graph.digest, plan.graph_digest)
            return traced, plan, evaluate(traced.graph, plan, self.cluster), summary

    def _trace_of(self, plan: Plan) -> TracedModule:
        count = plan.micro_batches
        module = self.traced if count is None else self._part(count)
        return _in_blocks(module, plan.blocks) if plan.blocks else module.of(plan.nodes)


def _in_blocks(module: TracedModule, blocks: Blocks) -> TracedModule:
    """The module of whose graph stretches run in blocks."""
    return module.on(block_graph(module.traced.uncut, blocks))


def _first_graph(module: TracedModule, request: Request) -> TracedModule:
    """The module with the graph that is planned first."""
    plan = request.constraints.plan
    if plan is None:
        return module.on(module.traced.offered) if request.recompute is True else module
    if plan.blocks and plan.micro_batches is not None:
        return _in_blocks(module, plan.blocks)
    same = module.of(plan.nodes)
    return same if same.graph.digest == plan.graph_digest else module


def _unlike_counts(module: TracedModule, values: Sequence[str]) -> str | None:
    """The first of these scalars that differs between micro-batches of the example inputs.

    A mean over the targets that are not ignored divides by such a value. What does not follow
    from the inputs alone is not compared; nothing is if the example inputs have no contents.
    """
    inputs = dict(zip(module.signature.inputs, module.signature.example, strict=True))
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if any(isinstance(value, FakeTensor) or value.is_meta for value in given.values()):
        return None
    assert module.micro is not None
    parts = module.micro.parts(given)
    for value in values:
        writer = GraphWriter(source=module.graph, nodes=needed(module.graph.nodes, (value,)))
        read = {each for node in writer.nodes for each in node.reads}
        names = tuple(name for name in module.graph.inputs if name in read)
        counting = writer.graph((), inputs=names, outputs=(value,))
        if not {*counting.inputs} <= given.keys():
            continue
        ranks = AllRanks(uncut_programs(counting, deliver_all=True), counting)
        reads, counts = counting.inputs, set()
        for part in parts:
            results = ranks.step({name: part[name].cpu() for name in reads}, {}).results
            counts.add(float(results[value]))
        if len(counts) > 1:
            return value
    return None
