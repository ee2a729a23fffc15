"""Writing a page: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from partitioner.ir.errors import PartitionerError


class ReportError(PartitionerError, ValueError):
    """A page that cannot be written."""


def write_page(path: Path, text: str) -> None:
    """Write a file beside `path`, then put it in its place.

    Raises:
        ReportError: It cannot be written.
    """
    check_page(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ReportError(f"cannot write {path}: {error.strerror}") from None


def check_page(path: Path) -> None:
    """Refuse early what `write_page` would refuse.

    Raises:
        ReportError: It is a folder, or there is none to put it in.
    """
    try:
        if path.is_dir():
            raise ReportError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise ReportError(f"cannot write {path}: there is no folder {path.parent}")
    except (OSError, ValueError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"cannot write {path}: {error}") from None
