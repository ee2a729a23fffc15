"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from partitioner.ir.errors import PartitionerError

_COPY_BYTES = 2**24  #: Copied at a time.


class FileError(PartitionerError, ValueError):
    """A file that cannot be written."""


def write_file(path: Path, data: bytes) -> None:
    """Put `data` into a file; one that is there is replaced in one step, a link stays a link.

    Raises:
        FileError: It cannot be written; what was there stays.
    """
    write_files({path: data})


def write_files(contents: Mapping[Path, bytes | Path]) -> None:
    """Write files that belong together; none is put in place before all are complete.

    Args:
        contents: For each file its bytes, or a file to copy. They are put in place in this order.

    Raises:
        FileError: One cannot be written.
    """
    drafts: dict[Path, Path] = {}
    path = Path()
    try:
        for path, content in contents.items():
            check_file(path)
            folder = _final(path).parent
            handle, draft = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=folder)
            drafts[path] = Path(draft)
            with os.fdopen(handle, "wb") as file:
                _fill(file, content)
        for path, draft_path in drafts.items():
            draft_path.chmod(0o666 & ~_umask())
            draft_path.replace(_final(path))
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        for draft_path in drafts.values():
            draft_path.unlink(missing_ok=True)


def _fill(file: BinaryIO, content: bytes | Path) -> None:
    if isinstance(content, Path):
        with content.open("rb") as source:
            shutil.copyfileobj(source, file, _COPY_BYTES)
    else:
        file.write(content)


def _umask() -> int:
    """Rights that new files do not get; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_file(path: Path) -> None:
    """Refuse early what `write_file` would refuse.

    Raises:
        FileError: There is no such folder, it cannot be written into, the path is a folder, or no
            file can be called so.
    """
    try:
        _check_file(path)
    except FileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"cannot write {path}: {why}") from None


def _check_file(path: Path) -> None:
    final = _final(path)
    if final.is_symlink():
        raise FileError(f"cannot write {path}: it is a link that leads to itself")
    folder = final.parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {folder}")
    try:
        final.lstat()
    except FileNotFoundError:
        pass
    else:
        if not final.is_file():
            raise FileError(f"cannot write {path}: it is there and is not a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"cannot write {path}: the folder {folder} is not writable")


def _final(path: Path) -> Path:
    """Where a path leads, through links, whether or not there is a file."""
    return Path(os.path.realpath(path))


def refuse_to_replace(source: Path, path: Path) -> None:
    """A result never replaces what it was made from.

    Raises:
        FileError: The two are one file.
    """
    try:
        same = path.samefile(source)
    except (OSError, ValueError):  # one of them is not there
        return
    if same:
        raise FileError(f"cannot write {path}: it is the model itself; name another file")
