"""The errors of reading a model."""

from __future__ import annotations

from partitioner.ir.errors import PartitionerError


class FrontendError(PartitionerError, ValueError):
    """A model, or a size given for it, that cannot be compiled; the message is one line."""


def one_line(error: BaseException | str) -> str:
    """Text of another library's error on one line."""
    return " ".join(str(error).split())
