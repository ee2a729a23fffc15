"""The bottleneck of a plan, and a sentence on what limits it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.prices.compute import node_limit
from partitioner.cost_model.schedule.readings import critical_path
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.report.planned import Planned

MOST = 0.5  #: A plan that communicates for a larger share of its time is limited by that.
BALANCED = 0.8  #: A plan with a smaller ratio of mean to largest load is unbalanced.
TIGHT = 0.05  #: The sentence mentions memory if a smaller share of a device is free.

WAITING = "waiting"
COMPUTING = ("launches", "arithmetic", "memory bandwidth")


@dataclass(frozen=True)
class Bottleneck:
    """The time of the busiest device, or of the critical path, by its limits."""

    device: int | None  #: The busiest device; None for the critical path.
    total_s: float  #: Its load, or the length of the path; in a plan with stages the whole step.
    #: By limit: one of `COMPUTING`, a kind of communication ("all-reduce"), or `WAITING` where
    #: nothing ran; adds up to `total_s`.
    seconds: Mapping[str, float]
    counts: Mapping[str, int]  #: Number of operators or communications of each limit.
    balance: float
    #: Name and seconds of the operator or communication that takes longest; of a step of micro-
    #: batches, all times that it runs.
    longest: tuple[str, float]
    turn: str = "request"

    @property
    def communication_s(self) -> Mapping[str, float]:
        """Seconds of each kind of communication."""
        return {k: s for k, s in self.seconds.items() if k not in (*COMPUTING, WAITING)}


def bottleneck(result: Planned) -> Bottleneck:
    """The bottleneck: of the critical path for "latency", else of the busiest device."""
    tasks, evaluation = result.schedule, result.evaluation
    device: int | None = None
    if result.objective == "latency":
        timeline = simulate(tasks)
        total_s = timeline.makespan_s
        spans, covered_s = [], 0.0  # less the seconds that earlier events cover
        for event in (timeline.events[index] for index in critical_path(timeline)):
            fresh_s = event.end_s - max(event.start_s, covered_s)
            if fresh_s > 0:
                spans.append((event.task, event.device, fresh_s))
                covered_s = event.end_s
    else:
        device = max(evaluation.load_s, key=evaluation.load_s.__getitem__)
        load_s = evaluation.load_s[device]
        total_s = evaluation.latency_s if evaluation.sequential else load_s
        spans = [
            (index, device, tasks.times(task) * task.devices[device])
            for index, task in enumerate(tasks.tasks)
            if device in task.devices
        ]
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    longest = ("", 0.0)
    for index, on, spent_s in spans:
        task = tasks.tasks[index]
        if task.comm is not None:
            limit = task.comm.kind.spelled
        else:
            assert task.placed is not None
            limit = node_limit(result.graph, task.placed, on, result.cluster)
        seconds[limit] += spent_s
        counts[limit] += tasks.times(task) if device is not None else 1
        if spent_s > longest[1]:
            longest = (task.name, spent_s)
    idle_s = total_s - sum(seconds.values())
    if idle_s > 1e-9 * total_s:
        seconds[WAITING] = idle_s
    shares = dict(seconds), dict(counts)
    turn = turn_of(result.graph, staged=not tasks.order.is_whole)
    return Bottleneck(device, total_s, *shares, balance(evaluation), longest, turn)


def turn_of(graph: Graph, *, staged: bool = False) -> str:
    """The unit of work that repeats: "request", or "step" of a training graph or with stages."""
    return "step" if graph.backward or staged else "request"


def balance(evaluation: Evaluation) -> float:
    """Mean load over the largest, of the devices that have any; of each copy its own largest."""
    loads, copies = evaluation.load_s, evaluation.copies
    if copies is not None:
        of_copies = zip(copies.devices, copies.seconds, strict=True)
        loads = {device: loads[device] / (s or 1) for copy, s in of_copies for device in copy}
    used = [load for load in loads.values() if load]
    return sum(used) / (len(used) * max(used)) if used else 1.0


def limit_sentence(result: Planned, limits: Bottleneck) -> str:
    """A sentence on what limits the plan, and one on memory if that is almost full."""
    evaluation = result.evaluation
    held = evaluation.needed_bytes
    if not evaluation.fits_exactly:
        over = {device: nbytes - evaluation.limit_bytes[device] for device, nbytes in held.items()}
        device = max(over, key=over.__getitem__)
        return (
            f"Does not fit: device {device} holds {units.size(held[device])} at "
            f"{evaluation.needed_peak(device).at}, {units.size(over[device])} over its limit."
        )
    if result.objective == "memory":
        device = max(held, key=held.__getitem__)
        peak = evaluation.needed_peak(device)
        return (
            f"Memory: device {device} holds {units.size(held[device])} at {peak.at}, "
            f"{units.size(peak.resident_bytes)} of it weights."
        )
    if not limits.total_s:
        return "Nothing takes time on this cluster."
    total = units.seconds(limits.total_s)
    subject = f"device {limits.device} is busy {total} a {limits.turn}"
    if limits.device is None:
        subject = f"the critical path takes {total}"
    elif WAITING in limits.seconds:
        subject = f"a {limits.turn} takes {total} on device {limits.device}, the busiest"
    tight, free = tightest(evaluation)
    tail = ""
    if free < TIGHT:
        tail = f" Memory is tight too: device {tight} has {units.share(max(free, 0.0))} free."
    comm_s = limits.communication_s
    if sum(comm_s.values()) > MOST * limits.total_s:
        share = units.share(sum(comm_s.values()) / limits.total_s)
        most = max(comm_s, key=comm_s.__getitem__)
        return (
            f"Communication: {subject}, {share} of it communicating, most in "
            f"{_counted(limits, most)} ({units.seconds(comm_s[most])}).{tail}"
        )
    staged = limits.device is not None and WAITING in limits.seconds
    if limits.balance < BALANCED and limits.device is not None:
        name, longest_s = limits.longest
        return (
            f"Imbalance: {subject}, the mean device {units.share(limits.balance)} of that; its "
            f"longest task, {name}, takes {units.seconds(longest_s)}.{tail}"
        )
    limit, spent_s = max(limits.seconds.items(), key=lambda entry: entry[1])
    titles = {"launches": "Kernel launches", WAITING: "Bubbles" if staged else "Waiting"}
    title = titles.get(limit, limit.capitalize())
    share = units.share(spent_s / limits.total_s)
    return f"{title}: {subject}, {share} of it in {_counted(limits, limit)}.{tail}"


def verdict(result: Planned, limits: Bottleneck, measured_s: float | None = None) -> str:
    """The plan's verdict, by its seconds in a run if there was one, with what limits it."""
    line, evaluation = result.verdict(measured_s).line, result.evaluation
    title, colon, _ = limit_sentence(result, limits).partition(":")
    if not evaluation.fits_exactly or not colon:
        return line
    where = "the critical path" if limits.device is None else f"device {limits.device}"
    if result.objective == "memory":
        held = evaluation.needed_bytes
        where = f"device {max(held, key=held.__getitem__)}"
    return f"{line}; limit: {title[0].lower()}{title[1:]} on {where}"


def tightest(evaluation: Evaluation) -> tuple[int, float]:
    """The device with the least free share of its memory, and that share."""
    free = {
        device: 1 - nbytes / evaluation.limit_bytes[device]
        for device, nbytes in evaluation.needed_bytes.items()
    }
    device = min(free, key=free.__getitem__)
    return device, free[device]


def _counted(limits: Bottleneck, limit: str) -> str:
    if limit == WAITING:
        return WAITING
    count = limits.counts[limit]
    if limit in COMPUTING:
        return f"{units.count(count, 'operator')} bound by {limit}"
    return f"{count:,} {limit} communications" if count > 1 else f"one {limit}"
