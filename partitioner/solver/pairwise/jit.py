"""Numba's compiler with the types kept, and random numbers for compiled functions.

Message passing and block moves visit millions of table entries in an order that depends on the
graph; as NumPy calls, one a message, they took 23 times as long (ADR 8). Compiled code is kept in
the user's cache folder, under the hash of all sources of this package, so that only the first run
of a version on a machine compiles, whichever checkout or environment it is in. (Numba itself would
keep it beside the sources, and not notice that an inlined function of another file has changed.)
It is kept in NUMBA_CACHE_DIR if that is set, and where Numba keeps it if neither can be written.
Where nothing can be written, every process compiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching, config, event

from partitioner.foundations.files import cache_folder
from partitioner.solver.work import COMPILATION

F = TypeVar("F", bound=Callable[..., object])
State = npt.NDArray[np.uint64]  #: Of the random numbers, one entry.


@cache
def _sources() -> str:
    """A hash of the sources of this package and of the compiler's version."""
    here = Path(__file__).parent
    contents = [path.read_bytes() for path in sorted(here.rglob("*.py"))]
    contents.append(numba.__version__.encode())  # another one would discard what is kept
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


class _Locator(caching._CacheLocator):  # noqa: SLF001
    def __init__(self, line: int) -> None:
        self._line = line

    def get_cache_path(self) -> str:
        return str(cache_folder() / "compiled" / _sources())

    def get_source_stamp(self) -> str:
        return _sources()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Callable[..., object], _: str) -> _Locator | None:
        """The place of a function; None if another one was asked for, or this one is no place."""
        if config.CACHE_DIR:  # type: ignore[attr-defined]
            return None
        try:
            place = cls(function.__code__.co_firstlineno)
            place.ensure_cache_path()  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError):  # read-only, or no home
            return None
        return place


class _Kept(caching.CompileResultCacheImpl):
    _locator_classes: ClassVar[list[type[object]]] = [  # type: ignore[misc]
        _Locator,
        *caching.CompileResultCacheImpl._locator_classes,  # noqa: SLF001
    ]


class _Cache(caching.FunctionCache):
    _impl_class = _Kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code, unless the disk is full or may no longer be written."""
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _Compiles(event.Listener):
    """Tells `COMPILATION` when a function of ours is compiled."""

    def on_start(self, event: Any) -> None:
        if _is_ours(event):
            COMPILATION.begin()

    def on_end(self, event: Any) -> None:
        if _is_ours(event):
            COMPILATION.end()


def _is_ours(event: Any) -> bool:
    module: str | None = event.data["dispatcher"].py_func.__module__  # None if it was made by exec
    return module is not None and module.startswith(f"{__package__}.")


event.register("numba:compile", _Compiles())  # type: ignore[no-untyped-call]


def jit(function: F) -> F:
    """Compile a function of arrays and numbers when it is first called."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no place can be written
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return cast("F", compiled)


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
