"""How busy other processes keep the cores of this machine while it is measured (Linux only)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_STAT = Path("/proc/stat")
#: Fields of a core's line in which nothing runs: idle, and waiting for a disk.
_IDLE = (3, 4)
#: Fields that are counted elsewhere, too: guests, which are among the users' time.
_COUNTED = slice(0, 8)


def _busy_s(cores: frozenset[int]) -> float | None:
    """Seconds that the cores have run anything since the machine began; None if nobody tells."""
    ticks = 0
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            counted = [int(one) for one in fields[_COUNTED]]
            ticks += sum(counted) - sum(counted[index] for index in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass
class Others:
    """The other processes of this machine, from now on."""

    cores: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    _began_s: float = field(default_factory=time.perf_counter)
    _own_s: float = field(default_factory=_own_s)
    _busy_s: float | None = None

    def __post_init__(self) -> None:
        self._busy_s = _busy_s(self.cores)

    def share(self) -> float | None:
        """Share of the time of this process's cores that others have taken; None: nobody tells.

        Processes that this one has started count as its own once it has waited for them.
        """
        now_s, wall_s = _busy_s(self.cores), time.perf_counter() - self._began_s
        if now_s is None or self._busy_s is None or not wall_s:
            return None
        others_s = now_s - self._busy_s - (_own_s() - self._own_s)
        return min(1.0, max(0.0, others_s / (wall_s * len(self.cores))))
