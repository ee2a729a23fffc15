"""Drafts: files and folders that are filled beside the place that they are for.

A draft is locked while its process lives, so that the next run for the same place can tell the
drafts of a process that was killed, and removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME_CHARACTERS = 40  #: Of the place's name in its drafts' names.


@contextmanager
def draft_file(place: Path) -> Iterator[Path]:
    """An empty file beside `place` or an OSError; it is removed at the end unless moved away."""

    def make(prefix: str) -> str:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=place.parent)
        os.close(handle)
        return name

    with _draft(place, make) as path:
        yield path


@contextmanager
def draft_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside `place` or an OSError; it is removed at the end unless moved away."""
    with _draft(place, lambda prefix: tempfile.mkdtemp(prefix=prefix, dir=place.parent)) as path:
        yield path


@contextmanager
def _draft(place: Path, make: Callable[[str], str]) -> Iterator[Path]:
    _remove_abandoned(place)
    while True:
        path = Path(make(_prefix(place)))
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process may remove one before it is locked
            continue
        if _lock(lock) is not False and path.exists():
            break
        os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _prefix(place: Path) -> str:
    return f".{place.name[:_NAME_CHARACTERS]}.draft-"


def _remove_abandoned(place: Path) -> None:
    if not os.access(place.parent, os.R_OK):
        return
    pattern = re.compile(re.escape(_prefix(place)) + "[a-z0-9_]{8}")
    for path in list(place.parent.iterdir()):
        if not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:  # gone, or somebody else's
            continue
        if _lock(lock):
            _remove(path)
        os.close(lock)


def _lock(handle: int) -> bool | None:
    """Take the lock: False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
