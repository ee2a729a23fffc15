"""Writing a folder whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from partitioner.ir.errors import PartitionerError


class DirectoryError(PartitionerError, ValueError):
    """A folder that cannot be written, or whose files are not of one another."""


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
        raise DirectoryError(f"cannot write {target}: {_why(error)}") from None
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
        raise DirectoryError(f"cannot write {target}: {_why(error)}") from None


def _why(error: OSError | ValueError) -> object:
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
