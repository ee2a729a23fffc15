"""`compile` plans a model and lowers the plan to programs; `dump_problem` writes its problem."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from typing_extensions import Unpack

from partitioner import units
from partitioner.backends.torch.tried import untried
from partitioner.compiled.base import Compiled
from partitioner.compiled.onnx_model import OnnxModel
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.cost_model.prices.compute import Sources
from partitioner.files import check_file, refuse_to_replace
from partitioner.frontends.model import ModuleInput, OnnxInput
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.plan import Plan, resolve
from partitioner.no_gc import no_collection
from partitioner.option_table import CompileOptions, DumpOptions
from partitioner.options import open_with, processes, request_of, takes, target_cluster
from partitioner.problem.dump import Dump, write_problem
from partitioner.report.delivery import delivery_notes
from partitioner.report.moved_each_step import moved_notes
from partitioner.report.one_device import OneDevice
from partitioner.report.spaces import space_facts
from partitioner.report.summary import facts
from partitioner.report.text.profile_notes import border_notes, profile_notes
from partitioner.report.whole_machine import whole_machine_notes
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.micro_batch_graph import batch_size, even_counts
from partitioner.rewrites.same_in_parts import Difference, difference
from partitioner.search.blocks.paths import (
    Prices,
    Unfit,
    least_limit,
    plan_in_blocks,
    why_not_in_blocks,
)
from partitioner.search.find_plan import find_plan
from partitioner.search.limits import EXPLICIT, MOST_EXPLICIT
from partitioner.search.outcome import Candidate, NoCheaper, Outcome, stopped_refusal
from partitioner.search.request import Budget, Request, Say, silent
from partitioner.search.spaces.explicit import first_problem
from partitioner.search.stages.micro_batch_counts import CountSearch, Graphs, Trial, usual_trials
from partitioner.search.stages.pipelines import over_counts
from partitioner.search.what_would_fit import relaxed
from partitioner.solver import Infeasible, Objective
from partitioner.solver.compiling import COMPILATION
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import forms, parallel_notes
from partitioner.strategies.spaces import SearchError, check_space, families
from partitioner.tuning import Compile, check_tunable, tuned, tuning_notes

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.compiled.module import ModuleProgram
    from partitioner.frontends.torch.trace import TracedModule

#: With offers, the search of the graph without them may take one such part of the steps, and that
#: with them one such part of the rest: what is left is for going on with the first.
FIRST_PART, OFFERS_PART = 1.5, 2
#: Seconds to look for the memory in which a model fits in blocks; never more than the request's.
MORE_S = 8.0
#: Gives a graph that offers to compute values of the forward pass again, with the request for
#: it; None if nothing can be offered.
Offers = Callable[[], tuple[Graph, Request] | None]


@overload
def compile(  # noqa: A001 - the public name
    model: nn.Module,
    example_inputs: Any,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> ModuleProgram: ...


@overload
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto,
    example_inputs: None = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled: ...


@takes(CompileOptions)
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled | ModuleProgram:
    """Plan a model over devices and lower the plan to one program a rank.

    Args:
        model: Path of an ONNX file, the ONNX model itself, or a PyTorch module. A module's weights
            may be fake, or on the meta device: it is planned without them. Also a module's
            exported program ("model.pt2"), or "package.module:factory": a function, which is
            called, and returns the module and its example inputs.
        example_inputs: For a module itself: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments.
        devices: Number of devices (default: the cluster's; without one the number of processes of
            torch.distributed or torchrun, or 1).
        **options: As the fields of `CompileOptions` are described.

    Returns:
        The compiled model. A module gives a `ModuleProgram`, which is called like the module, and
        whose `.module()` is each rank's part under torchrun. A path or an ONNX model gives a
        `Compiled`, which for a ".pt2" file or a factory is a `ModuleProgram` as well. Once
        torch.distributed is initialised with as many processes as the plan has devices, all
        processes compile a module together: each traces it, process 0 searches.

    Raises:
        PartitionerError: The model or the constraints are wrong; `OptionError` for an option that
            has no meaning or contradicts another, `Infeasible` if no plan fits the devices' memory.
            Processes that compile together all raise.

    Examples:
        >>> import partitioner
        >>> result = partitioner.compile("resnet50.onnx", devices=4)  # doctest: +SKIP
        >>> result.show()  # doctest: +SKIP
        >>> result.save("resnet50.partition")  # doctest: +SKIP
    """
    clock = Clock(options.get("progress") or silent)
    cluster, request = check_options(devices, options)
    opened = open_with(model, example_inputs, options)
    if request.tune is not None:
        if options.get("plan_only"):
            raise OptionError("tune runs the plans, which needs the weights: leave plan_only out")
        check_tunable(cluster, is_module=isinstance(opened, ModuleInput))
    cluster = cluster.for_backend(in_sessions=isinstance(opened, OnnxInput))
    if isinstance(opened, ModuleInput):
        if request.is_pipelined:
            return _compile_in_stages(opened, cluster, request, clock)
        return _compile_module(opened, cluster, request, clock)
    return _compile_onnx(opened, cluster, request, clock)


def check_options(devices: int | None, options: Mapping[str, Any]) -> tuple[Cluster, Request]:
    """The devices and the request of the options of `compile`; no model is read.

    Raises:
        PartitionerError: As `compile`, of options that have no meaning with any model.
    """
    cluster = target_cluster(options, devices, processes())
    request = request_of(options)
    _check_pipeline(request, options)
    _check_kept(request)
    check_space(request.strategy, len(cluster), request.mesh)
    ModuleOptions(options.get("training", False), options.get("optimizer", "adamw"))
    if request.tune is not None:
        check_tunable(cluster, is_module=False)
    return cluster, request


def _compile_onnx(opened: OnnxInput, cluster: Cluster, request: Request, clock: Clock) -> Compiled:
    with clock("reading the model"):
        traced = opened.traced
    onnx_model = OnnxModel.of(opened.model, traced, opened.dims, opened.shapes)
    if request.constraints.plan is not None:
        onnx_model = onnx_model.of_form(request.constraints.plan.graph_digest)
    notes = (
        *traced.notes,
        *profile_notes(cluster, _onnx_backend, measures_gpus=False),
        *border_notes(cluster),
    )
    parts = _OnnxParts(onnx_model, notes, cluster, request, clock)
    if request.is_pipelined:
        outcome, summary = parts.best()
    elif request.micro_batches == "auto":
        outcome, summary = _whole_or_in_parts(parts)
    else:
        outcome, summary = _plan_onnx(onnx_model, notes, cluster, request, clock)
    model = parts.of(outcome.plan).of_form(outcome.graph.digest)
    result = Compiled.of(
        *(model, cluster, outcome.plan, outcome.evaluation), *(summary, clock.seconds)
    )
    _lower(result, clock)
    return result


def _plan_onnx(
    onnx_model: OnnxModel,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
) -> tuple[Outcome, dict[str, Any]]:
    """The best plan of requests that run as a whole."""

    def compiled(candidate: Candidate) -> Compiled:
        model = onnx_model.of_form(candidate.graph.digest)
        return Compiled.of(model, cluster, candidate.plan, candidate.evaluation, {})

    spaces = request.over(len(cluster))

    def plan_form(graph: Graph) -> tuple[Outcome, dict[str, Any]]:
        own = spaces.on(graph)
        return plan_graph(graph, notes, cluster, own, clock, compiled=compiled, fuses=True)

    graph = onnx_model.graph
    known = _known(tuple(form.graph for form in onnx_model.forms), cluster, request)
    graphs = forms(request.parallel, known, spaces.mesh, free=True)
    planned = _cheapest_form(graphs, plan_form, request.objective)
    if not isinstance(planned, Infeasible):
        return planned
    request = spaces.on(graph)
    smaller = _plan_in_blocks(graph, notes, cluster, request, clock, fuses=True)
    if isinstance(smaller, tuple):
        return smaller
    clock.say("looking for what would fit")
    raise smaller.added_to(relaxed(planned, graph, cluster, request, Rules.of(graph)))


@dataclass(frozen=True)
class _NotInBlocks:
    """A search in blocks that has found no plan, or was none.

    Attributes:
        why: What was searched, or what of the request stands against it, as a clause.
        ways: Changes of the request under which a plan in parts is known.
    """

    why: str
    ways: tuple[str, ...] = ()

    def added_to(self, refusal: Infeasible) -> Infeasible:
        """A refusal that says it too."""
        refusal = reduce(_also_fits, self.ways, refusal)
        return Infeasible(f"{refusal}; {self.why}", **vars(refusal))


def _plan_in_blocks(
    graph: Graph,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
    *,
    fuses: bool,
) -> tuple[Outcome, dict[str, Any]] | _NotInBlocks:
    """The best plan in blocks of a graph that fits no plan as a whole, with its facts."""
    if why := why_not_in_blocks(graph, cluster, request):
        return _NotInBlocks(f"blocks are not searched with {why}")
    prices = Prices()
    with clock("searching"):
        outcome = plan_in_blocks(graph, cluster, request, Budget.of(request, clock.say), prices)
    if isinstance(outcome, Unfit):
        quick = replace(request, time_limit_s=min(MORE_S, request.time_limit_s))
        quickly = Budget.of(quick, clock.say)
        limit = least_limit(graph, cluster, request, quickly, prices, outcome)
        whole = OneDevice.best(cluster, request.objective, (graph, None)).held_bytes
        why = f"within the limit given, none in blocks was found (searched: {outcome.searched})"
        if limit is None or limit >= whole:
            return _NotInBlocks(why)
        return _NotInBlocks(why, (f"in blocks with --memory {limit} ({units.size(limit)})",))
    note = "the model as a whole does not fit: parts of it run in blocks, one after the other"
    kind: tuple[str, ...] = ()
    ruled = graph  # blocks placed whole have operators for parts that need no rule
    if graph.backward and len(cluster) > 1:
        ruled = outcome.graph
        note += f", of which each device has its part ({outcome.candidates[0].space.name})"
        kind = parallel_notes(request.parallel, outcome.graph, outcome.plan, request.mesh)
    objective = request.objective
    with no_collection():
        single = OneDevice.best(cluster, objective, (graph, None))
        cost = outcome.evaluation.cost(objective)
        sources = _sources(outcome, cluster)
        alone = whole_machine_notes(graph, cluster, cost, sources, objective, fuses=fuses)
    opaque = _opaque_notes(Rules.of(ruled))
    return outcome, facts(
        *(outcome, single, len(cluster), (note, *notes, *kind, *opaque, *alone)),
        rules=rules_of(outcome.graph),
        sources=sources,
        spaces=space_facts(outcome, cluster, single),
        constraints=request.constraints,
    )


@dataclass(frozen=True)
class _OnnxParts:
    """An ONNX model whose requests run in micro-batches, once for each number of them."""

    whole: OnnxModel
    notes: tuple[str, ...]
    cluster: Cluster
    request: Request
    clock: Clock
    _models: dict[int, OnnxModel] = field(default_factory=dict)

    def __getitem__(self, count: int) -> OnnxModel:
        if count not in self._models:
            self._models[count] = self.whole.in_micro_batches(count)
        return self._models[count]

    def of(self, plan: Plan) -> OnnxModel:
        """The model with the graph of a plan."""
        if plan.micro_batches is not None:
            return self[plan.micro_batches]
        return self.whole.in_blocks(plan.blocks)

    def graphs(self, count: int) -> Iterator[Graph]:
        """The graph of a micro-batch."""
        yield self[count].graph

    def best(self, *, least: int = 1) -> tuple[Outcome, dict[str, Any]]:
        """The best plan in micro-batches: so many as are asked for, or several numbers from least.

        Raises:
            OptionError: The model does not run in so many.
            Infeasible: No plan fits.
        """
        graph = self.whole.graph
        with self.clock("cutting the batch"):
            batch = batch_size(graph)
            trials = usual_trials(batch, self.cluster, self.request)
            trials = tuple(t for t in trials if t.count >= least) or (Trial(batch),)
            for trial in trials:
                self[trial.count]
        with self.clock("searching"):
            outcome = plan_in_stages(
                trials, even_counts(graph), self.graphs, self.cluster, self.request, self.clock
            )
        outcome, run_notes = _tuned(outcome, self._compiled, self.request, self.cluster, self.clock)
        return outcome, self.facts(outcome, run_notes)

    def _compiled(self, candidate: Candidate) -> Compiled:
        model = self.of(candidate.plan).of_form(candidate.graph.digest)
        return Compiled.of(model, self.cluster, candidate.plan, candidate.evaluation, {})

    def facts(self, outcome: Outcome, run_notes: tuple[str, ...] = ()) -> dict[str, Any]:
        """The facts of a plan in micro-batches, beside those of the whole batch on one device."""
        graph, objective = self.whole.graph, self.request.objective
        cost = outcome.evaluation.cost(objective)
        with no_collection():
            sources = _sources(outcome, self.cluster)
            alone = whole_machine_notes(graph, self.cluster, cost, sources, objective, fuses=True)
        notes = (*self.notes, *run_notes, *alone)
        return _facts_in_parts(outcome, notes, self.graphs, self.cluster, self.request, graph)


def _whole_or_in_parts(parts: _OnnxParts) -> tuple[Outcome, dict[str, Any]]:
    """The better of the plans of requests as a whole and in micro-batches.

    Raises:
        Infeasible: Neither fits.
    """
    request = replace(parts.request, time_limit_s=parts.request.time_limit_s / 2)
    whole = refusal = None
    try:
        whole = _plan_onnx(
            *(parts.whole, parts.notes, parts.cluster),
            *(replace(request, micro_batches=None), parts.clock),
        )
    except Infeasible as error:
        refusal = error
    try:
        cut = replace(parts, request=request).best(least=2)
    except (OptionError, Infeasible) as error:
        if whole is None:
            assert refusal is not None
            raise refusal from None
        outcome, summary = whole
        return outcome, {**summary, "notes": [*summary["notes"], f"not in micro-batches: {error}"]}
    if whole is None:
        return cut
    objective = request.objective
    costs = [outcome.evaluation.cost(objective) for outcome, _ in (whole, cut)]
    count = cut[0].plan.micro_batches
    assert count is not None
    tried = {0: whole[0], count: cut[0]}
    if costs[1] < costs[0]:
        outcome = over_counts(tried, count, request.gap)
        return outcome, parts.facts(outcome)
    outcome, summary = over_counts(tried, 0, request.gap), whole[1]
    certificate = outcome.plan.certificate
    assert certificate is not None
    note = (
        f"not in micro-batches: {units.seconds(cut[0].evaluation.step_s)} a request in {count} of "
        "them"
    )
    return outcome, {
        **summary,
        "bound": certificate.bound,
        "gap": certificate.gap,
        "status": certificate.status,
        "searched": certificate.space,
        "notes": [*summary["notes"], note],
    }


def _cheapest_form(
    graphs: Iterable[Graph],
    plan_form: Callable[[Graph], tuple[Outcome, dict[str, Any]]],
    objective: Objective,
) -> tuple[Outcome, dict[str, Any]] | Infeasible:
    """The plan of least cost among those of the forms of a graph, or why the first has none.

    Raises:
        ConstraintError: The constraints fit no form; of the first one.
    """
    plans, refusals = list[tuple[Outcome, dict[str, Any]]](), list[Infeasible | ConstraintError]()
    for graph in graphs:
        try:
            plans.append(plan_form(graph))
        except (Infeasible, ConstraintError) as error:
            refusals.append(error)
    if not plans:
        if isinstance(refusals[0], ConstraintError):
            raise refusals[0]
        return refusals[0]
    return min(plans, key=lambda plan: plan[0].evaluation.cost(objective))


def _known(graphs: tuple[Graph, ...], cluster: Cluster, request: Request) -> tuple[Graph, ...]:
    """The forms of a graph that may be planned: the first one alone on one device, or by a plan."""
    return graphs if len(cluster) > 1 and request.constraints.plan is None else graphs[:1]


def _compile_module(
    opened: ModuleInput, cluster: Cluster, request: Request, clock: Clock
) -> ModuleProgram:
    from partitioner.compiled.module import ModuleModel, ModuleProgram
    from partitioner.compiled.ranks import agreement_on, plan_together

    spaces = request.over(len(cluster))
    with clock("tracing the module"):
        agreement = agreement_on(len(cluster))
        with agreement.together("compile()"):
            traced = _first_graph(opened.traced, request)
    parts = _Parts(opened, request, clock)

    def offers() -> tuple[Graph, Request] | None:
        graph = traced.traced.offered
        return (graph, spaces.on(graph)) if graph.optional else None

    def compiled(candidate: Candidate) -> ModuleProgram:
        model = ModuleModel(traced.on(candidate.graph), opened.source)
        return ModuleProgram.of(model, cluster, candidate.plan, candidate.evaluation, {})

    may_offer = opened.training and request.recompute == "auto" and request.constraints.plan is None
    offered = offers if may_offer else None

    def search() -> tuple[Outcome, dict[str, Any]]:
        notes = (
            *filter(None, [untried()]),
            *profile_notes(cluster, _torch_backend, training=opened.training),
        )
        known = _known(traced.traced.forms, cluster, request)
        free = not request.constraints.bound
        graphs = forms(request.parallel, known, spaces.mesh, free=free)

        def plan_form(graph: Graph) -> tuple[Outcome, dict[str, Any]]:
            own, may = spaces.on(graph), offered if graph is traced.graph else None
            return plan_graph(
                *(graph, notes, cluster, own, clock, may), compiled=compiled, fuses=False
            )

        planned = _cheapest_form(graphs, plan_form, request.objective)
        if not isinstance(planned, Infeasible):
            return _or_in_stages(planned, parts, notes, cluster, request, clock)
        if traced.graph not in graphs:
            raise planned
        smaller = _plan_in_parts_or_blocks(traced, parts, notes, cluster, request, clock)
        if isinstance(smaller, tuple):
            return smaller
        clock.say("looking for what would fit")
        graph, own = (offered and offered()) or (traced.graph, spaces.on(traced.graph))
        raise smaller.added_to(relaxed(planned, graph, cluster, own, Rules.of(graph)))

    def own_trace(plan: Plan) -> TracedModule:
        if plan.blocks:
            return traced.on(block_graph(traced.traced.uncut, plan.blocks))
        return traced.of(plan.nodes) if plan.pipeline is None else parts.of(plan)

    module, plan, evaluation, summary = plan_together(
        agreement, traced, cluster, request, search, own_trace
    )
    model = ModuleModel(module, opened.source)
    gathers = delivery_notes(model.graph, plan, evaluation, model.delivered, len(cluster))
    moved = moved_notes(model.graph, plan)
    summary = {**summary, "notes": [*summary["notes"], *gathers, *moved]}
    program = ModuleProgram.of(model, cluster, plan, evaluation, summary, clock.seconds)
    _lower(program, clock)
    return program


@dataclass(frozen=True)
class _Parts:
    """A module as traced with one of some micro-batches, once for each number of them."""

    opened: ModuleInput
    request: Request
    clock: Clock
    _traced: dict[int, TracedModule] = field(default_factory=dict)
    _changes: dict[int, Difference] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, count: int) -> TracedModule:
        if count not in self._traced:
            with self.clock("tracing the module"):
                self._traced[count] = self.opened.in_micro_batches(count)
        return self._traced[count]

    def of(self, plan: Plan) -> TracedModule:
        """The trace with the graph of a plan in micro-batches."""
        assert plan.pipeline is not None
        return self[plan.pipeline.micro_batches].of(plan.nodes)

    @property
    def whole_if_any(self) -> TracedModule | str:
        """The trace with the whole batch, or why it has none."""
        from partitioner.backends.errors import BackendError
        from partitioner.frontends.errors import FrontendError

        if 1 in self._traced:
            return self._traced[1]
        try:
            return self.opened.traced
        except (BackendError, FrontendError) as error:
            return str(error)

    @property
    def whole_graph(self) -> Graph | None:
        """The graph of the whole batch, which keeps all values; None if it has none."""
        with self.clock("tracing the module"):
            whole = self.whole_if_any
        return None if isinstance(whole, str) else whole.graph

    def changes(self, count: int) -> Difference:
        """Compare a step in so many micro-batches with the whole batch.

        Means over targets are compared with the numbers of targets in the example inputs.
        """
        if count not in self._changes:
            self._changes[count] = self._changes_in(count)
        return self._changes[count]

    def _changes_in(self, count: int) -> Difference:
        from partitioner.compiled.target_counts import unlike_counts

        part = self[count]
        assert part.micro is not None
        if part.rest is not None:
            return Difference(("the last micro-batch is smaller than the others",))
        with self.clock("tracing the module"):
            whole = self.whole_if_any
        if isinstance(whole, str):
            return Difference((f"the whole batch has no trace: {whole}",))
        found = difference(
            whole.graph,
            part.graph,
            part.micro.split,
            tuple(filter(None, whole.traced.results)),
            count,
            whole.traced.seed,
        )
        if found.counted and (value := unlike_counts(part, found.counted)):
            node = part.graph.producers[value].name
            counts = f"{node} counts unlike numbers of targets in the micro-batches of the example"
            return replace(found, reasons=(*found.reasons, counts), redrawn=False)
        return found

    def why_not(self, count: int) -> str:
        """Why a step in so many micro-batches is not taken without being asked for; "" if it is.

        It is taken if it is proven to compute what the whole batch does, but for other random
        numbers.
        """
        from partitioner.backends.errors import BackendError
        from partitioner.frontends.errors import FrontendError

        if count == 1:
            return ""
        try:
            changes = self.changes(count)
        except (BackendError, FrontendError) as error:
            return str(error)
        return "" if changes.redrawn else next(iter(changes.reasons), "")

    def proven(self, count: int) -> Iterator[Graph]:
        """The graphs, if a step in so many micro-batches computes what the whole batch does.

        Raises:
            ConstraintError: It is not proven to.
        """
        why = self._refused.setdefault(count, self.why_not(count))
        if why:
            raise ConstraintError(self.left_out)
        yield from self.graphs(count)

    @property
    def left_out(self) -> str:
        """The numbers of micro-batches that were refused for what they change, as a sentence."""
        refused = {count: why for count, why in sorted(self._refused.items()) if why}
        if not refused:
            return ""
        *most, last = map(str, refused)
        counts = f"{', '.join(most)} or {last}" if most else last
        return (
            f"not in {counts} micro-batches, which are not proven to compute what the whole batch "
            f"does: {next(iter(refused.values()))}; give micro_batches=N for N of them all the same"
        )

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """Say what a plan in micro-batches computes otherwise, and which numbers were left out."""
        count = plan.micro_batches
        assert count is not None
        left_out = (self.left_out,) if self.left_out else ()
        if count == 1:
            return left_out
        changes = self.changes(count)
        if changes.reasons and not changes.redrawn:
            why = "; ".join(changes.reasons)
            note = f"results are not proven to be those of the whole batch: {why}"
            return (f"in {count} micro-batches {note}", *left_out)
        if changes.reasons or changes.counted:
            return (f"in {count} micro-batches {_effect(changes)}", *left_out)
        return left_out

    def graphs_if_any(self, count: int) -> Iterator[Graph]:
        """The graphs, if there are any.

        Raises:
            Infeasible: The module has no such micro-batches: a batch norm of one sample, a result
                that is of no micro-batch.
        """
        from partitioner.backends.errors import BackendError
        from partitioner.frontends.errors import FrontendError

        try:
            self[count]
        except (BackendError, FrontendError) as error:
            raise Infeasible(str(error)) from None
        yield from self.graphs(count)

    def graphs(self, count: int) -> Iterator[Graph]:
        """The graph that is planned first, and that with offers where those are for later."""
        yield _first_graph(self[count], self.request).graph
        if self.opened.training and self.request.recompute == "auto":
            yield self[count].traced.offered


def _plan_in_parts_or_blocks(
    whole: TracedModule,
    parts: _Parts,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
) -> tuple[Outcome, dict[str, Any]] | _NotInBlocks:
    """The best plan in micro-batches or, if there is none, in blocks; else what would fit."""
    in_parts = _plan_in_parts(whole, parts, notes, cluster, request, clock)
    if isinstance(in_parts, tuple):
        return in_parts
    graph = whole.traced.uncut
    in_blocks = _plan_in_blocks(graph, notes, cluster, request, clock, fuses=False)
    if isinstance(in_blocks, tuple):
        return in_blocks
    return replace(in_blocks, ways=(in_parts, *in_blocks.ways))


def _plan_in_parts(
    whole: TracedModule,
    parts: _Parts,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
) -> tuple[Outcome, dict[str, Any]] | str:
    """The best plan of a batch that runs in micro-batches, as the whole fits no plan.

    All devices make one mesh or, if nothing fits it and the request leaves it open, stages.

    Returns:
        The outcome and its facts, if the module is proven to compute the same, or the request
        allows what it computes otherwise. Else a sentence that names the micro-batches that would
        fit; "" if none are known to.
    """
    from partitioner.backends.errors import BackendError

    memory = sum(device.memory_bytes for device in cluster.devices)
    if not request.may_run_in_parts or kept_bytes(whole.graph) > memory:
        return ""
    outcome = None
    with clock("searching micro-batches"):
        try:
            counts = parts.opened.even_counts()
        except BackendError:  # there is no batch
            return ""
        for sizes in request.sizes_in_parts(len(cluster)):
            budget = Budget.of(request, clock.say)
            search = CountSearch(parts.graphs_if_any, cluster, request, budget, sizes)
            in_stages = sizes != (len(cluster),)  # each holds its weights alone: 1 may fit
            outcome = outcome or search.fewest((1, *counts) if in_stages else counts)
    if outcome is None:
        return ""
    micro = parts.of(outcome.plan)
    assert micro.micro is not None
    count = micro.micro.count
    if count == 1:
        note = f"no plan without stages was found to fit: it runs{_through_stages(outcome.plan)}"
        return outcome, _facts_in_parts(
            outcome, (note, *notes), parts.graphs, cluster, request, whole.graph
        )
    changes = parts.changes(count)
    if changes.reasons and request.micro_batches != "auto":
        return f"{_fitting(outcome)}, which changes the results: {changes.reasons[0]}"
    added = ", whose gradients are added up" if parts.opened.training else ""
    note = (
        "no plan of the whole batch was found to fit: it runs in "
        f"{count} micro-batches{_through_stages(outcome.plan)}{added}; {_effect(changes)}"
    )
    return outcome, _facts_in_parts(
        outcome, (note, *notes), parts.graphs, cluster, request, whole.graph
    )


def _or_in_stages(
    planned: tuple[Outcome, dict[str, Any]],
    parts: _Parts,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
) -> tuple[Outcome, dict[str, Any]]:
    """The plan of a step on one mesh or, with "auto" micro-batches on several nodes, in stages."""
    outcome, summary = planned
    if not _weighs_stages(parts.opened, cluster, request):
        return planned
    with clock("searching stages"):
        trials = usual_trials(parts.opened.batch_size(), cluster, request)
        known_s = outcome.evaluation.step_s
        budget = replace(Budget.of(request, clock.say), best_s=known_s)
        try:
            staged = CountSearch(parts.graphs_if_any, cluster, request, budget).all(trials)
        except (Infeasible, NoCheaper, ConstraintError) as error:
            note = f"not in stages: {error}"
            return outcome, {**summary, "notes": [*summary["notes"], note]}
        staged_s = staged.evaluation.step_s
        if staged_s >= known_s:  # what is estimated to be as fast may turn out to be slower
            note = f"not in stages: the best plan found takes {units.seconds(staged_s)} a step"
            return outcome, {**summary, "notes": [*summary["notes"], note]}
        count = staged.plan.micro_batches
        assert count is not None
        changes = parts.changes(count)
    staged = over_counts({0: outcome, count: staged}, count, request.gap)
    note = (
        f"on one mesh a step takes {units.seconds(known_s)}: it runs in {count} micro-batches"
        f"{_through_stages(staged.plan)}; {_effect(changes)}"
    )
    whole = parts.whole_graph
    return staged, _facts_in_parts(staged, (note, *notes), parts.graphs, cluster, request, whole)


def _weighs_stages(opened: ModuleInput, cluster: Cluster, request: Request) -> bool:
    """Whether stages are weighed against the best plan on one mesh: of training on several nodes.

    Each number of micro-batches is a trace and a search, so it must be asked for.
    """
    from partitioner.backends.errors import BackendError

    nodes = len(cluster) > EXPLICIT and len(cluster.levels) > 1 and cluster.has_equal_devices
    kinds = request.parallel is None and request.mesh is None and request.strategy == "auto"
    free = kinds and request.objective == "throughput" and not request.constraints.bound
    asked = request.micro_batches == "auto" and request.may_run_in_parts
    if not (opened.training and nodes and free and asked):
        return False
    try:
        return opened.batch_size() > 1
    except BackendError:  # there is no batch
        return False


def _through_stages(plan: Plan) -> str:
    assert plan.pipeline is not None
    stages = 1 + max(plan.pipeline.stages)
    return f" through {stages} stages" if stages > 1 else ""


def _effect(changes: Difference) -> str:
    """The results of a step in micro-batches beside those of the whole batch, as a clause."""
    if changes.reasons:
        return f"results differ from those of the whole batch: {'; '.join(changes.reasons)}"
    same = "results are those of the whole batch"
    return f"{same} if as many targets are ignored in each" if changes.counted else same


def _fitting(outcome: Outcome) -> str:
    """The micro-batches of a plan as a change of a request."""
    step = units.seconds(outcome.evaluation.step_s)
    return f"with --micro-batches {outcome.plan.micro_batches} ({step} a step)"


def _also_fits(refusal: Infeasible, way: str) -> Infeasible:
    """A refusal that names one more change of the request that makes it feasible."""
    if not way:
        return refusal
    joint = " or" if refusal.relaxations else "; it fits"
    known = {**vars(refusal), "relaxations": (*refusal.relaxations, way)}
    return Infeasible(f"{refusal}{joint} {way}", **known)


def _check_kept(request: Request) -> None:
    """Refuse to keep a plan in blocks, whose nodes are not the model's, or one in stages.

    Raises:
        OptionError: It is asked for.
    """
    plan = request.constraints.plan
    if plan is not None and plan.blocks:
        raise OptionError(
            "constraints: a plan in blocks cannot be kept: leave it out, blocks are found anew"
        )
    if plan is not None and plan.pipeline is not None:
        raise OptionError(
            "constraints: a plan in stages cannot be kept: pin groups of nodes to devices instead"
        )


def _check_pipeline(request: Request, options: Mapping[str, Any]) -> None:
    """Refuse options that a plan in stages does not take.

    Raises:
        OptionError: There is one.
    """
    if not request.is_pipelined:
        return
    if request.strategy != "auto":
        raise OptionError(f"strategy {request.strategy!r} is not for pipelines: leave it out")
    if options.get("recompute") is True and not options.get("training"):
        raise OptionError("recompute is for training: inference keeps nothing")


def _compile_in_stages(
    opened: ModuleInput, cluster: Cluster, request: Request, clock: Clock
) -> ModuleProgram:
    """The best plan of stages over all numbers of micro-batches that are tried."""
    from partitioner.compiled.module import ModuleModel, ModuleProgram
    from partitioner.compiled.ranks import agreement_on, plan_together

    parts = _Parts(opened, request, clock)
    agreement = agreement_on(len(cluster))
    with agreement.together("compile()"):
        batch = opened.batch_size(request.micro_batch_count or 1)
        trials = usual_trials(batch, cluster, request)
        first = parts[request.micro_batch_count or 1]

    def compiled(candidate: Candidate) -> ModuleProgram:
        model = ModuleModel(parts.of(candidate.plan), opened.source)
        return ModuleProgram.of(model, cluster, candidate.plan, candidate.evaluation, {})

    def search() -> tuple[Outcome, dict[str, Any]]:
        notes = profile_notes(cluster, _torch_backend, training=opened.training)
        counts = opened.even_counts()
        graphs = parts.proven
        if request.micro_batches is not None:  # asked for, whatever it computes
            graphs = parts.graphs_if_any if request.micro_batches == "auto" else parts.graphs
        with clock("searching"):
            try:
                outcome = plan_in_stages(trials, counts, graphs, cluster, request, clock)
            except Infeasible as error:
                also = f"; {parts.left_out}" if parts.left_out else ""
                raise Infeasible(f"{error}{also}", **vars(error)) from None
        outcome, run_notes = _tuned(outcome, compiled, request, cluster, clock)
        notes = (*parts.notes(outcome.plan), *notes, *run_notes)
        whole = parts.whole_graph
        return outcome, _facts_in_parts(outcome, notes, parts.graphs, cluster, request, whole)

    module, plan, evaluation, summary = plan_together(
        agreement, first, cluster, request, search, parts.of
    )
    model = ModuleModel(module, opened.source)
    program = ModuleProgram.of(model, cluster, plan, evaluation, summary, clock.seconds)
    _lower(program, clock)
    return program


def plan_in_stages(
    trials: Sequence[Trial],
    counts: Sequence[int],
    graphs: Graphs,
    cluster: Cluster,
    request: Request,
    clock: Clock,
) -> Outcome:
    """The best plan of stages of a model.

    Args:
        trials: Numbers of micro-batches to try.
        counts: All numbers, ascending; larger ones are tried where no plan of those fits.
        graphs: The graphs of a micro-batch.
        cluster: The devices.
        request: The request.
        clock: Receives what is done.

    Raises:
        PartitionerError: As `compile`.
    """
    budget = Budget.of(request, clock.say)
    try:
        return CountSearch(graphs, cluster, request, budget).all(trials)
    except Infeasible as error:
        refusal = stopped_refusal(error, budget.work)
    if budget.work.stopped:  # what more micro-batches would take was not to be waited for
        raise refusal
    clock.say("looking for more micro-batches that fit")
    most = max(trial.count for trial in trials)
    more = tuple(count for count in counts if count > most)
    budget = Budget.of(request, clock.say)
    outcome = CountSearch(graphs, cluster, request, budget).fewest(more)
    if outcome is None:
        raise refusal
    if request.micro_batch_count is None:
        return outcome
    raise _also_fits(refusal, _fitting(outcome))


def _facts_in_parts(
    outcome: Outcome,
    notes: tuple[str, ...],
    graphs: Graphs,
    cluster: Cluster,
    request: Request,
    whole: Graph | None = None,
) -> dict[str, Any]:
    """The facts of the summary of a plan in micro-batches.

    One device beside it runs the same micro-batches or the `whole` batch at once, whichever is
    better.
    """
    count = outcome.plan.micro_batches
    assert count is not None
    with no_collection():
        runs: list[tuple[Graph, int | None]] = [(outcome.graph, count)]
        if whole is not None:
            runs.append((whole, None))
        single = OneDevice.best(cluster, request.objective, *runs)
    rules = Rules.of(outcome.graph)
    again = tuple(
        note
        for graph in graphs(count)
        if graph.optional
        for note in _recompute_notes(graph, outcome)
        if any(node.name in graph.optional for node in outcome.graph.nodes)
    )
    kind = parallel_notes(request.parallel, outcome.graph, outcome.plan, request.mesh)
    return facts(
        *(outcome, single, len(cluster), (*notes, *kind, *again, *_opaque_notes(rules))),
        rules=rules_of(outcome.graph),
        sources=_sources(outcome, cluster),
        spaces=space_facts(outcome, cluster, single),
        constraints=request.constraints,
    )


def _first_graph(module: TracedModule, request: Request) -> TracedModule:
    """The module with the graph that is planned first.

    Raises:
        OptionError: Recomputation is asked for, and a plan fixes it already.
    """
    plan = request.constraints.plan
    if plan is None:
        return module.on(module.traced.offered) if request.recompute is True else module
    if request.recompute is True:
        raise OptionError("recompute=True: the plan in constraints says what is recomputed")
    same = module.of(plan.nodes)
    return same if same.graph.digest == plan.graph_digest else module


def _lower(result: Compiled, clock: Clock) -> None:
    """Lower a plan now rather than on first use, where the cluster is small enough for programs."""
    if len(result.cluster) <= MOST_EXPLICIT:
        with clock("lowering"):
            result.programs  # noqa: B018 - computed on first use


@takes(DumpOptions)
def dump_problem(
    model: str | Path | onnx.ModelProto | nn.Module,
    path: str | Path,
    devices: int | None = None,
    **options: Unpack[DumpOptions],
) -> Dump:
    """Write the problem that `compile` would solve, for other solvers.

    Args:
        model: As of `compile`.
        path: File to write, gzipped if its name ends in `.gz`; an existing one is replaced. A name
            in `.lp` or `.mps` asks for the integer program in that format.
        devices: Number of devices (default: the cluster's, or 1).
        **options: As the fields of `DumpOptions` are described.

    Raises:
        PartitionerError: The model or the constraints are wrong, the file cannot be written, or
            the strategy is neither of the two.
    """
    strategy = options["strategy"]
    if strategy == "auto":
        raise SearchError("a problem file holds one problem: give strategy intra or inter")
    say = options.get("progress") or silent
    target = Path(path)
    check_file(target)
    cluster = target_cluster(options, devices)
    request = request_of(options)
    families(strategy, len(cluster), request.mesh)  # refuses before anything is read
    opened = open_with(model, options.get("example_inputs"), options)
    if opened.path is not None:
        refuse_to_replace(opened.path, target)
    spaces = request.over(len(cluster))
    say("reading the model")
    graph = opened.graph
    say("building the problem")
    cluster = cluster.for_backend(in_sessions=isinstance(opened, OnnxInput))
    family, built = first_problem(graph, cluster, spaces.on(graph))
    say(f"writing {target}")
    dumped = write_problem(built.problem, target, str(family), placement=strategy == "inter")
    if strategy == "inter" or spaces.mesh is not None or len(cluster) == 1:
        return dumped
    one_axis = "no mesh was given: this is the one of a single axis"
    return replace(dumped, notes=(dumped.notes[0], one_axis, *dumped.notes[1:]))


def plan_graph(
    graph: Graph,
    notes: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    clock: Clock,
    offers: Offers | None = None,
    *,
    compiled: Compile,
    fuses: bool,
) -> tuple[Outcome, dict[str, Any]]:
    """The best plan of a traced graph, and the facts of its summary.

    Args:
        graph: The graph.
        notes: Notes of the front end.
        cluster: The devices.
        request: The request.
        clock: Times the stages.
        offers: Called where no plan of `graph` fits or, by levels, memory forbids a cheaper one;
            the better of the two graphs' plans is returned.
        compiled: Makes the program of a plan that is to be run (`Request.tune`).
        fuses: Whether the backend computes several operators in one kernel.

    Raises:
        PartitionerError: As `compile`.
    """
    with clock("deriving strategies"):
        rules = Rules.of(graph)
    with clock("searching"):
        planned, budget = None, Budget.of(request, clock.say)
        try:
            if offers is not None:
                planned = _plan_with_offers(graph, rules, cluster, request, budget, offers)
            if planned is None:
                planned = _plan_without_offers(graph, rules, cluster, request, budget)
        except Infeasible as error:
            raise stopped_refusal(error, budget.work) from None
    outcome, rules = planned.outcome, planned.rules
    if offers is not None and planned.graph is graph:
        outcome = outcome.limited_to("plans that keep all values for the backward pass")
    outcome, run_notes = _tuned(outcome, compiled, request, cluster, clock)
    notes = (*notes, *run_notes)
    kind = parallel_notes(request.parallel, outcome.graph, outcome.plan, request.mesh)
    notes = (
        *notes,
        *kind,
        *request.constraints.notes,
        *planned.notes,
        *_opaque_notes(rules),
        *_size_notes(cluster),
    )
    with no_collection():
        plan = outcome.plan
        runs: list[tuple[Graph, int | None]] = [(outcome.graph, plan.micro_batches)]
        if outcome.graph is not graph:  # it computes values again, which one device need not
            runs.append((graph, None))
        single = OneDevice.best(cluster, request.objective, *runs)
        cost = outcome.evaluation.cost(request.objective)
        objective, count = request.objective, plan.micro_batches
        sources = _sources(outcome, cluster)
        notes += whole_machine_notes(
            outcome.graph, cluster, cost, sources, objective, fuses=fuses, micro_batches=count
        )
    summary = facts(
        *(outcome, single, len(cluster), notes),
        rules=rules_of(outcome.graph),
        sources=sources,
        spaces=space_facts(outcome, cluster, single),
        constraints=request.constraints,
    )
    return outcome, summary


def _tuned(
    outcome: Outcome, compiled: Compile, request: Request, cluster: Cluster, clock: Clock
) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome with the plan that runs fastest, and notes, if the request wants plans run."""
    if request.tune is None:
        return outcome, ()
    with clock("running the best plans"):
        outcome = tuned(outcome, compiled, request, cluster, clock.say)
    return outcome, tuning_notes(outcome, request)


def _sources(outcome: Outcome, cluster: Cluster) -> Sources:
    """Where the seconds of a plan come from."""
    if all(spec.profile is None and spec.table is None for spec in cluster.first_of_spec):
        return Sources({}, 0.0)
    return Sources.of(outcome.graph, resolve(outcome.graph, outcome.plan), cluster)


@dataclass(frozen=True)
class _Planned:
    """The outcome of a graph's search, its rules, and notes on recomputation."""

    graph: Graph
    rules: Rules
    outcome: Outcome
    notes: tuple[str, ...]


def _plan_with_offers(
    graph: Graph, rules: Rules, cluster: Cluster, request: Request, budget: Budget, offers: Offers
) -> _Planned | None:
    """The better plan of a graph and of the same graph with offers, where memory binds.

    None if memory binds and the offers gain nothing: the search of the graph was then cut short,
    and there is work left to go on with it.
    """
    outcome = None
    first = replace(budget.share(FIRST_PART), defers_memory=True)
    try:
        outcome = find_plan(graph, cluster, request, first, rules)
    except Infeasible:
        note = "no plan that keeps all values for the backward pass was found to fit"
    else:
        if not outcome.memory_binds:
            return _Planned(graph, rules, outcome, ())
        note = "memory forbids the cheapest plan that keeps all values"
    offered = offers()
    if offered is None:
        return None
    budget.say("allowing values to be computed again")
    offering, request = offered
    offering_rules = Rules.of(offering)
    if outcome is None:
        planned = _plan_without_offers(offering, offering_rules, cluster, request, budget)
        return replace(planned, notes=(note, *planned.notes))
    best_s = outcome.evaluation.step_s
    cheaper = None
    if not budget.work.over:
        with suppress(Infeasible):
            share = replace(budget.share(OFFERS_PART), best_s=best_s)
            cheaper = find_plan(offering, cluster, request, share, offering_rules)
    if cheaper is not None and cheaper.evaluation.step_s < best_s:
        notes = (note, *_recompute_notes(offering, cheaper))
        return _Planned(offering, offering_rules, cheaper, notes)
    if budget.work.late:
        return _Planned(graph, rules, outcome.stopped(), (note,))
    return None


def _plan_without_offers(
    graph: Graph, rules: Rules, cluster: Cluster, request: Request, budget: Budget
) -> _Planned:
    """The best plan of a graph.

    Raises:
        Infeasible: No plan fits.
    """
    outcome = find_plan(graph, cluster, request, budget, rules)
    return _Planned(graph, rules, outcome, _recompute_notes(graph, outcome))


@dataclass(frozen=True)
class Clock:
    """Announces the stages of a compilation and keeps their seconds.

    Attributes:
        say: Receives the name of each stage as it begins.
        seconds: Seconds of each finished stage, without those of stages inside of it.
    """

    say: Say
    seconds: dict[str, float] = field(default_factory=dict)
    _inside: list[float] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block as a stage, or as one more part of it."""
        self.say(stage)
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            with COMPILATION.told_to(self.say):
                yield
        finally:
            spent = time.perf_counter() - start
            own = spent - self._inside.pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + own
            if self._inside:
                self._inside[-1] += spent


def _onnx_backend() -> str:
    from partitioner.backends.onnx.measuring.timing import NAME

    return NAME


def _torch_backend() -> str:
    from partitioner.backends.torch.measuring.timing import NAME

    return NAME


def _size_notes(cluster: Cluster) -> tuple[str, ...]:
    if len(cluster) <= MOST_EXPLICIT:
        return ()
    note = (
        f"{len(cluster)} devices: rank files are written for up to {MOST_EXPLICIT}; the plan, its "
        "timeline and its report are"
    )
    return (note,)


def _recompute_notes(graph: Graph, outcome: Outcome) -> tuple[str, ...]:
    """The number of operators that are computed again, where that was offered."""
    if not graph.optional:
        return ()
    repeated = [node for node in outcome.graph.nodes if node.name in graph.optional]
    count = sum(1 for node in repeated if (row := row_of(node)) is None or not row.view)
    return (f"{count} operators of the forward pass are computed again in the backward pass",)


def _opaque_notes(rules: Rules) -> tuple[str, ...]:
    """One line for each reason that keeps nodes whole."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in rules.opaque.items():
        by_reason[why].append(name)
    notes = []
    for why, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"kept whole on one device: {', '.join(names[:3])}{more}: {why}")
    return tuple(notes)
