"""Runs many cases as real processes with one import of torch: a script for test_processes.py.

Prints a line a case: its name and "ok", or what is wrong.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import rank_programs as hand
from rank_cases import CASES, check

from partitioner.backends import worker
from partitioner.backends.arrays import assemble, load_arrays, local_inputs, save_arrays
from partitioner.backends.onnx.emit import emit
from partitioner.backends.onnx.load import read_directory


def run(case: hand.Case, requests: int, folder: Path) -> dict[str, np.ndarray]:
    emit(case.programs, case.graph, folder)
    headers = read_directory(folder)
    job = {
        "backend": "onnx",
        "directory": str(folder),
        "ranks": len(headers),
        "requests": requests,
        "optimization": "all",
        "threads": 1,
    }
    (folder / "job.json").write_text(json.dumps(job))
    for header in headers:
        inputs = local_inputs(header, case.inputs)
        save_arrays(folder / f"inputs-{header.rank}.npz", inputs.values())
    if worker.main(folder):
        raise RuntimeError((folder / "failure.txt").read_text())
    parts = {}
    for header in headers:
        dtypes = {o.value: header.whole_outputs[o.whole].dtype for o in header.outputs}
        arrays = load_arrays(folder / f"outputs-{header.rank}.npz", dtypes.values())
        parts[header.rank] = dict(zip(dtypes, arrays, strict=True))
    return assemble(headers, parts)


def main() -> None:
    for name in sys.argv[1:]:
        case = CASES[name]()
        alone = name in ("pipeline", "tensor_parallel")
        for requests in (1, 5) if alone else (5,):
            with tempfile.TemporaryDirectory() as folder:
                check(case, run(case, requests, Path(folder)))
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    assert not os.isatty(0)  # the worker takes an open pipe for a living parent
    main()
