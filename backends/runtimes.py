"""The runtimes that a plan is made for, PyTorch and ONNX Runtime: is one missing, or not tried.

Neither is a dependency of the package: whoever plans an ONNX model needs no PyTorch, and ONNX
Runtime is one of two packages that overwrite each other. What needs a runtime that is not there
says so in one line.

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
from importlib.util import find_spec

from partitioner.ir.errors import PartitionerError

#: Major and minor numbers. `pyproject.toml` has the same bounds (a test compares them).
TRIED = ((2, 13), (2, 14))
#: Of a PyTorch that was tried, as pip takes it.
_REQUIREMENT = "'torch>={0[0]}.{0[1]},<{1[0]}.{2}'".format(TRIED[0], TRIED[-1], TRIED[-1][1] + 1)
#: What is said of a runtime that is missing, by the name of its package.
_MISSING = {
    "onnxruntime": (
        "ONNX Runtime is not installed, and ONNX models are read and run by it: `pip install "
        "onnxruntime`, or `pip install onnxruntime-gpu` for GPUs of NVIDIA (never both)"
    ),
    "torch": (
        "PyTorch is not installed, and its modules, and ranks that send each other tensors, need "
        f"it: `pip install {_REQUIREMENT}`"
    ),
}


class MissingRuntimeError(PartitionerError, ImportError):
    """An error of something that needs a runtime which is not installed."""


class UntriedError(PartitionerError, RuntimeError):
    """An unforeseen error under a release of PyTorch that was not tried."""


def untried() -> str:
    """Say which release is installed if it was not tried, and how to get one that was; else ""."""
    torch = sys.modules.get("torch")
    version = str(getattr(torch, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) in TRIED:
        return ""
    names = " and ".join(f"{one[0]}.{one[1]}" for one in TRIED)
    return (
        f"PyTorch {version} was not tried, only {names} were: its private interfaces may differ; "
        f"pip install {_REQUIREMENT} takes a tried one"
    )


def check_installed(package: str) -> None:
    """Raise a MissingRuntimeError if a runtime is not installed; it is not imported."""
    if find_spec(package) is None:
        raise MissingRuntimeError(_MISSING[package])


@contextmanager
def naming_runtimes(*foreseen: type[Exception]) -> Iterator[None]:
    """Name the runtime that is missing, or that was not tried, in errors that nobody foresaw.

    Args:
        *foreseen: Errors that are raised as they are, as are ours.
    """
    try:
        yield
    except Exception as error:
        package = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
        if package in _MISSING:
            raise MissingRuntimeError(_MISSING[package]) from error
        line = untried()
        if not line or isinstance(error, (PartitionerError, *foreseen)):
            raise
        text = " ".join(str(error).split())
        raise UntriedError(f"{line} ({type(error).__name__}: {text})") from error
