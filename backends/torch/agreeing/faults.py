"""Failed communications in words: which one failed, and why.

Every rank tells the others which process it is. When a communication fails, a rank looks up the
processes of its own host; about those of other hosts nothing is known. Linux only (/proc).
"""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.torch.graphs.notes import COMM, OPERATOR
from partitioner.backends.waiting import process_of
from partitioner.ir.program import Comm

c10d = torch.ops._c10d_functional

#: Seconds that an ended process may take to be seen as such, after its connections closed; no
#: longer, since torchrun soon stops the remaining ones.
_PATIENCE_S = 0.5

_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|socket closed"
    r"|connection refused|connect failure|ncclremoteerror",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


def own_process() -> str:
    """Host, number and start of this process; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        space = Path("/proc/self/ns/pid").readlink()
        return f"{boot} {space} {os.getpid()} {process_of(os.getpid())[1]}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Roll:
    """The processes of all ranks, each as its `own_process()`."""

    processes: Sequence[str]

    def here(self) -> dict[int, tuple[int, str]]:
        """Number and start of the processes of this host's ranks, by rank."""
        this_host = own_process().split()[:2]
        found = {}
        for rank, process in enumerate(self.processes):
            *host, pid, start = process.split(" ") if process else ("", "", "")
            if this_host and host == this_host:
                found[rank] = int(pid), start
        return found

    def ended(self) -> list[int]:
        """Ranks whose processes have ended, as far as this process can see."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            here = self.here().items()
            ranks = [rank for rank, (pid, start) in here if process_of(pid)[1] != start]
            if ranks or time.monotonic() >= until:
                return ranks
            time.sleep(0.01)


def cause(error: BaseException, roll: Roll) -> str:
    """The cause of a failed communication: PyTorch's text, and its most probable meaning."""
    text = one_line(error).partition(" This is typically caused")[0]
    text = re.sub(r"^\[\S+:\d+\] ", "", text)
    if _GONE.search(text):
        gone = roll.ended()
        who = f"{named(gone)} {'have' if len(gone) > 1 else 'has'}" if gone else "a rank has"
        return f"{who} ended, by an error of its own or killed: see its output ({text})"
    if _LATE.search(text):
        return (
            "a rank did not come in time, as it hangs, does something else or its link is broken; "
            f"init_process_group(timeout=...) is how long to wait ({text})"
        )
    return text


def named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def explained(
    error: RuntimeError, module: object, rank: int, roll: Roll, which: str
) -> BackendError | None:
    """The error of a pass with the communication that failed; None if none did.

    `module` is the pass's graph, or its compiled form.
    """
    comms = _failed(error.__traceback__, module) if isinstance(module, fx.GraphModule) else ()
    if comms:
        comm, more = comms[0], f" and {len(comms) - 1} more" if len(comms) > 1 else ""
        peers = named([other for other in comm.ranks if other != rank])
        value = comm.source if rank in comm.sources() else comm.target
        wanted = (f" for {comm.why!r}" if comm.why else "") + more
        return CommunicationError(
            f"rank {rank}: {comm.kind.spelled} of {value!r}{wanted} with {peers} "
            f"in the {which} pass: {cause(error, roll)}"
        )
    if not _is_of_communication(error):
        return None
    return CommunicationError(
        f"rank {rank}: a communication in the {which} pass: {cause(error, roll)}"
    )


@contextmanager
def telling(doing: str, rank: int, roll: Roll) -> Iterator[None]:
    """Name the rank and its activity in errors of communications inside."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_communication(error):
            raise
        raise CommunicationError(f"rank {rank}: {doing}: {cause(error, roll)}") from error


def _is_of_communication(error: RuntimeError) -> bool:
    text = str(error)
    is_known = _GONE.search(text) or _LATE.search(text)
    return bool(is_known) and not isinstance(error, torch.OutOfMemoryError)


def _failed(trace: TracebackType | None, module: fx.GraphModule) -> tuple[Comm, ...]:
    nodes = {node.name: node for node in module.graph.nodes}
    comms: tuple[Comm, ...] = ()
    while trace is not None:
        code = trace.tb_frame.f_code
        line = linecache.getline(code.co_filename, trace.tb_lineno)
        name = re.match(r"\s*(\w+)\s*(?::[^=]*)?=", line)
        node = nodes.get(name.group(1)) if name and code is module.forward.__code__ else None
        if node is not None:
            operator = node.meta.get(OPERATOR, node.target)
            if operator is c10d.wait_tensor.default and isinstance(node.args[0], fx.Node):
                node = node.args[0]
            comms = node.meta.get(COMM, ())
        trace = trace.tb_next
    return comms
