"""Plain tensors that are computed with those of ranks' modules, which all ranks must have alike.

A rank that draws one for itself (`p.mul_(torch.rand(p.shape) > 0.5)`) would compute with parts of
another tensor than the others. So checksums are noted of what is only read, and the ranks compare
their sums at the next call of a module, in whatever order each of them came to its tensors. After
three such times of an operator and sizes nothing is noted of them. No rank waits.

What is noted is what a thread that has a module computes, and a backward pass, for which such a
thread waits: nobody knows how far other threads are when a module is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from partitioner.backends.torch.agreeing.sums import checksum, code
from partitioner.backends.torch.dtensors.schemas import written_tensors

#: Times between two calls of a module that an operator with tensors of the same sizes is noted.
_COMPARED = 3
#: Ranks of a mesh.
Ranks = tuple[int, ...]


@dataclass(eq=False)
class _Notes:
    """Hold what was noted and not yet taken.

    Attributes:
        sums: By ranks that are to have them alike and name of an operator: sums of checksums.
        calls: Operators with sizes, by ranks.
        times: By ranks, operator and sizes: how often they were noted, this time included.
    """

    sums: dict[Ranks, Counter[str]] = field(default_factory=dict)
    calls: dict[Ranks, set[Hashable]] = field(default_factory=dict)
    times: Counter[Hashable] = field(default_factory=Counter)

    def add(self, ranks: Ranks, name: str, read: Sequence[Tensor]) -> bool:
        """Note the tensors that an operator reads, unless it was noted often enough."""
        call = ranks, name, tuple(one.shape for one in read)
        calls = self.calls.setdefault(ranks, set())
        if call not in calls:
            if self.times[call] == _COMPARED:
                return False
            self.times[call] += 1
            calls.add(call)
        sums = self.sums.setdefault(ranks, Counter())
        sums[name] += code(repr([*map(checksum, read)]).encode())
        return True

    def take(self, ranks: Ranks) -> Counter[str]:
        """The sums that ranks are to have alike, which are noted no longer."""
        self.calls.pop(ranks, None)
        return self.sums.pop(ranks, Counter())


#: The notes of each thread that has a module.
_OF_THREAD = local()
#: Those of backward passes.
_OF_BACKWARD = _Notes()
#: All notes of threads that have not ended; the lock is held while these are added or listed.
_ALL, _LOCK = WeakSet[_Notes]([_OF_BACKWARD]), Lock()


def note_here() -> None:
    """Note what this thread computes from now on."""
    if not hasattr(_OF_THREAD, "notes"):
        _OF_THREAD.notes = _Notes()
        with _LOCK:
            _ALL.add(_OF_THREAD.notes)


def _notes() -> _Notes | None:
    """The notes of what is computed now; None if it is not noted."""
    if getattr(_OF_THREAD, "is_inside", False):
        return None
    is_backward = torch._C._current_graph_task_id() >= 0
    return _OF_BACKWARD if is_backward else getattr(_OF_THREAD, "notes", None)


def note_plain(
    mesh: DeviceMesh,
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Note the plain tensors that a call of an operator only reads, if this rank takes part.

    Returns:
        Whether the call was noted: not where it is part of another one, or was often enough.
    """
    notes = _notes()
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    plain = [leaf for leaf in leaves if type(leaf) in (Tensor, nn.Parameter)]
    if notes is None or not plain or mesh.get_coordinate() is None:
        return False
    written = set(map(id, written_tensors(operator, args, kwargs)))
    read = [
        one
        for one in plain
        if id(one) not in written and one.layout is torch.strided and not one.is_meta
    ]
    ranks = tuple(mesh.mesh.flatten().tolist())
    if not read or len(ranks) == 1:
        return False
    return notes.add(ranks, operator._schema.name.partition("::")[2], read)


@contextmanager
def noted_already() -> Iterator[None]:
    """Count what this thread computes inside as part of a call that was noted."""
    outer = getattr(_OF_THREAD, "is_inside", False)
    _OF_THREAD.is_inside = True
    try:
        yield
    finally:
        _OF_THREAD.is_inside = outer


def noted_names() -> set[str]:
    """The operators that any thread noted since notes of their ranks were taken."""
    with _LOCK:
        every = [*_ALL]
    # other threads go on noting: what they add to is copied before it is gone through
    return {name for notes in every for sums in [*notes.sums.values()] for name in [*sums]}


def taken_notes(meshes: Collection[Ranks]) -> dict[str, int]:
    """The checksums by operator that were noted since they were taken last, of these meshes."""
    note_here()
    taken: Counter[str] = Counter()
    for ranks in meshes:
        for notes in (_OF_THREAD.notes, _OF_BACKWARD):
            taken.update(notes.take(ranks))
    return dict(sorted(taken.items()))
