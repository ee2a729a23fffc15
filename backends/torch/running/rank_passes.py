"""The graphs of one program on one rank, called with inputs and stored values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.errors import BackendError
from partitioner.backends.regions import region_shape, whole_region
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import Roll, explained
from partitioner.backends.torch.agreeing.groups import group_ranks, register_named
from partitioner.backends.torch.graphs.eager import eager
from partitioner.backends.torch.graphs.emit import PassGraph, emit_rank
from partitioner.backends.torch.running.direct import Gate, direct, gated
from partitioner.backends.torch.state.buffers import memory_of, without_views, write_buffers
from partitioner.backends.torch.state.shards import part_of, whole_of
from partitioner.backends.torch.state.whole import Whole
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Placement

c10d = torch.ops._c10d_functional
Values = dict[str, Tensor]


class RankPasses:
    """A program's graphs on this rank; every rank makes one at the same time.

    Args:
        places: Placements of stored values by first name, which must be the program's.

    Raises:
        BackendError: A stored value has another placement, or a graph cannot be made.
    """

    def __init__(
        self,
        whole: Whole,
        rank: int,
        device: torch.device,
        places: Mapping[str, Placement],
        roll: Roll,
    ) -> None:
        whole.check_places(places)
        self.whole = whole
        self.rank = rank
        self.device = device
        self._roll = roll
        register_named(group_ranks(whole.programs))
        self.graphs = emit_rank(whole.programs, rank, whole.graph, device, keeps=True)
        self._modules = {
            which: graph.module.to(device) for which, graph in self.graphs.passes.items()
        }
        passes = {which: eager(module, boxed=True) for which, module in self._modules.items()}
        self._gate = Gate()
        self._gated = gated(passes["forward"], self._gate)
        self._runs: dict[str, Callable[[list[Tensor]], Sequence[Tensor]]] = {
            which: direct(one) for which, one in passes.items()
        }
        self._outputs = {o.whole: o.value for o in self.graphs.outputs}
        names = dict.fromkeys(whole.signature.results)
        self._shown = tuple(value for value in names if value)
        # stored values and local names: of next contents, and of gradients
        self._next = self._local_outputs({e.names[0]: e.written for e in whole.stored})
        self._gradients = self._local_outputs({e.names[0]: e.gradient for e in whole.stored})
        tangent = whole.signature.tangent
        inputs = self.graphs.inputs.items()
        self._tangents = [local for local, part in inputs if part.whole == tangent]

    def _local_outputs(self, values: Mapping[str, str]) -> list[tuple[str, str]]:
        """Names of stored values with the local names of values of the graph, if it has them."""
        outputs = self._outputs
        return [(name, outputs[value]) for name, value in values.items() if value in outputs]

    @property
    def differentiates(self) -> bool:
        """Tell whether there is a backward pass."""
        return "backward" in self._runs

    @property
    def communicates_going_back(self) -> bool:
        """Tell whether ranks may send something in `backward`."""
        return True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs with `torch.compile`, with its arguments."""
        for which, module in self._modules.items():
            self._runs[which] = _boxed(torch.compile(module, *args, **kwargs))

    # Inputs ----------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """Number of seeds that a step takes."""
        return 1

    def start(
        self, inputs: Mapping[str, Any], seed: Mapping[str, Tensor], *, local: bool
    ) -> Values:
        """Inputs by local name, from whole ones or, if `local`, from the rank's own parts."""
        return self.local(inputs) | self.parts(seed) if local else self.parts({**inputs, **seed})

    def parts(self, inputs: Mapping[str, Any]) -> Values:
        """Take this rank's parts of whole inputs, by local name."""
        return {
            name: part_of(inputs[part.whole], part.region).to(self.device)
            for name, part in self.graphs.inputs.items()
            if part.whole in inputs
        }

    def local(self, inputs: Mapping[str, Any]) -> Values:
        """Inputs by local name, where the rank is called with its own parts of the batch."""
        signature = self.whole.signature
        values = {}
        for name, part in self.graphs.inputs.items():
            if part.whole in (signature.tangent, signature.seed):
                continue
            tensor, wanted = inputs[part.whole], self.graphs.types[name]
            if not isinstance(tensor, Tensor):
                raise BackendError(f"rank {self.rank}: input {part.whole!r} is {tensor!r}")
            if tuple(tensor.shape) != wanted.shape or tensor.dtype != torch_dtype(wanted.dtype):
                raise BackendError(
                    f"rank {self.rank}: its part of input {part.whole!r} is "
                    f"{dtype_word(tensor.dtype)}{list(tensor.shape)}, "
                    f"the plan gives it {wanted}"
                )
            values[name] = tensor.to(self.device)
        return values

    def joined(self, inputs: Mapping[str, Any], agreement: Agreement) -> dict[str, Tensor]:
        """Whole inputs from every rank's own parts of them; all ranks must call it."""
        self.local(inputs)
        return joined_inputs(self.whole, inputs, agreement)

    # Passes ----------------------------------------------------------------------------------

    def forward(
        self,
        inputs: Values,
        shards: Mapping[str, Tensor],
        agreed: Callable[[], None],
        *,
        backward: bool = False,
    ) -> tuple[tuple[Tensor, ...], Values]:
        """Run the forward graph; written buffers get their next contents.

        Args:
            inputs: By local name.
            shards: This rank's shards of stored values by first name.
            agreed: Returns once all ranks do the same; called once, before anything is sent or
                written.
            backward: Whether the backward pass follows.

        Returns:
            The module's results, and the values that the backward graph takes.
        """
        del backward  # all that it reads is kept in any case
        values = {**inputs, **self.whole.local_shards(shards)}
        graph = self.graphs.forward
        if self._runs["forward"] is self._gated:
            self._gate.wait = agreed
        else:
            agreed()
        try:
            arguments = [values[name] for name in graph.arguments]
            values.update(self._run("forward", graph, arguments))
        except BaseException as error:
            self._gate.leave(error)
            raise
        later = self.graphs.backward.arguments if self.graphs.backward is not None else ()
        shown = [self._outputs[value] for value in self._shown]
        next_contents = {
            name: values[local] for name, local in self._next if local in values and name in shards
        }
        if next_contents:
            written = {memory_of(shards[name]) for name in next_contents}
            for name in {*later, *shown} & values.keys():
                values[name] = without_views(values[name], written)
            write_buffers(shards, next_contents)
        results = tuple(values[name] for name in shown)
        return results, {name: values[name] for name in later if name in values}

    def backward(self, values: Values, tangent: Tensor) -> Mapping[str, Tensor]:
        """Run the backward graph.

        Args:
            values: Values that the forward graph kept; taken out, so that each is freed after its
                last reader.

        Returns:
            This rank's shards of gradients by first name.
        """
        graph = self.graphs.backward
        assert graph is not None
        values.update(dict.fromkeys(self._tangents, tangent))
        results = self._run("backward", graph, [values.pop(name) for name in graph.arguments])
        return {name: results[local] for name, local in self._gradients if local in results}

    def structured(self, results: Sequence[Tensor]) -> Any:
        """The module's returned value."""
        return self.whole.signature.unflatten(dict(zip(self._shown, results, strict=True)))

    def _run(self, which: str, graph: PassGraph, arguments: list[Tensor]) -> Values:
        """Results by name; the list of arguments may be emptied."""
        try:
            with torch.no_grad(), without_autocast(self.device.type):
                results = self._runs[which](arguments)
        except BackendError:
            raise
        except RuntimeError as error:
            failure = explained(error, self._runs[which], self.rank, self._roll, which)
            if failure is None:
                raise
            raise failure from error
        return dict(zip(graph.results, results, strict=True))


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A region without `torch.autocast`, as graphs have their own casts."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _boxed(compiled: Callable[..., Sequence[Tensor]]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A compiled pass as a function of a list of arguments."""
    return lambda arguments: compiled(*arguments)


def joined_inputs(
    whole: Whole, inputs: Mapping[str, Any], agreement: Agreement
) -> dict[str, Tensor]:
    """Whole inputs of a program from every rank's own parts of them; all ranks must call it."""
    joined = {}
    for name, regions in sorted(local_regions(whole).items()):
        shape, tensor = whole.programs.inputs[name].shape, inputs[name]
        places = {rank: region or whole_region(shape) for rank, region in regions.items()}
        ranks = range(agreement.ranks)
        shapes = [region_shape(places[r]) if r in places else (0,) for r in ranks]
        part = tensor if agreement.rank in places else tensor.new_empty(0)
        parts = agreement.parts(part, shapes)
        joined[name] = whole_of(((places[r], parts[r]) for r in places), shape)
    return joined


def local_regions(whole: Whole) -> Mapping[str, Mapping[int, Region | None]]:
    """Region of each input that each rank is called with under "local" inputs; None for all."""
    regions: dict[str, dict[int, Region | None]] = {}
    apart = {whole.signature.tangent, whole.signature.seed}
    for program in whole.programs.ranks:
        for part in program.inputs.values():
            if part.whole in apart:
                continue
            by_rank = regions.setdefault(part.whole, {})
            if by_rank.setdefault(program.rank, part.region) != part.region:
                raise BackendError(
                    f"inputs='local': rank {program.rank} reads input {part.whole!r} in two "
                    "different parts; use inputs='global', or pin the input to one layout"
                )
    return regions
