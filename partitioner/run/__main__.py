"""`torchrun --nproc-per-node N -m partitioner.run DIR`: one rank of a saved compilation.

Rank 0 reads or draws the inputs, hands each rank its parts, gathers the outputs and writes them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch.distributed as dist

from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.header import Header
from partitioner.backends.launch import threads_per_rank
from partitioner.backends.onnx.load import read_directory
from partitioner.backends.onnx.rank import RankProcess
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.process_group import TIMEOUT
from partitioner.compiled.folder import load_plan
from partitioner.compiled.rank_files import ModuleFiles, rank_files
from partitioner.ir.errors import PartitionerError
from partitioner.run.local import (
    check_outputs,
    draw_inputs,
    prediction,
    read_inputs,
    report,
    write_outputs,
)

#: Seconds that an error waits to be printed if another rank's error may be its cause, or the same
#: error: torchrun ends all ranks within a second of the first that fails.
_GRACE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run this process's rank; returns the exit code."""
    args = _parser().parse_args(argv)
    headers = _headers(args.directory)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    config = SessionConfig(threads=threads_per_rank(here))
    process = RankProcess(args.directory, local_rank, config)
    is_first = dist.get_rank() == 0
    inputs = _whole_inputs(args, headers[0]) if is_first else None
    outputs, seconds = process.run(_scattered(inputs, headers), args.requests)
    parts: list[Mapping[str, np.ndarray] | None] = [None] * len(headers)
    dist.gather_object(outputs, parts if is_first else None)
    if is_first:
        wholes = assemble(headers, {rank: part or {} for rank, part in enumerate(parts)})
        if args.outputs is not None:
            write_outputs(args.outputs, wholes)
        has_plan = (args.directory / "plan.json").exists()
        expected = prediction(args.directory) if has_plan else ""
        print(report(seconds, args.requests, expected, wholes))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partitioner.run", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--inputs", metavar="in.npz", type=Path, help="whole inputs by name")
    text = "where to write whole outputs"
    parser.add_argument("--outputs", metavar="out.npz", type=Path, help=text)
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="requests in flight")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs")
    return parser


def _headers(directory: Path) -> Sequence[Header]:
    """The headers of the ranks that torchrun has started.

    Raises:
        BackendError: Not under torchrun, the files are of a module, or their number is not that of
            the processes.
        DirectoryError: The files are not up to date.
    """
    if "RANK" not in os.environ:
        raise BackendError("start it with torchrun, or use `partition run`")
    if (directory / "plan.json").exists():  # without a plan the files cannot be out of date
        files = rank_files(directory)
        if isinstance(files, ModuleFiles):
            raise BackendError(
                f"{directory} is of a PyTorch module: use `partition run`, or module() of the "
                "loaded program under torchrun"
            )
        files.check(load_plan(directory))
    headers, world_size = read_directory(directory), int(os.environ["WORLD_SIZE"])
    if len(headers) != world_size:
        raise BackendError(f"{directory} holds {len(headers)} ranks, torchrun started {world_size}")
    return headers


def _whole_inputs(args: argparse.Namespace, header: Header) -> Mapping[str, np.ndarray]:
    if args.requests < 1:
        raise BackendError(f"--requests is {args.requests}; it must be at least 1")
    if args.outputs is not None:
        check_outputs(args.outputs, args.directory)
    if args.inputs is None:
        inputs = draw_inputs(args.directory, args.seed)
    else:
        inputs = read_inputs(args.inputs, header)
    check_inputs(header, inputs)
    return inputs


def _scattered(
    inputs: Mapping[str, np.ndarray] | None, headers: Sequence[Header]
) -> Mapping[str, np.ndarray]:
    """This rank's parts of the whole inputs; rank 0 has `inputs` and scatters them, others None."""
    parts = None if inputs is None else [local_inputs(header, inputs) for header in headers]
    received: list[Mapping[str, np.ndarray]] = [{}]
    dist.scatter_object_list(received, parts)
    return received[0]


def _fail(error: Exception) -> NoReturn:
    """Print a line on stderr and exit with 1; torchrun stops the other ranks.

    A mistake that rank 0 refuses is printed at once. An error that may follow from another rank's
    end waits first, so that in most runs only one rank prints.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    is_mistake = isinstance(error, PartitionerError) and not isinstance(error, CommunicationError)
    if not (is_first and is_mistake):
        time.sleep(_GRACE_S)
    rank, message = f"rank {os.environ.get('RANK', '?')}", one_line(error)
    line = message if message.startswith(f"{rank}:") else f"{rank}: {message}"
    print(line, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:  # noqa: BLE001 - any error is printed in one line
        _fail(error)
