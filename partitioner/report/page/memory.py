"""Bytes of the devices over the schedule, and of communications by pair of devices and by level."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.memory.lifetimes import (
    Lifetime,
    exact_lifetimes,
    loaded_among_activations,
    safe_lifetimes,
    with_headroom,
)
from partitioner.cost_model.memory.lives import Moments, StepLives
from partitioner.cost_model.prices.collectives import comm_cost
from partitioner.cost_model.schedule.simulate import Timeline, simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.cost_model.schedule.traffic import moves
from partitioner.foundations import units
from partitioner.ir.types import DTYPE_BITS
from partitioner.report.planned import Lanes, Planned
from partitioner.report.schema import Link, Live, Memory, Traffic

EXECUTOR = "what the executor takes beside these"
MAX_LIVE = 40  #: Entries of a live set that are listed.
MAX_MOMENTS = 4000  #: Of one device in stages; of more the largest of each pass is kept.


def memory(result: Planned, lanes: Lanes) -> list[Memory]:
    """Bytes of the fullest device of each lane, by the safe formula where it fits.

    What the executor takes beside them has no moments: it is one figure.
    """
    over, schedule = result.evaluation.over_bytes, result.schedule
    needed_bytes = result.evaluation.needed_bytes
    safe = _by_device(safe_lifetimes(schedule))
    exact = _by_device(exact_lifetimes(schedule)) if over else {}
    weights: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for key, nbytes in schedule.residents.items():
        if key not in schedule.loads:
            weights[key[0]].append((key[1][0], nbytes))
    loaded = _by_device(loaded_among_activations(schedule))
    timeline = simulate(schedule)
    memories = []
    for device in lanes.fullest:
        limit = result.cluster.devices[device].memory_bytes
        lives = (exact if device in over else safe).get(device, [])
        lives = [*lives, *loaded.get(device, [])]
        moments = StepLives.of(schedule, lives).moments(device)
        timed = timeline.makespan_s > 0
        seconds = _seconds(moments, device, schedule, timeline) if timed else None
        memories.append(_device(moments, seconds, weights[device], limit, needed_bytes[device]))
    return memories


def _by_device(lifetimes: Iterable[Lifetime]) -> dict[int, list[Lifetime]]:
    by_device: dict[int, list[Lifetime]] = defaultdict(list)
    for life in lifetimes:
        by_device[life.device].append(life)
    return by_device


def _seconds(
    moments: Moments, device: int, schedule: Schedule, timeline: Timeline
) -> Sequence[float]:
    """Find when each moment of a step begins: with its task or, if not the device's, the next."""
    runs = schedule.order.runs(device)
    starts: Mapping[tuple[int, int], float] = {
        (event.task, event.request): event.start_s
        for event in timeline.events
        if event.device == device
    }
    known = [
        starts.get((int(position), runs[run][1]))
        for position, run in zip(moments.position, moments.run, strict=True)
    ]
    seconds: list[float] = [0.0] * len(known)
    for moment in reversed(range(len(known))):
        here = known[moment]
        after = moment + 1 < len(known) and moments.run[moment + 1] == moments.run[moment]
        seconds[moment] = here if here is not None else seconds[moment + 1] if after else -1.0
    return tuple(itertools.accumulate(seconds, max, initial=0.0))[1:]


def _device(
    moments: Moments,
    seconds: Sequence[float] | None,
    weights: Sequence[tuple[str, int]],
    limit: int,
    needed: int,
) -> Memory:
    buffers = with_headroom(moments.buffers)
    total = with_headroom(moments.activations + moments.buffers)
    resident = sum(nbytes for _, nbytes in weights)
    peak = moments.peak
    changes = [np.diff(part, prepend=-1) for part in (moments.activations, moments.buffers)]
    shown: list[int] = np.flatnonzero(changes[0] | changes[1]).tolist()
    if moments.run.any() and len(shown) > MAX_MOMENTS:
        fullest: dict[int, int] = {}
        for moment, run in enumerate(moments.run.tolist()):
            if run not in fullest or total[moment] > total[fullest[run]]:
                fullest[run] = moment
        shown = sorted({*fullest.values(), peak})
    counts: Counter[tuple[str, str, int]] = Counter()
    for life, number in moments.at(peak):
        kind = "buffers" if life.buffer else "activations"
        counts[life.value, kind, with_headroom(life.nbytes)] += number
    rows = [(nbytes, name, "weights", 1) for name, nbytes in weights]
    rows += [(n * nbytes, name, kind, n) for (name, kind, nbytes), n in counts.items()]
    executor = max(needed - resident - (int(total[peak]) if total.size else 0), 0)
    rows += [(executor, EXECUTOR, "executor", 1)] * bool(executor)
    rows.sort(key=lambda row: (-row[0], row[1]))
    listed, rest = rows[:MAX_LIVE], rows[MAX_LIVE:]
    return Memory(
        limit_bytes=limit,
        weights_bytes=resident,
        position=moments.position[shown].tolist(),
        seconds=None if seconds is None else [units.short(seconds[m]) for m in shown],
        activations=(total - buffers)[shown].tolist(),
        buffers=buffers[shown].tolist(),
        peak_bytes=needed,
        executor_bytes=executor,
        peak_position=int(moments.position[peak]) if total.size else 0,
        peak_s=units.short(seconds[peak]) if seconds else None,
        live=Live(
            name=[name for _, name, _, _ in listed],
            kind=[kind for _, _, kind, _ in listed],  # type: ignore[misc]
            bytes=[nbytes for nbytes, _, _, _ in listed],
            times=[times for _, _, _, times in listed],
            more=len(rest),
            more_bytes=sum(nbytes for nbytes, _, _, _ in rest),
        ),
    )


def traffic(schedule: Schedule, cluster: Cluster, lanes: Lanes) -> Traffic:
    """Bytes that a request or step moves, by pair of lanes and by level of the cluster."""
    exact: dict[tuple[int, int], float] = defaultdict(float)
    for task in schedule.tasks:
        for source, target, nbytes in moves(task):
            exact[source, target] += schedule.times(task) * nbytes
    pairs = {pair: round(nbytes) for pair, nbytes in exact.items()}
    of_lanes: Counter[tuple[int, int]] = Counter()
    sent: dict[str, Counter[int]] = defaultdict(Counter)
    for (source, target), nbytes in pairs.items():
        of_lanes[lanes.of[source], lanes.of[target]] += nbytes
        sent[cluster.level((source, target)).name][source] += nbytes
    links = []
    for level in cluster.levels:
        most = max(sent[level.name].values(), default=0)
        rate = level.bandwidth_bytes_per_s
        link = Link(
            level=level.name,
            size=min(level.size, len(cluster)),
            bytes=most,
            total_bytes=sum(sent[level.name].values()),
            seconds=most / rate,
            bandwidth_bytes_per_s=rate if math.isfinite(rate) else None,
        )
        links.append(link)
    rows = sorted(of_lanes.items())
    return Traffic(
        source=[source for (source, _), _ in rows],
        target=[target for (_, target), _ in rows],
        bytes=[nbytes for _, nbytes in rows],
        links=links,
    )


def crossing_bytes(task: Task) -> int:
    """Bytes that a communication moves between devices, its collectives as rings."""
    return round(sum(nbytes for _, _, nbytes in moves(task)))


def algorithm(task: Task, cluster: Cluster) -> str:
    """The algorithm that a communication is priced with."""
    comm = task.comm
    assert comm is not None
    bits = DTYPE_BITS[comm.dtype]
    largest = max((nbytes for _, _, nbytes in task.writes), default=0)
    return comm_cost(comm, largest * 8 // bits, cluster).algorithm
