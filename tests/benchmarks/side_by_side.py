"""What benchmarks share that run ours and a twin on the same processes, turn by turn."""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist


def with_numbers(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A parser with an option of a whole number for each name."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def start_rank(rank: int, ranks: int, port: int) -> None:
    """Join the gloo group of all processes, with one thread."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def ratios(times: Sequence[float], twins: Sequence[float]) -> list[float]:
    """The ratio of each round but the first, which warms up."""
    return [a / b for a, b in zip(times[1:], twins[1:], strict=True)]


def print_table(
    seconds: Mapping[str, Sequence[float]], width: int, twin_of: Callable[[str], str]
) -> None:
    """A line a mode: the median of its rounds, and ratios to its twin; the first round warms up."""
    print(f"{'':>{width}} {'ms':>7} {'ratio':>6}  least and largest ratio")
    for name, times in seconds.items():
        of_rounds = ratios(times, seconds[twin_of(name)])
        print(
            f"{name:>{width}} {1000 * statistics.median(times[1:]):7.1f} "
            f"{statistics.median(of_rounds):6.3f}  {min(of_rounds):.3f} to {max(of_rounds):.3f}"
        )
