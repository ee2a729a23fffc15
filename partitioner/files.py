"""Writing a file, or a folder, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from partitioner.ir.errors import PartitionerError

_COPY_BYTES = 2**24  #: Copied at a time.


class FileError(PartitionerError, ValueError):
    """A file that cannot be written."""


class DirectoryError(PartitionerError, ValueError):
    """A folder that cannot be written, or whose files are not of one another."""


class ResultError(PartitionerError, ValueError):
    """A folder that is not a saved compilation, or a result without what was asked of it."""


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
        raise FileError(f"cannot write {path}: {_reason(error)}") from None


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


def replace_directory(target: Path, write: Callable[[Path], None], *, force: bool) -> None:
    """Let `write` fill a new folder beside `target`, then put it in place.

    Args:
        target: Folder to make.
        write: Fills the folder that it is given; if it raises, nothing is left behind.
        force: Replace a folder that is there already.

    Raises:
        DirectoryError: `target` is there (without `force`), is a file, or cannot be made.
    """
    check_target(target, force=force)
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except (OSError, ValueError) as error:
        raise DirectoryError(f"cannot write {target}: {_reason(error)}") from None
    try:
        draft.chmod(0o755)
        write(draft)
        _swap(draft, target)
    except OSError as error:
        raise DirectoryError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_target(target: Path, *, force: bool) -> None:
    """Refuse early what `replace_directory` would refuse.

    Raises:
        DirectoryError: See `replace_directory`. Only folders that look like one of ours, or
            empty ones, are replaced.
    """
    try:
        _check_target(target, force)
    except DirectoryError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        raise DirectoryError(f"cannot write {target}: {_reason(error)}") from None


def _reason(error: OSError | ValueError) -> object:
    return error.strerror if isinstance(error, OSError) else error


def _check_target(target: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise DirectoryError(f"cannot write {target}: there is no folder {target.parent}")
    if not target.exists():
        return
    if not target.is_dir() or target.is_symlink():
        raise DirectoryError(f"cannot write {target}: it is there and is not a folder")
    if not force:
        raise DirectoryError(
            f"{target} is there already; pass --force (Python: force=True) to replace it, "
            "or name another folder"
        )
    if any(target.iterdir()) and not (target / "plan.json").is_file():
        raise DirectoryError(f"{target} holds something else than a plan; it is not replaced")


def _swap(draft: Path, target: Path) -> None:
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        try:
            target.rename(old / "was")
            draft.rename(target)
        except OSError:
            if not target.exists() and (old / "was").exists():
                (old / "was").rename(target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        draft.rename(target)
