"""Runs the rank files of a module for inference on this machine's CPU, one process a rank."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.faults import Roll
from partitioner.backends.torch.groups import Link, register_links, register_named
from partitioner.backends.torch.host_memory import keep_freed_memory
from partitioner.backends.torch.phase_recording import PhaseRecorder, read_phases
from partitioner.backends.torch.rank_files import (
    PASSES,
    file_name,
    read_pass,
    read_rank_file,
    read_rank_files,
)
from partitioner.backends.torch.recording import Pass, Recorder, Training, Update
from partitioner.backends.torch.step_values import PhaseValues

_SECONDS = "seconds.json"


def run_module_files(
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    requests: int = 1,
    *,
    steps: int = 0,
    timeout_s: float | None = None,
) -> LocalRun:
    """Run requests with the same inputs, one after the other.

    Args:
        inputs: Whole inputs by name.
        requests: At least 1.
        steps: Steps of one request each that are recorded before; 0 for none.
        timeout_s: Seconds after which the run is given up; None waits for ever.

    Raises:
        BackendError: The files are of a program for training, or of one that writes its buffers;
            an input or a file is wrong, a rank raised or was killed, or the time is up.
    """
    if requests < 1:
        raise BackendError(f"requests is {requests}; it must be at least 1")
    files = read_rank_files(directory)
    if files[0].staged and not files[0].training:
        raise BackendError(
            f"{directory} is of a plan in micro-batches: run it under torchrun, with the module() "
            "of the loaded program"
        )
    if files[0].training:
        raise BackendError(
            f"{directory} is of a program for training: run it under torchrun, with the module() "
            "of the loaded program"
        )
    if any(file.stored for file in files):
        raise BackendError(
            f"{directory} is of a module that writes its buffers: call eval() before it is "
            "compiled, or run it under torchrun, with the module() of the loaded program"
        )
    headers = [file.header for file in files]
    check_inputs(headers[0], inputs)
    job = {"runner": __name__, "directory": str(directory.resolve()), "requests": requests}
    return run_ranks(headers, inputs, {**job, "steps": steps}, timeout_s)


def record_module_files(
    directory: Path,
    values: Sequence[Mapping[str, Tensor]],
    steps: int,
    optimizer: str = "",
    updates: Sequence[Sequence[Update]] = (),
) -> tuple[RankLog, ...]:
    """Record steps of the rank files of a module: in training with backward pass and optimizer.

    Args:
        directory: Folder of the files.
        values: Parts of inputs and of stored values by local name, of each rank.
        steps: At least 1.
        optimizer: In training, one of `optimizers.OPTIMIZERS`.
        updates: In training, the parameters of each rank.

    Raises:
        BackendError: A file is wrong, a rank raised or was killed.
    """
    job = {"optimizer": optimizer, "updates": updates, "records": True}
    with _steps_run(directory, list(map(dict, values)), steps, job) as folder:
        return load_logs(folder, len(values))


def record_phase_files(
    directory: Path,
    values: Sequence[PhaseValues],
    phases: Sequence[Mapping[str, Any]],
    links: Sequence[Link],
    steps: int,
    optimizer: str = "",
    updates: Sequence[Sequence[Update]] = (),
) -> tuple[RankLog, ...]:
    """Record steps of the rank files of a module in stages, with its optimizer in training.

    Args:
        directory: Folder of the files.
        values: What each rank begins a step with.
        phases: The phases of each rank, see `phase_recording.described`.
        links: The pairs of phases and ranks between which messages pass.
        steps: At least 1.
        optimizer: In training, one of `optimizers.OPTIMIZERS`.
        updates: In training, the parameters of each rank.

    Raises:
        BackendError: A file is wrong, a rank raised or was killed.
    """
    job = {"optimizer": optimizer, "updates": updates, "records": True, "links": links}
    start = [{"stored": one.stored, "micro_batches": list(one.micro_batches)} for one in values]
    job["phases"] = [
        {**own, "written": dict(one.written)} for own, one in zip(phases, values, strict=True)
    ]
    with _steps_run(directory, start, steps, job) as folder:
        return load_logs(folder, len(values))


def time_module_files(
    directory: Path,
    values: Sequence[Mapping[str, Tensor]],
    steps: int,
    optimizer: str,
    updates: Sequence[Sequence[Update]],
) -> float:
    """Seconds of steps of a program for training, after one to warm up, on the slowest rank.

    Args and errors are those of `record_module_files`.
    """
    job = {"optimizer": optimizer, "updates": updates, "records": False}
    with _steps_run(directory, list(map(dict, values)), steps, job) as folder:
        return float(json.loads((folder / _SECONDS).read_text()))


@contextlib.contextmanager
def _steps_run(
    directory: Path, values: Sequence[dict[str, Any]], steps: int, job: Mapping[str, Any]
) -> Iterator[Path]:
    """The folder of a job that has run steps of rank files.

    Args:
        directory: Folder of the files.
        values: Tensors that each rank begins with.
        steps: At least 1.
        job: Arguments of `run_files` beside these.
    """
    if steps < 1:
        raise BackendError(f"steps is {steps}; it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="partitioner-steps-") as name:
        folder = Path(name)
        for rank, local in enumerate(values):
            torch.save(local, folder / _values_file(rank))
        ran = {"runner": __name__, "directory": str(directory.resolve()), "steps": steps}
        run_job(folder, len(values), {**ran, **job})
        yield folder


def _values_file(rank: int) -> str:
    return f"values-{rank}.pt"


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`, from and to files of its folder."""
    torch.set_num_threads(job["threads"])
    keep_freed_memory()
    path = Path(job["directory"]) / file_name(rank)
    file = read_rank_file(path)
    header = file.header
    register_named(file.groups)
    if (folder / _values_file(rank)).is_file():
        values = torch.load(folder / _values_file(rank), weights_only=True)
        _run_steps(rank, folder, values, job)
        return
    module = read_pass(path)
    dtypes = {name: header.whole_inputs[part.whole].dtype for name, part in header.inputs.items()}
    arrays = load_arrays(folder / f"inputs-{rank}.npz", dtypes.values())
    inputs = {
        name: from_numpy(array, dtype)
        for (name, dtype), array in zip(dtypes.items(), arrays, strict=True)
    }
    if job["steps"]:
        _record(rank, folder, _recorder(rank, inputs, job), job)
    module = eager(module)
    arguments = [inputs[name] for name in file.arguments]
    results, seconds = timed(lambda number: _serve(module, arguments, number), job["requests"])
    values = dict(zip(file.results, results, strict=True))
    outputs = {
        output.value: to_numpy(values[output.value], header.whole_outputs[output.whole].dtype)
        for output in header.outputs
    }
    save_results(folder, rank, outputs.values(), seconds)


def _run_steps(rank: int, folder: Path, values: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Record or time the steps of a rank."""
    recorder = (_phase_recorder if "phases" in job else _recorder)(rank, values, job)
    if job["records"]:
        _record(rank, folder, recorder, job)
        return
    try:
        seconds = recorder.seconds(job["steps"])
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    if rank == 0:
        (folder / _SECONDS).write_text(json.dumps(seconds))


def _recorder(rank: int, values: Mapping[str, Tensor], job: Mapping[str, Any]) -> Recorder:
    """The steps of a rank, from the files of its passes."""
    directory = Path(job["directory"])
    paths = [directory / file_name(rank, which) for which in PASSES]
    paths = paths if read_rank_file(paths[0]).training else paths[:1]
    passes = [
        Pass(read_pass(path), file.arguments, file.results)
        for path in paths
        for file in [read_rank_file(path)]
    ]
    return Recorder(passes, values, torch.device("cpu"), _training(rank, values, job))


def _training(rank: int, values: Mapping[str, Tensor], job: Mapping[str, Any]) -> Training | None:
    if not job.get("optimizer"):
        return None
    updates = [Update(*one) for one in job["updates"][rank]]
    return Training(job["optimizer"], updates, values)


def _phase_recorder(rank: int, values: Mapping[str, Any], job: Mapping[str, Any]) -> PhaseRecorder:
    """The steps of a rank in stages, from the files of its phases."""
    own = job["phases"][rank]
    register_links([(first, second, *pair) for first, second, *pair in job["links"]])
    start = PhaseValues(values["stored"], values["micro_batches"], own["written"])
    return PhaseRecorder(
        read_phases(own, Path(job["directory"]), rank),
        [(phase, micro_batch) for phase, micro_batch in own["runs"]],
        start,
        torch.device("cpu"),
        Roll([""] * job["ranks"]),
        _training(rank, start.stored, job),
    )


def _record(
    rank: int, folder: Path, recorder: Recorder | PhaseRecorder, job: Mapping[str, Any]
) -> None:
    """Leave the record of a rank's steps."""
    try:
        log = recorder.record(job["steps"], job["threads"])
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    save_log(folder, rank, log)


def _serve(module: torch.nn.Module, arguments: Sequence[Tensor], requests: int) -> Sequence[Tensor]:
    results: Sequence[Tensor] = ()
    try:
        with torch.no_grad():
            for _ in range(requests):
                results = module(*arguments)
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    return results
