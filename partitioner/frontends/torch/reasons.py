"""PyTorch's reason of a failed trace, in a line."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from partitioner.frontends.errors import one_line


def reason(error: BaseException) -> str:
    """The first line of PyTorch's message, or the two that it introduces; the rest is advice."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"sizes or values that {error.func} gives depend on data"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[0].endswith(":"):
        lines = [f"{lines[1]} ({lines[2]})"]
    return one_line(lines[0])[:300] if lines else type(error).__name__
