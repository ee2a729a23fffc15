"""Pauses of Python's garbage collector, whole or in part."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: graphs are many small objects that stay, visited at every collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def only_new_objects_collected() -> Iterator[None]:
    """Let `gc.collect()` inside visit only what is made inside; Python's heap may be large.

    Where objects are frozen already, it visits all others: thawing is of all at once.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
