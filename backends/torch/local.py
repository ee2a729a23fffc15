"""Runs the rank files of a module for inference on this machine's CPU, one process a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitioner.backends.arrays import check_inputs, load_arrays
from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.launch import LocalRun, run_ranks, save_results
from partitioner.backends.process_group import timed
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.groups import register_named
from partitioner.backends.torch.rank_files import (
    file_name,
    read_pass,
    read_rank_file,
    read_rank_files,
)


def run_module_files(
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    requests: int = 1,
    *,
    timeout_s: float | None = None,
) -> LocalRun:
    """Run requests with the same inputs, one after the other.

    Args:
        inputs: Whole inputs by name.
        timeout_s: Seconds after which the run is given up; None waits for ever.

    Raises:
        BackendError: The files are of a program for training, or of one that writes its buffers;
            an input or a file is wrong, a rank raised or was killed, or the time is up.
    """
    if requests < 1:
        raise BackendError(f"requests is {requests}; it must be at least 1")
    files = read_rank_files(directory)
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
    return run_ranks(headers, inputs, job, timeout_s)


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`, from and to files of its folder."""
    torch.set_num_threads(job["threads"])
    path = Path(job["directory"]) / file_name(rank)
    file, module = read_rank_file(path), eager(read_pass(path))
    header = file.header
    register_named(file.groups)
    dtypes = {name: header.whole_inputs[part.whole].dtype for name, part in header.inputs.items()}
    arrays = load_arrays(folder / f"inputs-{rank}.npz", dtypes.values())
    inputs = {
        name: from_numpy(array, dtype)
        for (name, dtype), array in zip(dtypes.items(), arrays, strict=True)
    }
    arguments = [inputs[name] for name in file.arguments]
    results, seconds = timed(lambda number: _serve(module, arguments, number), job["requests"])
    values = dict(zip(file.results, results, strict=True))
    outputs = {
        output.value: to_numpy(values[output.value], header.whole_outputs[output.whole].dtype)
        for output in header.outputs
    }
    save_results(folder, rank, outputs.values(), seconds)


def _serve(module: torch.nn.Module, arguments: Sequence[Tensor], requests: int) -> Sequence[Tensor]:
    results: Sequence[Tensor] = ()
    try:
        with torch.no_grad():
            for _ in range(requests):
                results = module(*arguments)
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    return results
