"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from partitioner.ir.errors import PartitionerError


class FileError(PartitionerError, ValueError):
    """A file that cannot be written."""


def write_file(path: Path, data: bytes) -> None:
    """Put `data` into a file; one that is there is replaced in one step.

    Raises:
        FileError: It cannot be written; what was there stays.
    """
    check_file(path)
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        publish(Path(draft), path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def publish(draft: Path, path: Path) -> None:
    """Move a finished file of `mkstemp` into place, with the rights of an ordinary new file."""
    mask = os.umask(0)
    os.umask(mask)
    draft.chmod(0o666 & ~mask)
    draft.replace(path)


def check_file(path: Path) -> None:
    """Refuse early what `write_file` would refuse.

    Raises:
        FileError: There is no such folder, it cannot be written into, or the path is a folder.
    """
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise FileError(f"cannot write {path}: it is there and is not a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FileError(f"cannot write {path}: the folder {path.parent} is not writable")
