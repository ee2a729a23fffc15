"""`torchrun --nproc-per-node N -m partitioner.run DIR`: one rank of a saved compilation.

Rank 0 reads or draws the inputs, hands each rank its parts, gathers the outputs and writes them.
Each rank reads its own file only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from partitioner.backends.errors import CommunicationError, one_line
from partitioner.backends.process_group import TIMEOUT, Start
from partitioner.foundations.streams import print_plainly

#: Seconds that an error waits to be printed if another rank prints it, or its cause: torchrun ends
#: all ranks within a second of the first that fails.
_GRACE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run this process's rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="partitioner.run", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--inputs", metavar="in.npz", type=Path, help="whole inputs by name")
    text = "where to write whole outputs"
    parser.add_argument("--outputs", metavar="out.npz", type=Path, help=text)
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="requests in flight")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs")
    args = parser.parse_args(argv)
    print_plainly()
    start = Start.of_environment()
    with start.together("loading"):
        from partitioner.run.rank import loaded  # a package may be missing on this host

        run = loaded(args.directory, start, args.inputs, args.outputs, args.requests, args.seed)
    dist.init_process_group(
        "gloo", store=start.store, rank=start.rank, world_size=start.ranks, timeout=TIMEOUT
    )
    text = run()
    if text:
        print(text)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:  # noqa: BLE001 - any error is printed in one line
        rank, message = f"rank {os.environ.get('RANK', '0')}", one_line(error)
        # the rank that the error names prints it at once, the others later: most often only one
        if not message.startswith(f"{rank}:") or isinstance(error, CommunicationError):
            time.sleep(_GRACE_S)
        line = message if message.startswith("rank ") else f"{rank}: {message}"
        print(line, file=sys.stderr, flush=True)
        os._exit(1)  # torchrun stops the other ranks
