"""Products whose weights lie in caches, in memory, and as a model finds them.

    OMP_NUM_THREADS=1 python tests/benchmarks/caches.py

A product is timed over and over (warm), after 64 MiB were written and its other operand was read
(cold), the same where the product of other weights comes between, which brings back its code (as
`partition profile` measures what reads weights), and as one of a chain with 96 MiB of weights (a
model). Seconds are the thread's own, so that other programs count for little.
"""

from __future__ import annotations

import time

import numpy as np
import torch

SIZES = (
    *((128, 512, 2048), (128, 2048, 512), (128, 512, 512), (96, 512, 1536), (1, 2048, 2048)),
    *((128, 256, 256), (128, 256, 1024), (256, 256, 256)),
)
MODEL_BYTES, OTHER_BYTES, ROUNDS = 96 * 2**20, 2**26, 11


def seconds(left: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Of one of some products."""
    begin = time.thread_time()
    for weight in weights:
        left @ weight
    return (time.thread_time() - begin) / len(weights)


def lower_quartile(runs: list[float]) -> float:
    return sorted(runs)[len(runs) // 4]


def main() -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    others = np.zeros(OTHER_BYTES, np.uint8)
    for m, k, n in SIZES:
        left = torch.randn(m, k)
        weights = [torch.randn(k, n) for _ in range(MODEL_BYTES // (4 * k * n))]
        ways: dict[str, list[float]] = {"warm": [], "cold": [], "with its code": []}
        chain = []
        for _ in range(ROUNDS):
            left @ weights[0]
            ways["warm"].append(seconds(left, weights[:1]))
            others.fill(1)
            left.sum()
            ways["cold"].append(seconds(left, weights[:1]))
            others.fill(1)
            left @ weights[-1]
            left.sum()
            ways["with its code"].append(seconds(left, weights[:3]))
            chain.append(seconds(left, weights))
        model_s = lower_quartile(chain)
        words = ", ".join(
            f"{way} {lower_quartile(runs) / model_s - 1:+.0%}" for way, runs in ways.items()
        )
        print(f"  {m} x {k} x {n}: {model_s * 1e3:.2f} ms in a model; {words}")


if __name__ == "__main__":
    main()
