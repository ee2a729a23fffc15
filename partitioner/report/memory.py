"""Bytes of every device over the schedule, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.memory import (
    Lifetime,
    exact_lifetimes,
    safe_lifetimes,
    with_headroom,
)
from partitioner.report.schema import Live, Memory
from partitioner.result import Compiled

#: Entries of a live set that are listed.
MAX_LIVE = 40

Kind = Literal["weights", "activations", "buffers"]


def memory(result: Compiled) -> list[Memory]:
    """One entry a device: by the safe formula or, where that is over the limit, the exact one."""
    over = result.evaluation.over_bytes
    safe, exact = _by_device(safe_lifetimes(result.schedule)), {}
    if over:
        exact = _by_device(exact_lifetimes(result.schedule))
    weights: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for (device, (value, _)), nbytes in result.schedule.residents.items():
        weights[device].append((value, nbytes))
    count = len(result.schedule.tasks)
    return [
        _device(
            (exact if device in over else safe).get(device, []),
            weights[device],
            spec.memory_bytes,
            count,
        )
        for device, spec in enumerate(result.cluster.devices)
    ]


def _by_device(lifetimes: object) -> dict[int, list[Lifetime]]:
    found: dict[int, list[Lifetime]] = defaultdict(list)
    for life in lifetimes:  # type: ignore[attr-defined]
        found[life.device].append(life)
    return found


def _device(
    lives: Sequence[Lifetime], weights: Sequence[tuple[str, int]], limit: int, count: int
) -> Memory:
    activations = _curve([life for life in lives if not life.buffer], count)
    buffers = _curve([life for life in lives if life.buffer], count)
    held = with_headroom(activations + buffers)
    resident = sum(nbytes for _, nbytes in weights)
    peak = int(np.argmax(held)) if count else 0
    changed = np.flatnonzero(np.diff(activations, prepend=-1) | np.diff(buffers, prepend=-1))
    return Memory(
        limit_bytes=limit,
        weights_bytes=resident,
        position=changed.tolist(),
        activations=(held - with_headroom(buffers))[changed].tolist(),
        buffers=with_headroom(buffers)[changed].tolist(),
        peak_bytes=resident + (int(held[peak]) if count else 0),
        peak_position=peak,
        live=_live(lives, weights, peak),
    )


def _curve(lives: Sequence[Lifetime], count: int) -> npt.NDArray[np.int64]:
    change = np.zeros(count + 1, np.int64)
    for life in lives:
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return np.cumsum(change)[:count]


def _live(lives: Sequence[Lifetime], weights: Sequence[tuple[str, int]], at: int) -> Live:
    rows: list[tuple[int, str, Kind]] = [(nbytes, name, "weights") for name, nbytes in weights]
    rows += [
        (with_headroom(life.nbytes), life.value, "buffers" if life.buffer else "activations")
        for life in lives
        if life.first <= at <= life.last
    ]
    rows.sort(key=lambda row: (-row[0], row[1]))
    shown, rest = rows[:MAX_LIVE], rows[MAX_LIVE:]
    return Live(
        name=[name for _, name, _ in shown],
        kind=[kind for _, _, kind in shown],
        bytes=[nbytes for nbytes, _, _ in shown],
        more=len(rest),
        more_bytes=sum(nbytes for nbytes, _, _ in rest),
    )
