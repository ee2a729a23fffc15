"""A rank of a saved compilation under torchrun, from its own file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from partitioner.api.compiled.folder import check_plan, has_module_file, load_plan
from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalRun, threads_per_rank
from partitioner.backends.onnx.files.load import check_ranks, load_rank, read_rank
from partitioner.backends.onnx.rank import RankProcess, rank_device
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.backends.process_group import Start
from partitioner.run.local import (
    check_outputs,
    draw_inputs,
    prediction,
    read_inputs,
    report,
    write_outputs,
)


def loaded(
    directory: Path,
    start: Start,
    inputs: Path | None,
    outputs: Path | None,
    requests: int,
    seed: int,
) -> Callable[[], str]:
    """Load the rank of this process from its file, before it meets the others.

    Rank 0's folder has the plan, and what inputs are drawn from if it is given none.

    Returns:
        A function that runs it, once torch.distributed is up, and on rank 0 writes the outputs. It
        gives a report of a few lines, "" on other ranks.
    """
    if has_module_file(directory, start.rank):
        raise BackendError(
            f"{directory} is of a PyTorch module: use `partition run`, or module() of the "
            "loaded program under torchrun"
        )
    file = read_rank(directory, start.rank)
    header = file[0]
    if header.ranks != start.ranks:
        raise BackendError(
            f"{directory} holds {header.ranks} ranks, torchrun started {start.ranks}"
        )
    has_plan = (directory / "plan.json").exists()
    if has_plan:  # without a plan the file cannot be out of date
        check_plan(directory, header, f"rank{start.rank}.onnx", load_plan(directory))
    if requests < 1:
        raise BackendError(f"--requests is {requests}; it must be at least 1")
    wholes: Mapping[str, np.ndarray] | None = None
    if start.rank == 0:
        if outputs is not None:
            check_outputs(outputs, directory)
        types = header.whole_inputs
        wholes = (
            draw_inputs(directory, seed, types) if inputs is None else read_inputs(inputs, types)
        )
        check_inputs(header, wholes)
    model = load_rank(directory / f"rank{start.rank}.onnx")

    def run() -> str:
        files: list[Any] = [None] * start.ranks
        dist.all_gather_object(files, file)
        headers = check_ranks(files, str(directory))
        local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        config = SessionConfig(threads=threads_per_rank(local_ranks))
        device = rank_device(int(os.environ["LOCAL_RANK"]), local_ranks)
        with start.together("making sessions"):
            process = RankProcess(model, device, config)
        own: list[Mapping[str, np.ndarray]] = [{}]  # rank 0 alone has whole inputs
        wholes_of = None if wholes is None else [local_inputs(each, wholes) for each in headers]
        dist.scatter_object_list(own, wholes_of)
        results, seconds = process.run(own[0], requests)
        parts: list[Mapping[str, np.ndarray] | None] = [None] * start.ranks
        dist.gather_object(results, parts if start.rank == 0 else None)
        if start.rank > 0:
            return ""
        last = header.of_request(requests - 1, headers)
        whole_results = assemble(last, {rank: part or {} for rank, part in enumerate(parts)})
        if outputs is not None:
            write_outputs(outputs, whole_results)
        expected = prediction(directory) if has_plan else ""
        done = LocalRun(whole_results, seconds)
        return report(done, requests, expected, optimization=config.optimization)

    return run
