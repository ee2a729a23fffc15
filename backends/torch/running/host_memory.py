"""What a rank does with memory of the CPU that its tensors no longer need."""

from __future__ import annotations

import ctypes
import os
from functools import cache

#: Parameters of glibc's `mallopt` (malloc.h, mallopt(3)).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Bytes of an allocation that still gets pages of its own, which are given back when it is freed.
_OWN_PAGES_BYTES = 2**30
_NEVER = -1


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory of this process for later allocations; whether it does so.

    A step allocates and frees the same tensors again and again. By default glibc gives large ones
    back to the system each time, which then clears their pages anew: up to a quarter of a step
    (docs/performance.md). A process whose environment sets glibc's allocator itself, or loads
    another one, stays as it is, as does one without glibc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") + os.environ.get("LD_PRELOAD", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_kept = mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(is_kept)
