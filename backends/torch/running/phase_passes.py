"""A rank's part of calls that run in micro-batches, over torch.distributed.

The rank runs its phases in the order of the schedule (see `phase_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import Roll, explained
from partitioner.backends.torch.agreeing.groups import group_ranks, register_links, register_named
from partitioner.backends.torch.graphs.phases import RankPhases, emit_all_phases, step_runs
from partitioner.backends.torch.running.direct import direct
from partitioner.backends.torch.running.phase_steps import Posts, links_of, run_phases
from partitioner.backends.torch.running.rank_passes import (
    Values,
    joined_inputs,
    without_autocast,
)
from partitioner.backends.torch.running.step_values import PhaseValues, StepValues
from partitioner.backends.torch.state.buffers import apart
from partitioner.backends.torch.state.shards import part_of
from partitioner.backends.torch.state.whole import Whole
from partitioner.ir.layout import Placement

#: Name, among a step's gradients, of the gradient of the loss that they are for.
_SCALE = ""
#: Runs a phase on its arguments, which it may take out of their list.
Run = Callable[[list[Tensor | None]], Sequence[Tensor]]


class PhasePasses:
    """A program's phases on this rank; every rank makes one at the same time.

    It has the interface of `RankPasses`. The forward pass runs the backward passes of the
    micro-batches too, before the gradient of the loss is known: for one of one, or, in float16, for
    the one that a `GradScaler` had last; `backward` scales the gradients.

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
        assert whole.programs.order is not None
        assert whole.micro is not None
        self.whole = whole
        self.rank = rank
        self.device = device
        self._roll = roll
        self._order, self._micro = whole.programs.order, whole.micro
        for programs in (whole.programs, *([] if whole.rest is None else [whole.rest.programs])):
            register_named(group_ranks(programs))
            register_links(links_of(programs))
        count = self._micro.count
        self._all = emit_all_phases(whole.programs, rank, whole.graph, device, whole.rest, count)
        self.graphs = self._all[0]
        self._runs: dict[int, Run] = _runs(self.graphs, device)
        self._last_runs = self._runs
        if whole.rest is not None:
            self._last_runs = _runs(self._all[-1], device)
        self._adds = True  # whether passes add to sums themselves
        self._is_half = any(type_.dtype == "float16" for type_ in whole.graph.types.values())
        self._scale = 1.0  # the gradient of the loss that steps run for, a power of two
        self._outputs = {output.whole: output.value for output in self.graphs.outputs}
        self._shown = tuple(dict.fromkeys(filter(None, whole.signature.results)))
        homes = whole.programs.homes
        self._written = {
            self._outputs[entry.written]: homes[entry.value].name
            for entry in whole.stored
            if entry.written in self._outputs
        }

    @property
    def differentiates(self) -> bool:
        """Tell whether there is a backward pass."""
        return self.whole.training

    @property
    def communicates_going_back(self) -> bool:
        """Deny what `RankPasses` allows: here `forward` has run the backward passes."""
        return False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs with `torch.compile`, with its arguments."""

        def compiled(phases: RankPhases) -> dict[int, Run]:
            modules = {phase: graph.graph.module for phase, graph in phases.graphs.items()}
            return {
                phase: partial(_unboxed, torch.compile(module, *args, **kwargs))
                for phase, module in modules.items()
            }

        self._adds = False
        self._runs = self._last_runs = compiled(self.graphs)
        if self.whole.rest is not None:
            self._last_runs = compiled(self._all[-1])

    # Inputs ----------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """Number of seeds that a step takes: one a micro-batch."""
        return self._micro.count

    def start(
        self, inputs: Mapping[str, Any], seed: Mapping[str, Tensor], *, local: bool
    ) -> list[Values]:
        """Inputs of each micro-batch by local name; see `RankPasses.start`."""
        started = self.local(inputs) if local else self._parts(self._micro.parts(inputs))
        seeds = [{n: one + m for n, one in seed.items()} for m in range(self._micro.count)]
        return [a | b for a, b in zip(started, self._parts(seeds), strict=True)]

    def _parts(self, micro_batches: Iterable[Mapping[str, Any]]) -> list[Values]:
        """Take this rank's parts of the whole inputs of each micro-batch, by local name."""
        return [
            {
                name: part_of(micro_batch[part.whole], part.region).to(self.device)
                for name, part in phases.inputs.items()
                if part.whole in micro_batch
            }
            for phases, micro_batch in zip(self._all, micro_batches, strict=True)
        ]

    def local(self, inputs: Mapping[str, Any]) -> list[Values]:
        """Micro-batches by local name, where the rank is called with its own parts of the batch."""
        signature, micro_batches = self.whole.signature, self._micro.parts(inputs)
        names = {
            name: part.whole
            for name, part in self.graphs.inputs.items()
            if part.whole not in (signature.tangent, signature.seed)
        }
        for phases, micro_batch in zip(self._all, micro_batches, strict=True):
            for name, whole in names.items():
                tensor, wanted = micro_batch[whole], phases.types[name]
                shape, dtype = tuple(tensor.shape), torch_dtype(wanted.dtype)
                if shape != wanted.shape or tensor.dtype != dtype:
                    raise BackendError(
                        f"rank {self.rank}: one of {self._micro.count} micro-batches of its part "
                        f"of input {whole!r} is {dtype_word(tensor.dtype)}{list(shape)}, the plan "
                        f"gives it {wanted}"
                    )
        return [
            {name: one[whole].to(self.device) for name, whole in names.items()}
            for one in micro_batches
        ]

    def joined(self, inputs: Mapping[str, Any], agreement: Agreement) -> dict[str, Tensor]:
        """Whole inputs from every rank's own parts of them; all ranks must call it."""
        self.local(inputs)
        wholes = [self.whole] * self._micro.count
        if self.whole.rest is not None:
            wholes[-1] = replace(self.whole, programs=self.whole.rest.programs)
        parts = zip(wholes, self._micro.parts(inputs), strict=True)
        return self._micro.inputs([joined_inputs(*one, agreement) for one in parts])

    # Passes ----------------------------------------------------------------------------------

    def forward(
        self,
        inputs: list[Values],
        shards: Mapping[str, Tensor],
        agreed: Callable[[], None],
        *,
        backward: bool = False,
    ) -> tuple[tuple[Tensor, ...], Values]:
        """Run a step; written buffers get their next contents.

        Args:
            inputs: Of each micro-batch, by local name.
            shards: This rank's shards of stored values by first name.
            agreed: As of `RankPasses.forward`.
            backward: Whether the backward passes run.

        Returns:
            The module's results, and this rank's gradients by first name.
        """
        agreed()
        stored = self.whole.local_shards(shards)
        tangent = self.whole.signature.tangent
        for name, part in self.graphs.inputs.items():
            if part.whole == tangent:
                dtype = torch_dtype(self.graphs.types[name].dtype)
                for values, share in zip(inputs, self._micro.shares, strict=True):
                    gradient = share * self._scale
                    values[name] = torch.full((), gradient, dtype=dtype, device=self.device)
        start = PhaseValues(stored, inputs, self._written)
        held = StepValues(self._all, start, backward=backward, adds=self._adds)
        self._run_all(held, backward=backward)
        micro_batches = range(self._micro.count)
        results = self._micro.whole(
            [{v: held.result(self._outputs[v], m) for v in self._shown} for m in micro_batches]
        )
        gradients = {
            entry.names[0]: held.total(self._outputs[entry.gradient])
            for entry in self.whole.stored
            if backward and entry.gradient in self._outputs
        }
        if backward:
            gradients[_SCALE] = torch.tensor(self._scale, dtype=torch.float64)
        held.store()
        return tuple(results[value] for value in self._shown), gradients

    def backward(self, values: Values, tangent: Tensor) -> Mapping[str, Tensor]:
        """The gradients of a step, for a gradient of its loss.

        Args:
            values: The gradients that the forward pass returned.
            tangent: The gradient of the loss.
        """
        wanted = float(tangent)
        factor = wanted / float(values.pop(_SCALE))
        gradients = dict(values)
        if factor != 1.0:
            gradients = {name: g.mul_(factor) for name, g in apart(values).items()}
        values.clear()
        if self._is_half:
            is_large = 2.0 <= wanted < math.inf
            self._scale = 2.0 ** round(math.log2(wanted)) if is_large else 1.0
        return gradients

    def structured(self, results: Sequence[Tensor]) -> Any:
        """The module's returned value."""
        return self.whole.signature.unflatten(dict(zip(self._shown, results, strict=True)))

    def _run_all(self, values: StepValues, *, backward: bool) -> None:
        runs = [
            (phase, micro_batch)
            for phase, micro_batch in step_runs(self._order, self.rank, self.whole.rest)
            if phase in self._runs_of(micro_batch) and (backward or self.graphs.is_forward(phase))
        ]
        graphs = [phases.graphs for phases in self._all]
        posts = Posts(graphs, self.rank, self.device, self._roll)

        def wanted(phase: int) -> bool:
            return backward or self.graphs.is_forward(phase)

        run_phases(runs, values, posts, self._run, wanted)

    def _runs_of(self, micro_batch: int) -> Mapping[int, Run]:
        return self._last_runs if micro_batch == self._micro.count - 1 else self._runs

    def _run(
        self, phase: int, micro_batch: int, arguments: list[Tensor | None]
    ) -> Sequence[Tensor]:
        part, stage = self._order.phases.of(phase)
        run = self._runs_of(micro_batch)[phase]
        try:
            with torch.no_grad(), without_autocast(self.device.type):
                return run(arguments)
        except RuntimeError as error:
            which = f"{part} (stage {stage})"
            failure = explained(error, run, self.rank, self._roll, which)
            if failure is None:
                raise
            raise failure from error


def _runs(phases: RankPhases, device: torch.device) -> dict[int, Run]:
    for graph in phases.graphs.values():
        graph.graph.module.to(device)
    return {phase: direct(phases.eager(phase)) for phase in phases.graphs}


def _unboxed(
    compiled: Callable[..., Sequence[Tensor]], arguments: list[Tensor | None]
) -> Sequence[Tensor]:
    return compiled(*arguments)
