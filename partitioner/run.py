"""`torchrun --nproc-per-node N -m partitioner.run DIR`: one rank of a saved compilation.

Rank 0 reads or draws the inputs, hands each rank its parts, gathers the outputs and writes them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from partitioner import units
from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.load import read_directory
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.process_group import TIMEOUT
from partitioner.backends.rank import RankProcess, RankRun, threads_per_rank
from partitioner.runner import draw_inputs, read_inputs, write_outputs


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
    ranks, given = len(read_directory(directory)), int(os.environ["WORLD_SIZE"])
    if ranks != given:
        raise BackendError(f"{directory} holds {ranks} ranks, torchrun started {given}")
    return ranks


def _whole_inputs(args: argparse.Namespace, directory: Path) -> Mapping[str, np.ndarray]:
    if args.requests < 1:
        raise BackendError(f"--requests is {args.requests}; it must be at least 1")
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
    print(f"measured: {requests} request(s) in {units.seconds(done.seconds)}")
    for name, array in outputs.items():
        print(f"  {name}: {array.dtype}{list(array.shape)}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:  # noqa: BLE001 (one line, and torchrun stops the other ranks)
        print(f"rank {os.environ.get('RANK', '?')}: {one_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)
