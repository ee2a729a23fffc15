"""Numbers of micro-batches: those worth a try, the best plan of some, and the fewest that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.cost_model.prices.compute import is_free, node_seconds
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rules_of
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import place
from partitioner.ir.rule import Rule
from partitioner.search.outcome import NoCheaper, Outcome
from partitioner.search.request import EXPLICIT, Budget, Request
from partitioner.search.spaces.one_device import shortage
from partitioner.search.stages.cut_search import NOT_SEARCHED, step_cost, to_beat
from partitioner.search.stages.pipelines import find_pipeline
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError

#: Gives the graphs of a micro-batch for a number of them, the second to be planned if no plan of
#: the first fits; raises `Infeasible` if there are no such micro-batches.
Graphs = Callable[[int], Iterable[Graph]]
#: Finds the best plan of stages for the graph of one micro-batch, as `find_pipeline`.
Find = Callable[[Graph, Cluster, Request, Budget, int, "tuple[int, ...] | None"], Outcome]
#: Micro-batches for each stage with which a pipeline is full most of the time.
FULL = 4
#: Beside the best plan, so many times its cost is far more.
RISEN = 1.2
#: A number has the steps of one of so many at least.
COUNTS = 6


@dataclass(frozen=True)
class Trial:
    """A number of micro-batches with the stages to try for it."""

    count: int  #: Micro-batches of a step.
    #: Numbers of devices of a stage; None for those of the request.
    sizes: tuple[int, ...] | None = None


def usual_trials(batch: int, cluster: Cluster, request: Request) -> tuple[Trial, ...]:
    """The numbers of micro-batches to try.

    On few devices the usual ones, or that asked for, with stages of all sizes. On many, each size
    of a stage has a number of its own, and stages are whole nodes where there are several: slow
    links are those between stages then. Fewer and larger stages come first.

    Raises:
        SearchError: As `Request.stage_sizes`.
    """
    asked, devices = request.micro_batch_count, len(cluster)
    if devices <= EXPLICIT or request.constraints.names_devices:
        counts = (asked,) if asked else usual_counts(batch, devices)
        return tuple(map(Trial, counts))
    node = cluster.levels[0].size if len(cluster.levels) > 1 else 1
    sizes = request.stage_sizes(devices)
    whole = tuple(size for size in sizes if size % node == 0 and size < devices) or sizes
    if asked:
        apt = tuple(size for size in whole if size // node <= batch // asked) or whole
        return (Trial(asked, apt),)
    by_count: dict[int, list[int]] = {}
    for size in sorted(whole, reverse=True):
        # Each node of a stage keeps a sample of every micro-batch: its nodes can share the batch.
        most = max(1, batch // max(1, size // node))
        count = _nearest(batch, min(most, FULL * (devices // size)))
        by_count.setdefault(count, []).append(size)
    return tuple(Trial(count, tuple(of)) for count, of in by_count.items())


def _nearest(batch: int, count: int) -> int:
    """The nearest number that divides a batch; the smaller one of two."""
    divisors = (n for n in range(1, batch + 1) if batch % n == 0)
    return min(divisors, key=lambda n: (abs(n - count), n))


def usual_counts(batch: int, devices: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth a try: about one, two and four for each device, and few.

    Few are the fastest where a step takes as long as its launches and messages: of a small model,
    which is not for many devices.
    """
    few = (2**power for power in range(devices.bit_length())) if devices <= EXPLICIT else ()
    wanted = (devices, 2 * devices, 4 * devices, *few)
    return tuple(sorted({_nearest(batch, count) for count in wanted}))


class BatchBytes(NamedTuple):
    """Bytes of a whole batch on one device."""

    kept: int  #: Those that stay from step to step.
    moving: int  #: Those beside them at the peak, of which a micro-batch has its part.

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster) -> BatchBytes:
        """Count them for a graph, on the device of a cluster that needs the fewest."""
        device, alone = best_single(graph, cluster, "memory")
        gradients = (n for n in graph.nodes if n.attrs.get("role") == "gradient")
        kept = kept_bytes(graph) + sum(graph.types[n.outputs[0]].nbytes for n in gradients)
        return cls(kept, max(0, alone.needed_bytes[device] - kept))


@dataclass(frozen=True)
class Traces:
    """The traces that graphs of micro-batches need, which take a part of the clock."""

    seconds: float = 0.0  #: About those of one.
    #: Tells by the number of micro-batches whether their graph is there, maybe as a guess.
    is_there: Callable[[int], bool] = lambda _count: True
    #: Tells whether it is a guess, which a trace will confirm.
    is_guessed: Callable[[int], bool] = lambda _count: False


@dataclass
class CountSearch:
    """Plans of a step by the number of its micro-batches."""

    graphs: Graphs  #: The graphs of a micro-batch.
    cluster: Cluster
    request: Request  #: The request; called before `Request.over`.
    budget: Budget  #: The budget of all numbers.
    #: Numbers of devices of a stage to try; None for those of the request.
    sizes: tuple[int, ...] | None = None
    #: Gives the least seconds of a step by the number of its micro-batches.
    least: Callable[[int], float] | None = None
    #: Gives what one device would hold of a whole batch.
    held: Callable[[], BatchBytes] = lambda: BatchBytes(0, 0)
    traces: Traces = field(default_factory=Traces)  #: What graphs of micro-batches take.
    #: Gives the graph of the last micro-batch, if that is smaller than the others.
    last: Callable[[int], Graph | None] = lambda _count: None
    is_short: bool = False  #: Whether bytes are, which values that are computed again save.
    find: Find = find_pipeline  #: Plans each graph.
    #: The best plan of each number that has one.
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    #: The refusal of each other number.
    refused: dict[int, Infeasible] = field(default_factory=dict)
    #: Why a number has no plan whatever the memory is, as where ranks outnumber rows.
    impossible: dict[int, ConstraintError | PipelineScheduleError] = field(default_factory=dict)
    #: Why each other number was left: no plan of it was found to be faster than others.
    slower: dict[int, NoCheaper] = field(default_factory=dict)
    _kept_s: float = 0.0  # seconds of the clock for a trace that confirms a guess

    def all(self, trials: Sequence[Trial]) -> Outcome:
        """The best plan of these numbers.

        On many devices the trials end behind one whose plan is slower than that of the one before,
        since each takes long. Half the number of the best plan is tried then. The clock ends all.

        Raises:
            Infeasible: None of them has one; the refusal that is short of the fewest bytes.
            NoCheaper: None was found that costs less than the known plan of the budget.
        """
        for index, trial in enumerate(trials):
            if index and self._is_late(trial.count):
                break
            known_s = self._best_s
            fits = self._plan(trial.count, len(trials) - index, trial.sizes, known_s)
            is_known = self.outcomes and (fits or trial.count in self.slower)
            if is_known and trial.sizes is not None and self._best_s >= known_s:
                break
            if index and self._rises(trials[index - 1].count, trial.count):
                for left in trials[index + 1 :]:
                    text = f"{left.count} micro-batches are not tried: {trial.count} take longer"
                    least_s = self.least(left.count) if self.least else 0.0
                    self.slower[left.count] = NoCheaper(text, least_s)
                break
        if self.outcomes:
            if trials[0].sizes is not None and self.request.micro_batch_count is None:
                self._halve()
            return self.best
        if self.slower:
            raise min(self.slower.values(), key=lambda error: error.bound)
        raise self.nearest

    def _rises(self, few: int, more: int) -> bool:
        """Tell whether a step takes far longer in more micro-batches: in yet more it does, too."""
        if few > more or not {few, more} <= self.outcomes.keys() or self.request.tune:
            return False
        return self._cost(more) > max(RISEN * self._best_s, self._cost(few))

    @property
    def nearest(self) -> Infeasible | ConstraintError | PipelineScheduleError:
        """The refusal that is short of the fewest bytes, or why no number has plans."""
        if self.refused:
            return min(self.refused.values(), key=lambda error: error.bytes_short)
        return next(iter(self.impossible.values()))

    def _halve(self) -> None:
        """Plan half the best number, in stages of its size: a node has samples to share then."""
        count, plan = self._best_count, self.best.plan
        if count > 1 and not self.budget.work.late:
            size = max(mesh.size() for mesh in plan.groups)
            self._plan(_nearest(count, count // 2), 1, (size,), self._best_s)

    @property
    def _best_count(self) -> int:
        return min(self.outcomes, key=self._cost)

    def _cost(self, count: int) -> float:
        return step_cost(self.outcomes[count].evaluation, self.request.objective)

    @property
    def _best_s(self) -> float:
        """Cost that a plan must beat: of the best or, of plans to be run, of the last one."""
        goal = self.request.objective
        if self.request.tune is None:
            return min((self.budget.best_s, *map(self._cost, self.outcomes)))
        plans = (plan for outcome in self.outcomes.values() for plan in outcome.candidates)
        costs = (step_cost(plan.evaluation, goal) for plan in plans)
        return min(self.budget.best_s, to_beat(costs, self.request.tune))

    def fewest(self, counts: Sequence[int]) -> Outcome | None:
        """The best plan of the least number that fits, or of a larger one that is faster.

        With more micro-batches less is held at once, down to one sample on each device. The first
        number is tried that fits if all devices share what the whole batch takes; then those that
        make up for the bytes that the last one is short of, and the least one that fits is
        bisected; fewer than the first, if that fits, as long as they are faster. A larger one is
        faster where it computes less again or communicates less. The numbers ascend, to one sample
        in each micro-batch.
        """
        if not counts:
            return None
        self.is_short = True
        order = {count: place for place, count in enumerate(counts)}
        fits = next((count for count in self._likely(counts) if self._plan(count)), None)
        if fits is None:
            return None
        refused = [order[count] for count in self.refused if count < fits and count in order]
        low, high = max([-1, *refused]), order[fits]
        while high - low > 1:
            # where none was refused, the number beside is the likeliest
            middle = (low + high) // 2 if refused else high - 1
            if not self._plan(counts[middle]):
                low = middle
            elif not refused and self._cost(counts[middle]) > self._cost(counts[high]):
                break
            else:
                high = middle
        best_s = self._cost(counts[high])
        for count in counts[high + 1 :]:
            if not self._plan(count) or self._cost(count) >= best_s:
                break
            best_s = self._cost(count)
        return self.best

    @property
    def _sharing(self) -> int:
        """Devices that share what is held of a micro-batch: in stages as many of them are held."""
        devices = len(self.cluster)
        return devices if self.sizes in (None, (devices,)) else 1

    def _likely(self, counts: Sequence[int]) -> Iterator[int]:
        """The numbers one of which fits if any does, in the order of trial.

        First that for which the devices would share all bytes evenly, then those that leave each
        device one sample, or two. Where too many are impossible, fewer are tried, and at last those
        beside the number that was short of the fewest bytes.
        """
        kept, moving = self.held()
        limit = sum(device.memory_bytes for device in self.cluster.devices) - kept
        least = moving * len(self.cluster) / self._sharing
        fits = (place for place, count in enumerate(counts) if least <= limit * count)
        place = next(fits, len(counts) - 1)
        while place < len(counts):
            count = counts[place]
            yield count
            if count not in self.refused:
                break
            short = self.refused[count].bytes_short * self._sharing
            most = 1 / count - short / max(1, moving)
            enough = (n for n in range(place + 1, len(counts)) if 1 / counts[n] <= most)
            place = next(enough, max(place + 1, len(counts) - 1))
        for samples in (1, 2):
            least = counts[-1] // (samples * len(self.cluster))
            yield from [count for count in counts if count <= least][-1:]
        for count in reversed(counts):
            if all(other in self.impossible for other in counts if other > count):
                yield count
        while self.refused and not self.budget.work.over:
            nearest = min(self.refused, key=lambda count: self.refused[count].bytes_short)
            at = counts.index(nearest)
            beside = [*counts[at + 1 : at + 2], *counts[max(0, at - 1) : at]]
            untried = [
                count for count in beside if count not in {**self.refused, **self.impossible}
            ]
            if not untried:
                break
            yield untried[0]

    @property
    def best(self) -> Outcome:
        """The fastest plan, with a certificate over all numbers that were tried."""
        best, every = self.outcomes[self._best_count], tuple(self.outcomes.values())
        known, cost = [one.certificate for one in every], best.certificate.cost
        slower = (error.bound for error in self.slower.values())
        bound, status = min(cost, *(one.bound for one in known), *slower), best.certificate.status
        if status == "optimal" and cost - bound > self.request.gap * cost:
            status = "feasible"
        space = ", ".join(dict.fromkeys(one.space for one in known))
        candidates = tuple(plan for one in every for plan in one.candidates)
        best = replace(best, candidates=candidates)
        best = best.certified(bound=bound, status=status, space=space)
        return best.stopped() if self.budget.work.stopped else best

    def _sizes(self, count: int) -> tuple[int, ...] | None:
        """Numbers of devices of a stage: on one mesh of all, one micro-batch is the whole batch."""
        if self.sizes is None or self.least is None or count > 1:
            return self.sizes
        return tuple(size for size in self.sizes if size < len(self.cluster))

    def _open_graphs(self, count: int, sizes: tuple[int, ...] | None) -> Iterator[Graph]:
        """The graphs of a micro-batch, but for one that is sure not to fit where another follows.

        Where bytes are short the last goes first, since it has the plans of the others, and where a
        plan is known alone. None follows behind the time limit.
        """
        graphs = iter(self.graphs(count))
        if self.is_short:
            graphs = reversed([*graphs])
            if self.outcomes or self.budget.best_s < math.inf:
                graphs = islice(graphs, 1)
        for graph in graphs:
            on_one_mesh = sizes == (len(self.cluster),) and bool(graph.backward)
            is_too_large = on_one_mesh and not graph.optional and shortage(graph, self.cluster)[1]
            yield next(graphs, graph) if is_too_large else graph
            if self.budget.work.late:
                break

    def _plan(
        self,
        count: int,
        parts: int = 2,
        sizes: tuple[int, ...] | None = None,
        known_s: float = math.inf,
    ) -> bool:
        """Plan a number of micro-batches with a part of the budget; whether a plan fits.

        None but the first is planned behind the time limit. Plans that cost more than `known_s` are
        of no interest; `sizes` of stages are those of the search if None.
        """
        known = {**self.outcomes, **self.refused, **self.impossible, **self.slower}
        if count not in known and known and self.budget.work.late:
            self.refused[count] = Infeasible(NOT_SEARCHED, proven=False)
        elif self.least and (least_s := self.least(count)) >= (1 - self.budget.gap) * known_s:
            text = f"no step of {count} micro-batches takes less than {units.seconds(least_s)}"
            self.slower[count] = NoCheaper(text, least_s)
        elif count not in known:
            self.budget.say(f"planning {count} micro-batch{'es' if count > 1 else ''}")
            self._search(count, parts, sizes or self._sizes(count), known_s)
        return count in self.outcomes

    def _search(
        self, count: int, parts: int, sizes: tuple[int, ...] | None, known_s: float
    ) -> None:
        """Plan the graphs of a number in turn, until a plan of one fits or is not worth it.

        Whatever the numbers before it took, it has the steps of one of `COUNTS`, and half of the
        clock at most, on many devices all: each takes long there, and may be the last.
        """
        graphs, is_large = self._open_graphs(count, sizes), len(self.cluster) > EXPLICIT
        clock = 1 if is_large and sizes is not None else min(parts, 2)
        while count not in {**self.outcomes, **self.slower}:
            try:
                graph = next(graphs)
                self._keep_for_trace(count)
                if known_s < math.inf and self.budget.work.late:
                    least_s = self.least(count) if self.least else 0.0
                    self.slower[count] = NoCheaper(NOT_SEARCHED, least_s)
                    break
                if graph.optional:
                    self.budget.say("allowing values to be computed again")
                share = self.budget.share(parts, clock).with_steps(self.budget.work.steps / COUNTS)
                constraints = replace(self.request.constraints, last=self.last(count))
                request = replace(self.request, constraints=constraints)
                self.outcomes[count] = self.find(
                    graph, self.cluster, request, replace(share, best_s=known_s), count, sizes
                )
            except StopIteration:
                break
            except NoCheaper as error:
                self.slower[count] = error
            except Infeasible as error:
                self.refused[count] = error
            except ConstraintError as error:
                self.impossible[count] = error
            except PipelineScheduleError as error:
                if sizes is None:
                    raise
                self.impossible[count] = error  # stages of other sizes may be had

    def _is_late(self, count: int) -> bool:
        """Tell whether the clock leaves a number no seconds behind the trace that it needs."""
        is_known, work = self._best_s < math.inf, self.budget.work
        if is_known and not self.traces.is_there(count) and work.left_s <= self.traces.seconds:
            work.stop()
            return True
        return work.late

    def _keep_for_trace(self, count: int) -> None:
        """Keep seconds of the clock, once, if the graph of a number is a guess."""
        if not self._kept_s and self.traces.is_guessed(count):
            self._kept_s = min(self.traces.seconds, self.budget.work.left_s / 2)
            self.budget.work.deadline -= self._kept_s


@dataclass(frozen=True)
class LeastStep:
    """The least seconds of a step by the number of its micro-batches.

    A kernel takes no less than its launch, and one of several parts of it no less than its share,
    so that smaller micro-batches save nothing. Communications are not counted. Measured kernels
    may take less together than alone: nothing is known of devices with a profile.
    """

    graph: Graph  #: The graph of the whole batch.
    cluster: Cluster
    most: int  #: Most devices of a stage.
    waits: bool  #: Whether the cost is that of one step from begin to end, and not of a stream.

    def seconds(self, count: int) -> float:
        """No step in so many micro-batches takes less.

        The devices share the kernels of all micro-batches, evenly at best; and a micro-batch takes
        its longest path, of kernels that the devices of a stage share.
        """
        specs, devices, load_s = self.cluster.first_of_spec, len(self.cluster), 0.0
        if any(spec.profile is not None for spec in specs):
            return 0.0
        launch_s = min(spec.launch_s for spec in specs)
        done: dict[str, float] = {}
        for node in self.graph.nodes:
            begin = max((done.get(value, 0.0) for value in node.reads), default=0.0)
            times = count if node.name in self._repeated else 1
            whole_s = self._whole_s.get(node.name, 0.0)
            floor_s = min(launch_s, whole_s)
            load_s += max(times * floor_s, whole_s) / devices
            end = begin + max(floor_s, whole_s / (times * self.most))
            done.update(dict.fromkeys(node.writes, end))
        return max(load_s, max(done.values(), default=0.0)) if self.waits else load_s

    @cached_property
    def _whole_s(self) -> Mapping[str, float]:
        """Seconds of each kernel on the device that is fastest at it."""
        rules, specs = rules_of(self.graph), self.cluster.first_of_spec.values()
        seconds: dict[str, float] = {}
        for node in self.graph.nodes:
            rule = rules[node.name]
            own = rule if isinstance(rule, Rule) else None
            each: list[float] = []
            for device in specs:
                placed = place(self.graph, node, DeviceMesh.single(device), {}, own)
                if not is_free(placed):
                    each += node_seconds(self.graph, placed, self.cluster).values()
            if each:
                seconds[node.name] = min(each)
        return seconds

    @cached_property
    def _repeated(self) -> frozenset[str]:
        """The nodes that every micro-batch runs: those that follow from the inputs."""
        known, names = {*self.graph.inputs}, set[str]()
        for node in self.graph.nodes:
            if not known.isdisjoint(node.reads):
                known.update(node.writes)
                names.add(node.name)
        return frozenset(names)
