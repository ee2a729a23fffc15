"""`calibrate` adds what a plan's ranks were measured to take to a profile."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.reload import look
from partitioner.backends.observed import MeasuredTask
from partitioner.cost_model.cluster.resolve import is_of_gpu
from partitioner.cost_model.prices.compute import (
    compute_dtype,
    is_free,
    local_flops,
    local_moved_bytes,
    shape_at,
)
from partitioner.cost_model.profiles.database import check_writable, default_profile, write_entries
from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import form_of, stores_parts
from partitioner.foundations import units
from partitioner.foundations.files import ResultError
from partitioner.ir.errors import hints_keywords
from partitioner.report.measured import FILE, Measured

#: Shortest kernel that becomes an entry: ONNX Runtime's profile counts whole microseconds.
_LEAST_S = 10e-6


@dataclass(frozen=True)
class Calibrated:
    """The entries that `calibrate` added; printed, a few lines."""

    file: Path  #: The profile.
    device: str  #: Fingerprint of the device.
    threads: int  #: Threads of one operator.
    processes: int  #: Number of processes that were busy at once.
    entries: int  #: Number of forms that were added or replaced.
    fused: int  #: Number of kernels that computed several nodes: they are of no single form.
    short: int  #: Number of kernels that are too short for the runtime's clock.

    def __str__(self) -> str:
        """A few lines for people."""
        threads = units.count(self.threads, "thread")
        busy = "process" if self.processes == 1 else "processes"
        fused = units.count(self.fused, "kernel")
        return "\n".join(
            [
                f"calibrated {units.count(self.entries, 'form')} of operators",
                f"  device   {self.device}, {threads}, {self.processes} {busy} at once",
                f"  left out {fused} of several nodes, {self.short} too short",
                f"  profile  {self.file}",
            ]
        )


@hints_keywords
def calibrate(program: str | Path | Compiled, profile: str | Path | None = None) -> Calibrated:
    """Add the record of a plan's measured run to a profile.

    A kernel that computed one whole node of the plan is a measurement of the node's form among its
    neighbours, with all ranks busy (one, if the plan is on one device); it replaces an earlier one
    of as many processes. Kernels that fuse several nodes, communications, and kernels under 10 us
    are left out.

    Args:
        program: The folder of a saved plan with a record, or a plan whose `measured` is set.
        profile: As of `profile`.

    Raises:
        ResultError: There is no record, it is of GPUs, or the folder is no saved plan.
        CostError: The file is no profile, or its folder is missing.
    """
    result = program if isinstance(program, Compiled) else look(program)
    measured = result.measured
    if measured is None:
        where = result.name if isinstance(program, Compiled) else program
        reason = result.warnings[-1] if result.warnings else f"{where} has no {FILE}"
        raise ResultError(f"{reason}; record a run: partition run DIR --profile")
    if is_of_gpu(measured.device):
        raise ResultError(
            f"the record of {result.name} is of {measured.device}: marks between kernels hold up "
            "the processor that starts them, so that they are no prices; measure with `profile`"
        )
    file = Path(profile) if profile is not None else default_profile()
    check_writable(file)
    runs: dict[str, list[MeasuredTask]] = {}
    entries: dict[str, Entry] = {}
    for entry, task in _forms(result, measured):
        entries[entry.form] = entry
        runs.setdefault(entry.form, []).append(task)
    done = [
        replace(
            entries[form],
            seconds=statistics.median(task.seconds for task in tasks),
            spread=statistics.median(task.spread for task in tasks),
            repeats=measured.steps * len(tasks),
        )
        for form, tasks in runs.items()  # on whichever rank and node
    ]
    write_entries(file, measured.device, measured.threads, done)
    kernels = [task for rank in measured.ranks for task in rank.tasks]
    return Calibrated(
        file,
        measured.device,
        measured.threads,
        _busy(result, measured),
        len(done),
        sum(len(task.nodes) > 1 for task in kernels),
        sum(len(task.nodes) == 1 and task.seconds < _LEAST_S for task in kernels),
    )


def _forms(result: Compiled, measured: Measured) -> Iterator[tuple[Entry, MeasuredTask]]:
    """The kernels that computed one node alone, each with its entry without figures."""
    graph, in_parts = result.graph, stores_parts(result.placed)
    placed = {one.node.name: one for one in result.placed}
    schedule = result.run_schedule
    times = {task.name: schedule.times(task) for task in schedule.tasks if task.placed is not None}
    processes = _busy(result, measured)
    for rank, record in enumerate(measured.ranks):
        kernels = Counter(name for task in record.tasks for name in task.nodes)
        for task in record.tasks:
            node = placed.get(task.nodes[0]) if len(task.nodes) == 1 else None
            if node is None or task.comms or task.seconds < _LEAST_S:
                continue
            if kernels[node.node.name] == 1 and not is_free(node):
                seconds = task.seconds / times[node.node.name]  # in stages, of a micro-batch
                point = dict(node.mesh.coords())[rank]
                form = form_of(graph, node, partial(shape_at, point), in_parts=in_parts)
                entry = Entry(
                    form=form.key,
                    op=form.family,
                    dtype=compute_dtype(graph, node),
                    flops=local_flops(graph, node, point),
                    moved_bytes=local_moved_bytes(graph, node, point),
                    seconds=0.0,
                    spread=0.0,
                    repeats=0,
                    backend=measured.backend,
                    measured_at=measured.measured_at,
                    processes=processes,
                )
                yield entry, replace(task, seconds=seconds)


def _busy(result: Compiled, measured: Measured) -> int:
    """Number of processes that were busy at once: one, or all (see `Cluster.beside`)."""
    devices = {device for one in result.placed for device in one.mesh.devices}
    return 1 if len(devices) == 1 else len(measured.ranks)
