"""Runs the rank files of a module on this machine, one process a rank."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partitioner.backends.arrays import check_inputs, load_arrays
from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.launch import (
    LocalRun,
    load_logs,
    run_job,
    run_ranks,
    save_log,
    save_results,
)
from partitioner.backends.observed import RankLog
from partitioner.backends.process_group import timed
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.agreeing.groups import Link, register_links, register_named
from partitioner.backends.torch.files.rank_files import (
    CPU,
    RankFile,
    file_name,
    read_pass,
    read_rank_file,
    read_rank_files,
)
from partitioner.backends.torch.graphs.eager import eager
from partitioner.backends.torch.measuring.recorder import Recorder, read_phases, request_phases
from partitioner.backends.torch.measuring.recording import Training, Update
from partitioner.backends.torch.running.direct import direct
from partitioner.backends.torch.running.host_memory import keep_freed_memory
from partitioner.backends.torch.running.step_values import StepStart
from partitioner.backends.torch.state.buffers import memory_of
from partitioner.backends.waiting import STEPS

_RESULTS, _SECONDS = "results.pt", "seconds.json"


def run_module_files(
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    requests: int = 1,
    *,
    steps: int = 0,
    timeout_s: float | None = None,
    device: str = "cpu",
) -> LocalRun:
    """Run requests with the same inputs, one after the other.

    Args:
        inputs: Whole inputs by name.
        requests: At least 1.
        steps: Steps of one request each that are recorded before; 0 for none.
        timeout_s: Seconds after which the run is given up; None waits for ever.
        device: Type of the device that each rank runs on, "cpu" or "cuda".

    Raises:
        BackendError: The files need values that they do not hold (`needs_values`); there are fewer
            GPUs than ranks; an input or a file is wrong, a rank raised or was killed, or the time
            is up.
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
    check_gpus(device, len(headers))
    job = {"runner": __name__, "directory": str(directory.resolve()), "requests": requests}
    return run_ranks(headers, inputs, {**job, "recorded": steps, "device": device}, timeout_s)


def check_gpus(device: str, ranks: int) -> None:
    """Check that each of the ranks has a device of a type, "cpu" or "cuda", on this machine.

    Raises:
        BackendError: There are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if gpus < ranks:
        raise BackendError(f"the plan has {ranks} ranks, one GPU each; this machine has {gpus}")


def needs_values(files: Sequence[RankFile]) -> bool:
    """Test whether rank files lack values to run: weights in training, buffers."""
    return any(file.training or file.staged or file.stored for file in files)


@dataclass(frozen=True)
class StepFiles:
    """Rank files of a module, and what they need for a step beside what they hold.

    Attributes:
        directory: Folder of the files.
        starts: The values that each rank begins with.
        shown: Local names of the module's results on rank 0, which has them whole, by name.
        optimizer: In training, one of `optimizers.OPTIMIZERS`.
        updates: In training, the parameters of each rank.
        phases: The phases of each rank, see `recorder.described`.
        last_phases: Those of the last micro-batch, if it is smaller than the others.
        links: The pairs of phases and ranks between which messages pass.
        groups: The ranks of each process group that a phase names.
        device: Type of the device that each rank runs on, "cpu" or "cuda".
    """

    directory: Path
    starts: Sequence[StepStart]
    shown: Mapping[str, str]
    phases: Sequence[Mapping[str, Any]]
    last_phases: Sequence[Mapping[str, Any]]
    links: Sequence[Link]
    groups: Sequence[tuple[int, ...]]
    optimizer: str = ""
    updates: Sequence[Sequence[Update]] = ()
    device: str = "cpu"

    def values(self, rank: int) -> dict[str, Any]:
        """The values that a rank begins with as a file holds them."""
        start = self.starts[rank]
        all_values = [start.stored, *start.micro_batches]
        readers = Counter(memory_of(value) for of in all_values for value in of.values())

        def dense(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            """The values; a file of a view has all that it is of, such as the whole batch."""
            return {
                name: value.clone()
                if value.untyped_storage().nbytes() > value.nbytes
                and readers[memory_of(value)] == 1
                else value
                for name, value in values.items()
            }

        micro_batches = [dense(values) for values in start.micro_batches]
        return {"stored": dense(start.stored), "micro_batches": micro_batches}

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of `run_files`."""
        return {
            "runner": __name__,
            "directory": str(self.directory.resolve()),
            "shown": dict(self.shown),
            "optimizer": self.optimizer,
            "updates": self.updates,
            "device": self.device,
            "phases": self.phases,
            "last_phases": self.last_phases,
            "links": self.links,
            "groups": self.groups,
            "written": [dict(start.written) for start in self.starts],
        }


class StepRun(NamedTuple):
    """A run of steps.

    Attributes:
        results: The module's results of each micro-batch of the last step, by name. Empty if only
            recorded steps were run.
        seconds: Of all steps together, on the slowest rank.
        logs: What each rank recorded; none if nothing was recorded.
    """

    results: Sequence[Mapping[str, Tensor]]
    seconds: float
    logs: tuple[RankLog, ...]


def run_steps(files: StepFiles, steps: int, *, recorded: int = 0) -> StepRun:
    """Run steps of the rank files of a module: in training with backward pass and optimizer.

    Steps do not depend on the ones before: all have the same inputs, random draws and buffers, and
    the optimizer's rate is 0. One more, to warm up, goes before them.

    Args:
        files: The files.
        steps: Steps that are timed together, without recording; 0 for none.
        recorded: Steps that are recorded before; 0 for none.

    Raises:
        BackendError: There are fewer GPUs than ranks, a file is wrong, a rank raised or was killed.
    """
    if steps < 0 or recorded < 0 or not steps + recorded:
        raise BackendError(f"steps is {steps or recorded}; it must be at least 1")
    check_gpus(files.device, len(files.starts))
    with tempfile.TemporaryDirectory(prefix="partitioner-steps-") as name:
        folder, ranks = Path(name), len(files.starts)
        for rank in range(ranks):
            torch.save(files.values(rank), folder / _values_file(rank))
        run_job(folder, ranks, {**files.job, "timed": steps, "recorded": recorded})
        results, seconds = [], 0.0
        if steps:
            results = torch.load(folder / _RESULTS, weights_only=True, map_location=CPU)
            seconds = float(json.loads((folder / _SECONDS).read_text()))
        return StepRun(results, seconds, load_logs(folder, ranks))


def _values_file(rank: int) -> str:
    return f"values-{rank}.pt"


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`, from and to files of its folder."""
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"], rank) if job.get("device", "cpu") != "cpu" else CPU
    if device == CPU:
        keep_freed_memory()
    path = Path(job["directory"]) / file_name(rank)
    file = read_rank_file(path)
    header = file.header
    register_named(file.groups)
    if (folder / _values_file(rank)).is_file():
        values = torch.load(folder / _values_file(rank), weights_only=True, map_location=device)
        _run_steps(rank, folder, values, device, job)
        return
    module = read_pass(path, device)
    dtypes = {name: header.whole_inputs[part.whole].dtype for name, part in header.inputs.items()}
    arrays = load_arrays(folder / f"inputs-{rank}.npz", dtypes.values())
    inputs = {
        name: from_numpy(array, dtype).to(device)
        for (name, dtype), array in zip(dtypes.items(), arrays, strict=True)
    }
    if job["recorded"]:
        _record(rank, folder, _request_recorder(rank, inputs, device, job), job)
    module = direct(eager(module))
    arguments = [inputs[name] for name in file.arguments]
    results, seconds = timed(lambda number: _serve(module, arguments, number), job["requests"])
    values = dict(zip(file.results, results, strict=True))
    outputs = {
        output.value: to_numpy(values[output.value], header.whole_outputs[output.whole].dtype)
        for output in header.outputs
    }
    save_results(folder, rank, outputs.values(), seconds)


def _run_steps(
    rank: int,
    folder: Path,
    values: Mapping[str, Any],
    device: torch.device,
    job: Mapping[str, Any],
) -> None:
    """Record and time the steps of a rank."""
    recorder = _recorder(rank, values, device, job)
    if job["recorded"]:
        _record(rank, folder, recorder, job)
    if not job["timed"]:
        return
    try:
        results, seconds = recorder.timed(job["timed"], job["shown"] if rank == 0 else {})
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    if rank == 0:
        torch.save(results, folder / _RESULTS)
        (folder / _SECONDS).write_text(json.dumps(seconds))


def _request_recorder(
    rank: int, inputs: Mapping[str, Tensor], device: torch.device, job: Mapping[str, Any]
) -> Recorder:
    """The requests of a rank, whose file holds all but inputs."""
    phases = request_phases(Path(job["directory"]), rank, device)
    runs = [(phase, 0) for phase in phases.graphs]
    start = StepStart({}, [dict(inputs)], {})
    return Recorder(phases, runs, start, device, Roll([""] * job["ranks"]))


def _recorder(
    rank: int, values: Mapping[str, Any], device: torch.device, job: Mapping[str, Any]
) -> Recorder:
    """The steps of a rank, from the files of its phases."""
    own, directory = job["phases"][rank], Path(job["directory"])
    register_named(map(tuple, job["groups"]))
    register_links([(first, second, *pair) for first, second, *pair in job["links"]])
    start = StepStart(values["stored"], values["micro_batches"], job["written"][rank])
    last = job["last_phases"]
    training = None
    if job["optimizer"]:
        updates = [Update(*one) for one in job["updates"][rank]]
        training = Training(job["optimizer"], updates, start.stored)
    return Recorder(
        read_phases(own, directory, rank, device),
        [(phase, micro_batch) for phase, micro_batch in own["runs"]],
        start,
        device,
        Roll([""] * job["ranks"]),
        training,
        read_phases(last[rank], directory, rank, device) if last else None,
    )


def _record(rank: int, folder: Path, recorder: Recorder, job: Mapping[str, Any]) -> None:
    """Leave the record of a rank's steps."""
    try:
        log = recorder.record(job["recorded"], job["threads"])
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    save_log(folder, rank, log)


def _serve(module: torch.nn.Module, arguments: Sequence[Tensor], requests: int) -> Sequence[Tensor]:
    results: Sequence[Tensor] = ()
    try:
        with torch.no_grad():
            for _ in range(requests):
                results = module(*arguments)
                STEPS.begin()
        if arguments and arguments[0].device.type == "cuda":
            torch.cuda.synchronize(arguments[0].device)
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    return results
