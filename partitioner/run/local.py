"""`partition run`: one local process a rank; the measured time is shown beside the predicted."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from partitioner.api.compiled.folder import EXAMPLES, OnnxFiles, load_plan, load_summary, rank_files
from partitioner.backends.arrays import save_named_arrays
from partitioner.backends.errors import one_line
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.backends.optimization import DEFAULT, Optimization, level_line
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.foundations import units
from partitioner.foundations.files import (
    ResultError,
    check_no_link,
    draft_file,
    open_file,
    umask,
    write_file,
)
from partitioner.ir.errors import PartitionerError
from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.report.measured import FILE


class RunError(PartitionerError, ValueError):
    """Inputs or outputs of a run that cannot be read or written."""


#: Bytes of the largest element type that a model has, complex128.
_MAX_ITEM_BYTES = 16
#: Most bytes of an array's header.
_MAX_HEADER_BYTES = 2**16
#: Errors that NumPy raises for a file that is no .npz file, or a broken one.
_NO_NPZ = (
    *(OSError, ValueError, AttributeError, TypeError, KeyError, EOFError, MemoryError),
    *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


def run_directory(
    directory: Path,
    inputs: Path | None,
    outputs: Path | None,
    *,
    module: str | None = None,
    model: Path | None = None,
    optimization: Optimization | None = None,
    requests: int = 1,
    seed: int = 0,
    steps: int = 0,
) -> str:
    """Run a saved compilation; returns a report of a few lines. Nothing that it names is imported.

    Of a module for training, a request is a step with the optimizer, whose rate is 0, on a copy of
    the weights. If steps are recorded, the record is written into the folder, and the report anew.

    Args:
        inputs: .npz of whole inputs by name; None draws valid random ones.
        outputs: .npz to write the whole outputs to; None writes none.
        module: ``package.module:factory`` of a module whose weights the files do not hold; None
            takes its ``.pt2`` file, which is `model` if it is not where it was.
        requests: Requests in flight; of a PyTorch module, one after the other.
        seed: Seed of the random inputs and, of a module, of dropout.
    """
    from partitioner.api.compiled.reload import load_named, look

    files = rank_files(directory)
    files.check(load_plan(directory))
    for name in (FILE, "report.html") if steps else ():
        check_no_link(directory / name)
    expected = prediction(directory)
    if optimization is not None:
        if not isinstance(files, OnnxFiles):
            raise RunError("--optimization is of ONNX Runtime, and the plan is of a module")
        files = replace(files, optimization=optimization)
    needs_model = files.needs_model
    program = look(directory) if steps and not needs_model else None
    if needs_model:
        program = load_named(directory, module, model)
    if program is not None and steps:
        files = replace(files, device=program.measuring_device)
    if outputs is not None:
        check_outputs(outputs, directory)
    unit = "request"
    if program is not None and needs_model:  # a module's, which has values that the files lack
        types = program.model.input_types
        given = None if inputs is None else read_inputs(inputs, types)
        job = LocalJob(
            inputs=given, requests=requests, seed=seed, recorded=steps, device=files.device
        )
        run = program.ranks.run_written(directory, job)
        unit = "step" if program.graph.backward else "request"
    else:
        types = files.headers()[0].whole_inputs
        arrays = read_inputs(inputs, types) if inputs else draw_inputs(directory, seed, types)
        run = files.run(arrays, requests, steps)
    if outputs is not None:
        write_outputs(outputs, run.outputs)
    level = files.optimization if isinstance(files, OnnxFiles) else ""
    text = report(run, requests, expected, unit, level)
    if program is None or not steps:
        return text
    comparison = program.compared(run.logs, run.seconds, requests)
    write_file(directory / FILE, comparison.measured.to_json().encode())
    comparison.result.report(directory / "report.html")
    return f"{text}\n\n{comparison}\n\nwritten to {directory / FILE} and report.html"


def run_sized(
    directory: Path,
    inputs: Path | None,
    outputs: Path | None,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    model: Path | None = None,
    optimization: Optimization | None = None,
    requests: int = 1,
    seed: int = 0,
) -> str:
    """Run a saved ONNX model with other shapes of inputs than planned; else as `run_directory`.

    Its ranks are made for them, with the weights that the model has now (`Compiled.of_sizes`).
    """
    from partitioner.api.compiled.reload import load

    if not isinstance(rank_files(directory), OnnxFiles):
        raise RunError(f"{directory}: --shape is of ONNX models, and the plan is of a module")
    if outputs is not None:
        check_outputs(outputs, directory)
    program = load(directory, model=model).of_sizes(shapes)
    drawn = program.model.random_inputs(seed)
    arrays = read_inputs(inputs, program.model.input_types) if inputs else drawn
    level = optimization or DEFAULT
    with tempfile.TemporaryDirectory(prefix="partitioner-run-") as name:
        program.ranks.write(Path(name))
        run = OnnxFiles(Path(name), optimization=level).run(arrays, requests)
    if outputs is not None:
        write_outputs(outputs, run.outputs)
    return report(run, requests, "", "request", level)


def report(
    run: LocalRun, requests: int, expected: str, unit: str = "request", optimization: str = ""
) -> str:
    """The measured time of requests (a `unit` each), the expected line, and the outputs' types."""
    number = f"{requests} {unit}s" if requests > 1 else f"1 {unit}"
    rate = units.per_second(requests / run.seconds)
    lines = [f"measured on this machine: {number} in {units.seconds(run.seconds)}, {rate}"]
    lines += [expected] if expected else []
    lines += [f"  {name}: {x.dtype}{list(x.shape)}" for name, x in run.outputs.items()]
    lines += [level_line(optimization)] if optimization else []
    return "\n".join(lines)


def prediction(directory: Path) -> str:
    """A line with the time that a saved plan should take on the cluster that it was planned for."""
    summary, plan = load_summary(directory), load_plan(directory)
    latency = units.seconds(summary["latency_s"])
    rate = units.per_second(summary["throughput_per_s"])
    count = len(Cluster.from_data(plan.cluster))
    devices = f"{count} devices" if count > 1 else "1 device"
    name = f"{plan.cluster.get('name')} ({devices})"
    return f"predicted for the planned cluster {name}: latency {latency}, {rate}"


def read_inputs(path: Path, types: Mapping[str, TensorType]) -> dict[str, np.ndarray]:
    """The plain arrays of an .npz file, in the element types of whole inputs; else a RunError.

    An .npz file has no bfloat16 or float8: such an input may be float32 in the file, which is
    rounded to nearest, or raw bytes, as NumPy writes an ml_dtypes array.
    """
    try:
        with open_file(path) as file:
            data = np.load(file, allow_pickle=False)
            if isinstance(data, np.lib.npyio.NpzFile) and data.zip is not None:
                _check_headers(path, data.zip, types)
                return {name: _from_file(data[name], types.get(name)) for name in data.files}
    except RunError:
        raise
    except OSError as error:
        raise RunError(f"inputs {path}: {error.strerror or one_line(error)}") from None
    except _NO_NPZ as error:
        if _is_zip(path):
            raise RunError(f"inputs {path}: {one_line(error)}") from None
    raise RunError(f"inputs {path}: not an .npz file (numpy.savez of arrays by input name)")


def _check_headers(path: Path, file: zipfile.ZipFile, types: Mapping[str, TensorType]) -> None:
    """Refuse arrays that are no inputs, by the headers alone: a small file may hold huge arrays."""
    for entry in file.infolist():
        name = entry.filename.removesuffix(".npy")
        if name not in types:
            names = ", ".join(map(repr, types)) or "none"
            raise RunError(f"inputs {path}: input {name!r} is not one of the model's: {names}")
        type_ = types[name]
        if entry.file_size > type_.numel * _MAX_ITEM_BYTES + _MAX_HEADER_BYTES:
            raise RunError(
                f"inputs {path}: input {name!r} has {entry.file_size} bytes, not {type_}"
            )
        with file.open(entry) as array:
            old = np.lib.format.read_magic(array) == (1, 0)
            form = np.lib.format
            read = form.read_array_header_1_0 if old else form.read_array_header_2_0
            shape, _, dtype = read(array)
        if shape != type_.shape and not dtype.hasobject:  # NumPy refuses objects unread
            raise RunError(f"inputs {path}: input {name!r} has shape {shape}, not {type_.shape}")


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except ValueError:  # a name that no file can have
        return False


def _from_file(array: np.ndarray, type_: TensorType | None) -> np.ndarray:
    dtype = array.dtype if type_ is None else numpy_dtype(type_.dtype)
    if not _is_foreign(dtype):
        return array
    if array.dtype == np.dtype((np.void, dtype.itemsize)):
        return array.view(dtype)
    return array.astype(dtype) if array.dtype == np.float32 else array


def _is_foreign(dtype: np.dtype) -> bool:
    """Test whether an .npz file cannot hold an element type."""
    return dtype.isbuiltin == 2  # NumPy's mark of types that another package (ml_dtypes) adds


def draw_inputs(
    directory: Path, seed: int, types: Mapping[str, TensorType]
) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model; a RunError without what tells them."""
    from partitioner.api.compiled import reload

    examples = directory / EXAMPLES
    if os.path.lexists(examples):
        from partitioner.api.verify.module import arrays_like

        return arrays_like(read_inputs(examples, types), types, seed)
    try:
        return reload.draw_inputs(directory, seed)
    except ResultError as error:
        raise RunError(f"{error}; or give --inputs, which needs no model") from None


def check_outputs(path: Path, directory: Path) -> None:
    """Refuse, before a run, a file that `write_outputs` could not or must not write after it."""
    try:
        rules = (
            (path.is_dir(), "it is a folder; name an .npz file"),
            (path.exists() and not path.is_file(), "it is not a regular file"),
            (path.suffix.lower() != ".npz", "name a file that ends in .npz"),
            (
                directory.resolve() in path.resolve().parents,
                f"it is in {directory}, the saved plan; name another place",
            ),
            (
                path.is_file() and not zipfile.is_zipfile(path),
                "not an .npz file, so it is not replaced",
            ),
        )
        why = next((why for is_broken, why in rules if is_broken), "")
        if not why:
            with draft_file(path):
                pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise RunError(f"outputs {path}: {why}")


def write_outputs(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write outputs to an .npz file, or raise a RunError; bfloat16 and float8 as exact float32."""
    stored = {
        name: array.astype(np.float32) if _is_foreign(array.dtype) else array
        for name, array in arrays.items()
    }
    try:
        with draft_file(path) as draft:
            with draft.open("wb") as file:
                save_named_arrays(file, stored)
            draft.chmod(0o666 & ~umask())
            draft.replace(path)
    except OSError as error:
        raise RunError(f"outputs {path}: {error.strerror}") from None
