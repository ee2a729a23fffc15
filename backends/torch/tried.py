"""The releases of PyTorch that were tried.

Traces, checks of replaced operators and meshes of parameters rest on interfaces that PyTorch does
not publish, and that any release may change. The package asks for the tried releases; another one
is there only if somebody installed it nevertheless. It may work: so it is tried, with a note, and
an error that nobody foresaw says first of all that this release was not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from partitioner.ir.errors import PartitionerError

#: Major and minor numbers. `pyproject.toml` has the same bounds (a test compares them).
TRIED = ((2, 13), (2, 14))


class UntriedError(PartitionerError, RuntimeError):
    """An unforeseen error under a release of PyTorch that was not tried."""


def untried() -> str:
    """Say which release is installed if it was not tried, and how to get one that was; else ""."""
    torch = sys.modules.get("torch")
    version = str(getattr(torch, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) in TRIED:
        return ""
    (major, minor), last = TRIED[0], TRIED[-1]
    names = " and ".join(f"{one[0]}.{one[1]}" for one in TRIED)
    return (
        f"PyTorch {version} was not tried, only {names} were: its private interfaces may differ; "
        f"pip install 'torch>={major}.{minor},<{last[0]}.{last[1] + 1}' takes a tried one"
    )


@contextmanager
def naming_untried(*foreseen: type[Exception]) -> Iterator[None]:
    """Begin errors that nobody foresaw with the line of `untried`, where it says something.

    Args:
        *foreseen: Errors that are raised as they are, as are ours.
    """
    try:
        yield
    except Exception as error:
        line = untried()
        if not line or isinstance(error, (PartitionerError, *foreseen)):
            raise
        text = " ".join(str(error).split())
        raise UntriedError(f"{line} ({type(error).__name__}: {text})") from error
