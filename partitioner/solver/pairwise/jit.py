"""Numba's compiler with the types kept.

Message passing and block moves visit millions of table entries in an order that depends on the
graph; as NumPy calls, one a message, they took 23 times as long (ADR 8). The
compiled code is kept beside the sources (or in NUMBA_CACHE_DIR), so that only the first run
compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile a function of arrays and numbers when it is first called."""
    return cast("F", numba.njit(cache=True, nogil=True, error_model="numpy")(function))
