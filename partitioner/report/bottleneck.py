"""What limits a plan, in one sentence, and whether splitting is worth it, in another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from partitioner import units
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import node_limit
from partitioner.cost_model.critical_path import critical_path
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.memory import MemoryPeak
from partitioner.cost_model.schedule import Schedule
from partitioner.cost_model.simulate import simulate
from partitioner.ir.graph import Graph

#: A share of the time above this is what a plan is said to be limited by.
MOST = 0.5
#: Below this ratio of the mean load to the largest, the plan is said to be unbalanced.
BALANCED = 0.8
#: Gains over one device up to this ratio are not called worth the devices.
WORTH = 1.05
#: Less free memory than this share of a device is worth a word.
TIGHT = 0.05


@dataclass(frozen=True)
class Bottleneck:
    """Where the time goes.

    Attributes:
        over: "step", the busiest device's load, or "latency", the critical path.
        device: The busiest device; None for a path over several.
        total_s: Seconds explained.
        seconds: By "launches", "arithmetic", "memory bandwidth" and kind of communication
            ("all-reduce"), and "waiting" where nothing ran; adds up to `total_s`.
        counts: How many operators or communications each of them has.
        balance: Mean load over the largest, of the devices that have any.
        largest: Name of the operator or communication that takes longest, and its seconds.
        turn: What is done again and again: "request", or "step" of a training graph.
    """

    over: str
    device: int | None
    total_s: float
    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    balance: float
    largest: tuple[str, float]
    turn: str = "request"

    @property
    def communication_s(self) -> float:
        """Seconds that are not computing."""
        return sum(s for what, s in self.seconds.items() if what not in (*COMPUTING, WAITING))


WAITING = "waiting"
COMPUTING = ("launches", "arithmetic", "memory bandwidth")


def bottleneck(
    graph: Graph, tasks: Schedule, evaluation: Evaluation, cluster: Cluster, objective: str
) -> Bottleneck:
    """Take a plan's time apart: the critical path for "latency", else the busiest device."""
    loads = evaluation.load_s
    busiest = max(loads, key=loads.__getitem__)
    if objective == "latency":
        timeline = simulate(tasks)
        path = [timeline.events[index] for index in critical_path(timeline)]
        spans = _disjoint([(e.task, e.device, e.start_s, e.end_s) for e in path])
        over, device, total = "latency", None, timeline.makespan_s
    else:
        spans = [
            (index, busiest, task.devices[busiest])
            for index, task in enumerate(tasks.tasks)
            if busiest in task.devices
        ]
        over, device, total = "step", busiest, loads[busiest]
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    longest = ("", 0.0)
    for index, on, spent in spans:
        task = tasks.tasks[index]
        what = _kind(graph, tasks, index, on, cluster)
        seconds[what] += spent
        counts[what] += 1
        if spent > longest[1]:
            longest = (task.name, spent)
    idle = total - sum(seconds.values())
    if idle > 1e-9 * total:
        seconds[WAITING] = idle
    return Bottleneck(
        over,
        device,
        total,
        dict(seconds),
        dict(counts),
        balance(evaluation),
        longest,
        turn_of(graph),
    )


def turn_of(graph: Graph) -> str:
    """What is done again and again: "request", or "step" of a training graph."""
    return "step" if graph.backward else "request"


def balance(evaluation: Evaluation) -> float:
    """Mean load over the largest, of the devices that have any."""
    used = [load for load in evaluation.load_s.values() if load]
    return sum(used) / (len(used) * max(used)) if used else 1.0


def limit_sentence(found: Bottleneck, evaluation: Evaluation, objective: str) -> str:
    """One sentence: what limits the plan."""
    if not evaluation.fits_exactly:
        return _short_sentence(evaluation)
    if objective == "memory":
        return _memory_sentence(evaluation)
    if not found.total_s:
        return "Nothing takes time on this cluster."
    subject = (
        f"device {found.device} is busy {units.seconds(found.total_s)} a {found.turn}"
        if found.device is not None
        else f"the critical path takes {units.seconds(found.total_s)}"
    )
    what, spent = max(found.seconds.items(), key=lambda entry: entry[1])
    part = units.share(spent / found.total_s)
    tail = _tight(evaluation)
    if found.communication_s > MOST * found.total_s:
        share = units.share(found.communication_s / found.total_s)
        kinds = {k: s for k, s in found.seconds.items() if k not in (*COMPUTING, WAITING)}
        most = max(kinds, key=kinds.__getitem__)
        return (
            f"Communication: {subject}, {share} of it communicating, most in "
            f"{_counted(found, most)} ({units.seconds(kinds[most])}).{tail}"
        )
    if found.balance < BALANCED and found.over == "step":
        name, longest = found.largest
        return (
            f"Imbalance: {subject}, the mean device {units.share(found.balance)} of that; its "
            f"longest task, {name}, takes {units.seconds(longest)}.{tail}"
        )
    names = {
        "launches": "Kernel launches",
        "arithmetic": "Arithmetic",
        "memory bandwidth": "Memory bandwidth",
    }
    return (
        f"{names.get(what, what.capitalize())}: {subject}, {part} of it in "
        f"{_counted(found, what)}.{tail}"
    )


def worth_sentence(
    evaluation: Evaluation,
    single: tuple[int, Evaluation],
    cluster: Cluster,
    objective: str,
    turn: str = "request",
) -> str:
    """One sentence: is splitting worth it, beside the whole model on one device?

    Args:
        evaluation: The plan's.
        single: The best single device and its evaluation, see `best_single`.
        cluster: What the plan is for.
        objective: Of the plan.
        turn: See `turn_of`.
    """
    used, (device, alone) = evaluation.devices_used, single
    alike = len(set(cluster.devices)) == 1
    one = "one device alone" if alike else f"device {device} ({cluster.devices[device].name}) alone"
    if used <= 1:
        return "The plan uses one device: nothing is split."
    if not alone.fits_exactly:
        need, have = alone.held_bytes[device], alone.limit_bytes[device]
        most = "a device has" if alike else "the largest device has"
        return (
            f"The split is needed: the whole model takes {units.size(need)}, "
            f"{most} {units.size(have)}."
        )
    before, after = alone.cost(objective), evaluation.cost(objective)
    if not after:
        return "Nothing takes time on this cluster: splitting gains nothing."
    gain = before / after
    show = units.size if objective == "memory" else units.seconds
    if gain < WORTH:
        return (
            f"Splitting is not worth it here: {used} devices take {show(after)}, "
            f"{one} {show(before)}."
        )
    if objective == "memory":
        speed = alone.step_s / evaluation.step_s if evaluation.step_s else 1.0
        return (
            f"The fullest of {used} devices holds {units.size(after)}, {one} "
            f"{units.size(before)}; the throughput is {speed:.3g} times that of one."
        )
    what = "latency" if objective == "latency" else f"time between {turn}s"
    ideal = f", {units.share(gain / used)} of the ideal {used} times" if alike else ""
    return (
        f"{used} devices are {gain:.3g} times as fast as {one} "
        f"({what} {show(after)} against {show(before)}{ideal})."
    )


def tightest(evaluation: Evaluation) -> tuple[int, float]:
    """The device with the least free share of its memory, and that share."""
    free = {
        device: 1 - held / evaluation.limit_bytes[device]
        for device, held in evaluation.held_bytes.items()
    }
    device = min(free, key=free.__getitem__)
    return device, free[device]


def _disjoint(path: list[tuple[int, int, float, float]]) -> list[tuple[int, int, float]]:
    """Each event's share of the path: what none before it has covered."""
    spans = []
    covered = 0.0
    for task, device, start, end in path:
        fresh = end - max(start, covered)
        if fresh > 0:
            spans.append((task, device, fresh))
            covered = end
    return spans


def _kind(graph: Graph, tasks: Schedule, index: int, device: int, cluster: Cluster) -> str:
    task = tasks.tasks[index]
    if task.comm is not None:
        return task.comm.kind.spelled
    assert task.placed is not None
    return node_limit(graph, task.placed, device, cluster)


def _counted(found: Bottleneck, what: str) -> str:
    if what == WAITING:
        return WAITING
    count = found.counts[what]
    if what in COMPUTING:
        return f"{count} operator{'s' if count > 1 else ''} bound by {what}"
    return f"{count} {what} communications" if count > 1 else f"one {what}"


def _tight(evaluation: Evaluation) -> str:
    device, free = tightest(evaluation)
    if free >= TIGHT:
        return ""
    return f" Memory is tight too: device {device} has {units.share(max(free, 0.0))} free."


def _memory_sentence(evaluation: Evaluation) -> str:
    held = evaluation.held_bytes
    device = max(held, key=held.__getitem__)
    peak = _peak(evaluation, device)
    return (
        f"Memory: device {device} holds {units.size(held[device])} at {peak.at}, "
        f"{units.size(peak.resident_bytes)} of it weights."
    )


def _short_sentence(evaluation: Evaluation) -> str:
    over = {d: held - evaluation.limit_bytes[d] for d, held in evaluation.held_bytes.items()}
    device = max(over, key=over.__getitem__)
    return (
        f"Does not fit: device {device} holds {units.size(evaluation.held_bytes[device])} at "
        f"{_peak(evaluation, device).at}, {units.size(over[device])} over its limit."
    )


def _peak(evaluation: Evaluation, device: int) -> MemoryPeak:
    """The peak that `Evaluation.held_bytes` counts."""
    peaks = evaluation.exact_peak if device in evaluation.over_bytes else evaluation.peak
    return peaks[device]
