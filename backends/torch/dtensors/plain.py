"""Plain tensors that are computed with those of ranks' modules, which all ranks must have alike.

A rank that draws one for itself (`p.mul_(torch.rand(p.shape) > 0.5)`) would compute with parts of
another tensor than the others. So checksums are noted of what is only read, the first times that an
operator is called so, and the ranks compare them at the next call of a module. No rank waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from partitioner.backends.torch.dtensors.schemas import written_tensors
from partitioner.backends.torch.sums import checksum, code

#: Calls of an operator with tensors of the same sizes of which checksums are noted.
_COMPARED = 3
#: Ranks of a mesh.
Ranks = tuple[int, ...]
_CALLS: Counter[tuple[Ranks, str, tuple[torch.Size, ...]]] = Counter()
#: By the ranks that are to have them alike, and the name of the operator: sums of checksums.
_NOTED: dict[Ranks, Counter[str]] = {}


def note_plain(
    mesh: DeviceMesh,
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Note the plain tensors that a call of an operator only reads, if this rank takes part."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    plain = [leaf for leaf in leaves if type(leaf) in (Tensor, nn.Parameter)]
    if not plain or mesh.get_coordinate() is None:
        return
    written = set(map(id, written_tensors(operator, args, kwargs)))
    read = [one for one in plain if id(one) not in written and _has_contents(one)]
    ranks = tuple(mesh.mesh.flatten().tolist())
    name = operator._schema.name.partition("::")[2]
    call = ranks, name, tuple(one.shape for one in read)
    if not read or len(ranks) == 1 or _CALLS[call] == _COMPARED:
        return
    _CALLS[call] += 1
    _NOTED.setdefault(ranks, Counter())[name] += code(repr([*map(checksum, read)]).encode())


def _has_contents(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def taken_notes(meshes: Collection[Ranks]) -> dict[str, int]:
    """The checksums by operator that were noted since they were taken last, of these meshes."""
    taken: Counter[str] = Counter()
    for ranks in meshes:
        taken.update(_NOTED.pop(ranks, {}))
    return dict(sorted(taken.items()))
