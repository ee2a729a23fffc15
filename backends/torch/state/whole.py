"""A program with the programs of all ranks, and what its model stores, as every rank needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from partitioner.backends.torch.graphs.emit import rest_argument
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH, MicroBatches
from partitioner.backends.torch.graphs.phases import Rest
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.state.own_state import OwnState
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Programs


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the whole model."""

    value: str  #: Name in the graph; "" if nothing computes with it.
    names: tuple[str, ...]  #: Its names in the module, the first one first.
    trained: bool  #: Whether it has a gradient.
    frozen: bool  #: Whether `requires_grad` was off when the module was compiled.
    parameter: bool  #: Whether it is a parameter; a buffer otherwise.
    shape: tuple[int, ...]  #: Sizes of the whole value.
    dtype: torch.dtype
    gradient: str = ""  #: Graph output of its gradient; "" if it has none.
    written: str = ""  #: Graph output of its next contents; "" if it is not written.
    #: Those of its names that are not in the module's `state_dict`.
    hidden: frozenset[str] = frozenset()
    #: Name in the graph of the value as it lies between steps; "" if that is `value`.
    rest: str = ""


@dataclass(frozen=True)
class Submodule:
    """Describe what a rank's module shows of a submodule of the whole model."""

    kind: type[nn.Module] = nn.Module  #: Its class.
    #: Names of its attributes that are constants of the graph.
    constants: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: Names of its parameters and buffers that are None.
    training: bool = True  #: Whether it was in training mode.
    first: str = ""  #: The first path of a submodule that has several; "" at the first.
    #: Plain values of attributes, by name.
    values: Mapping[str, object] = field(default_factory=dict)
    #: What it saves and loads beside parameters and buffers.
    state: OwnState = field(default_factory=OwnState)


@dataclass(frozen=True)
class Whole:
    """A program with the programs of all ranks."""

    programs: Programs
    graph: Graph
    signature: Signature
    stored: tuple[Stored, ...]
    training: bool  #: Whether it has a backward pass.
    #: Mesh of all ranks, each of which holds the stored values that nothing computes with.
    spare: DeviceMesh
    #: Those of the model by path, in its order; the model itself has the path "".
    submodules: Mapping[str, Submodule] = field(default_factory=dict)
    micro: MicroBatches = WHOLE_BATCH  #: The micro-batches of a call.
    rest: Rest | None = None  #: The last of them, if it is smaller.

    @property
    def places(self) -> Mapping[str, Placement]:
        """Placement of each stored value that the program computes with, by its first name."""
        homes = self.programs.homes
        return {e.names[0]: homes[e.value].placement for e in self.stored if e.value in homes}

    @cached_property
    def written(self) -> tuple[str, ...]:
        """First names of the stored values that the program writes to."""
        return tuple(entry.names[0] for entry in self.stored if entry.written)

    def local_shards(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A rank's shards, which have first names, and values at rest, by local name."""
        return {local: shards[name] for local, name in self._local_names if name in shards}

    @cached_property
    def _local_names(self) -> list[tuple[str, str]]:
        """Local name of each stored value with its first name, and of each value at rest."""
        homes = self.programs.homes
        used = [(homes[e.value].name, e.names[0]) for e in self.stored if e.value in homes]
        rests = (entry.rest for entry in self.stored if entry.rest in homes)
        return used + [(rest_argument(homes[rest].name), rest) for rest in rests]
