"""Cases of rank programs in real processes, with one import of torch: jobs of test_processes.py."""

import json
import tempfile
from pathlib import Path

import numpy as np

from helpers.plans import rank_programs as hand
from helpers.plans.rank_cases import CASES, check
from jobs.processes.torch_ranks import serve
from partitioner.backends import worker
from partitioner.backends.arrays import assemble, load_arrays, local_inputs
from partitioner.backends.onnx.files.emit import emit
from partitioner.backends.onnx.files.load import read_directory


def run(case: hand.Case, requests: int, folder: Path) -> dict[str, np.ndarray]:
    emit(case.programs, case.graph, folder)
    headers = read_directory(folder)
    job = {
        "runner": "partitioner.backends.onnx.rank",
        "directory": str(folder),
        "ranks": len(headers),
        "requests": requests,
        "optimization": "all",
        "threads": 1,
    }
    (folder / "job.json").write_text(json.dumps(job))
    for header in headers:
        inputs = local_inputs(header, case.inputs)
        np.savez(folder / f"inputs-{header.rank}.npz", *inputs.values())
    if worker.main(folder):
        raise RuntimeError((folder / "failure.txt").read_text())
    parts = {}
    for header in headers:
        dtypes = {o.value: header.whole_outputs[o.whole].dtype for o in header.outputs}
        arrays = load_arrays(folder / f"outputs-{header.rank}.npz", dtypes.values())
        parts[header.rank] = dict(zip(dtypes, arrays, strict=True))
    return assemble(headers, parts)


def run_case(name: str) -> str:
    case = CASES[name]()
    for requests in (1, 5) if name in ("pipeline", "tensor_parallel") else (5,):
        with tempfile.TemporaryDirectory() as folder:
            check(case, run(case, requests, Path(folder)))
    return ""


if __name__ == "__main__":
    serve(run_case)  # the worker takes the open pipe, as long as it is silent, for a living parent
