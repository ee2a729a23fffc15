"""The border between our reader and the libraries that it calls with a model from outside.

The libraries (onnx, onnx_ir, onnxscript, onnx_shape_inference) and the op table's rules take a
valid model for granted. On another one they raise whatever Python raises there: IndexError,
ZeroDivisionError, OverflowError. At the border, each becomes one line that names the model and the
node. What they log of a model goes to those who set up logging, not to a user's terminal.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.ir.errors import PartitionerError

for _library in ("onnx_ir", "onnx_shape_inference", "onnxscript"):
    logging.getLogger(_library).addHandler(logging.NullHandler())

#: Longest text of another library's error in a message.
_MAX_TEXT = 400


@contextmanager
def border(what: str) -> Iterator[None]:
    """Refuse a model on which anything inside raises; its name, and the node's if known, is `what`.

    Otherwise the node is that at which a library stood.

    Raises:
        FrontendError: In place of any other error. Errors of this package pass; those that do
            not name the model yet then do.
    """
    try:
        yield
    except FrontendError:
        raise
    except PartitionerError as error:
        raise FrontendError(f"{what}{_place(error)}: {one_line(error)}") from error
    except MemoryError as error:
        raise FrontendError(f"{what}{_place(error)}: this machine's memory is too small") from error
    except Exception as error:
        raise FrontendError(f"{what}{_place(error)}: not a valid model: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first cause of an error, on one line of limited length."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error)
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    speaks = text.startswith("[") or (text and isinstance(error, ValueError))  # [ShapeInference...
    return text if speaks else f"{type(error).__name__}: {text}"


def _place(error: BaseException) -> str:
    """`: node 'name' (Op)` of the innermost node that the code was at; "" for none."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("node")
        if isinstance(node, onnx_ir.Node):
            place = f": node {node.name!r} ({node.op_type})"
    return place
