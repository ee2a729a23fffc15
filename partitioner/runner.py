"""`partition run`: one local process a rank, and what was measured beside what was predicted."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from partitioner import units
from partitioner.backends.launch import run_local
from partitioner.backends.onnx.load import read_directory
from partitioner.directory import check_ranks
from partitioner.ir.errors import PartitionerError
from partitioner.ir.types import numpy_dtype


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
        DirectoryError: The folder holds no rank files.
        RunError: A file cannot be read or written.
        BackendError: A wrong input, or a rank failed.
    """
    check_ranks(directory)
    fed = read_inputs(inputs, directory) if inputs is not None else draw_inputs(directory, seed)
    done = run_local(directory, fed, requests)
    if outputs is not None:
        write_outputs(outputs, done.outputs)
    return report(directory, done.seconds, requests, done.outputs)


def report(
    directory: Path, seconds: float, requests: int, outputs: Mapping[str, np.ndarray]
) -> str:
    """What a run took, beside the prediction, and the types of its outputs; a line each."""
    lines = [_seconds_line(directory, seconds, requests)]
    lines += [f"  {name}: {array.dtype}{list(array.shape)}" for name, array in outputs.items()]
    return "\n".join(lines)


def read_inputs(path: Path, directory: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz file, never unpickling.

    An .npz file cannot say bfloat16 or float8: an input of these may be float32 in the file, and
    is rounded to nearest, or its raw bytes, which is what NumPy writes of an ml_dtypes array.

    Args:
        path: The file.
        directory: Folder of rank files, which say the inputs' element types.

    Raises:
        RunError: Not an .npz file of plain arrays.
        BackendError: The rank files cannot be read.
    """
    arrays = _read_arrays(path)
    kinds = read_directory(directory)[0].whole_inputs
    return {
        name: _from_file(array, numpy_dtype(kinds[name].dtype)) if name in kinds else array
        for name, array in arrays.items()
    }


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            data = np.load(file, allow_pickle=False)
            if isinstance(data, np.lib.npyio.NpzFile):
                return {name: data[name] for name in data.files}
    except OSError as error:
        raise RunError(f"inputs {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if zipfile.is_zipfile(path):
            raise RunError(f"inputs {path}: {error}") from None
    raise RunError(f"inputs {path}: not an .npz file (numpy.savez of arrays by input name)")


def _from_file(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if not _is_foreign(dtype):
        return array
    if array.dtype == np.dtype((np.void, dtype.itemsize)):
        return array.view(dtype)
    return array.astype(dtype) if array.dtype == np.float32 else array


def _is_foreign(dtype: np.dtype) -> bool:
    """Whether an .npz file forgets an element type."""
    return dtype.isbuiltin == 2  # NumPy's mark of types that another package (ml_dtypes) adds


def draw_inputs(directory: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model.

    Raises:
        RunError: The model, which says what is valid, is gone or has changed.
    """
    from partitioner.frontends.inputs import random_inputs
    from partitioner.result import ResultError, load_graph

    try:
        graph = load_graph(directory).graph
    except ResultError as error:
        raise RunError(f"{error}; or give --inputs, which needs no model") from None
    return random_inputs(graph, seed)


def write_outputs(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write whole outputs to an .npz file; nothing is left if that fails.

    Outputs of bfloat16 and float8, which such a file cannot hold, are written as float32 (exact).

    Raises:
        RunError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **{name: _to_file(array) for name, array in arrays.items()})  # type: ignore[arg-type]
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"outputs {path}: {error.strerror}") from None


def _to_file(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if _is_foreign(array.dtype) else array


def _seconds_line(directory: Path, seconds: float, requests: int) -> str:
    many = f"{requests} requests" if requests > 1 else "1 request"
    measured = f"{many} in {units.seconds(seconds)}, {units.per_second(requests / seconds)}"
    return f"measured on this machine: {measured}\n{_prediction(directory)}"


def _prediction(directory: Path) -> str:
    """What the plan's own cluster would take, named: it is seldom the machine that ran."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        cluster = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["cluster"]
        rate = summary["throughput_per_s"]
        latency = units.seconds(summary["latency_s"])
        many = units.per_second(float("inf") if rate is None else rate)
        name = cluster["name"]
        count = sum(entry["count"] for entry in cluster["devices"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"no prediction: {directory} has no readable summary.json and plan.json"
    devices = f"{count} devices" if count > 1 else "1 device"
    return f"predicted for the planned cluster {name} ({devices}): latency {latency}, {many}"
