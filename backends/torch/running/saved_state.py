"""The state of a rank's module as it is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import telling
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.running.held_state import HeldState
from partitioner.backends.torch.state.own_state import KEY, OwnState
from partitioner.backends.torch.state.shards import (
    gathered_value,
    part_of,
    region_on,
)
from partitioner.backends.torch.state.whole import Whole


def own_states(whole: Whole) -> Mapping[str, OwnState]:
    """List what submodules save beside parameters and buffers, by each of their paths."""
    of = whole.submodules
    return {path: of[part.first].state if part.first else part.state for path, part in of.items()}


def full_state(
    whole: Whole, held: HeldState, agreement: Agreement, device: torch.device
) -> dict[str, Any]:
    """Gather the whole model's state on every rank, under its names; all ranks must call it.

    Raises:
        CommunicationError: A rank is gone, or does not call it in time.
    """
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
    """Put this rank's shards in the place of whole tensors in a state that is loaded.

    DTensors in the state become whole where the module has no shards: all ranks must load it.

    Returns:
        The whole tensors by first name.
    """
    wholes: dict[str, Tensor] = {}
    for entry in held.places.stored:
        first, names = entry.names[0], [prefix + name for name in entry.names]
        given = {name: state.get(name) for name in names}
        for value in given.values():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                wholes[first] = value
        tensor = held.tensors.get(first)
        if not held.places.are_parts[entry.parameter]:
            state |= {n: x.full_tensor() for n, x in given.items() if isinstance(x, DTensor)}
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
