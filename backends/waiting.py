"""Ranks of this machine that do not run, though others wait for them.

A process that was stopped (by SIGSTOP or a debugger), or whose memory is read back from the disk,
has not ended: its connections stay open, and nothing tells the other ranks why nothing comes. So
somebody looks at the processes now and then, and names such a rank. Linux only (/proc).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds between two looks.
LOOK_S = 2.0
#: Seconds for which a process is in a state before it is named: stopped, or waiting for the disk,
#: which each page that is read takes a moment of.
_NAMED_AFTER_S = {"stopped": 8.0, "waiting for the disk, as if it were swapped out": 20.0}
#: The states of /proc in words.
_STATES: Mapping[str, str] = {
    **dict.fromkeys("Tt", "stopped"),
    "D": "waiting for the disk, as if it were swapped out",
}
_COUNT_BYTES = 8
_STEPS = "steps"  #: Name of the file with the number of each rank's step.


def process_of(pid: int) -> tuple[str, str]:
    """The state of a process as a letter, and its start in ticks; ("", "") if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return ("", "") if fields[0] in ("Z", "X") else (fields[0], fields[19])


class Steps:
    """The number of this process's step, of requests or of calls, also in a file."""

    def __init__(self) -> None:
        self.number = 0
        self._file = -1
        self._place = 0

    def keep_in(self, folder: Path, rank: int) -> None:
        """Keep the number in the folder of a job from now on, too: the first step begins."""
        self._file = os.open(folder / _STEPS, os.O_WRONLY | os.O_CREAT, 0o600)
        self._place = rank * _COUNT_BYTES
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.number += 1
        if self._file >= 0:
            os.pwrite(self._file, self.number.to_bytes(_COUNT_BYTES, "little"), self._place)

    @staticmethod
    def latest(folder: Path) -> int:
        """The last step that a rank of a job has begun."""
        data = b""
        with suppress(OSError):
            data = (folder / _STEPS).read_bytes()
        parts = (data[at : at + _COUNT_BYTES] for at in range(0, len(data), _COUNT_BYTES))
        return max((int.from_bytes(part, "little") for part in parts), default=0)


#: The step of this process.
STEPS = Steps()


def say(line: str) -> None:
    """Print a line on stderr, if that can be written."""
    with suppress(OSError, ValueError, AttributeError):
        print(f"partitioner: {line}", file=sys.stderr, flush=True)


@dataclass
class Lookout:
    """Looks at the processes of ranks, and names those that do not run."""

    #: Number and start of the process of each rank that can be seen.
    processes: Mapping[int, tuple[int, str]]
    step: Callable[[], int]  #: Gives the number of the step that ranks wait in.
    say: Callable[[str], None] = say  #: Prints a line.
    clock: Callable[[], float] = time.monotonic  #: Tells the time, in seconds.
    _since: dict[int, tuple[str, float]] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Look at all of them, and say what is new."""
        now = self.clock()
        for rank, (pid, start) in self.processes.items():
            state, began = process_of(pid)
            word = _STATES.get(state, "") if began == start else ""
            before, since = self._since.get(rank, ("", now))
            self._since[rank] = (word, since if word == before else now)
            if (
                word
                and rank not in self._named
                and now - self._since[rank][1] >= _NAMED_AFTER_S[word]
            ):
                self._named.add(rank)
                way_out = f"; it goes on with `kill -CONT {pid}`" if word == "stopped" else ""
                self.say(
                    f"waiting for rank {rank} in step {self.step()}: "
                    f"its process {pid} is {word}{way_out}"
                )
            elif not word and rank in self._named:
                self._named.discard(rank)
                if began == start:
                    self.say(f"rank {rank} goes on")

    @property
    def first_running(self) -> int:
        """The first rank whose process runs, of those that were looked at; -1 for none."""
        return min((r for r in self.processes if not self._since.get(r, ("", 0.0))[0]), default=-1)


def write_processes(folder: Path, pids: Mapping[int, int]) -> None:
    """Leave the processes of a job's ranks in its folder; `pids` has the ranks by process."""
    listed = {rank: (pid, process_of(pid)[1]) for pid, rank in pids.items()}
    draft = folder / "processes.draft"
    draft.write_text(json.dumps(list(listed.items())))
    draft.replace(folder / "processes.json")


def lookout_of(folder: Path) -> Lookout | None:
    """Look at the ranks of a job; None while they are not there."""
    file = folder / "processes.json"
    if not file.is_file():
        return None
    listed = json.loads(file.read_text())
    processes = {rank: (pid, start) for rank, (pid, start) in listed}
    return Lookout(processes, lambda: Steps.latest(folder))
