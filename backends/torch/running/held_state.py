"""Parameters and buffers of a model: where they lie, a rank's parts of them, and their state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import telling
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.dtensors.uneven_shard import UnevenSpec, has_uneven, shard_of
from partitioner.backends.torch.state.shards import (
    gathered_value,
    part_of,
    region_on,
)
from partitioner.backends.torch.state.whole import KEY, OwnState, Stored, Whole
from partitioner.ir.layout import Placement, Sharding


@dataclass(frozen=True)
class StatePlaces:
    """Where the parameters and buffers of a model lie; alike on all ranks."""

    stored: Sequence[Stored]  #: The parameters and buffers of the whole model.
    by_name: Mapping[str, Placement]  #: Placements by first name.
    #: Whether parameters (True) and buffers (False) are `RankTensor`: the plan cuts any of them, or
    #: a rank does not train all.
    are_parts: Mapping[bool, bool]
    #: First names of the trained parameters that each rank holds.
    trained: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, whole: Whole, ranks: int) -> StatePlaces:
        """Read them from a program; what it does not compute with lies whole on its spare mesh."""
        used = whole.places
        places = {
            entry.names[0]: used.get(entry.names[0])
            or Placement(whole.spare, Sharding.replicate(entry.shape))
            for entry in whole.stored
        }
        holders = {name: place.mesh.devices for name, place in places.items()}
        names = [entry.names[0] for entry in whole.stored if entry.trained]
        are_parts = {
            is_parameter: any(
                not places[entry.names[0]].sharding.is_replicated
                or (entry.trained and len(holders[entry.names[0]]) < ranks)
                for entry in whole.stored
                if entry.parameter is is_parameter
            )
            for is_parameter in (False, True)
        }
        return cls(
            whole.stored,
            places,
            are_parts,
            {rank: tuple(name for name in names if rank in holders[name]) for rank in range(ranks)},
        )

    def holds(self, rank: int, entry: Stored) -> bool:
        """Test whether a rank holds a part of a value."""
        return rank in self.by_name[entry.names[0]].mesh.devices

    @cached_property
    def all_hold_all(self) -> bool:
        """Tell whether every rank holds a part of every trained parameter."""
        trained = [entry for entry in self.stored if entry.trained]
        return all(self.holds(rank, entry) for entry in trained for rank in self.trained)

    @property
    def listed_elsewhere(self) -> Stored | None:
        """The parameter that ranks list which train none; None if each has its own."""
        trained = (entry for entry in self.stored if entry.trained)
        return None if all(self.trained.values()) else next(trained, None)


@dataclass(frozen=True)
class HeldState:
    """Parts of parameters and buffers that a rank holds."""

    rank: int
    places: StatePlaces
    tensors: Mapping[str, Tensor]  #: The rank's parameters and buffers by first name.
    elsewhere: Mapping[str, nn.Parameter]  #: Parameters of other ranks that it lists.
    #: Its parts of `tensors` by first name, and values at rest by value, detached. Writing to these
    #: is no change of a parameter.
    shards: dict[str, Tensor]

    @cached_property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters that the rank holds, by first name."""
        return {name: self.tensors[name] for name in self.places.trained[self.rank]}

    def shards_now(self) -> Mapping[str, Tensor]:
        """Return the shards as they lie: the same tensors until what they are of lies elsewhere."""
        shards = self.shards
        for name, tensor in self.tensors.items():
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not part.is_set_to(shards[name]):
                shards[name] = part.detach()
        return shards

    def writes_to(self, shards: Mapping[str, Tensor]) -> list[tuple[int, int] | None]:
        """PyTorch's counts of writes to tensors and `shards`; None of those elsewhere by now."""
        counts: list[tuple[int, int] | None] = []
        for name, shard in shards.items():
            tensor = self.tensors[name]
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            is_there = part.is_set_to(shard)
            counts.append((tensor._version, shard._version) if is_there else None)
        return counts


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def versions(tensors: Collection[Tensor]) -> list[int]:
    """PyTorch's counts of writes to tensors; it counts none to those of `inference_mode`."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def distributed(
    part: Tensor,
    place: Placement,
    meshes: Mapping[Any, Any],
    shape: Sequence[int],
    agreement: Agreement | None,
) -> RankTensor:
    """Make a distributed tensor of a value of this `shape` from this rank's part."""
    outline = torch.empty(shape, device="meta")
    meta = TensorMeta(outline.shape, outline.stride(), part.dtype)
    placements: list[Shard | Replicate] = []
    for axis in place.mesh.names or ("one",):
        cuts = place.sharding.dims
        of_axis = [shard_of(dim, cut) for dim, cut in enumerate(cuts) if axis in cut.axes]
        placements.append(of_axis[0] if of_axis else Replicate())
    made = UnevenSpec if has_uneven(placements) else DTensorSpec
    spec = made(meshes[place.mesh], tuple(placements), meta)
    return RankTensor.of(part, spec, agreement)


def own_states(whole: Whole) -> Mapping[str, OwnState]:
    """List what submodules save beside parameters and buffers, by each of their paths."""
    of = whole.submodules
    return {path: of[part.first].state if part.first else part.state for path, part in of.items()}


def full_state(
    whole: Whole, held: HeldState, agreement: Agreement, device: torch.device
) -> dict[str, Any]:
    """Gather the whole model's state on every rank, under its names; all ranks must call it."""
    state: dict[str, Any] = {}
    for entry in whole.stored:
        first = entry.names[0]
        shard, holders = held.tensors.get(first), held.places.by_name[first].mesh.devices
        with telling(f"gathering {first}", held.rank, agreement.roll):
            value = gathered_value(shard, holders, entry.shape, entry.dtype, device)
        state |= {name: value for name in entry.names if name not in entry.hidden}
    for path, own in own_states(whole).items():
        if own.extra:
            state[f"{path}.{KEY}".lstrip(".")] = own.extra[0]
    return state


def take_parts(held: HeldState, state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Put this rank's shards in the place of whole tensors in a state; returns these by first name.

    DTensors that lie on other ranks than the module's become whole: all ranks must load it.
    """
    wholes: dict[str, Tensor] = {}
    for entry in held.places.stored:
        first, names = entry.names[0], [prefix + name for name in entry.names]
        given = {name: state.get(name) for name in names}
        for value in given.values():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                wholes[first] = value
        tensor = held.tensors.get(first)
        holders = held.places.by_name[first].mesh.devices
        is_whole = not held.places.are_parts[entry.parameter]
        for name, value in given.items():
            if isinstance(value, DTensor) and (
                is_whole or value.device_mesh.size() != len(holders)
            ):
                state[name] = value.full_tensor()
        for name in names if tensor is None else ():
            state.pop(name, None)  # other ranks hold it
        if not isinstance(tensor, RankTensor):
            continue
        region = region_on(held.places.by_name[first], held.rank)
        for name in names:
            value = state.get(name)
            if value is None or isinstance(value, DTensor) or value.shape != tensor.shape:
                continue  # PyTorch's own message names both sizes
            part = part_of(value.detach(), region)
            state[name] = tensor.like(part.to(tensor.device))
    state |= {prefix + name: tensor for name, tensor in held.elsewhere.items()}
    return wholes
