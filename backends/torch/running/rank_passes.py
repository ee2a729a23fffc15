"""A rank's part of calls of a module, over torch.distributed: its phases, in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.errors import BackendError
from partitioner.backends.regions import region_shape, whole_region
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.faults import Roll, explained
from partitioner.backends.torch.agreeing.groups import group_ranks, register_links, register_named
from partitioner.backends.torch.graphs.eager import Gate, carrier_of, direct, gated
from partitioner.backends.torch.graphs.joined_calls import join_calls
from partitioner.backends.torch.graphs.phases import (
    RankPhases,
    emit_all_phases,
    links_of,
    of_each,
    step_runs,
)
from partitioner.backends.torch.operators.registry import group_name
from partitioner.backends.torch.running.step_values import (
    Posts,
    Run,
    StepPlan,
    StepStart,
    StepValues,
    run_phases,
)
from partitioner.backends.torch.state.buffers import apart
from partitioner.backends.torch.state.shards import part_of, whole_of
from partitioner.backends.torch.state.whole import Whole
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Placement

Values = dict[str, Tensor]
#: Name, among a step's gradients, of the gradient of the loss that they are for.
_SCALE = ""
#: Runs a phase on its arguments, which it may take out of their list.
Pass = Callable[[list[Tensor | None]], Sequence[Tensor]]
_NOTHING: AbstractContextManager[Any] = nullcontext()


class RankPasses:
    """A program's phases on this rank; every rank makes one at the same time.

    Where the order turns, `backward` runs the backward passes. Else the forward pass runs those of
    all micro-batches too, before the gradient of the loss is known: for one of one, or, in float16,
    for the one that a `GradScaler` had last; `backward` scales the gradients.

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
        for name, place in whole.places.items():
            if places.get(name) != place:
                raise BackendError(f"{name} is stored as {places.get(name)}, not as {place}")
        self.whole = whole
        self.rank = rank
        self.device = device
        self._roll = roll
        self.order, self._micro = whole.programs.order, whole.micro
        links = []
        for programs in (whole.programs, *([] if whole.rest is None else [whole.rest.programs])):
            register_named(group_ranks(programs))
            links += links_of(programs)
            register_links(links)
        self._all = emit_all_phases(
            whole.programs,
            rank,
            whole.graph,
            device,
            whole.rest,
            self._micro.count,
        )
        self.graphs = self._all[0]
        runs = step_runs(self.order, rank, whole.rest)
        early = [run for run in runs if not self.order.is_late(run[0])]
        late = [run for run in runs if self.order.is_late(run[0])]
        self._outputs = {output.whole: output.value for output in self.graphs.outputs}
        self._shown = tuple(dict.fromkeys(filter(None, whole.signature.results)))
        homes = whole.programs.homes
        self._written = {
            self._outputs[entry.written]: homes[entry.value].name
            for entry in whole.stored
            if entry.written in self._outputs and entry.value in homes
        }
        self._gradients = [  # stored values, and the local names of their gradients
            (entry.names[0], self._outputs[entry.gradient])
            for entry in whole.stored
            if entry.gradient in self._outputs
        ]
        tangent, inputs = whole.signature.tangent, self.graphs.inputs.items()
        self._tangents = [local for local, part in inputs if part.whole == tangent]
        plan = partial(StepPlan, self._all, written=self._written, adds=True)
        outputs, gradients = self.graphs.delivered, {local for _, local in self._gradients}
        self._late = plan(late, keep=gradients)
        read = {name for run in self._late.runs for name in run.arguments} | gradients
        made = {name for run in self._late.runs for _, name in run.kept}
        self._read_late = sorted(read - made) if late else []
        #: First names of the stored values that the backward pass reads as they lie.
        self.read_again = tuple(
            entry.names[0]
            for entry in whole.stored
            if entry.value in homes
            and homes[entry.value].name in self._read_late
            and not entry.written
        )
        forward = [run for run in early if self.graphs.is_forward(run[0])]
        self._early = {  # by whether the backward pass runs
            True: plan(early, keep=outputs.union(self._read_late)),
            False: plan(forward, keep=outputs),
        }
        self._gate = Gate()
        # with messages to post, the rank waits before any pass
        begins = (plan.runs[0].phase for plan in (self._early[True], self._late) if plan.runs)
        first = () if links else tuple(begins)
        ranks = range(len(whole.programs.ranks))
        #: The group of all ranks, whose all-reduces carry what they agree on; "" if none do.
        self.group = group = group_name(ranks) if device.type == "cpu" else ""
        self._runs = of_each(  # by micro-batch and phase
            self._all, lambda one: self._passes_of(one, first if one is self.graphs else (), group)
        )
        self._gated = [self._runs[0][phase] for phase in first]
        carriers = {phase: carrier_of(self._runs[0][phase]) for phase in first}
        #: How the ranks agree with the first all-reduce of a call (False), and of its backward pass
        #: (True); no entry if they agree before.
        self.carriers = {self.order.is_late(phase): one for phase, one in carriers.items() if one}
        self._is_half = any(type_.dtype == "float16" for type_ in whole.graph.types.values())
        self._scale = 1.0  # the gradient of the loss that steps run for, a power of two

    def _passes_of(self, phases: RankPhases, first: Collection[int], group: str) -> dict[int, Pass]:
        """The pass of each phase; those that come first enter the gate."""
        passes: dict[int, Pass] = {}
        for phase, graph in phases.graphs.items():
            graph.module.to(self.device)
            module = phases.eager(phase)
            module = gated(module, self._gate, group) if phase in first else module
            passes[phase] = direct(join_calls(module))
        return passes

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs with `torch.compile`, with its arguments."""

        def compiled(module: fx.GraphModule) -> Pass:
            run = torch.compile(module, *args, **kwargs)
            return lambda arguments: run(*arguments)

        self._gated, self.carriers = [], {}
        self._early = {backward: plan.without_adding for backward, plan in self._early.items()}
        self._runs = of_each(
            self._all,
            lambda one: {phase: compiled(graph.module) for phase, graph in one.graphs.items()},
        )

    # Inputs ----------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """Number of seeds that a step takes: one a micro-batch."""
        return self._micro.count

    def start(
        self, inputs: Mapping[str, Any], seed: Mapping[str, Tensor], *, local: bool
    ) -> list[Values]:
        """Inputs of each micro-batch by local name, from whole ones or, if `local`, own parts."""
        started = self.local(inputs) if local else self._parts(self._micro.parts(inputs))
        if not seed:
            return started
        seeds = [
            {name: one + m if m else one for name, one in seed.items()}
            for m in range(self._micro.count)
        ]
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
        signature, count = self.whole.signature, self._micro.count
        names = {
            name: part.whole
            for name, part in self.graphs.inputs.items()
            if part.whole not in (signature.tangent, signature.seed)
        }
        for whole in names.values():
            if not isinstance(inputs[whole], Tensor):
                raise BackendError(f"rank {self.rank}: input {whole!r} is {inputs[whole]!r}")
        micro_batches = self._micro.parts(inputs)
        for phases, micro_batch in zip(self._all, micro_batches, strict=True):
            for name, whole in names.items():
                tensor, wanted = micro_batch[whole], phases.types[name]
                shape, dtype = tuple(tensor.shape), torch_dtype(wanted.dtype)
                if shape != wanted.shape or tensor.dtype != dtype:
                    which = f"one of {count} micro-batches of " if count > 1 else ""
                    raise BackendError(
                        f"rank {self.rank}: {which}its part of input {whole!r} is "
                        f"{dtype_word(tensor.dtype)}{list(shape)}, the plan gives it {wanted}"
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
        agreed: Callable[..., object],
        *,
        backward: bool = False,
    ) -> tuple[tuple[Tensor, ...], Values]:
        """Run a step up to where it turns; written buffers get their next contents.

        Args:
            inputs: Of each micro-batch, by local name.
            shards: This rank's shards of stored values by first name.
            agreed: Returns once all ranks do the same; called once, before anything is sent or
                written, or with the first of an all-reduce (see `Gate`).
            backward: Whether the backward passes run, too, here or in `backward`.

        Returns:
            The module's results, and what `backward` takes.
        """
        plan, stored = self._early[backward], self.whole.local_shards(shards)
        for name in () if self.order.turns else self._tangents:  # their shares of the gradient
            dtype = torch_dtype(self.graphs.types[name].dtype)
            for one, share in zip(inputs, self._micro.shares, strict=True):
                gradient = share * self._scale
                one[name] = torch.full((), gradient, dtype=dtype, device=self.device)
        values = StepValues(plan, StepStart(stored, inputs, self._written).values)
        self._run_all(values, agreed, backward=backward)
        results = self._micro.whole(
            [
                {shown: values.result(self._outputs[shown], m) for shown in self._shown}
                for m in range(self._micro.count)
            ],
            {shown: values.whole(self._outputs[shown]) for shown in self._shown},
        )
        kept: Values = {}
        if backward and self.order.turns:
            kept = values.taken(self._read_late)
        elif backward:
            kept = {name: values.total(local) for name, local in self._gradients}
            kept[_SCALE] = torch.tensor(self._scale, dtype=torch.float64)
        values.store(stored, results, kept)
        return tuple(results.values()), kept

    def backward(
        self, values: Values, tangent: Tensor, agreed: Callable[..., object]
    ) -> Mapping[str, Tensor]:
        """Gradients by first name for that of the loss; empties `values`, to free what was kept.

        Where the order turns, `agreed` is called as in `forward`; else nothing is sent.
        """
        if not self.order.turns:
            return self._scaled(values, float(tangent))
        values.update(dict.fromkeys(self._tangents, tangent))
        held = StepValues(self._late, [values])
        self._run_all(held, agreed, backward=True)
        gradients = {name: held.total(local) for name, local in self._gradients}
        values.clear()
        return gradients

    def _scaled(self, values: Values, wanted: float) -> Mapping[str, Tensor]:
        """The gradients that the forward pass computed, for a gradient of the loss."""
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

    def _run_all(
        self, values: StepValues, agreed: Callable[..., object], *, backward: bool
    ) -> None:
        """Run the phases of a plan, the first of which waits for the other ranks if it can."""
        runs = values.plan.runs
        if runs and self._runs[runs[0].micro_batch][runs[0].phase] in self._gated:
            self._gate.wait = agreed
        else:
            agreed()
        posts = Posts(self._all, self.device, self._roll)

        def wanted(phase: int) -> bool:
            return backward or self.graphs.is_forward(phase)

        try:
            with without_grad(), without_autocast(self.device.type):
                run_phases(values, posts, self._run, wanted)
        except BaseException as error:
            self._gate.leave(error)
            raise

    def _run(self, run: Run, arguments: list[Tensor | None]) -> Sequence[Tensor]:
        one = self._runs[run.micro_batch][run.phase]
        try:
            if isinstance(one, fx.GraphModule):  # without what modules do around their calls
                results: Sequence[Tensor] = one.forward(arguments)
                return results
            return one(arguments)
        except BackendError:
            raise
        except RuntimeError as error:
            which = self.graphs.words(run.phase)
            failure = explained(error, one, self.rank, self._roll, which)
            if failure is None:
                raise
            raise failure from error


def without_grad() -> AbstractContextManager[Any]:
    """A region without autograd, as inside of its functions."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A region without `torch.autocast`, as graphs have their own casts."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING


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
