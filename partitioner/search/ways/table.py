"""The ways that a request leaves open for a model, and data parallelism to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single
from partitioner.cost_model.memory.least import LeastBytes
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.blocks.find_blocks import why_not_in_blocks
from partitioner.search.find_plan import find_plan
from partitioner.search.levels.meshes import device_pools
from partitioner.search.neighbourhood import improved
from partitioner.search.outcome import Outcome, OutOfTime, best_of
from partitioner.search.request import EXPLICIT, Budget, Request, StageClock
from partitioner.search.stages.micro_batch_counts import BatchBytes, LeastStep, Trial
from partitioner.search.stages.pipelines import least_memory
from partitioner.search.ways.model_graphs import ModelGraphs
from partitioner.search.ways.parts import FewestParts, InStages, Parts
from partitioner.search.ways.way import (
    FIRST_SHARE,
    LEAST_SHARE,
    Change,
    Way,
    Weighing,
    nothing,
    what_would_fit,
)
from partitioner.search.ways.whole import InBlocks, WholeBatch
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import Work, now_s
from partitioner.strategies.constraints import possible
from partitioner.strategies.kinds.parallel import DATA, depends_on_mesh, forms
from partitioner.strategies.spaces import Family

#: Share of a device's memory within which the whole model must fit one, so that nothing is short.
AMPLE = 0.8
#: Share of the time limit that is kept for changes of the best plan.
LAST_SHARE = 0.1
#: Nodes for whose tensors a stage has memory if a micro-batch likely fits without blocks.
NODES = 3
#: Numbers of micro-batches that are tried at most to find what one device holds of a batch.
MOST_TRACES = 3


@dataclass(frozen=True)
class Table:
    """The ways of a model."""

    model: ModelGraphs
    cluster: Cluster
    request: Request  #: The request, as the user gave it.
    clock: StageClock  #: Times the stages.

    def best(self) -> Outcome:
        """The best plan of all ways.

        Raises:
            PartitionerError: As `compile`.
        """
        try:
            return self._weighed()
        except Infeasible as error:
            proof = None if error.proven else self._too_much
            raise error if proof is None else error.proving(proof) from None

    def _weighed(self) -> Outcome:
        ways = tuple(self.ways())
        budget = Budget.of(self.request, self.clock.say, self.clock.begun_s)
        is_short, share = self._is_short, FIRST_SHARE
        # less, the less memory there is for what one device holds
        if is_short and not self.request.is_pipelined:
            room = sum(device.memory_bytes for device in self.cluster.devices) / sum(self._held)
            share = max(LEAST_SHARE, FIRST_SHARE * min(1.0, room / 2))
        return Weighing(
            ways,
            self.request,
            budget.of_clock(1 / (1 - LAST_SHARE)),
            is_short=is_short,
            first_share=share,
            memory_bytes=max(device.memory_bytes for device in self.cluster.devices),
            least=self._least_of_all,
            improved=lambda found: self._improved(found, budget),
            confirms=self.model.confirms,
        ).best()

    @property
    def _too_much(self) -> str | None:
        """The proof that no plan fits, if devices have less than any holds when a step ends."""
        try:
            graph = self._first if not self.request.is_pipelined else self.model.uncut
        except PartitionerError:  # the whole batch has no graph
            return None
        least, devices = LeastBytes.of(graph, self.cluster), len(self.cluster)
        memory = sum(device.memory_bytes for device in self.cluster.devices)
        if least.bytes <= memory:
            return None
        parts = ", ".join(f"{units.size(n)} {what}" for what, n in least.parts.items() if n)
        have = f"all {devices} devices have" if devices > 1 else "the device has"
        holds = f"when a step ends, any holds {units.size(least.bytes, 5)} at least ({parts})"
        return f"{holds}, and {have} {units.size(memory, 5)}"

    def why_not_in(self, count: int) -> str:
        """Why so many micro-batches are not taken without being asked for; "" if they are."""
        return self._parts.why_not(count)

    def _improved(self, found: Outcome, budget: Budget) -> Outcome:
        """The outcome with the changes that make it cheaper, found in what is left of the clock."""
        seconds = max(budget.work.left_s, LAST_SHARE * self.request.time_limit_s)
        request, count = found.request or self.request, found.plan.micro_batches
        last = self.model.last_in(count) if count else None
        request = replace(request, constraints=replace(request.constraints, last=last))
        with self.clock("searching"):
            return improved(found, self.cluster, request, Work.within(seconds))

    def beside_others(self, outcome: Outcome) -> Outcome:
        """The outcome beside data parallelism, see `beside_data_parallelism`, and parts of a batch.

        These are as few micro-batches as one device holds, where it does not hold a batch at once.
        """
        with self.clock("planning what one would do instead"):
            left_s = self.request.time_limit_s - (now_s() - self.clock.begun_s)
            outcome = beside_data_parallelism(outcome, self._parts, left_s)
            return replace(outcome, alone=self._fewest_alone(outcome))

    def _fewest_alone(self, outcome: Outcome) -> tuple[Graph, int] | None:
        """The graph and number of the fewest micro-batches that one device holds; None for none.

        None where it holds the batch at once, too, where only numbers would do that are not proven
        to compute what the whole batch does, and where the model refuses the whole batch.
        """
        limit = max(device.memory_bytes for device in self.cluster.devices)
        try:
            kept, moving = self._held
            if outcome.plan.blocks or not kept <= limit < kept + moving:
                return None
            counts = [n for n in self.model.even_counts() if moving <= n * (limit - kept)]
        except PartitionerError:  # there is no batch
            return None
        for count in counts[:MOST_TRACES]:
            if self._parts.why_not(count):
                return None
            graph = self.model.in_micro_batches(count)
            alone = best_single(graph, self.cluster, self.request.objective, count)[1]
            if alone.fits_exactly:
                return graph, count
        return None

    def ways(self) -> Iterator[Way]:
        """The ways that the request leaves open, and those that it closes, with the reason."""
        if self.request.is_pipelined:
            stages = self._staged
            yield Way("micro-batches", stages.search, would_fit=stages.would_fit)
            in_blocks = replace(stages, parts=replace(self._parts, in_blocks=True))
            yield self._staged_blocks("blocks", in_blocks.search, rung=2)
            return
        for graph, spaces in self._forms:
            yield self._whole(graph, spaces)
        rivals = tuple(self._in_stages())
        yield from rivals
        if self._forms[0][0] is self._first:
            yield from self._fewest_parts(weighs_stages=bool(rivals))
            yield self._in_blocks()
            yield from self._fewest_in_blocks()

    @cached_property
    def _spaces(self) -> Request:
        """The request with the mesh that it names."""
        return self.request.over(len(self.cluster))

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self.model, self.cluster, self.request, self.clock, lambda: self._held)

    @cached_property
    def _staged(self) -> InStages:
        """The micro-batches and stages that the request asks for."""
        return InStages(self._parts)

    @cached_property
    def _first(self) -> Graph:
        """The graph as read or traced."""
        return self.model.forms[0]

    @property
    def training(self) -> bool:
        """Tell whether the model is planned for training."""
        return bool(self._first.backward)

    @cached_property
    def _forms(self) -> tuple[tuple[Graph, Request], ...]:
        """The graphs of the whole batch that are planned, each with its request.

        A mesh that is left open is named where the form depends on it.

        Raises:
            ConstraintError: A form is asked for that the graph cannot have.
            SearchError: The mesh has no axis of a form.
        """
        known = self.model.forms
        if len(self.cluster) == 1 or self.request.constraints.plan is not None:
            known = known[:1]
        requests: tuple[Request, ...] = (self._spaces,)
        if depends_on_mesh(self.request.parallel):
            requests = self._spaces.on_meshes(len(self.cluster))
        free = self.model.pins_reach_forms

        def of(one: Request) -> Sequence[tuple[Graph, Request]]:
            return [(graph, one) for graph in forms(one.parallel, known, one.mesh, free=free)]

        return tuple(chain(*possible(requests, of)))

    @cached_property
    def _is_short(self) -> bool:
        """Tell whether the whole model does not surely fit each device alone.

        Of micro-batches that are asked for: whether one likely fits in blocks alone.
        """
        if self.request.is_pipelined:
            return self._wants_blocks
        least = min(device.memory_bytes for device in self.cluster.devices)
        return sum(self._held) > AMPLE * least

    @property
    def _wants_blocks(self) -> bool:
        """Tell whether a stage has no memory for `NODES` of the largest one of a micro-batch.

        False where there is no such micro-batch, which the search refuses.
        """
        devices, asked = len(self.cluster), self.request.micro_batch_count
        try:
            size = max(self.request.stage_sizes(devices))
            graph = self.model.uncut_in(asked or 1)
            count = asked or max(t.count for t in self._staged.trials)
        except PartitionerError:
            return False
        types, least = graph.types, least_memory(self.cluster)
        nodes = (sum(types[value].nbytes for value in {*n.reads, *n.writes}) for n in graph.nodes)
        node_bytes = max(nodes, default=0) * (asked or 1) / count / size
        return NODES * node_bytes > least - kept_bytes(graph) / devices

    @cached_property
    def _held(self) -> BatchBytes:
        """Bytes that one device needs for the whole model."""
        graph = self.model.whole if self.request.is_pipelined else self._first
        return BatchBytes.of(graph or self.model.uncut, self.cluster)

    def _whole(self, graph: Graph, spaces: Request) -> Way:
        is_first = graph is self._first
        request = self.request
        may_offer = request.recompute == "auto" and request.constraints.plan is None
        has_offers = is_first and self.training and may_offer
        offers = (lambda: self.model.offered) if has_offers else None
        at_once = self.model.uncut if self._keeps_blocks else graph
        whole = WholeBatch(graph, self.cluster, spaces, self.clock, offers, at_once)
        name = "the whole batch" if is_first else "the whole batch in another form"
        is_first_way = (graph, spaces) == self._forms[0]

        def would_fit(budget: Budget, refusal: Infeasible) -> tuple[Change, ...]:
            left_s, of = budget.work.left_s, graph
            if is_first and self.training:
                of = self.model.offered or graph
            return what_would_fit(refusal, of, self.cluster, self._spaces.on(of), left_s)

        return Way(name, whole.search, would_fit=would_fit if is_first_way else nothing)

    @property
    def _keeps_blocks(self) -> bool:
        """Tell whether a plan in blocks is kept, so that the graph of all blocks is the first."""
        kept = self.request.constraints.plan
        return kept is not None and bool(kept.blocks)

    def _in_stages(self) -> Iterator[Way]:
        """Micro-batches, as far as they may be faster than the whole batch at once.

        A stream of requests is as fast as its busiest device, which operators that are placed load
        no more than stages do; and each number of them is a search by levels on many devices. So
        both are weighed only where the request asks for any micro-batches, or, of a stream, where
        memory is short: micro-batches hold less.
        """
        asked, devices = self.request.micro_batches == "auto", len(self.cluster)
        if not (self._leaves_stages_open and self._holds_weights and self._has_batch):
            return
        if not asked and (not (self._waits or self._is_short) or devices > EXPLICIT):
            return
        sizes = None
        if (self.training or not asked) and devices <= EXPLICIT:
            sizes = self.request.stage_sizes(devices)
            if not self._is_short:
                sizes = sizes[:-1]  # one mesh of all is no faster in parts
        most = devices  # of a stage; those of several sizes are of powers of two
        if sizes:
            most = max(*sizes, 2 ** ((devices - 1).bit_length() - 1))
        bound, least, begin_s = self._least(most), 1 if self.training else 2, self._parts.trace_s
        stages = InStages(self._parts, sizes, least, bound)
        bound_s = min(bound(trial.count) for trial in stages.trials)
        yield Way("stages", stages.search, bound_s, is_rival=True, begin_s=begin_s)

    @property
    def _waits(self) -> bool:
        """Tell whether the cost is that of one step from begin to end."""
        return self.training or self.request.objective == "latency"

    def _least(self, most: int) -> Callable[[int], float]:
        """A bound on steps by their micro-batches, with stages of so many devices at most."""
        if self.request.objective == "memory":
            return lambda _count: 0.0  # of bytes nothing is known
        return LeastStep(self.model.uncut, self.cluster, most, waits=self._waits).seconds

    def _least_of_all(self) -> float:
        """A bound on the cost of all plans; 0 where the whole batch has no graph."""
        try:
            return self._least(len(self.cluster))(1)
        except PartitionerError:
            return 0.0

    @property
    def _leaves_stages_open(self) -> bool:
        """Tell whether the request names nothing that stages would contradict."""
        request = self.request
        if not request.may_run_in_parts:
            return False
        if not self.training and request.micro_batches == "auto":
            return True
        kinds = request.parallel is None and request.mesh is None and request.strategy == "auto"
        nodes = len(self.cluster) <= EXPLICIT or (
            len(self.cluster.levels) > 1 and self.cluster.has_equal_devices
        )
        return kinds and nodes and not request.constraints.bound and len(self.cluster) > 1

    @cached_property
    def _holds_weights(self) -> bool:
        """Tell whether all devices together have the memory for what is kept for all steps."""
        memory = sum(device.memory_bytes for device in self.cluster.devices)
        return kept_bytes(self._first) <= memory

    @cached_property
    def _has_batch(self) -> bool:
        """Tell whether the model has a batch; in inference one that can be cut."""
        try:
            return self.model.batch_size() > 1 or self.training
        except PartitionerError:
            return False

    def _fewest_parts(self, *, weighs_stages: bool) -> Iterator[Way]:
        """Micro-batches through stages, of which each device holds one, then on one mesh of all."""
        if not (self.request.may_run_in_parts and self._holds_weights):
            return
        try:
            counts = self.model.even_counts()
        except PartitionerError:  # there is no batch
            return
        devices = len(self.cluster)
        mesh, *stages = self.request.sizes_in_parts(devices)
        is_one_mesh = devices <= EXPLICIT or len(device_pools(self.cluster)) == 1
        if stages and not weighs_stages:
            yield self._fewest("micro-batches through stages", stages[0])
        if len(counts) > 1 and is_one_mesh:
            yield self._fewest("micro-batches on all devices", mesh)

    def _fewest(self, name: str, sizes: tuple[int, ...]) -> Way:
        fewest, begin_s = FewestParts(self._parts, sizes), self._parts.trace_s
        return Way(name, fewest.search, rung=1, would_fit=fewest.would_fit, begin_s=begin_s)

    def _in_blocks(self) -> Way:
        why = why_not_in_blocks(self.cluster, self.request, staged=False)
        if why:
            closed = f"blocks are not searched with {why}"
            return Way("blocks", _not_searched, rung=2, closed=closed)
        blocks = InBlocks(self.model.uncut, self.cluster, self.request, self.clock)
        return Way("blocks", blocks.search, rung=2, would_fit=blocks.would_fit)

    def _fewest_in_blocks(self) -> Iterator[Way]:
        """Micro-batches of which stretches run in blocks, through stages or on all devices.

        In inference blocks cut the batch, too.
        """
        may_run = self.training and self.request.may_run_in_parts
        if not (may_run and self._has_batch and self._holds_weights):
            return
        mesh, *stages = self.request.sizes_in_parts(len(self.cluster))
        in_blocks = replace(self._parts, in_blocks=True)
        fewest = FewestParts(in_blocks, (*chain(*stages), *mesh))
        yield self._staged_blocks("micro-batches in blocks", fewest.search, rung=3)

    def _staged_blocks(self, name: str, search: Callable[[Budget], Outcome], rung: int) -> Way:
        why = why_not_in_blocks(self.cluster, self.request, staged=True)
        closed = f"blocks are not searched with {why}" if why else ""
        return Way(name, search, rung=rung, closed=closed, begin_s=self._parts.trace_s)


def _not_searched(_budget: Budget) -> Outcome:
    raise AssertionError("a closed way is not searched")


#: Share of the time limit that data parallelism has at least, behind a search that took it all.
USUAL_SHARE = 0.1
#: Numbers of micro-batches that are tried at most.
MOST_COUNTS = 3
#: About the seconds that it takes for each node of a graph.
NODE_S = 1e-3


def beside_data_parallelism(outcome: Outcome, parts: Parts, left_s: float) -> Outcome:
    """Plan data parallelism of the whole batch, if no space that was searched is that.

    Where devices do not hold their parts of the batch at once, it is planned with as few
    micro-batches as they hold. Its plan is one more candidate. Where there is none, within memory
    or within the seconds that are left of the time limit, it is among what failed. The outcome is
    the same in inference, on one device, of data parallelism itself, and where devices have unequal
    parts of a batch or the whole batch has no graph.
    """
    cluster, request = parts.cluster, parts.request
    devices, graph = len(cluster), _whole(outcome)
    is_known = any(plan.space.name == DATA for plan in outcome.candidates)
    if graph is None or not graph.backward or devices == 1 or is_known or request.parallel == DATA:
        return outcome
    usual = Request(
        objective=request.objective,
        parallel=DATA,
        time_limit_s=request.time_limit_s,
        gap=request.gap,
        solver=request.solver,
        seed=request.seed,
    )
    seconds = max(left_s, USUAL_SHARE * request.time_limit_s)
    budget = Budget.of(usual, parts.clock.say).anew(seconds)
    late = OutOfTime(f"not planned within {request.time_limit_s:g} s")
    space = Family(DATA, (DeviceMesh.line(devices, DATA),), (), symmetric=False)
    try:
        asked = usual.over(devices).on(graph)
        asked.constraints.check(graph, devices)
        _check_room(graph, cluster)
        if NODE_S * len(graph.nodes) > seconds:
            raise late
        found = find_plan(graph, cluster, asked, budget)
    except (Infeasible, OutOfTime) as error:
        is_late = isinstance(error, Infeasible) and budget.work.stopped and not error.proven
        in_parts = None if is_late or error is late else _in_parts(usual, budget, parts)
        if in_parts is None:
            return replace(outcome, failed=(*outcome.failed, (space, late if is_late else error)))
        found = in_parts
    except PartitionerError:  # it has no such plan, whatever the memory is
        return outcome
    plan = best_of(found.candidates, request.objective, devices)
    found_plan = replace(plan, space=space, bounds_space=False)
    return replace(outcome, candidates=(*outcome.candidates, found_plan))


def _in_parts(request: Request, budget: Budget, parts: Parts) -> Outcome | None:
    """The plan in as few micro-batches as devices hold, of `MOST_COUNTS` numbers; None if none is.

    None, too, where a step in so many is not proven to compute what the whole batch does.
    """
    devices, limit = len(parts.cluster), least_memory(parts.cluster)
    try:
        counts = parts.model.even_counts()[1:]
    except PartitionerError:  # there is no batch
        return None
    kept, moving = parts.held()
    enough = (count for count in counts if kept + moving / (devices * count) <= limit)
    for count in islice(enough, MOST_COUNTS):
        if parts.why_not(count) or budget.work.late:
            break
        asked = replace(request, micro_batches=count)
        search = replace(parts, request=asked).search(
            lambda n: iter((parts.model.in_micro_batches(n),)), budget, (devices,)
        )
        with suppress(PartitionerError):
            return search.all((Trial(count),))
    return None


def _whole(outcome: Outcome) -> Graph | None:
    """The graph of the whole batch, which computes nothing again; None if there is none."""
    is_whole = outcome.plan.micro_batches is None and not outcome.plan.blocks
    graph = outcome.whole or (outcome.of if is_whole else None)
    return chosen(graph, frozenset()) if graph is not None and graph.optional else graph


def _check_room(graph: Graph, cluster: Cluster) -> None:
    """Refuse, by an Infeasible, what each device would hold at least: all weights, and its part."""
    held = BatchBytes.of(graph, cluster)
    least = held.kept + held.moving // len(cluster)
    limit = min(device.memory_bytes for device in cluster.devices)
    if least > limit:
        each = f"each device would hold {units.size(least)} of {units.size(limit)}"
        raise Infeasible(each, bytes_short=least - limit, proven=True)
