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
from partitioner.backends.onnx.load import read_directory
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.process_group import TIMEOUT
from partitioner.backends.rank import RankProcess, RankRun, threads_per_rank
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

#: Seconds that an error waits to be printed if another rank's may be its cause, or the same:
#: torchrun ends all ranks within a second of the first that fails.
_GRACE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run this process's rank; 0 if all is well."""
    args = _parser().parse_args(argv)
    directory = Path(args.directory)
    ranks = _world_size(directory)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    process = RankProcess(directory, local_rank, SessionConfig(threads=threads_per_rank(here)))
    whole = _whole_inputs(args, directory) if dist.get_rank() == 0 else None
    done = process.run(_own_inputs(whole, directory, ranks), args.requests)
    _deliver(done, directory, Path(args.outputs) if args.outputs else None, args.requests)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partitioner.run", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--inputs", metavar="in.npz", help="whole inputs by name")
    parser.add_argument("--outputs", metavar="out.npz", help="where to write whole outputs")
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="requests in flight")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs")
    return parser


def _world_size(directory: Path) -> int:
    if "RANK" not in os.environ:
        raise BackendError("start it with torchrun, or use `partition run`")
    if (directory / "plan.json").exists():  # without one there is nothing to be out of date
        files = rank_files(directory)
        if isinstance(files, ModuleFiles):
            raise BackendError(
                f"{directory} is of a PyTorch module: use `partition run`, or module() of the "
                "loaded program under torchrun"
            )
        files.check(load_plan(directory))
    ranks, given = len(read_directory(directory)), int(os.environ["WORLD_SIZE"])
    if ranks != given:
        raise BackendError(f"{directory} holds {ranks} ranks, torchrun started {given}")
    return ranks


def _whole_inputs(args: argparse.Namespace, directory: Path) -> Mapping[str, np.ndarray]:
    if args.requests < 1:
        raise BackendError(f"--requests is {args.requests}; it must be at least 1")
    if args.outputs:
        check_outputs(Path(args.outputs))
    path = Path(args.inputs) if args.inputs else None
    inputs = draw_inputs(directory, args.seed) if path is None else read_inputs(path, directory)
    check_inputs(read_directory(directory)[0], inputs)
    return inputs


def _own_inputs(
    whole: Mapping[str, np.ndarray] | None, directory: Path, ranks: int
) -> Mapping[str, np.ndarray]:
    """Rank 0 hands out parts; the others have `whole` None."""
    parts: list[Mapping[str, np.ndarray]] | None = None
    if whole is not None:
        parts = [local_inputs(header, whole) for header in read_directory(directory)]
        assert len(parts) == ranks
    own: list[Mapping[str, np.ndarray]] = [{}]
    dist.scatter_object_list(own, parts)
    return own[0]


def _deliver(done: RankRun, directory: Path, path: Path | None, requests: int) -> None:
    """Rank 0 puts the outputs together, writes them and says how long it took."""
    first = dist.get_rank() == 0
    parts: list[Mapping[str, np.ndarray] | None] = [None] * dist.get_world_size()
    dist.gather_object(dict(done.outputs), parts if first else None)
    if not first:
        return
    outputs = assemble(read_directory(directory), dict(enumerate(p or {} for p in parts)))
    if path is not None:
        write_outputs(path, outputs)
    expected = prediction(directory) if (directory / "plan.json").exists() else ""
    print(report(done.seconds, requests, expected, outputs))


def _fail(error: Exception) -> NoReturn:
    """One line on stderr and exit code 1; torchrun stops the other ranks.

    Rank 0's own mistakes speak at once. What may only echo another rank's end waits first, so
    that in most runs one rank speaks.
    """
    first = os.environ.get("RANK", "0") == "0"
    own = isinstance(error, PartitionerError) and not isinstance(error, CommunicationError)
    if not (first and own):
        time.sleep(_GRACE_S)
    message = one_line(error)
    rank = f"rank {os.environ.get('RANK', '?')}"
    said = message if message.startswith(f"{rank}:") else f"{rank}: {message}"
    print(said, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:  # noqa: BLE001 (whatever it is, one line)
        _fail(error)
