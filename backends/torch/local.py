"""Runs the rank files of a module on this machine, one process a rank."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.launch import LocalRun, load_logs, run_job, save_log
from partitioner.backends.observed import RankLog
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.agreeing.groups import register_links, register_named
from partitioner.backends.torch.files.rank_files import (
    CPU,
    RankFile,
    read_rank_files,
    written_phases,
)
from partitioner.backends.torch.graphs.emit import PassGraph
from partitioner.backends.torch.graphs.phases import RankPhases, of_each
from partitioner.backends.torch.measuring.recording import Recorder, Training, Update
from partitioner.backends.torch.running.host_memory import keep_freed_memory
from partitioner.backends.torch.running.step_values import StepStart, Values
from partitioner.backends.torch.state.buffers import memory_of
from partitioner.ir.mesh import Copies
from partitioner.ir.messages import Link
from partitioner.ir.phases import Part, whole_batch_order

_SECONDS = "seconds.json"
_NO_GRAPH = fx.GraphModule({}, fx.Graph())


def run_module_files(
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    requests: int = 1,
    *,
    steps: int = 0,
    device: str = "cpu",
) -> LocalRun:
    """Run requests with the same whole inputs, one after the other; arguments as of `run_steps`.

    Args:
        directory: Folder of the files.
        steps: Steps of one request each that are recorded before; 0 for none.
        device: Type of the device that each rank runs on, "cpu" or "cuda".

    Raises:
        BackendError: The files need values that they do not hold (`needs_values`); there are fewer
            GPUs than ranks; an input or a file is wrong, or a rank raised or was killed.
    """
    if requests < 1:
        raise BackendError(f"requests is {requests}; it must be at least 1")
    files = read_rank_files(directory)
    if needs_values(files):
        raise BackendError(
            f"{directory} is of a module for training, in micro-batches or that writes its "
            "buffers: its files run with the values of the loaded program only"
        )
    headers = [file.header for file in files]
    check_inputs(headers[0], inputs)
    ranks = [_request(file, inputs) for file in files]
    run = run_steps(
        StepFiles(
            directory.resolve(), ranks, (), files[0].groups, device=device, copies=headers[0].copies
        ),
        requests,
        recorded=steps,
    )
    types = headers[0].whole_outputs
    parts = {
        header.rank: {
            output.value: to_numpy(results[0][output.value], types[output.whole].dtype)
            for output in header.outputs
        }
        for header, results in zip(headers, run.results, strict=True)
    }
    last = headers[0].of_request(requests - 1, headers)
    return LocalRun(assemble(last, parts), run.seconds, run.logs)


def _request(file: RankFile, inputs: Mapping[str, np.ndarray]) -> RankSteps:
    """The requests of a rank, whose file holds all but inputs: steps of one phase."""
    header = file.header
    order = whole_batch_order(header.ranks)
    graph = PassGraph(_NO_GRAPH, file.arguments, file.results)
    phase = order.phases.number(Part.FORWARD)
    phases = RankPhases(
        rank=header.rank,
        graphs={phase: graph},
        stored=(),
        inputs=header.inputs,
        outputs=header.outputs,
        types={},
        summed=frozenset(),
        order=order,
    )
    start = {
        name: from_numpy(part, header.whole_inputs[header.inputs[name].whole].dtype)
        for name, part in local_inputs(header, inputs).items()
    }
    shown = {name: name for name in phases.delivered}
    return RankSteps([phases], ((phase, 0),), StepStart({}, [start], {}), shown)


def check_gpus(device: str, ranks: int) -> None:
    """Refuse more ranks than there are devices of a type, "cpu" or "cuda", on this machine."""
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if gpus < ranks:
        raise BackendError(f"the plan has {ranks} ranks, one GPU each; this machine has {gpus}")


def needs_values(files: Sequence[RankFile]) -> bool:
    """Test whether rank files lack values to run: weights in training, buffers."""
    return any(file.training or file.staged or file.stored for file in files)


@dataclass(frozen=True)
class RankSteps:
    """The steps of a rank, whose graphs are in the files of its phases."""

    phases: Sequence[RankPhases]  #: Its phases in each micro-batch.
    runs: Sequence[tuple[int, int]]  #: (phase, micro-batch) in order.
    start: StepStart  #: The values that a step begins with.
    shown: Mapping[str, str]  #: Local names of the results to return, by name.
    updates: Sequence[Update] = ()  #: In training, its parameters.

    def to_send(self) -> RankSteps:
        """The same without graphs; a file of a view has all that it is of, such as a batch."""
        stored, copies = self.start.stored, dict[tuple[object, ...], Tensor]()
        readers = Counter(map(memory_of, stored.values()))

        def dense(value: Tensor) -> Tensor:
            if value.untyped_storage().nbytes() == value.nbytes or readers[memory_of(value)] > 1:
                return value
            place = memory_of(value), value.storage_offset(), value.shape, value.stride()
            if place not in copies:  # micro-batches may have the same input
                copies[place] = value.clone()
            return copies[place]

        start = replace(
            self.start,
            stored={name: dense(value) for name, value in stored.items()},
            micro_batches=[
                {name: dense(value) for name, value in values.items()}
                for values in self.start.micro_batches
            ],
        )

        def without_graphs(phases: RankPhases) -> RankPhases:
            graphs = {
                phase: replace(graph, module=_NO_GRAPH)
                for phase, graph in phases.graphs.items()
                if phases is self.phases[0] or not phases.is_of_all(phase)
            }
            types = {n: type_ for n, type_ in phases.types.items() if n in phases.delivered}
            return replace(phases, graphs=graphs, types=types)

        return replace(self, phases=of_each(self.phases, without_graphs), start=start)


@dataclass(frozen=True)
class StepFiles:
    """Rank files of a module, and what they need for a step beside what they hold."""

    directory: Path  #: Folder of the files, from the root.
    ranks: Sequence[RankSteps]  #: The steps of each rank.
    links: Sequence[Link]  #: The pairs of phases and ranks between which messages pass.
    groups: Sequence[tuple[int, ...]]  #: The ranks of each process group that a phase names.
    optimizer: str = ""  #: In training, one of `timing.OPTIMIZERS`.
    device: str = "cpu"  #: Type of the device that each rank runs on, "cpu" or "cuda".
    copies: Copies | None = None  #: Whole copies, of which each step that is timed has one.


class StepRun(NamedTuple):
    """A run of steps."""

    #: What each rank shows of each micro-batch of the last step, by name. Empty if only recorded
    #: steps were run.
    results: Sequence[Sequence[Values]]
    seconds: float  #: Of all steps together, on the slowest rank.
    logs: tuple[RankLog, ...]  #: What each rank recorded; none if nothing was recorded.


def run_steps(files: StepFiles, steps: int, *, recorded: int = 0) -> StepRun:
    """Run steps of the rank files of a module: in training with backward pass and optimizer.

    Steps do not depend on the ones before: all have the same inputs, random draws and buffers, and
    the optimizer's rate is 0. One more, to warm up, goes before them.

    Args:
        steps: Steps that are timed together, without recording; 0 for none.
        recorded: Steps that are recorded before; 0 for none.

    Raises:
        BackendError: There are fewer GPUs than ranks, a file is wrong, a rank raised or was killed.
    """
    if steps < 0 or recorded < 0 or not steps + recorded:
        raise BackendError(f"steps is {steps or recorded}; it must be at least 1")
    check_gpus(files.device, len(files.ranks))
    with tempfile.TemporaryDirectory(prefix="partitioner-steps-") as name:
        folder, ranks = Path(name), len(files.ranks)
        for rank, own in enumerate(files.ranks):
            torch.save(replace(files, ranks=[own.to_send()]), folder / f"steps-{rank}.pt")
        job = {"runner": __name__, "device": files.device, "timed": steps, "recorded": recorded}
        run_job(folder, ranks, job)
        results, seconds = [], 0.0
        if steps:
            paths = (folder / f"results-{rank}.pt" for rank in range(ranks))
            results = [torch.load(path, weights_only=True, map_location=CPU) for path in paths]
            seconds = float(json.loads((folder / _SECONDS).read_text()))
        return StepRun(results, seconds, load_logs(folder, ranks))


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`, from and to files of its folder."""
    torch.set_num_threads(job["threads"])
    device = CPU if job["device"] == "cpu" else torch.device(job["device"], rank)
    if device == CPU:
        keep_freed_memory()
    files = torch.load(folder / f"steps-{rank}.pt", weights_only=False, map_location=device)
    (own,) = files.ranks
    register_named(files.groups)
    register_links(files.links)
    phases = written_phases(files.directory, own.phases, device)
    training = None
    if files.optimizer:
        training = Training(files.optimizer, own.updates, own.start.stored)
    roll = Roll([""] * job["ranks"])
    recorder = Recorder(phases, own.runs, own.start, device, roll, training)
    try:
        if job["recorded"]:
            save_log(folder, rank, recorder.record(job["recorded"], job["threads"]))
        if timed := job["timed"]:
            number = len(files.copies.of_rank(rank, timed)) if files.copies else timed
            results, seconds = recorder.timed(number, own.shown)
            torch.save(results, folder / f"results-{rank}.pt")
            if rank == 0:
                (folder / _SECONDS).write_text(json.dumps(seconds))
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
