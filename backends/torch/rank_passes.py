"""The graphs of one program on one rank: called with whole or own inputs and stored values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partitioner.backends.errors import BackendError
from partitioner.backends.regions import region_shape, whole_region
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.backends.torch.agreement import Agreement
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.emit import PassGraph, emit_rank
from partitioner.backends.torch.faults import explained
from partitioner.backends.torch.groups import register_groups
from partitioner.backends.torch.roll import Roll
from partitioner.backends.torch.shards import part_of, whole_of
from partitioner.backends.torch.signature import Signature
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Programs

c10d = torch.ops._c10d_functional
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the whole model.

    Attributes:
        value: Of the graph; "" if nothing computes with it.
        names: All names that it has in the module, the first one first.
        trained: Whether it has a gradient.
        frozen: Whether it wanted none when the module was compiled.
        parameter: Whether it is a parameter; a buffer otherwise.
        shape: Sizes of all of it.
        dtype: Of its elements.
        gradient: Graph output of its gradient; "" if it has none.
        written: Graph output of its next contents; "" if it is not written.
        hidden: Those of its names that are not in the module's `state_dict`.
    """

    value: str
    names: tuple[str, ...]
    trained: bool
    frozen: bool
    parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: str = ""
    written: str = ""
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Whole:
    """What is known of a program on every rank.

    Attributes:
        programs: Of all ranks.
        graph: Of the whole model.
        signature: How the module is called.
        stored: Parameters and buffers.
        training: Whether it has a backward pass.
        spare: Of all ranks: where stored values lie, whole, that nothing computes with.
    """

    programs: Programs
    graph: Graph
    signature: Signature
    stored: tuple[Stored, ...]
    training: bool
    spare: DeviceMesh

    @property
    def places(self) -> Mapping[str, Placement]:
        """Where each stored value that is computed with lies, by its first name."""
        homes = self.programs.homes
        return {e.names[0]: homes[e.value].placement for e in self.stored if e.value in homes}


class RankPasses:
    """A program's graphs on this rank; every rank makes one at the same time.

    Args:
        whole: The program.
        rank: This rank.
        device: Where it computes.
        places: Where stored values lie, by first name: the program must have them there.
        roll: The processes of all ranks.
    """

    def __init__(
        self,
        whole: Whole,
        rank: int,
        device: torch.device,
        places: Mapping[str, Placement],
        roll: Roll,
    ) -> None:
        for name, at in whole.places.items():
            if places.get(name) != at:
                raise BackendError(f"{name} is stored as {places.get(name)}, not as {at}")
        self.whole = whole
        self.rank = rank
        self.device = device
        self._roll = roll
        register_groups(whole.programs)
        self.graphs = emit_rank(whole.programs, rank, whole.graph, device)
        self._modules = {
            key: one.module.to(device)
            for key, one in (("forward", self.graphs.forward), ("backward", self.graphs.backward))
            if one is not None
        }
        self._runs: dict[str, Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]] = {
            key: eager(module, boxed=True) for key, module in self._modules.items()
        }
        self._outputs = {o.whole: o.value for o in self.graphs.outputs}
        names = dict.fromkeys(whole.signature.results)
        self._shown = tuple(value for value in names if value)

    @property
    def differentiates(self) -> bool:
        """Whether there is a backward pass."""
        return "backward" in self._runs

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs with `torch.compile`, with its arguments."""
        for key, module in self._modules.items():
            self._runs[key] = _unboxed(torch.compile(module, *args, **kwargs))

    # Inputs ----------------------------------------------------------------------------------

    def parts(self, given: Mapping[str, Any]) -> Values:
        """This rank's parts of those inputs that are given whole."""
        return {
            name: part_of(given[part.whole], part.region).to(self.device)
            for name, part in self.graphs.inputs.items()
            if part.whole in given
        }

    def own(self, given: Mapping[str, Any]) -> Values:
        """The inputs of a rank that is called with its own part of them.

        Raises:
            BackendError: A part is not as the plan has it.
        """
        signature = self.whole.signature
        values = {}
        for name, part in self.graphs.inputs.items():
            if part.whole in (signature.tangent, signature.seed):
                continue
            tensor, kind = given[part.whole], self.graphs.types[name]
            if not isinstance(tensor, torch.Tensor):
                raise BackendError(f"rank {self.rank}: input {part.whole!r} is {tensor!r}")
            if tuple(tensor.shape) != kind.shape or tensor.dtype != torch_dtype(kind.dtype):
                raise BackendError(
                    f"rank {self.rank}: its part of input {part.whole!r} is "
                    f"{dtype_word(tensor.dtype)}{list(tensor.shape)}, "
                    f"the plan gives it {kind}"
                )
            values[name] = tensor.to(self.device)
        return values

    def joined(self, given: Mapping[str, Any], agreement: Agreement) -> dict[str, torch.Tensor]:
        """Whole inputs from every rank's own parts of them; all ranks must call it."""
        whole = self.whole
        regions = own_parts(whole)
        self.own(given)
        found = {}
        for name, held in sorted(regions.items()):
            kind = whole.programs.inputs[name]
            full = whole_region(kind.shape)
            places = {rank: region or full for rank, region in held.items()}
            ranks = range(agreement.ranks)
            shapes = [region_shape(places[r]) if r in places else (0,) for r in ranks]
            own = given[name] if self.rank in places else given[name].new_empty(0)
            parts = agreement.whole(own, shapes)
            found[name] = whole_of(((places[r], parts[r]) for r in places), kind.shape)
        return found

    # Passes ----------------------------------------------------------------------------------

    def forward(
        self, values: Values, held: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], Values]:
        """Run the forward graph; written buffers take their next contents.

        Args:
            values: Inputs.
            held: This rank's parts of stored values by first name.

        Returns:
            Results that are shown, and the values that the backward graph takes.
        """
        homes = self.whole.programs.homes
        values = dict(values)
        for entry in self.whole.stored:
            if entry.value in homes and entry.names[0] in held:
                values[homes[entry.value].name] = held[entry.names[0]]
        one = self.graphs.forward
        values.update(self._run("forward", one, [values[name] for name in one.arguments]))
        for entry in self.whole.stored:
            value = self._outputs.get(entry.written)
            if value in values and entry.names[0] in held:
                held[entry.names[0]].copy_(values[value])
        results = tuple(values[self._outputs[value]] for value in self._shown)
        later = self.graphs.backward.arguments if self.graphs.backward is not None else ()
        return results, {name: values[name] for name in later if name in values}

    def backward(self, values: Values, tangent: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Run the backward graph.

        Args:
            values: What the forward graph kept; taken out, so that each is freed after its last
                reader.
            tangent: The gradient of the loss.

        Returns:
            This rank's parts of gradients by first name.
        """
        one = self.graphs.backward
        assert one is not None
        for local, part in self.graphs.inputs.items():
            if part.whole == self.whole.signature.tangent:
                values[local] = tangent
        made = self._run("backward", one, [values.pop(name) for name in one.arguments])
        return {
            entry.names[0]: made[self._outputs[entry.gradient]]
            for entry in self.whole.stored
            if self._outputs.get(entry.gradient) in made
        }

    def structured(self, results: Sequence[torch.Tensor]) -> Any:
        """What the module returns."""
        return self.whole.signature.unflatten(dict(zip(self._shown, results, strict=True)))

    def _run(self, key: str, one: PassGraph, given: list[torch.Tensor]) -> Values:
        """Results by name; the list is not used again."""
        try:
            # the graphs have their casts
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                results = self._runs[key](given)
        except RuntimeError as error:
            found = explained(error, self._runs[key], self.rank, self._roll, key)
            if found is None:
                raise
            raise found from error
        return dict(zip(one.results, results, strict=True))


def _unboxed(
    compiled: Callable[..., Sequence[torch.Tensor]],
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A compiled pass as one that is called with a list."""
    return lambda given: compiled(*given)


def own_parts(whole: Whole) -> Mapping[str, Mapping[int, Region | None]]:
    """Part of each input by rank, where a rank is called with its own; None for all of it.

    Raises:
        BackendError: A rank reads an input in two different parts.
    """
    found: dict[str, dict[int, Region | None]] = {}
    apart = {whole.signature.tangent, whole.signature.seed}
    for program in whole.programs.ranks:
        for part in program.inputs.values():
            if part.whole in apart:
                continue
            known = found.setdefault(part.whole, {})
            if known.setdefault(program.rank, part.region) != part.region:
                raise BackendError(
                    f"inputs='local': rank {program.rank} reads input {part.whole!r} in two "
                    "different parts; use inputs='global', or pin the input to one layout"
                )
    return found
