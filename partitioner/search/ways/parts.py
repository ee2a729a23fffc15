"""A batch in micro-batches: what is proven of them, and the searches over numbers of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import Plan
from partitioner.rewrites.same_in_parts import Difference
from partitioner.search.blocks.find_blocks import PARTS_IN_BLOCKS, find_staged_blocks
from partitioner.search.outcome import NoCheaper, Outcome, stopped_refusal
from partitioner.search.request import Budget, Request, StageClock
from partitioner.search.stages.micro_batch_counts import (
    COUNTS,
    BatchBytes,
    CountSearch,
    Graphs,
    Traces,
    Trial,
    usual_trials,
)
from partitioner.search.stages.pipelines import find_pipeline
from partitioner.search.ways.model_graphs import ModelGraphs
from partitioner.search.ways.way import Change, Impossible, Nearly
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.kinds.parallel import PIPELINE


@dataclass(frozen=True)
class Parts:
    """The micro-batches of a model, by their number."""

    model: ModelGraphs
    cluster: Cluster
    request: Request  #: The request; called before `Request.over`.
    clock: StageClock  #: Times the searches.
    held: Callable[[], BatchBytes]  #: Gives what one device would hold of the whole batch.
    in_blocks: bool = False  #: Whether stretches of each micro-batch run in blocks.
    _refused: dict[int, str] = field(default_factory=dict)

    @property
    def trace_s(self) -> float:
        """About the seconds of a trace."""
        return self.clock.seconds.get("tracing the module", 0.0)

    def graphs(self, count: int) -> Iterator[Graph]:
        """The graph that is planned first, and that with offers where those are for later.

        Raises:
            PartitionerError: A number was asked for of which the model has no micro-batches.
            Infeasible: The model has no such micro-batches: a batch norm of one sample, a result
                that is of no micro-batch.
            ConstraintError: A step in so many is not proven to compute what the whole batch does.
        """
        if self.request.micro_batches is None:
            why = self._refused.setdefault(count, self.why_not(count))
            if why:
                raise ConstraintError(self.left_out)
        is_any = self.request.micro_batches == "auto"
        yield from self.if_any(count) if is_any else self._graphs(count)

    def if_any(self, count: int) -> Iterator[Graph]:
        """The graphs, whatever they compute."""
        try:
            self.model.in_micro_batches(count)
        except PartitionerError as error:
            raise Infeasible(str(error)) from None
        yield from self._graphs(count)

    def _graphs(self, count: int) -> Iterator[Graph]:
        if self.in_blocks:
            yield self.model.uncut_in(count)
            return
        yield self.model.in_micro_batches(count)
        offered = self.model.offered_in(count)
        if offered is not None:
            yield offered

    def search(
        self,
        graphs: Graphs,
        budget: Budget,
        sizes: tuple[int, ...] | None,
        bound: Callable[[int], float] | None = None,
    ) -> CountSearch:
        """The search over numbers of micro-batches, through stages of these sizes."""
        traces = Traces(self.trace_s, self.model.is_there, self.model.is_guessed)
        find = find_staged_blocks if self.in_blocks else find_pipeline
        request, held = self.request, self.held
        return CountSearch(
            graphs,
            self.cluster,
            request,
            budget,
            sizes,
            bound,
            held,
            traces,
            self.model.last_in,
            find=find,
        )

    def why_not(self, count: int) -> str:
        """Why a step in so many micro-batches is not taken without being asked for; "" if it is.

        It is taken if it is proven to compute what the whole batch does, but for other random
        numbers.
        """
        if count == 1:
            return ""
        try:
            changes = self.model.changes(count)
        except PartitionerError as error:
            return str(error)
        return "" if changes.redrawn else next(iter(changes.reasons), "")

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
        if plan.blocks:
            left_out = (f"no micro-batch fits as a whole: {PARTS_IN_BLOCKS}", *left_out)
        if count == 1:
            return left_out
        changes = self.model.changes(count)
        if changes.reasons and not changes.redrawn:
            why = "; ".join(changes.reasons)
            note = f"results are not proven to be those of the whole batch: {why}"
            return (f"in {count} micro-batches {note}", *left_out)
        if changes.reasons or changes.counted:
            return (f"in {count} micro-batches {effect(changes)}", *left_out)
        return left_out


def effect(changes: Difference) -> str:
    """The results of a step in micro-batches beside those of the whole batch, as a clause."""
    if changes.reasons:
        return f"results differ from those of the whole batch: {'; '.join(changes.reasons)}"
    same = "results are those of the whole batch"
    return f"{same} if as many targets are ignored in each" if changes.counted else same


def through_stages(plan: Plan) -> str:
    """The number of stages of a plan in micro-batches, and its blocks, as the end of a clause.

    It is empty of one stage without blocks.
    """
    stages = 1 + max(plan.stages)
    through = f" through {stages} stages" if stages > 1 else ""
    return f"{through}, {PARTS_IN_BLOCKS}" if plan.blocks else through


def in_so_many(outcome: Outcome) -> str:
    """The micro-batches of a plan as a change of a request."""
    step = units.seconds(outcome.evaluation.step_s)
    return f"with --micro-batches {outcome.plan.micro_batches} ({step} a step)"


def _where_nothing_else_fits(outcome: Outcome, model: ModelGraphs) -> tuple[str, ...]:
    """Say why a batch runs in parts that was to run at once."""
    count, stages = outcome.plan.micro_batches, through_stages(outcome.plan)
    assert count is not None
    if count == 1:
        return (f"no plan without stages was found to fit: it runs{stages}",)
    added = ", whose gradients are added up" if outcome.graph.backward else ""
    parts = f"{count} micro-batches{stages}{added}; {effect(model.changes(count))}"
    return (f"no plan of the whole batch was found to fit: it runs in {parts}",)


@dataclass(frozen=True)
class InStages:
    """The plans in micro-batches, through stages: the usual numbers of them, or that asked for."""

    parts: Parts  #: The micro-batches.
    #: Numbers of devices of a stage; None for those of the request.
    sizes: tuple[int, ...] | None = None
    least: int = 1  #: The least number of micro-batches that is tried, if none is asked for.
    #: A bound on the seconds of a step by the number of its micro-batches.
    bound: Callable[[int], float] | None = None

    @property
    def request(self) -> Request:
        """The request; called before `Request.over`."""
        return self.parts.request

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """The numbers of micro-batches that are tried.

        Raises:
            PartitionerError: There is no batch, or it cannot be cut so.
        """
        asked = self.request.micro_batch_count
        batch = self.parts.model.batch_size(asked or 1)
        trials = usual_trials(batch, self.parts.cluster, self.request)
        return tuple(t for t in trials if asked or t.count >= self.least) or (Trial(batch),)

    def search(self, budget: Budget) -> Outcome:
        """The best plan, if need be of more micro-batches than the usual numbers.

        Raises:
            Infeasible: None was found that fits.
            NoCheaper: None was found that costs less than the known plan of the budget.
            PartitionerError: The batch cannot be cut so.
        """
        with self.parts.clock("searching"):
            outcome = self._named(self._best(budget), budget.best_s)
        work = budget.work  # a number that had steps left would find the same again
        is_cut_off = work.stopped or work.spent >= work.steps / COUNTS
        return outcome if is_cut_off else replace(outcome, more=None)

    def _named(self, outcome: Outcome, known: float) -> Outcome:
        """The outcome with what is said of it beside a plan of the whole batch of a `known` cost.

        Where it is one of several ways, the search goes on with its number of micro-batches.
        """
        model, through = self.parts.model, through_stages(outcome.plan)
        more = partial(self._go_on, outcome, known) if self._is_weighed else None
        outcome = replace(outcome, whole=model.whole, more=more)
        if self.bound is None or self.request.tune is not None:  # asked for, or one of several
            notes = self.parts.notes
            plans = tuple(replace(one, notes=notes(one.plan)) for one in outcome.candidates)
            return replace(outcome, notes=notes(outcome.plan), candidates=plans)
        if known == math.inf:
            return outcome.noted(*_where_nothing_else_fits(outcome, model))
        count = outcome.plan.micro_batches
        batches = f"{count} micro-batches" if count != 1 else "one micro-batch"
        shown = units.cost(self.request.objective, known)
        note = f"at once, the best plan takes {shown}: it runs in {batches}{through}"
        return outcome.noted(note, *self.parts.notes(outcome.plan))

    @property
    def _is_weighed(self) -> bool:
        """Tell whether this is one of several ways, of which the best plan alone is wanted."""
        return self.bound is not None and self.request.tune is None

    def _go_on(self, before: Outcome, known: float, budget: Budget) -> Outcome:
        """The best plan in as many micro-batches and stages of the same sizes; `before` if none is.

        Where bytes are short, the next fewer micro-batches go first. Behind them kinds of
        parallelism have a look, see `_of_kinds`. The bound is that of all numbers.
        """
        count = before.plan.micro_batches
        assert count is not None
        sizes = tuple(sorted({mesh.size() for mesh in before.plan.groups}))
        is_short = before.of is not None and bool(before.of.optional)
        # the next fewer ones hold more, and may have been refused for want of time
        fewer = [n for n in self.parts.model.even_counts() if n < count][-1:] if is_short else []
        found: Outcome | None = None
        with self.parts.clock("searching"):
            for number in (*fewer, count):
                with suppress(Infeasible, NoCheaper, ConstraintError, PipelineScheduleError):
                    search = self._counts(budget.of_clock(2))
                    search = replace(search, sizes=sizes, is_short=is_short)
                    found = search.all((Trial(number),))
                    break
            best_s = min(budget.best_s, (found or before).evaluation.cost(self.request.objective))
            others = tuple(size for size in self.sizes or () if size not in sizes)
            rest = replace(budget, best_s=best_s)
            found = self._of_kinds(rest, (*others, *sizes), is_short=is_short) or found
        if found is None:
            return replace(self._named(before, known), more=None)
        one, other = found.certificate, before.certificate
        bound, status = min(one.bound, other.bound), one.status
        if status == "optimal" and one.cost - bound > self.request.gap * one.cost:
            status = "feasible"  # it was of fewer plans
        found = self._named(found.certified(bound=bound, status=status, space=other.space), known)
        return (
            found if one.cost < (1 - self.request.gap) * other.cost else replace(found, more=None)
        )

    def _of_kinds(self, budget: Budget, sizes: Sequence[int], *, is_short: bool) -> Outcome | None:
        """The best plan of stages with one kind of parallelism each, if any costs less than known.

        The space of all plans of a stage has theirs, but may hide them from a short search.
        """
        best: Outcome | None = None
        request, devices = self.request, len(self.parts.cluster)
        if request.parallel is not None or request.mesh or request.constraints.bound:
            return best
        for size, kind, trial in product(sizes, ("tp", "dp"), self.trials):
            if not 1 < size < devices or size not in (trial.sizes or sizes) or budget.work.late:
                continue
            mesh = {PIPELINE: devices // size, kind: size}
            of_kind = replace(request, parallel=f"{PIPELINE}+{kind}", mesh=mesh)
            search = self._counts(budget)
            search = replace(search, request=of_kind, sizes=(size,), is_short=is_short)
            with suppress(Infeasible, NoCheaper, ConstraintError, PipelineScheduleError):
                best = search.all((Trial(trial.count),))
                budget = replace(budget, best_s=best.evaluation.cost(request.objective))
        return best

    def _best(self, budget: Budget) -> Outcome:
        asked, trials = self.request.micro_batch_count, self.trials
        search = self._counts(budget)
        if self._is_weighed and budget.best_s == math.inf and trials[0].sizes is None:
            # nothing else fits: a number that does comes first, with more than its part
            search.fewest(self.parts.model.even_counts())
        try:
            return search.all(trials)
        except Infeasible as error:
            refusal = stopped_refusal(error, budget.work)
        outcome = None
        if not asked and not budget.work.stopped and budget.best_s == math.inf:
            outcome = self._more(max(trial.count for trial in trials), budget)
        if outcome is not None:
            return outcome
        also = f"; {self.parts.left_out}" if self.parts.left_out else ""
        raise refusal.saying(f"{refusal}{also}")

    def would_fit(self, budget: Budget, refusal: Infeasible) -> tuple[Change, ...]:
        """More micro-batches than those that are asked for."""
        asked = self.request.micro_batch_count
        is_kept = self.request.constraints.plan is not None  # which is of as many
        if asked is None or is_kept or "time limit" in str(refusal) or budget.work.late:
            return ()
        outcome = self._more(asked, budget)
        return () if outcome is None else (Change(in_so_many(outcome)),)

    def _more(self, most: int, budget: Budget) -> Outcome | None:
        """The best plan of more micro-batches; None if none fits."""
        budget.say("looking for more micro-batches that fit")
        more = tuple(count for count in self.parts.model.even_counts() if count > most)
        return self._counts(budget).fewest(more)

    def _counts(self, budget: Budget) -> CountSearch:
        sizes, devices = self.sizes, len(self.parts.cluster)
        if sizes and self.bound is not None and budget.best_s == math.inf:
            # where nothing fits, micro-batches on one mesh of all are a way of their own
            sizes = tuple(size for size in sizes if size < devices) or sizes
        return self.parts.search(self.parts.graphs, budget, sizes, self.bound)


@dataclass
class FewestParts:
    """The plans in as few micro-batches as fit, where the whole batch does not."""

    parts: Parts  #: The micro-batches.
    sizes: tuple[int, ...]  #: Numbers of devices of a stage.
    #: The number of micro-batches that is short of the fewest bytes, and these.
    nearest: tuple[int, float] | None = None

    def search(self, budget: Budget) -> Outcome:
        """The best plan, if the model is proven to compute the same or the request allows it.

        Raises:
            Infeasible: None was found that fits, or results would be others.
        """
        parts, model = self.parts, self.parts.model
        counts = model.even_counts()
        if self.sizes == (
            len(parts.cluster),
        ):  # else each stage holds its weights alone: 1 may fit
            counts = counts[1:]
        with parts.clock("searching micro-batches"):
            search = parts.search(parts.if_any, budget, self.sizes)
            outcome = search.fewest(counts)
        if outcome is None:
            raise self._refusal(search, budget)
        count = outcome.plan.micro_batches
        assert count is not None
        reasons = model.changes(count).reasons if count > 1 else ()
        if reasons and parts.request.micro_batches != "auto":
            text = f"{in_so_many(outcome)}, which changes the results: {reasons[0]}"
            raise Nearly((Change(text),))
        outcome = replace(outcome, whole=model.whole)
        return outcome.noted(*_where_nothing_else_fits(outcome, model))

    def _refusal(self, search: CountSearch, budget: Budget) -> Infeasible | Impossible:
        """The refusal of the number of micro-batches that comes nearest."""
        short = {n: one.bytes_short for n, one in search.refused.items() if one.bytes_short > 0}
        if not short:
            nearest = search.nearest
            if isinstance(nearest, Infeasible):
                return stopped_refusal(nearest, budget.work)
            return nearest
        count = min(short, key=short.__getitem__)
        self.nearest = count, short[count]
        refusal = stopped_refusal(search.refused[count], budget.work)
        text = str(refusal)
        if count > 1 and "micro-batch" not in text:
            text += f"; the batch runs in {count} micro-batches there"
        return refusal.saying(text)

    def would_fit(self, budget: Budget, _refusal: Infeasible) -> tuple[Change, ...]:
        """A larger limit of memory, within which micro-batches fit that are proven."""
        if self.nearest is None or budget.work.late or self.parts.why_not(self.nearest[0]):
            return ()
        cluster, (count, short) = self.parts.cluster, self.nearest
        limit = min(device.memory_bytes for device in cluster.devices) + math.ceil(short)
        larger = replace(self.parts, cluster=cluster.with_memory(limit))
        search = larger.search(larger.if_any, budget, self.sizes)
        if search.fewest([count]) is None:
            return ()
        return (Change(f"with --memory {limit} ({units.size(limit)})", memory_bytes=limit),)
