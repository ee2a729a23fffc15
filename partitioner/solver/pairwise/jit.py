"""Numba's compiler with the types kept, and random numbers for compiled functions.

Message passing and block moves visit millions of table entries in an order that depends on the
graph; as NumPy calls, one a message, they took 23 times as long (ADR 8). The compiled code is kept
beside the sources (or in NUMBA_CACHE_DIR), so that only the first run compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

F = TypeVar("F", bound=Callable[..., object])
State = npt.NDArray[np.uint64]  #: Of the random numbers, one entry.


def jit(function: F) -> F:
    """Compile a function of arrays and numbers when it is first called."""
    return cast("F", numba.njit(cache=True, nogil=True, error_model="numpy")(function))


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
