"""Which ranks have ended: what a rank that lost the connection to another one can find out.

Every rank tells the others which process it is. When a communication fails, those of the same host
are looked up; about processes of other hosts nothing is known. Linux only (/proc).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: How long an ended process may take to be seen as such, after its connections closed; no longer,
#: since torchrun soon stops those that are left.
_PATIENCE_S = 0.5


def own_process() -> str:
    """Host, number and start of this process; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        space = Path("/proc/self/ns/pid").readlink()
        return f"{boot} {space} {os.getpid()} {_start(os.getpid())}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Roll:
    """The processes of all ranks.

    Attributes:
        processes: Each rank's `own_process()`.
    """

    processes: Sequence[str]

    def ended(self) -> list[int]:
        """Ranks whose processes have ended, as far as this process can see."""
        until = time.monotonic() + _PATIENCE_S
        while not (found := self._ended()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _ended(self) -> list[int]:
        own = own_process().split()[:2]
        found = []
        for rank, process in enumerate(self.processes):
            *host, pid, start = process.split(" ") if process else ("", "", "")
            if own and host == own and _start(int(pid)) != start:
                found.append(rank)
        return found


def _start(pid: int) -> str:
    """When a process began, in ticks since the host did; "" if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]
