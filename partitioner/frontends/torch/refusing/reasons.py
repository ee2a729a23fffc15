"""PyTorch's reason of a failed trace, in a line, with the user's line and a way out."""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from contextlib import suppress
from types import FrameType, TracebackType

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from partitioner.backends.torch.agreeing.source_files import is_of_user
from partitioner.frontends.errors import one_line

_BRANCH = "data-dependent expression"
_WAYS = (
    ("specialized integer", "let no size or Python number depend on the values of a tensor"),
    ("_local_scalar_dense", "keep it a tensor, without .item(), .tolist(), int() or float()"),
    (_BRANCH, "choose by torch.where, or by torch.cond for a costly branch"),
    ("nonzero", "keep all elements and mask them, by torch.where or a product"),
    ("repeat_interleave", "give it a number of repeats"),
    ("functorch.", "call torch.autograd.Function or the formula instead of torch.func in forward"),
    (".numpy()", "compute with PyTorch's operators"),
)


def reason(error: BaseException) -> str:
    """The first line of PyTorch's message, or the two that it introduces; then a way out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        text = f"sizes or values that {error.func} gives depend on data"
    elif len(lines) > 2 and lines[0].endswith(":"):
        text = one_line(f"{lines[1]} ({lines[2]})")[:300]
    else:
        text = one_line(lines[0])[:300] if lines else type(error).__name__
    way = next((f": {way}" for word, way in _WAYS if word in text), "")
    return text + way


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback: "train.py:7 (y = x.item())"; or ""."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_of_user(file):
            place = _place(file, trace.tb_lineno)
        trace = trace.tb_next
    return place


def called_at() -> str:
    """The innermost line of the user's code that runs now, as `raised_at`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return _place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def depends_at(module: nn.Module, program: ExportedProgram) -> str:
    """The user's line that first makes sizes or numbers that depend on data, as `raised_at`.

    The module is exported again, with the stacks of its nodes.
    """
    if not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes):
        return ""
    args, kwargs = program.example_inputs or ((), {})
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        again = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        for node in again.graph.nodes:
            stack = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
            places = [_place(file, int(line)) for file, line in stack if is_of_user(file)]
            if places and free_unbacked_symbols(node.meta.get("val")):
                return places[-1]
    return ""


def _place(file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({code})" if code else "")
