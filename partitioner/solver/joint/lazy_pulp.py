"""PuLP, imported when it is first needed."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def load_pulp() -> Any:
    """PuLP.

    Its classes of solvers that are not installed keep the error of looking for them. From there a
    traceback leads to the frames of all callers of the first import, and what those hold would live
    as long as the process: a model, its data, process groups with their threads.
    """
    import pulp

    for one in vars(pulp).values():
        error = getattr(one, "err", None)
        if isinstance(error, BaseException):
            error.__traceback__ = None
    return pulp
