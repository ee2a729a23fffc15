"""The errors of writing, loading and running rank programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from partitioner.ir.errors import PartitionerError


class BackendError(PartitionerError, RuntimeError):
    """A rank file that cannot be written or run, or a rank that failed; one line."""


class CommunicationError(BackendError):
    """A communication failed; most often because another rank is gone."""


def one_line(error: BaseException | str) -> str:
    """Text of another library's error on one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


@contextmanager
def failing(*where: object) -> Iterator[None]:
    """Raise an error of torch.distributed as a CommunicationError that begins with `where`."""
    try:
        yield
    except RuntimeError as error:
        at = " ".join(map(str, where))
        raise CommunicationError(f"{at}: {one_line(error)}") from error


def why_unreadable(error: Exception) -> str:
    """The reason why a file cannot be read; without its path, which the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)
