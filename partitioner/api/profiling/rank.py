"""A process that measures: all of a cluster run the same programs at once, then one runs alone."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.api.profiling.measure import Anyone, Timing, nothing, timed_runs
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.measuring import timing as onnx_timing
from partitioner.backends.prepared import Prepared
from partitioner.backends.torch.measuring import timing as torch_timing
from partitioner.backends.torch.measuring.clocks import Clock, clock_of, timed_run
from partitioner.cost_model.profiles.database import write_entries
from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import Order
from partitioner.foundations import units
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.program import Programs

#: Files in the folder of a job of `run_job` whose runner is this module.
WORK, _STATUS = "work.pickle", "status.json"
#: What a form takes at least: one that another's kernel computes may take nothing.
_LEAST_S = 1e-7
#: Programs that take turns: few enough to hold in memory, with their weights.
_AT_A_TIME = 8
#: Seconds that a run takes at least: its call would add much to a short operator. And most
#: operators of such a run.
_RUN_S, _MOST_COPIES = 1e-3, 64
#: Seconds of a run with empty caches to which reading its code from memory adds little.
_LONG_RUN_S = 1e-2
#: Bytes of a cache's line.
_LINE_BYTES = 64
#: Bytes, by type of device, of what drives all else out of caches of up to half as many: those of
#: two cores, and the L2 caches of GPUs (50 MB on an H100, 126 MB on a B200). The processes that
#: share a larger last cache of a processor write as many bytes as it has together.
_OTHER_BYTES = {"cpu": 2**26, "cuda": 2**28}
#: What Linux tells of the caches of the first processor, and units of their sizes.
_CACHES, _UNITS = Path("/sys/devices/system/cpu/cpu0/cache"), {"K": 2**10, "M": 2**20, "G": 2**30}
_Prepare = Callable[[Programs, Graph, Mapping[str, np.ndarray], int, str], Prepared]
_BACKENDS: Mapping[str, _Prepare] = {one.NAME: one.prepared for one in (onnx_timing, torch_timing)}


@dataclass(frozen=True)
class Item:
    """A form to measure."""

    graph: Graph  #: The operators as a graph of their own, with its constants.
    #: The graph without the form, where that stands behind other operators: what both take
    #: differs by the form. None if the graph is the form alone.
    before: Graph | None
    entry: Entry  #: What becomes its entry, without figures.
    together: bool  #: Whether all processes measure it at once.
    alone: bool  #: Whether one process measures it while the others wait.
    #: Inputs of the graph that a model makes shortly before, so that they lie in caches.
    recent: tuple[str, ...]
    #: Whether much of what it reads was made long before, or of what it writes lies there long
    #: after, so that it lies in memory.
    is_cold: bool
    #: Whether a model keeps its results long after, so that each run writes to memory that was not
    #: touched shortly before.
    is_kept: bool
    #: `memory_order` of the inputs of the graph that have another than that of their dims.
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


#: Items with their programs.
Ready = list[tuple[Item, Prepared]]


def read_status(folder: Path) -> tuple[frozenset[str], Mapping[str, str]]:
    """Keys of the forms that were measured in all ways, and why operators cannot be."""
    try:
        measured, failed = json.loads((folder / _STATUS).read_text())
    except FileNotFoundError:
        return frozenset(), {}
    return frozenset(measured), failed


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    work: Work = pickle.loads((folder / WORK).read_bytes())  # noqa: S301 (our own file)
    device = Device.of(job["device"])
    measured: set[str] = set()
    failed: dict[str, str] = {}
    for some in _batches(work.items):
        if _anyone([time.perf_counter() >= work.end_s])[0]:
            return
        entries = _measured(rank, work, device, some, failed)
        if rank == 0:
            write_entries(work.file, work.device, work.threads, entries)
            counts = Counter(entry.form for entry in entries)
            wanted = {item.entry.form: item.together + item.alone for item in some}
            measured.update(form for form, count in wanted.items() if counts[form] == count)
            draft = folder / f"{_STATUS}.new"  # in one step
            draft.write_text(json.dumps([sorted(measured), failed]))
            draft.replace(folder / _STATUS)


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Items that take turns: all are cold, or none; in order of the first of each."""
    open_ones: dict[bool, list[Item]] = {}
    for item in items:
        some = open_ones.setdefault(item.is_cold, [])
        some.append(item)
        if len(some) == _AT_A_TIME:
            yield open_ones.pop(item.is_cold)
    yield from open_ones.values()


def _anyone(wishes: Sequence[bool]) -> list[bool]:
    flags = torch.tensor(wishes, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags]


def _measured(
    rank: int, work: Work, device: Device, items: Sequence[Item], failed: dict[str, str]
) -> list[Entry]:
    """Entries of items that all processes can run in time; the others are in `failed`."""
    entries: list[Entry] = []
    ranks = dist.get_world_size()
    together = [item for item in items if item.together]
    ready = _prepared(work, device, together, failed, _anyone)
    entries += _timed(device, ready, ranks, _anyone, work.end_s)
    if rank == 0 and time.perf_counter() < work.end_s:
        # A program that counts its own seconds would give those of the runs before, too.
        again = [(item, one) for item, one in ready if item.alone and one.own_seconds is None]
        known = {id(item) for item, _ in again}
        others = [item for item in items if item.alone and id(item) not in known]
        ready = [*again, *_prepared(work, device, others, failed, list)]
        entries += _timed(device, ready, 1, list, work.end_s)
    dist.barrier()
    return entries


def _timed(
    device: Device, ready: Ready, processes: int, anyone: Anyone, end_s: float
) -> Iterator[Entry]:
    """Entries of the programs that fit before `end_s`, in turns on so many processes."""
    is_cold = any(item.is_cold for item, _ in ready)
    before_turn = partial(device.evict, processes) if is_cold else nothing
    runs = timed_runs(
        [one.run for _, one in ready],
        time.perf_counter,
        end_s,
        anyone,
        before_turn,
        [one.warm for _, one in ready],
        device.seconds_of,
    )
    for (item, one), own in zip(ready, runs, strict=True):
        if own:
            seconds = own if one.own_seconds is None else one.own_seconds()
            took = Timing.of([max(_LEAST_S, each / one.copies) for each in seconds])
            figures, now = took._asdict(), units.now()
            yield replace(item.entry, **figures, measured_at=now, processes=processes)


def _prepared(
    work: Work, device: Device, items: Sequence[Item], failed: dict[str, str], anyone: Anyone
) -> Ready:
    """The programs of the items, up to `work.end_s`, without those that fail in a process."""
    ready: list[tuple[Item, Prepared | None]] = []
    for item in items:
        if anyone([time.perf_counter() >= work.end_s])[0]:
            break
        one = None
        try:
            one = _as_in_model(device, item, _ready(work, device, item.graph, item.orders))
            if item.before is not None:
                one = _difference(_ready(work, device, item.before, item.orders), one)
        except PartitionerError as error:
            failed.setdefault(item.entry.op, str(error))
        ready.append((item, one))
    lost = anyone([one is None for _, one in ready])
    return [(item, one) for (item, one), gone in zip(ready, lost, strict=True) if one and not gone]


def _ready(work: Work, device: Device, graph: Graph, orders: Mapping[str, Order]) -> Prepared:
    inputs = random_inputs(graph, seed=0)
    for name, order in orders.items():
        if name in inputs:
            array = np.ascontiguousarray(inputs[name].transpose(order))
            inputs[name] = array.transpose(np.argsort(order))
    prepare = _BACKENDS[work.backend]
    return prepare(uncut_programs(graph), graph, inputs, work.threads, device.type)


def _as_in_model(device: Device, item: Item, one: Prepared) -> Prepared:
    """The program with what a model has in the caches when it comes to it, and long enough.

    Its code is there, as other layers ran it shortly before: a short program whose operands are not
    there reads others first. What that run writes is kept until the next one if the model keeps
    such results, so that the timed run does not write where it did.
    """
    if not item.is_cold:
        return _long_enough(device, one, None)
    recent = partial(device.read, [one.operands[name] for name in item.recent])
    if one.several is None or device.seconds_of(one.run) >= _LONG_RUN_S:
        return replace(one, warm=recent)
    kept: deque[object] = deque(maxlen=1)

    def warm() -> None:
        results = one.run()
        if item.is_kept:
            kept.append(results)
        del results
        recent()

    return replace(_long_enough(device, one, item.recent, is_kept=item.is_kept), warm=warm)


def _long_enough(
    device: Device, one: Prepared, shared: Collection[str] | None, *, is_kept: bool = False
) -> Prepared:
    """Make a program of as many of its operators as take `_RUN_S`.

    Their inputs share `shared`; None for all.
    """
    if one.several is None:
        return one
    run_s = min(device.seconds_of(one.run) for _ in range(3))
    copies = math.ceil(_RUN_S / max(_LEAST_S, run_s))
    if copies == 1 and shared is None:
        return one
    several = one.several(min(copies, _MOST_COPIES), shared, is_kept)
    several.run()
    return several


def _difference(before: Prepared, whole: Prepared) -> Prepared:
    """The seconds that a program takes more than another one, run by run in turns."""

    def run() -> None:
        before.run()
        whole.run()

    def own_seconds() -> Sequence[float]:
        assert before.own_seconds is not None
        assert whole.own_seconds is not None
        pairs = zip(before.own_seconds(), whole.own_seconds(), strict=True)
        return [more_s - less_s for less_s, more_s in pairs]

    return Prepared(run, own_seconds)


@dataclass
class Device:
    """The current device of a process."""

    clock: Clock  #: Its clock.
    others: Tensor = field(repr=False)  #: Tensor whose bytes drive all else out of its caches.

    @classmethod
    def of(cls, type_name: str) -> Device:
        """The device of PyTorch's type, "cpu" or "cuda"."""
        device, nbytes = torch.device(type_name), _OTHER_BYTES[type_name]
        if type_name == "cpu":  # bytes that nothing writes to take no memory
            others = torch.from_numpy(np.zeros(max(nbytes, last_cache().nbytes), np.uint8))
        else:
            others = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return cls(clock_of(device), others)

    @property
    def type(self) -> str:
        """PyTorch's type of it."""
        return self.others.device.type

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Seconds of a run; see `timed_run`."""
        return timed_run(self.clock, run)

    def evict(self, processes: int = 1) -> None:
        """Drive all else out of the caches, with so many processes of the machine that do so."""
        if self.type == "cpu":
            # Not by `fill_`, after which short operators take longer: all profiles are NumPy's.
            nbytes = max(
                _OTHER_BYTES["cpu"],
                self.others.numel() // max(1, int(processes * last_cache().share)),
            )
            self.others.numpy()[:nbytes].fill(1)
        else:
            self.others.fill_(1)

    def read(self, operands: Iterable[np.ndarray | Tensor]) -> None:
        """Read arrays or tensors, so that they lie in the caches as far as these hold them."""
        for one in operands:
            if not isinstance(one, Tensor):
                one.ravel(order="K").view(np.uint8)[::_LINE_BYTES].max(initial=0)
            elif one.device.type == "cpu":
                _in_memory(one).numpy()[::_LINE_BYTES].max(initial=0)
            elif one.numel():
                _in_memory(one)[::_LINE_BYTES].max()


def _in_memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its memory."""
    order = np.argsort([-stride for stride in tensor.stride()], kind="stable")
    return tensor.permute(order.tolist()).reshape(-1).view(torch.uint8)


class LastCache(NamedTuple):
    """The last cache of a processor."""

    nbytes: int  #: Its size; 0 if the system does not tell.
    share: float  #: Share of the machine's processors that it is of.


@cache
def last_cache(caches: Path = _CACHES, processors: int | None = None) -> LastCache:
    """The last cache of the first processor, by the system's folder of them; all are alike."""
    known = {0: LastCache(0, 1.0)}
    for folder in caches.glob("index*"):
        try:
            level, size, sharing = (
                (folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            nbytes = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
            share = _count(sharing) / (processors or os.cpu_count() or 1)
            known[int(level)] = LastCache(nbytes, share)
        except (OSError, ValueError):
            continue
    return known[max(known)]


def _count(numbers: str) -> int:
    """Count the numbers that a list like "0-3,8" has.

    >>> _count("0-3,8")
    5
    """
    spans = [one.split("-") for one in numbers.split(",")]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
