"""Fills a rank's module with submodules, and with its parts of parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.groups import torch_meshes
from partitioner.backends.torch.running.held_state import StatePlaces, distributed, part_and_rest
from partitioner.backends.torch.running.submodules import ELSEWHERE, RankSubmodule, submodule_at
from partitioner.backends.torch.state.initialise import Initialiser
from partitioner.backends.torch.state.whole import Whole
from partitioner.ir.mesh import DeviceMesh

#: Returns the whole contents of a parameter or buffer by name.
Source = Callable[[str], Tensor]


def torch_meshes_of(places: StatePlaces, device: torch.device) -> Mapping[DeviceMesh, Any]:
    """Make PyTorch's meshes of the parameters and buffers that are DTensors."""
    listed = places.listed_elsewhere
    cut = [entry.names[0] for entry in places.stored if places.are_parts[entry.parameter]]
    names = cut if listed is None else [*cut, listed.names[0]]
    return torch_meshes([places.by_name[name].mesh for name in names], device)


def add_submodules(module: nn.Module, whole: Whole) -> None:
    """Add all submodules, in the model's order: PyTorch lists them so."""
    for path, submodule in whole.submodules.items():
        if not path:
            continue
        *owner, leaf = path.split(".")
        if submodule.first:
            part = submodule_at(module, submodule.first.split("."))
        else:
            part = RankSubmodule.of(submodule)
            submodule.state.set_into(part, path)
        submodule_at(module, owner).add_module(leaf, part)


@dataclass(frozen=True)
class Filled:
    """What a rank's module was filled with."""

    tensors: dict[str, Tensor]  #: The rank's parameters and buffers by first name.
    at_rest: dict[str, Tensor]  #: What it keeps between steps besides them, by value of the graph.
    #: Checksums of whole parameters and buffers by first name; 0 for those that would have to be
    #: initialised for that alone.
    words: dict[str, int]


def fill(
    module: nn.Module,
    whole: Whole,
    places: StatePlaces,
    source: Source,
    agreement: Agreement,
    device: torch.device,
    meshes: Mapping[DeviceMesh, Any],
) -> Filled:
    """Register this rank's parts of parameters and buffers, under their names."""
    filled = Filled({}, {}, {})
    for entry in whole.stored:
        first = entry.names[0]
        if not places.holds(agreement.rank, entry):
            is_made = isinstance(source, Initialiser)
            filled.words[first] = 0 if is_made else agreement.checksum(source(first))
            continue
        value, place = source(first), places.by_name[first]
        filled.words[first] = agreement.checksum(value)
        home = whole.programs.homes.get(entry.rest)
        rests = place if home is None else home.placement
        part, at_rest = part_and_rest(value, place, rests, agreement.rank, device)
        if at_rest is not None:
            filled.at_rest[entry.rest] = at_rest
        if places.are_parts[entry.parameter]:
            asked = None if places.all_hold_all else agreement
            part = distributed(part, place, meshes, entry.shape, asked)
        tensor = nn.Parameter(part, requires_grad=entry.trained) if entry.parameter else part
        filled.tensors[first] = tensor
        for name in entry.names:
            *path, leaf = name.split(".")
            owner = submodule_at(module, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in entry.hidden)
    return filled


def list_another(
    module: nn.Module,
    places: StatePlaces,
    agreement: Agreement,
    device: torch.device,
    meshes: Mapping[DeviceMesh, Any],
) -> dict[str, nn.Parameter]:
    """List a parameter of other ranks if this one trains none; returns it by its first name.

    It has the whole size and no elements here, and gets no gradient, so that optimizers keep no
    state of it: what PyTorch keeps whole, such as Adam's number of steps, would be saved in place
    of its holder's.
    """
    entry = places.listed_elsewhere
    if entry is None or places.trained[agreement.rank]:
        return {}
    nothing = torch.empty(0, dtype=entry.dtype, device=device)
    place = places.by_name[entry.names[0]]
    whole = distributed(nothing, place, meshes, entry.shape, agreement)
    tensor = nn.Parameter(whole, requires_grad=entry.trained)
    *path, leaf = entry.names[0].split(".")
    submodule_at(module, path).register_parameter(leaf, tensor)
    return {entry.names[0]: tensor}


def mark_parts_elsewhere(module: nn.Module, whole: Whole, tensors: Container[str]) -> None:
    """Mark the submodules of whose own tensors that are computed with this rank holds none.

    They are of no kind here: code that goes by kinds leaves them to the ranks that hold them.

    Args:
        module: The rank's module.
        whole: The program.
        tensors: First names of what the rank holds.
    """
    is_held: dict[str, bool] = {}  # by path
    used = whole.places
    for entry in whole.stored:
        if entry.names[0] in used:
            for path in {name.rpartition(".")[0] for name in entry.names} - {""}:
                is_held[path] = is_held.get(path, False) or entry.names[0] in tensors
    for path, is_here in is_held.items():
        vars(submodule_at(module, path.split(".")))[ELSEWHERE] = not is_here


def constant_words(whole: Whole, source: Source, agreement: Agreement) -> dict[str, int]:
    """Checksums of the graph's constants; 0 for those that would be initialised for others."""
    constants = whole.graph.constants
    read = {part.whole for part in whole.programs.ranks[agreement.rank].constants.values()}
    known = read if isinstance(source, Initialiser) else constants.keys()
    return {
        name: agreement.checksum(from_numpy(constant.load(), constant.type.dtype))
        if name in known and agreement.ranks > 1
        else 0
        for name, constant in sorted(constants.items())
    }
