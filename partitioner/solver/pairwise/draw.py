"""Random numbers of compiled functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from partitioner.solver.pairwise.jit import jit

State = npt.NDArray[np.uint64]


def seeded(seed: int) -> State:
    """A state of its own for each seed."""
    return np.array([2 * seed + 1], dtype=np.uint64)


@jit
def draw(state: State, limit: int) -> int:
    """A number below the limit (xorshift64*); the state moves on."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % limit  # type: ignore[return-value]
