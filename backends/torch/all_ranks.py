"""A module's program on all ranks in this process: whole tensors in and out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from partitioner.backends.torch.emit import PassGraph, RankGraphs, emit_rank
from partitioner.backends.torch.lockstep import Watch, run_lockstep
from partitioner.backends.torch.shards import part_of, region_on, whole_of
from partitioner.ir.graph import Graph
from partitioner.ir.program import Output, Programs

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What a step gave, whole, by value of the graph.

    Attributes:
        results: Outputs of the forward pass, written buffers included.
        gradients: Outputs of the backward pass; empty for inference.
        kept: Local values that were asked for, by rank and name, as far as the graphs make them.
    """

    results: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    kept: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)


class AllRanks:
    """The graphs of all ranks, run in lock-step.

    Args:
        programs: The rank programs.
        graph: The whole model.
        ranks: Their graphs; None makes them.

    Raises:
        BackendError: A graph cannot be made.
    """

    def __init__(
        self, programs: Programs, graph: Graph, ranks: Sequence[RankGraphs] | None = None
    ) -> None:
        self.programs = programs
        self.graph = graph
        cpu = torch.device("cpu")
        made = (emit_rank(programs, rank, graph, cpu) for rank in range(len(programs.ranks)))
        self.ranks = tuple(made if ranks is None else ranks)

    def step(
        self,
        inputs: Mapping[str, torch.Tensor],
        stored: Mapping[str, torch.Tensor],
        keep: Mapping[int, Collection[str]] | None = None,
    ) -> Step:
        """Run the forward pass and, in training, the backward pass.

        Args:
            inputs: Whole graph inputs by name.
            stored: Whole stored values by name.
            keep: Local values to return beside the outputs, by rank.

        Raises:
            BackendError: The ranks deadlock.
        """
        values = [self._start(rank, inputs, stored) for rank in self.ranks]
        watch = Watch(keep or {})
        self._run(values, [rank.forward for rank in self.ranks], watch)
        backward = [rank.backward for rank in self.ranks]
        if not any(backward):
            return Step(dict(self._whole(values, late=False)), {}, watch.seen)
        self._run(values, backward, watch)
        late = dict(self._whole(values, late=True))
        return Step(dict(self._whole(values, late=False)), late, watch.seen)

    def _start(
        self,
        rank: RankGraphs,
        inputs: Mapping[str, torch.Tensor],
        stored: Mapping[str, torch.Tensor],
    ) -> Values:
        values = {
            name: part_of(inputs[part.whole], part.region) for name, part in rank.inputs.items()
        }
        local = {home.name: (value, home.placement) for value, home in self.programs.homes.items()}
        for name in rank.stored:
            value, at = local[name]
            values[name] = part_of(stored[value], region_on(at, rank.rank))
        return values

    def _run(
        self, values: Sequence[Values], passes: Sequence[PassGraph | None], watch: Watch
    ) -> None:
        present = {rank: one for rank, one in enumerate(passes) if one is not None}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graphs have their casts
            found = run_lockstep(
                {rank: one.module for rank, one in present.items()},
                {r: [values[r][name] for name in one.arguments] for r, one in present.items()},
                watch,
            )
        for rank, results in found.items():
            values[rank].update(zip(present[rank].results, results, strict=True))

    def _whole(self, values: Sequence[Values], *, late: bool) -> Iterator[tuple[str, torch.Tensor]]:
        parts: dict[str, list[tuple[int, Output]]] = {}
        for rank, graphs in enumerate(self.ranks):
            for output in graphs.outputs:
                if (output.value in graphs.forward.results) != late:
                    parts.setdefault(output.whole, []).append((rank, output))
        for whole, held in parts.items():
            pieces = [(output.region, values[rank][output.value]) for rank, output in held]
            yield whole, whole_of(pieces, self.programs.outputs[whole].shape)
