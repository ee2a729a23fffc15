"""`partition run`: one local process a rank, and what was measured beside what was predicted."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from partitioner import units
from partitioner.backends.launch import run_local
from partitioner.ir.errors import PartitionerError


class RunError(PartitionerError, ValueError):
    """Inputs or outputs of a run that cannot be read or written."""


def run_directory(
    directory: Path,
    inputs: Path | None,
    outputs: Path | None,
    *,
    requests: int = 1,
    seed: int = 0,
) -> str:
    """Run a saved compilation and report.

    Args:
        directory: What ``partition MODEL`` wrote.
        inputs: .npz of whole inputs by name; None draws valid random ones.
        outputs: .npz to write the whole outputs to.
        requests: Requests in flight.
        seed: Of the random inputs.

    Returns:
        A few lines for people.

    Raises:
        RunError: A file cannot be read or written.
        BackendError: A wrong input, or a rank failed.
    """
    fed = read_inputs(inputs) if inputs is not None else draw_inputs(directory, seed)
    done = run_local(directory, fed, requests)
    if outputs is not None:
        write_outputs(outputs, done.outputs)
    lines = [_seconds_line(directory, done.seconds, requests)]
    lines += [f"  {name}: {array.dtype}{list(array.shape)}" for name, array in done.outputs.items()]
    return "\n".join(lines)


def read_inputs(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz file, never unpickling.

    Raises:
        RunError: Not an .npz file of plain arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(f"inputs {path}: {error}") from None


def draw_inputs(directory: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model."""
    from partitioner.frontends.inputs import random_inputs
    from partitioner.result import load_graph

    return random_inputs(load_graph(directory).graph, seed)


def write_outputs(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write whole outputs; nothing is left if that fails.

    Raises:
        RunError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"outputs {path}: {error.strerror}") from None


def _seconds_line(directory: Path, seconds: float, requests: int) -> str:
    many = f"{requests} requests" if requests > 1 else "1 request"
    measured = f"{many} in {units.seconds(seconds)}, {units.per_second(requests / seconds)}"
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"measured on this machine: {measured}"
    rate = summary["throughput_per_s"]
    predicted = (
        f"latency {units.seconds(summary['latency_s'])}, "
        f"{units.per_second(float('inf') if rate is None else rate)}"
    )
    return (
        f"measured on this machine: {measured}\n"
        f"predicted for {plan['cluster']['name']}: {predicted}"
    )
