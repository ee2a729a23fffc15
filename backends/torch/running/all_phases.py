"""All ranks of a program in micro-batches in one process, in lock-step.

The phases run in the order of their numbers, one micro-batch after the other: any order that the
schedule allows gives the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.files.rank_files import with_written_phases
from partitioner.backends.torch.graphs.micro_batches import MicroBatches
from partitioner.backends.torch.graphs.phases import RankPhases, Rest, emit_all_phases, step_runs
from partitioner.backends.torch.running.all_ranks import Step, Values, run_lockstep
from partitioner.backends.torch.running.step_values import PhaseValues, StepValues
from partitioner.backends.torch.state.shards import part_of, region_on, whole_of
from partitioner.ir.graph import Graph
from partitioner.ir.phases import Part
from partitioner.ir.program import Output, Programs


class AllPhases:
    """The phases of all ranks, run in lock-step; it has the interface of `AllRanks`.

    Args:
        programs: Programs of a plan in stages.
        graph: The model of one micro-batch.
        micro: The micro-batches.
        tangent: Graph input for the gradient of the loss; "" for inference.
        seed: Graph input that seeds random draws; "" if there are none.
        written: The stored value that each output of the graph writes.
        rest: The last micro-batch, if it is smaller.

    Raises:
        BackendError: A graph cannot be made.
    """

    def __init__(
        self,
        programs: Programs,
        graph: Graph,
        micro: MicroBatches,
        tangent: str,
        seed: str,
        written: Mapping[str, str],
        rest: Rest | None = None,
    ) -> None:
        self.programs = programs
        self.graph = graph
        self.micro = micro
        self.rest = rest
        self._tangent, self._seed, self._written = tangent, seed, written
        cpu = torch.device("cpu")
        self._all = [
            emit_all_phases(programs, rank, graph, cpu, rest, micro.count)
            for rank in range(len(programs.ranks))
        ]

    @property
    def ranks(self) -> list[RankPhases]:
        """The phases of each rank, of the first micro-batch."""
        return [phases[0] for phases in self._all]

    @property
    def last_ranks(self) -> list[RankPhases]:
        """The phases of each rank, of a last micro-batch that is smaller; none without one."""
        return [] if self.rest is None else [phases[-1] for phases in self._all]

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(phase, micro-batch) of all that a rank runs in a step, in order."""
        assert self.programs.order is not None
        return step_runs(self.programs.order, rank, self.rest)

    def with_files(self, folder: Path) -> AllPhases:
        """The same ranks with the graphs in a folder's files.

        Raises:
            BackendError: A file cannot be read, or takes or gives other values.
        """
        other = copy.copy(self)
        other._all = []
        for phases in self._all:
            read = [with_written_phases(folder, phases[0])] * len(phases)
            if self.rest is not None:
                read[-1] = with_written_phases(folder, phases[-1], last=True)
            other._all.append(read)
        return other

    def of(self, programs: Programs, rest: Rest | None) -> AllPhases:
        """Other ranks of the same model."""
        names = self._tangent, self._seed, self._written
        return AllPhases(programs, self.graph, self.micro, *names, rest)

    def step(
        self,
        inputs: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        keep: Mapping[int, Collection[str]] | None = None,
    ) -> Step:
        """Run a step of all micro-batches.

        Args:
            inputs: Whole inputs; `keep` must be None.
            stored: Whole parameters and buffers by value of the graph.

        Raises:
            BackendError: The ranks deadlock.
        """
        assert keep is None, "values inside of a step of micro-batches are not kept"
        values = [
            StepValues(phases, start, backward=bool(self._tangent), adds=False)
            for phases, start in zip(self._all, self.start(inputs, stored), strict=True)
        ]
        assert self.programs.order is not None
        phases = self.programs.order.phases
        first, last = phases.number(Part.SETUP), phases.number(Part.REDUCE)
        self._run(values, first, 0)
        if self.rest is not None and self.rest.has_own_setup:
            self._run(values, first, self.micro.count - 1)
        for micro_batch in range(self.micro.count):
            for phase in range(first + 1, last):
                self._run(values, phase, micro_batch)
        self._run(values, last, 0)
        results = [
            dict(self._whole(values, self._shown, micro_batch))
            for micro_batch in range(self.micro.count)
        ]
        buffers = dict(self._whole(values, self._written, self.micro.count - 1))
        totals = dict(self._whole(values, self._gradients, None))
        return Step(self.micro.whole(results) | buffers, totals)

    def start(
        self, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> list[PhaseValues]:
        """The local values that each rank begins a step with; args as of `step`."""
        micro_batches = list(self._inputs(inputs))
        return [self._start(rank, micro_batches, stored) for rank in self._all]

    def _inputs(self, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Whole inputs of each micro-batch, with a seed of its own and its share of the loss."""
        for index, part in enumerate(self.micro.parts(inputs)):
            if self._seed in part:
                part[self._seed] = part[self._seed] + index
            if self._tangent:
                dtype = torch_dtype(self.graph.types[self._tangent].dtype)
                part[self._tangent] = torch.full((), self.micro.shares[index], dtype=dtype)
            yield part

    def _start(
        self,
        phases: Sequence[RankPhases],
        micro_batches: Sequence[Mapping[str, Tensor]],
        stored: Mapping[str, Tensor],
    ) -> PhaseValues:
        rank = phases[0]
        homes = self.programs.homes
        local = {home.name: (value, home.placement) for value, home in homes.items()}
        parts: Values = {}
        for name in rank.stored:
            value, placement = local[name]
            parts[name] = part_of(stored[value], region_on(placement, rank.rank)).clone()
        inputs = [
            {name: part_of(one[part.whole], part.region) for name, part in of.inputs.items()}
            for of, one in zip(phases, micro_batches, strict=True)
        ]
        written = {
            output.value: homes[self._written[output.whole]].name
            for output in rank.outputs
            if output.whole in self._written
        }
        return PhaseValues(parts, inputs, written)

    def _run(self, values: Sequence[StepValues], phase: int, micro_batch: int) -> None:
        graphs = [phases[micro_batch].graphs for phases in self._all]
        ranks = [rank for rank, of_rank in enumerate(graphs) if phase in of_rank]
        modules = {rank: graphs[rank][phase].graph.module for rank in ranks}
        arguments = {rank: values[rank].arguments(phase, micro_batch) for rank in ranks}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graphs have their casts
            results = run_lockstep(modules, arguments)
        for rank in ranks:
            for message, tensor in values[rank].finish(phase, micro_batch, results[rank]):
                values[message.target].receive(message, micro_batch, tensor)

    @cached_property
    def _gradients(self) -> frozenset[str]:
        made = {v for n in self.graph.nodes if n.name in self.graph.backward for v in n.writes}
        return frozenset(made.intersection(self.graph.outputs))

    @cached_property
    def _shown(self) -> frozenset[str]:
        return frozenset(self.graph.outputs) - self._gradients - self._written.keys()

    def _whole(
        self, values: Sequence[StepValues], names: Collection[str], micro_batch: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Outputs of a micro-batch, or of the whole step for None, joined of all ranks'."""
        by_output: dict[str, list[tuple[int, Output]]] = {}
        for phases in self._all:
            for output in phases[micro_batch or 0].outputs:
                if output.whole in names:
                    by_output.setdefault(output.whole, []).append((phases[0].rank, output))
        programs = self.programs
        if self.rest is not None and micro_batch == self.micro.count - 1:
            programs = self.rest.programs
        for name, outputs in by_output.items():
            parts = [
                (
                    output.region,
                    values[rank].total(output.value)
                    if micro_batch is None
                    else values[rank].result(output.value, micro_batch),
                )
                for rank, output in outputs
            ]
            yield name, whole_of(parts, programs.outputs[name].shape)
