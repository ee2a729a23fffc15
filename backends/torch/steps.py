"""Times training steps of a module's rank files on this machine's CPU, one process a rank.

A step is the forward pass, the backward pass, and the optimizer's update of the rank's shards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.launch import run_job
from partitioner.backends.process_group import timed
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.groups import register_named
from partitioner.backends.torch.optimizers import OPTIMIZERS
from partitioner.backends.torch.rank_files import (
    PASSES,
    RankFile,
    file_name,
    read_pass,
    read_rank_file,
    read_rank_files,
)
from partitioner.backends.torch.shards import part_of, region_on
from partitioner.ir.program import Programs


def run_steps(
    directory: Path,
    programs: Programs,
    inputs: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    gradients: Mapping[str, str],
    optimizer: str,
    steps: int,
) -> float:
    """Run training steps on the same whole inputs, after one to warm up.

    Args:
        directory: Folder of the rank files.
        programs: The programs that the files were made of.
        inputs: Whole inputs by name, the gradient of the loss included.
        stored: Whole parameters and buffers by value of the graph.
        gradients: Graph output of each trained parameter's gradient, by value of the parameter.
        optimizer: One of the optimizers that `compile` knows.
        steps: At least 1.

    Returns:
        Seconds of all steps together on the slowest rank.

    Raises:
        BackendError: The files are of a program for inference, a file is wrong, or a rank raised
            or was killed.
    """
    if steps < 1:
        raise BackendError(f"steps is {steps}; it must be at least 1")
    files = read_rank_files(directory)
    if not files[0].training:
        raise BackendError(f"{directory} is of a program for inference: it has no training steps")
    homes = {home.name: (value, home.placement) for value, home in programs.homes.items()}
    updates = []
    with tempfile.TemporaryDirectory(prefix="partitioner-steps-") as name:
        folder = Path(name)
        for rank, file in enumerate(files):
            parts = file.header.inputs.items()
            values = {local: part_of(inputs[part.whole], part.region) for local, part in parts}
            for local in file.stored:
                value, placement = homes[local]
                values[local] = part_of(stored[value], region_on(placement, rank))
            whole = {name: tensor.clone() for name, tensor in values.items()}
            torch.save(whole, folder / f"values-{rank}.pt")
            outputs = {output.whole: output.value for output in file.header.outputs}
            trained = {local: gradients.get(homes[local][0], "") for local in file.stored}
            updates.append({local: outputs[of] for local, of in trained.items() if of in outputs})
        job = {"runner": __name__, "directory": str(directory.resolve()), "updates": updates}
        run_job(folder, len(files), {**job, "optimizer": optimizer, "steps": steps})
        return float(json.loads((folder / "seconds.json").read_text()))


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    torch.set_num_threads(job["threads"])
    step = _Step(rank, folder, job)
    try:
        _, seconds = timed(step.run, job["steps"])
    except RuntimeError as error:  # most often because another rank is gone
        raise CommunicationError(one_line(error)) from error
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


class _Step:
    """A training step of a rank, ready to be run over and over."""

    def __init__(self, rank: int, folder: Path, job: Mapping[str, Any]) -> None:
        directory = Path(job["directory"])
        self._passes: list[tuple[RankFile, torch.nn.Module]] = []
        for which in PASSES:
            path = directory / file_name(rank, which)
            if path.is_file():
                self._passes.append((read_rank_file(path), eager(read_pass(path), boxed=True)))
        register_named(self._passes[0][0].groups)
        self._values = torch.load(folder / f"values-{rank}.pt", weights_only=True)
        self._updates: Mapping[str, str] = job["updates"][rank]
        trained = [self._values[local] for local in self._updates]
        self._optimizer = OPTIMIZERS[job["optimizer"]](trained) if trained else None

    def run(self, steps: int) -> None:
        """Run so many steps."""
        for _ in range(steps):
            self._run()

    def _run(self) -> None:
        values = dict(self._values)
        with torch.no_grad():
            for file, module in self._passes:
                arguments = [values[name] for name in file.arguments]
                for name in set(file.arguments) - self._values.keys():
                    del values[name]  # the pass frees each after its last reader
                values.update(zip(file.results, module(arguments), strict=True))
        for local, gradient in self._updates.items():
            self._values[local].grad = values[gradient]
        if self._optimizer is not None:
            self._optimizer.step()
