"""The errors of writing, loading and running rank programs."""

from __future__ import annotations

from partitioner.ir.errors import PartitionerError


class BackendError(PartitionerError, RuntimeError):
    """A rank file that cannot be written or run, or a rank that failed; one line."""


class CommunicationError(BackendError):
    """A communication failed; most often because another rank is gone."""


def one_line(error: BaseException | str) -> str:
    """Text of another library's error on one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def why_unreadable(error: Exception) -> str:
    """The reason why a file cannot be read; without its path, which the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)
