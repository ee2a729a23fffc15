"""Runs a folder of rank files on this machine, one process a rank.

>>> run_local(Path("model.partition"), {"x": x}).outputs  # doctest: +SKIP
{'y': array(...)}
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from partitioner.backends.arrays import assemble, check_inputs, load_arrays, local_inputs
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalRun, load_logs, run_job
from partitioner.backends.onnx.files.load import read_directory

RUNNER = "partitioner.backends.onnx.rank"  #: Runs a rank in its process.


def run_local(
    directory: Path,
    inputs: Mapping[str, np.ndarray],
    requests: int = 1,
    *,
    steps: int = 0,
    optimization: str = "all",
) -> LocalRun:
    """Run requests with the same whole inputs on a folder of rank files, several in flight.

    Args:
        directory: The folder.
        inputs: By name.
        requests: At least 1.
        steps: Steps of one request each that are recorded before; 0 for none.
        optimization: ONNX Runtime's level, see `SessionConfig`.

    Raises:
        BackendError: An input or a file is wrong, the steps of a plan in micro-batches are to be
            recorded, or a rank raised or was killed. No process and no temporary file is left, also
            on any other exception.
    """
    if requests < 1:
        raise BackendError(f"requests is {requests}; it must be at least 1")
    headers = read_directory(directory)
    if steps and headers[0].batch is not None:
        raise BackendError(
            "profiles do not serve plans in micro-batches: run the plan without recording it"
        )
    check_inputs(headers[0], inputs)
    job = {
        "runner": RUNNER,
        "directory": str(directory.resolve()),
        "optimization": optimization,
        "requests": requests,
        "steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="partitioner-run-") as name:
        folder, parts = Path(name), {}
        for header in headers:
            np.savez(folder / f"inputs-{header.rank}.npz", *local_inputs(header, inputs).values())
        run_job(folder, len(headers), job)
        for header in headers:
            # a value may be delivered several times: it is one array
            dtypes = {o.value: header.whole_outputs[o.whole].dtype for o in header.outputs}
            arrays = load_arrays(folder / f"outputs-{header.rank}.npz", dtypes.values())
            parts[header.rank] = dict(zip(dtypes, arrays, strict=True))
        seconds = json.loads((folder / "seconds.json").read_text())
        last = headers[0].of_request(requests - 1, headers)
        return LocalRun(assemble(last, parts), seconds, load_logs(folder, len(headers)))
