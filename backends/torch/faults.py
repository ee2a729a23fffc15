"""A communication of a rank's graph that fails, in words: which one it was, and why."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import fx

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.torch.roll import Roll
from partitioner.ir.program import Comm

c10d = torch.ops._c10d_functional

#: Key in a collective's `meta`: the communications that it carries.
COMM = "partitioner.comm"

_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|socket closed"
    r"|connection refused|connect failure|ncclremoteerror",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


def cause(error: BaseException, roll: Roll) -> str:
    """Why a communication failed: PyTorch's text, and what it most probably means."""
    text = one_line(error).partition(" This is typically caused")[0]
    text = re.sub(r"^\[\S+:\d+\] ", "", text)
    if _GONE.search(text):
        gone = roll.ended()
        who = f"{named(gone)} {'have' if len(gone) > 1 else 'has'}" if gone else "a rank has"
        return f"{who} ended, by an error of its own or killed: see its output ({text})"
    if _LATE.search(text):
        return (
            "a rank did not come in time, as it hangs or does something else; "
            f"init_process_group(timeout=...) is how long to wait ({text})"
        )
    return text


def named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def explained(
    error: RuntimeError, module: object, rank: int, roll: Roll, what: str
) -> BackendError | None:
    """The error of a pass in our words; None if it is not about communication.

    Args:
        error: What PyTorch raised.
        module: The pass's graph, or what was compiled from it.
        rank: This rank.
        roll: The processes of all ranks.
        what: "forward" or "backward".
    """
    comms = _failed(error.__traceback__, module) if isinstance(module, fx.GraphModule) else ()
    if comms:
        comm, more = comms[0], f" and {len(comms) - 1} more" if len(comms) > 1 else ""
        peers = named([other for other in comm.ranks if other != rank])
        value = comm.source if rank in comm.sources() else comm.target
        wanted = (f" for {comm.why!r}" if comm.why else "") + more
        return CommunicationError(
            f"rank {rank}: {comm.kind.spelled} of {value!r}{wanted} with {peers} "
            f"in the {what} pass: {cause(error, roll)}"
        )
    if not _of_communication(error):
        return None
    return CommunicationError(
        f"rank {rank}: a communication in the {what} pass: {cause(error, roll)}"
    )


@contextmanager
def telling(doing: str, rank: int, roll: Roll) -> Iterator[None]:
    """Say in our words what fails if a communication does.

    Args:
        doing: What the ranks do.
        rank: This rank.
        roll: The processes of all ranks.

    Raises:
        CommunicationError: One failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not _of_communication(error):
            raise
        raise CommunicationError(f"rank {rank}: {doing}: {cause(error, roll)}") from error


def _of_communication(error: RuntimeError) -> bool:
    text = str(error)
    known = _GONE.search(text) or _LATE.search(text)
    return bool(known) and not isinstance(error, torch.OutOfMemoryError)


def _failed(trace: TracebackType | None, module: fx.GraphModule) -> tuple[Comm, ...]:
    """The communications of the collective that a traceback ends in."""
    names = {node.name: node for node in module.graph.nodes}
    found: tuple[Comm, ...] = ()
    while trace is not None:
        code = trace.tb_frame.f_code
        line = linecache.getline(code.co_filename, trace.tb_lineno)
        name = re.match(r"\s*(\w+)\s*(?::[^=]*)?=", line)
        node = names.get(name.group(1)) if name and code is module.forward.__code__ else None
        if node is not None:
            found = _comms_of(node)
        trace = trace.tb_next
    return found


def _comms_of(node: fx.Node) -> tuple[Comm, ...]:
    if node.target is c10d.wait_tensor.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    found: tuple[Comm, ...] = node.meta.get(COMM, ())
    return found
