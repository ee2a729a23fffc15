"""Bytes of every device over the schedule, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory import (
    Lifetime,
    exact_lifetimes,
    safe_lifetimes,
    usage_curves,
    with_headroom,
)
from partitioner.cost_model.schedule import Schedule
from partitioner.report.page.schema import Live, Memory
from partitioner.report.planned import Planned

MAX_LIVE = 40  #: Entries of a live set that are listed.


def memory(result: Planned) -> list[Memory]:
    """Bytes of each device by the safe formula, or exactly where that exceeds the limit."""
    over = result.evaluation.over_bytes
    safe = _by_device(safe_lifetimes(result.schedule))
    exact = _by_device(exact_lifetimes(result.schedule)) if over else {}
    weights: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for (device, (value, _)), nbytes in result.schedule.residents.items():
        weights[device].append((value, nbytes))
    return [
        _device(
            (exact if device in over else safe).get(device, []),
            weights[device],
            spec.memory_bytes,
            result.schedule,
        )
        for device, spec in enumerate(result.cluster.devices)
    ]


def _by_device(lifetimes: Iterable[Lifetime]) -> dict[int, list[Lifetime]]:
    by_device: dict[int, list[Lifetime]] = defaultdict(list)
    for life in lifetimes:
        by_device[life.device].append(life)
    return by_device


def _device(
    lives: Sequence[Lifetime], weights: Sequence[tuple[str, int]], limit: int, schedule: Schedule
) -> Memory:
    activations = _curve(schedule, [life for life in lives if not life.buffer])
    buffers = _curve(schedule, [life for life in lives if life.buffer])
    total = with_headroom(activations + buffers)
    resident = sum(nbytes for _, nbytes in weights)
    peak = int(np.argmax(total)) if total.size else 0
    changed = np.flatnonzero(np.diff(activations, prepend=-1) | np.diff(buffers, prepend=-1))
    return Memory(
        limit_bytes=limit,
        weights_bytes=resident,
        position=changed.tolist(),
        activations=(total - with_headroom(buffers))[changed].tolist(),
        buffers=with_headroom(buffers)[changed].tolist(),
        peak_bytes=resident + (int(total[peak]) if total.size else 0),
        peak_position=peak,
        live=_live(lives, weights, peak),
    )


def _curve(schedule: Schedule, lives: Sequence[Lifetime]) -> npt.NDArray[np.int64]:
    """Bytes at each task position of one device's lifetimes."""
    (curve,) = usage_curves(schedule, lives).values() or (np.zeros(len(schedule.tasks), np.int64),)
    return curve


def _live(lives: Sequence[Lifetime], weights: Sequence[tuple[str, int]], at: int) -> Live:
    rows = [(nbytes, name, "weights") for name, nbytes in weights]
    rows += [
        (with_headroom(life.nbytes), life.value, "buffers" if life.buffer else "activations")
        for life in lives
        if life.first <= at <= life.last
    ]
    rows.sort(key=lambda row: (-row[0], row[1]))
    shown, rest = rows[:MAX_LIVE], rows[MAX_LIVE:]
    return Live(
        name=[name for _, name, _ in shown],
        kind=[kind for _, _, kind in shown],  # type: ignore[misc]
        bytes=[nbytes for nbytes, _, _ in shown],
        more=len(rest),
        more_bytes=sum(nbytes for nbytes, _, _ in rest),
    )
