"""Where ranks wait while others wait for them: it tells a late rank from one that never comes.

A rank that waits in an `Agreement` cannot take part in another communication. If another rank waits
for it there, as in `torch.distributed.barrier()` or in the gathering of a checkpoint, neither ever
goes on. So each process has a thread that looks at the main thread once a second, and posts in
the store of torch.distributed which communication it waits in. Nothing is posted but by ranks
that wait.

The thread ends before the process groups and before Python: it holds frames, whose variables hold
groups, and a thread that is in the store while Python shuts down ends the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import json
import linecache
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partitioner.backends.process_group import call_before_groups_end
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.agreeing.source_files import is_of_torch, is_of_user
from partitioner.backends.waiting import STEPS, Lookout, say

#: Seconds between two looks at the main thread.
_PERIOD_S = 1.0
#: Seconds between two looks at the processes of the other ranks.
_LOOK_S = 4.0
#: Looks in a row that find the main thread in one place before it is said to wait.
_LOOKS = 3
#: Seconds that the end of the groups waits for a thread that waits for the store.
_PATIENCE_S = 2.0
#: PyTorch's files with functions that communicate: by group, and by tensor.
_BY_GROUP = "distributed_c10d.py"
_COMMUNICATIONS = frozenset({_BY_GROUP, "_functional_collectives.py"})


@dataclass
class Whereabouts:
    """Where the ranks of this world wait."""

    rank: int  #: This process's.
    ranks: int  #: Number of ranks.
    store: Any  #: Where they post it.
    _look: tuple[int, int] = (-1, 0)  # the rank that was seen to wait last, and its count

    @staticmethod
    def of(rank: int, ranks: int) -> Whereabouts:
        """Take torch.distributed's world, in which this process posts its own place from now on."""
        return _of(rank, ranks, id(dist.group.WORLD))

    def post(self, doing: str) -> None:
        """Tell what this rank waits for; "" if it waits no longer."""
        self.store.set(_key(self.rank), doing)

    def elsewhere(self, doing: str) -> dict[int, str]:
        """The waits of ranks in words, if one waits for this one elsewhere, which is `doing`."""
        if not self.store.check([_KEY]):
            return {}
        rank, count, ranks = json.loads(self.store.get(_KEY))
        before, self._look = self._look, (rank, count)
        waits = before[0] == rank and before[1] < count
        if not waits or rank == self.rank or self.rank not in ranks:
            return {}
        keys = {other: _key(other) for other in range(self.ranks)}
        texts = {r: self.store.get(k).decode() for r, k in keys.items() if self.store.check([k])}
        return {r: text for r, text in texts.items() if text} | {self.rank: doing}

    def watch(self, ended: threading.Event) -> None:
        """Post where the main thread waits, until the event."""
        last, looks, posted = None, 0, False
        while not ended.wait(_PERIOD_S):
            place = _place()
            looks = looks + 1 if place is not None and place == last else 0
            last = place
            try:
                if place is not None and looks >= _LOOKS:
                    doing, ranks = _described(place[0], self.ranks)
                    self.post(doing)
                    self.store.set(_KEY, json.dumps([self.rank, looks, ranks]))
                    posted = True
                elif posted:
                    self.post("")
                    posted = False
            except RuntimeError:  # the process that keeps the store has ended
                return


_KEY = "partitioner/whereabouts"


def _key(rank: int) -> str:
    return f"{_KEY}/{rank}"


@lru_cache(maxsize=1)
def _of(rank: int, ranks: int, _world: int) -> Whereabouts:
    # a store serves one thread at a time, also while it waits
    store: Any = dist.distributed_c10d._get_default_store()
    ended = threading.Event()
    thread = threading.Thread(
        target=Whereabouts(rank, ranks, store.clone()).watch,
        args=(ended,),
        name="partitioner-whereabouts",
        daemon=True,
    )
    _start_until_groups_end(thread, ended)
    return Whereabouts(rank, ranks, store.clone())


def _start_until_groups_end(thread: threading.Thread, ended: threading.Event) -> None:
    """Start a thread that returns when `ended` is set: before process groups end, and at exit."""
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(_PATIENCE_S)

    call_before_groups_end(end)
    atexit.register(end)


@lru_cache(maxsize=1)
def look_out(rank: int, roll: Roll, _world: int) -> None:
    """Look now and then, until the groups end, whether the processes of this host's ranks run.

    One rank of the host speaks for all: the first that runs. It has a thread of its own, because
    the store may be that of a rank that was stopped.
    """
    ended = threading.Event()

    def tell(line: str) -> None:
        if lookout.first_running == rank:
            say(f"rank {rank}: {line}")

    lookout = Lookout(roll.here(), lambda: STEPS.number, tell)

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            lookout.look()

    thread = threading.Thread(target=watch, name="partitioner-lookout", daemon=True)
    _start_until_groups_end(thread, ended)


def _place() -> tuple[FrameType, int] | None:
    """The frame of a communication in which the main thread is, and its instruction; else None."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    for inner, _ in traceback.walk_stack(frame) if frame is not None else ():
        file = inner.f_code.co_filename
        if not is_of_torch(file):
            return None
        if Path(file).name in _COMMUNICATIONS:
            return inner, inner.f_lasti
    return None


def _described(frame: FrameType, ranks: int) -> tuple[str, list[int]]:
    """The user's line that waits in a communication, and the ranks that take part in it."""
    called, members = frame.f_code.co_name, None
    for outer, _ in traceback.walk_stack(frame):
        file, line = outer.f_code.co_filename, outer.f_lineno
        if is_of_user(file):
            return (
                f"{linecache.getline(file, line).strip() or called} ({file}:{line})",
                members or [],
            )
        members = _members(outer, ranks) if members is None else members
    return called, members or []


def _members(frame: FrameType, ranks: int) -> list[int] | None:
    """Ranks of the group or mesh that a function was called with; None if it has neither."""
    values = frame.f_locals
    file = frame.f_code.co_filename
    if is_of_torch(file) and Path(file).name == _BY_GROUP:
        if frame.f_code.co_name in ("send", "recv"):
            return []
        if "group" in values:
            group = values["group"]
            return list(range(ranks)) if group is None else dist.get_process_group_ranks(group)
    for value in values.values():
        mesh = value.device_mesh if isinstance(value, DTensor) else value
        if isinstance(mesh, DeviceMesh):
            return mesh.mesh.flatten().tolist() if mesh.ndim == 1 else []
    return None
