"""`profile` measures the local operators of a model and keeps their seconds."""

from __future__ import annotations

import itertools
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from partitioner.api.option_table import ProfileOptions
from partitioner.api.options import open_with, processes, takes, target_cluster
from partitioner.api.profiling.busy import Others
from partitioner.api.profiling.candidates import (
    Candidate,
    candidates,
    is_cold,
    is_made_shortly_before,
    is_read_long_after,
    local_graph,
    yardsticks,
)
from partitioner.api.profiling.links import (
    Wanted,
    groups_of,
    measure_here,
    measure_together,
    unknown_links,
)
from partitioner.api.profiling.profiled import UNSTABLE, Profiled
from partitioner.api.profiling.rank import WORK, Item, Work, read_status
from partitioner.api.profiling.sessions import border_seconds, whole_seconds
from partitioner.backends.launch import run_job
from partitioner.backends.onnx.measuring import timing as onnx_timing
from partitioner.backends.torch.measuring import timing as torch_timing
from partitioner.cost_model.cluster.resolve import (
    cpu_fingerprint,
    device_type,
    gpu_count,
    is_of_gpu,
    one_process,
)
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import Profile, check_writable
from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import memory_order
from partitioner.foundations import units
from partitioner.frontends.model import ModuleInput, OnnxInput
from partitioner.ir.checks import is_whole
from partitioner.ir.errors import OptionError, PartitionerError
from partitioner.ir.graph import Graph
from partitioner.rewrites.micro_batch_graph import micro_batch_graph
from partitioner.search.request import Say, silent
from partitioner.strategies.spaces import check_space

if TYPE_CHECKING:
    import onnx
    from torch import nn

_TIME_LIMIT_S = 120.0
#: Seconds that are kept for the communications while some are unknown, and their most of the time
#: that is left once the model is read.
_LINKS_S, _LINKS_SHARE = 30.0, 0.4
#: Most of that time for runs of the whole model while other things are unknown, too.
_WHOLE_SHARE = 1 / 4
#: Most of the time for preparing forms before those that are prepared are measured.
_PREPARING_SHARE = 1 / 4
#: Seconds that processes take to start, about: if less is left, none are started.
_START_S = 3.0
#: Most of that time for the border between two sessions while other things are unknown, too.
_BORDER_SHARE = 1 / 8
#: How often forms whose runs differ are measured again, if time is left.
_TIMES_AGAIN = 2
#: Most lines of progress of the measurement of forms.
_PROGRESS_LINES = 4


@takes(ProfileOptions, cluster="local", time_limit_s=_TIME_LIMIT_S)
def profile(
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: int | None = None,
    **options: Unpack[ProfileOptions],
) -> Profiled:
    """Measure, on this machine, the operators that a plan of a model could run.

    Every distinct form (operator, attributes, local shapes, types) of every strategy is run by the
    backend that will run it, those with the most predicted seconds first. Its median goes into a
    profile, which `compile` and the other functions read for ``cluster="local"``. Then the
    processes measure the communications between them. An ONNX model for several processes is also
    run as a whole, in one process with all cores: a plan has to be faster than that. Forms that
    the profile has from the same backend are not measured again. A new profile also gets copies
    and products of several sizes, with which operators are compared that no profile has.

    Called by all processes that torchrun started, one for each device, it measures communications
    alone: those between machines, and of groups over several of them, too.

    Args:
        model: As of `compile`.
        example_inputs: As of `compile`.
        devices: Number of processes that share the machine (default: 1), or of GPUs on a machine
            that has any (default: all).
        **options: As the fields of `ProfileOptions` are described.

    Raises:
        PartitionerError: The model is wrong, the cluster's devices have no profile, the file is no
            profile, or its folder is missing.
    """
    begin, others = time.perf_counter(), Others()
    say = options.get("progress") or silent
    limit_s = options.get("time_limit_s", _TIME_LIMIT_S)
    cluster = target_cluster({"cluster": "local", **options}, devices)
    if processes() > 1:
        return _profiled_links(cluster, begin, limit_s, say)
    strategy, mesh = options.get("strategy", "auto"), options.get("mesh")
    check_space(strategy, len(cluster), mesh)
    known = _profile_of(cluster)
    runs_on = _runs_on(cluster, known)
    check_writable(known.file)
    opened = open_with(model, example_inputs, options)
    say("reading the model")
    is_module = isinstance(opened, ModuleInput)
    if runs_on != "cpu" and not is_module:
        raise CostError(
            f"cluster {cluster.name!r} is of this machine's GPUs, on which only operators of "
            "PyTorch modules are measured; plans of ONNX models take the GPUs' published rates"
        )
    graph = _graph(opened, options.get("micro_batches"))
    say("collecting the operators")
    wanted = candidates(graph, cluster, strategy, mesh)
    backend = torch_timing.NAME if is_module else onnx_timing.NAME
    new = [one for one in wanted if any(_is_new(one, known, backend))]
    sticks = yardsticks(cluster.devices[0].memory_bytes, is_module=is_module)
    in_wanted = {one.form.key for one in wanted}
    missing = [
        one
        for one in candidates(sticks, cluster.beside((0,)), "inter", None)
        if one.form.key not in in_wanted and any(_is_new(one, known, backend))
    ]
    session = _Session(cluster, known, backend, runs_on, say)
    links = session.unknown_links()
    end_s = begin + limit_s
    reading_s = time.perf_counter() - begin
    whole_s, lacks_whole = None, False
    if isinstance(opened, OnnxInput) and (alone := one_process(cluster)) is not None:
        all_cores, traced = alone.devices[0].profile, opened.traced
        assert all_cores is not None
        whole_end_s = _until(end_s, _WHOLE_SHARE if new or links else 1.0)
        whole_s, lacks_whole = session.tried(
            "the whole model", lambda: whole_seconds(traced, all_cores, whole_end_s, say)
        )
    border_s, lacks_border = None, False
    if isinstance(opened, OnnxInput) and known.processes > 1:
        border_end_s = _until(end_s, _BORDER_SHARE if new or links else 1.0)
        border_s, lacks_border = session.tried(
            "the border between two sessions", lambda: border_seconds(known, border_end_s, say)
        )
    forms_end_s = max(end_s - _LINKS_S, _until(end_s, 1 - _LINKS_SHARE)) if links else end_s
    session.measure(_in_turns(sticks, missing, graph, new), forms_end_s)
    measured_links = session.measure_links(links, end_s)
    spreads = session.spreads()
    for _ in range(_TIMES_AGAIN):
        unsteady = [one for one in new if spreads.get(one.form.key, 0.0) > UNSTABLE]
        session.measure([(graph, one) for one in unsteady], end_s)
        spreads = session.spreads()
    covered = in_wanted - {one.form.key for one in new} | session.measured
    all_s = sum(one.weight_s for one in wanted)
    unknown = [one for one in wanted if one.form.key not in covered]
    unknown_s = sum(one.weight_s for one in unknown)
    return Profiled(
        file=known.file,
        device=known.device,
        machine=_machine(known),
        threads=known.threads,
        backend=backend,
        forms=len(wanted),
        measured=len(session.measured & in_wanted),
        known=len(wanted) - len(new),
        links=measured_links,
        unknown_links=2 * len(links) - measured_links,
        whole_s=whole_s,
        lacks_whole=lacks_whole,
        border_s=border_s,
        lacks_border=lacks_border,
        failed=dict(sorted(session.failed.items())),
        lacks_forms=any(one.form.op not in session.failed for one in unknown),
        unknown_share=unknown_s / all_s if all_s else 0.0,
        busy_share=others.share(),
        unstable=sum(1 for spread in spreads.values() if spread > UNSTABLE),
        spread=max(spreads.values(), default=0.0),
        seconds=time.perf_counter() - begin,
        reading_s=reading_s,
        limit_s=limit_s,
        far_levels=tuple(
            level.name
            for level in _far_levels(cluster, known)
            if not (level.profile is not None and bool(level.profile.links))
        ),
    )


def _until(end_s: float, share: float) -> float:
    now_s = time.perf_counter()
    return now_s + max(0.0, end_s - now_s) * share


def _in_turns(
    sticks: Graph, missing: Sequence[Candidate], graph: Graph, new: Sequence[Candidate]
) -> Sequence[tuple[Graph, Candidate]]:
    """Yardsticks that are missing, and new forms in their order, as they are measured.

    The forms that make up half of the seconds come first, as far as the time goes; the yardsticks
    tell about the rest of them.
    """
    shares = itertools.accumulate(one.weight_s for one in new)
    half_s = sum(one.weight_s for one in new) / 2
    first = sum(1 for until_s in shares if until_s <= half_s)
    return [
        *((graph, one) for one in new[:first]),
        *((sticks, one) for one in missing),
        *((graph, one) for one in new[first:]),
    ]


def _far_levels(cluster: Cluster, known: Profile) -> Sequence[LinkLevel]:
    """Levels that processes of torchrun measure: the innermost alone may be of one machine."""
    inner, *outer = cluster.levels
    return outer if inner.size <= known.processes else cluster.levels


def _profiled_links(cluster: Cluster, begin: float, limit_s: float, say: Say) -> Profiled:
    known = _profile_of(cluster)
    if is_of_gpu(known.device):
        raise CostError(
            f"cluster {cluster.name!r} is of GPUs, and communications between GPUs are not "
            "measured: they cost what published tables and the cluster's rates say"
        )
    links, unknown = measure_together(cluster, begin + limit_s, say)
    return Profiled(
        file=known.file,
        device=known.device,
        machine=_machine(known),
        threads=known.threads,
        links=links,
        unknown_links=unknown,
        seconds=time.perf_counter() - begin,
        limit_s=limit_s,
    )


def _graph(opened: OnnxInput | ModuleInput, micro_batches: int | None) -> Graph:
    if micro_batches is None:
        return opened.graph
    if not is_whole(micro_batches) or micro_batches < 1:
        raise OptionError(f"micro_batches is {micro_batches!r}, not a number of at least 1")
    if isinstance(opened, OnnxInput):
        return micro_batch_graph(opened.graph, micro_batches).graph
    return opened.in_micro_batches(micro_batches).graph


def _profile_of(cluster: Cluster) -> Profile:
    """The profile of the cluster's devices, which are equal."""
    profiles = {spec.profile for spec in cluster.devices}
    known = profiles.pop()
    if profiles or known is None:
        raise CostError(
            f"cluster {cluster.name!r} has devices without one common profile: measure for cluster "
            "'local' on a machine whose GPUs, if it has any, are equal, or for a cluster file that "
            "names a profile"
        )
    return known


def _runs_on(cluster: Cluster, known: Profile) -> str:
    """PyTorch's type of this machine's devices, to measure on; a CostError if it has others.

    The name of a processor in a cluster file is the user's; that of a GPU is the machine's.
    """
    here = device_type(known.device)
    if here is None and is_of_gpu(known.device):
        raise CostError(
            f"cluster {cluster.name!r} has {known.device}, which this machine has not: measure on "
            "a machine that has it"
        )
    if here == "cuda" and (gpus := gpu_count()) < known.processes:
        raise CostError(
            f"cluster {cluster.name!r} has {known.processes} GPUs in a machine, and this one has "
            f"{gpus}: measure for a cluster of fewer"
        )
    return here or "cpu"


def _machine(known: Profile) -> str:
    return known.device if device_type(known.device) else cpu_fingerprint()


def _is_new(candidate: Candidate, known: Profile, backend: str) -> tuple[bool, bool]:
    """Tell if the form is to be measured: by all processes at once, and by one alone."""

    def lacks(processes: int) -> bool:
        entry = known.known.get(processes, {}).get(candidate.form.key)
        return entry is None or entry.backend != backend

    together = lacks(known.processes)
    return together, candidate.is_whole and known.processes > 1 and lacks(1)


@dataclass
class _Session:
    """Measures candidates and adds them to the profile."""

    cluster: Cluster
    profile: Profile
    backend: str
    runs_on: str  #: PyTorch's type of the device, "cpu" or "cuda".
    say: Say
    measured: frozenset[str] = frozenset()  #: Keys of the forms that were measured.
    #: Reason for each operator that could not be prepared.
    failed: dict[str, str] = field(default_factory=dict)

    def unknown_links(self) -> Sequence[Wanted]:
        """The communications here that are to be measured; `failed` says why others cannot be."""
        groups = [group for group in groups_of(self.cluster) if not group.level]
        level = self.cluster.levels[0]
        if not groups or level in _far_levels(self.cluster, self.profile):
            return ()
        if self.runs_on != "cpu":
            self.failed["communication between GPUs"] = "it costs what published tables say"
            return ()
        if level.profile is None:
            why = f"level {level.name!r} names no profile, and costs its rates"
            self.failed["communication"] = why
            return ()
        return unknown_links([level.profile], groups)

    def measure_links(self, wanted: Sequence[Wanted], end_s: float) -> int:
        known = self.cluster.levels[0].profile
        if not wanted or known is None or time.perf_counter() + _START_S >= end_s:
            return 0
        return measure_here(known, wanted, end_s, self.say)

    def spreads(self) -> Mapping[str, float]:
        """How far the runs of each form that was measured now differ, as of an `Entry`."""
        known = self.profile
        now = Profile.read(known.file, known.device, known.threads, known.processes).known
        spreads = dict[str, float]()
        for key, entry in ((key, entry) for of in now.values() for key, entry in of.items()):
            if key in self.measured:
                spreads[key] = max(entry.spread, spreads.get(key, 0.0))
        return spreads

    def tried(self, what: str, measure: Callable[[], float | None]) -> tuple[float | None, bool]:
        """Seconds of a measurement, if any, and if it lacks time; `failed` has other reasons."""
        try:
            seconds = measure()
        except PartitionerError as error:
            self.failed[what] = str(error)
            return None, False
        return seconds, seconds is None

    def measure(self, wanted: Sequence[tuple[Graph, Candidate]], end_s: float) -> None:
        left, latest_s = deque(wanted), end_s - _START_S
        while left and time.perf_counter() < latest_s:
            self.say(f"preparing {len(left)} forms")
            items, prepared_s = list[Item](), _until(latest_s, _PREPARING_SHARE)
            while left:
                item = self._item(*left.popleft())
                items += [] if item is None else [item]
                if time.perf_counter() >= prepared_s:
                    break
            if items and time.perf_counter() < latest_s:
                self._run(items, end_s)

    def _run(self, items: Sequence[Item], end_s: float) -> None:
        with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as name:
            folder, profile = Path(name), self.profile
            where = profile.file, profile.device, profile.threads
            work = Work(self.backend, *where, items, end_s)
            (folder / WORK).write_bytes(pickle.dumps(work))
            self.say(f"measuring {len(items)} forms on {profile.processes} processes")
            told = 0

            def watch() -> None:
                nonlocal told
                measured = len(read_status(folder)[0])
                if measured - told >= max(1, len(items) // _PROGRESS_LINES):
                    told = measured
                    left = units.seconds(max(0.0, end_s - time.perf_counter()))
                    percent = units.share(measured / len(items))
                    self.say(f"measured {measured} of {len(items)} forms ({percent}, {left} left)")

            job = {"runner": "partitioner.api.profiling.rank", "device": self.runs_on}
            run_job(folder, profile.processes, job, watch=watch)
            done, failed = read_status(folder)
        self.measured |= done
        for op, why in failed.items():
            self.failed.setdefault(op, why)

    def _item(self, graph: Graph, candidate: Candidate) -> Item | None:
        try:
            alone, before = local_graph(graph, candidate, self.cluster), None
            if candidate.behind:
                before = local_graph(graph, candidate, self.cluster, is_before=True)
        except PartitionerError as error:
            self.failed.setdefault(candidate.form.op, str(error))
            return None
        entry = Entry(
            candidate.form.key,
            candidate.form.family,
            candidate.dtype,
            candidate.flops,
            candidate.moved_bytes,
            0.0,
            0.0,
            0,
            self.backend,
            "",
        )
        is_new = _is_new(candidate, self.profile, self.backend)
        whole = {value: value.partition("@")[0] for value in alone.inputs}
        recent = tuple(
            value
            for value, name in whole.items()
            if is_made_shortly_before(graph, candidate.placed.node, name)
        )
        orders = {value: memory_order(graph, name) for value, name in whole.items()}
        known = {value: dims for value, dims in orders.items() if dims is not None}
        node = candidate.placed.node
        is_kept = any(is_read_long_after(graph, node, value) for value in node.writes)
        temperature = is_cold(graph, candidate), is_kept
        return Item(alone, before, entry, *is_new, recent, *temperature, known)
