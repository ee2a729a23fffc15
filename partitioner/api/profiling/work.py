"""What processes that measure are told, and what they tell, in files of their job's folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import Order
from partitioner.ir.graph import Graph
from partitioner.ir.program import Programs

RUNNER = "partitioner.api.profiling.rank"  #: Runs a rank of the job.
_WORK, _STATUS = "work.pickle", "status.json"


@dataclass(frozen=True)
class Program:
    """Some operators on one rank: lowered, and as a graph of their own with its constants."""

    programs: Programs
    graph: Graph


@dataclass(frozen=True)
class Item:
    """A form to measure."""

    program: Program
    #: The program without the form, where that stands behind other operators: what both take
    #: differs by the form. None if the program is the form alone.
    before: Program | None
    entry: Entry  #: What becomes its entry, without figures.
    together: bool  #: Whether all processes measure it at once.
    alone: bool  #: Whether one process measures it while the others wait.
    #: Inputs of the program that a model makes shortly before, so that they lie in caches.
    recent: tuple[str, ...]
    #: Whether much of what it reads was made long before, or of what it writes lies there long
    #: after, so that it lies in memory.
    is_cold: bool
    #: Whether a model keeps its results long after, so that each run writes to memory that was not
    #: touched shortly before.
    is_kept: bool
    #: `memory_order` of the inputs of the program that have another than that of their dims.
    orders: Mapping[str, Order]


@dataclass(frozen=True)
class Work:
    """The measurements to make, in order."""

    backend: str  #: Name of the backend, with its version.
    file: Path  #: The profile.
    device: str  #: Fingerprint of the device.
    threads: int  #: Threads of one operator.
    items: Sequence[Item]
    #: Time of `time.perf_counter`, one clock for all processes of a machine, at which the
    #: measurements end.
    end_s: float


@dataclass(frozen=True)
class Status:
    """The progress of the work."""

    #: Keys of the forms that are in the profile now, in all ways that were asked for.
    measured: frozenset[str] = frozenset()
    #: Reason for each operator that a process could not run.
    failed: Mapping[str, str] = field(default_factory=dict)


def leave_work(folder: Path, work: Work) -> None:
    """Leave the work in the folder of a job of `run_job`, for `RUNNER`."""
    (folder / _WORK).write_bytes(pickle.dumps(work))


def read_work(folder: Path) -> Work:
    """The work that `leave_work` left."""
    work: Work = pickle.loads((folder / _WORK).read_bytes())  # noqa: S301 (our own file)
    return work


def leave_status(folder: Path, status: Status) -> None:
    """Leave how far the work is, in one step."""
    draft = folder / f"{_STATUS}.new"
    draft.write_text(json.dumps({"measured": sorted(status.measured), "failed": {**status.failed}}))
    draft.replace(folder / _STATUS)


def read_status(folder: Path) -> Status:
    """The progress of the processes of a job."""
    try:
        data = json.loads((folder / _STATUS).read_text())
    except FileNotFoundError:
        return Status()
    return Status(frozenset(data["measured"]), data["failed"])
