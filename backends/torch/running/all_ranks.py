"""All ranks of a module in one process, in lock-step: no torch.distributed, always the same order.

The phases run in the order of their numbers, one micro-batch after the other: any order that the
schedule allows gives the same values. In a phase each rank interprets its graph up to a collective;
when all ranks of the collective's group have reached it, it is carried out and they go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import combine, torch_dtype
from partitioner.backends.torch.files.rank_files import written_phases
from partitioner.backends.torch.graphs.emit import rest_argument
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH, MicroBatches
from partitioner.backends.torch.graphs.notes import noted_values
from partitioner.backends.torch.graphs.phases import RankPhases, Rest, emit_all_phases, step_runs
from partitioner.backends.torch.operators.registry import SENDING, Call
from partitioner.backends.torch.running.step_values import Run, StepPlan, StepStart, StepValues
from partitioner.backends.torch.state.shards import part_and_rest, part_of, region_on, whole_of
from partitioner.ir.graph import Graph
from partitioner.ir.phases import Part
from partitioner.ir.program import Output, Programs

c10d = torch.ops._c10d_functional
_CPU = torch.device("cpu")
_REDUCE = {"sum": "sum", "product": "prod", "max": "max", "min": "min"}

Values = dict[str, Tensor]
#: Shows a rank's node and its result.
Observe = Callable[[int, fx.Node, object], None]
#: A rank's pass: yields a collective, is sent its result, and returns the pass's results.
Passing = Generator[Call, Any, Sequence[Tensor]]


@dataclass(frozen=True)
class Step:
    """Whole results of a step, by value of the graph."""

    results: Mapping[str, Tensor]  #: Outputs of the forward pass, written buffers included.
    gradients: Mapping[str, Tensor]  #: Outputs of the backward pass; empty for inference.
    #: The local values to keep, by rank and name, as far as the graphs make them.
    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    copies: Sequence[Mapping[str, Tensor]] = ()  #: The results of each whole copy but the first.


class AllRanks:
    """The phases of all ranks, run in lock-step.

    Args:
        programs: Their programs.
        graph: The model of one micro-batch.
        tangent: Graph input for the gradient of the loss; "" if it is given as other inputs are.
        seed: Graph input that seeds random draws; "" if there are none.
        written: The stored value that each output of the graph writes for the next micro-batch.
        rest: The last micro-batch, if it is smaller.

    Raises:
        BackendError: A graph cannot be made.
    """

    def __init__(
        self,
        programs: Programs,
        graph: Graph,
        micro: MicroBatches = WHOLE_BATCH,
        tangent: str = "",
        seed: str = "",
        written: Mapping[str, str] | None = None,
        rest: Rest | None = None,
    ) -> None:
        self.programs = programs
        self.graph = graph
        self.micro = micro
        self.rest = rest
        self._tangent, self._seed, self._written = tangent, seed, written or {}
        #: The phases of each rank and micro-batch.
        self.phases = [
            emit_all_phases(programs, rank, graph, _CPU, rest, micro.count)
            for rank in range(len(programs.ranks))
        ]

    @property
    def ranks(self) -> list[RankPhases]:
        """The phases of each rank, of the first micro-batch."""
        return [phases[0] for phases in self.phases]

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(phase, micro-batch) of all that a rank runs in a step, in order."""
        return step_runs(self.programs.order, rank, self.rest)

    def with_files(self, folder: Path) -> AllRanks:
        """The same ranks with the graphs in a folder's files."""
        return self.with_phases([written_phases(folder, phases) for phases in self.phases])

    def with_phases(self, phases: Sequence[Sequence[RankPhases]]) -> AllRanks:
        """The same ranks with other graphs, of each rank and micro-batch."""
        other = copy.copy(self)
        other.phases = [list(of_rank) for of_rank in phases]
        return other

    def of(self, programs: Programs, graph: Graph, rest: Rest | None) -> AllRanks:
        """Other ranks of the same model."""
        names = self._tangent, self._seed, self._written
        return AllRanks(programs, graph, self.micro, *names, rest)

    def step(
        self,
        inputs: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        keep: Mapping[int, Collection[str]] | None = None,
    ) -> Step:
        """Run a step of all micro-batches with whole inputs, parameters and buffers.

        Args:
            inputs: By name.
            stored: By value of the graph.
            keep: Local values to return beside the outputs, by rank; those of the last micro-batch.

        Raises:
            BackendError: The ranks deadlock.
        """
        kept: dict[int, Values] = {}

        def observe(rank: int, node: fx.Node, result: object) -> None:
            if keep:
                kept.setdefault(rank, {}).update(noted_values(node, result, keep.get(rank, ())))

        values = [
            StepValues(
                StepPlan(phases, self._turns, start.written, phases[0].delivered), start.values
            )
            for phases, start in zip(self.phases, self.start(inputs, stored), strict=True)
        ]
        for turn in self._turns:
            self._run(values, turn, observe)
        every = self.programs.copies
        first, *others = [
            self.micro.whole(
                [
                    dict(self._whole(values, self._shown, micro_batch, ranks))
                    for micro_batch in range(self.micro.count)
                ]
            )
            for ranks in (every.devices if every else [range(len(self.phases))])
        ]
        buffers = dict(self._whole(values, self._written, self.micro.count - 1))
        totals = dict(self._whole(values, self._gradients, None))
        return Step(first | buffers, totals, kept, others)

    def start(self, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[StepStart]:
        """The local values that each rank begins a step with; args as of `step`."""
        micro_batches = self.micro.parts(inputs)
        for index, part in enumerate(micro_batches):  # a seed of its own, its share of the loss
            if self._seed in part:
                part[self._seed] = part[self._seed] + index
            if self._tangent:
                dtype = torch_dtype(self.graph.types[self._tangent].dtype)
                part[self._tangent] = torch.full((), self.micro.shares[index], dtype=dtype)
        return [self._start(rank, micro_batches, stored) for rank in self.phases]

    def _start(
        self,
        phases: Sequence[RankPhases],
        micro_batches: Sequence[Mapping[str, Tensor]],
        stored: Mapping[str, Tensor],
    ) -> StepStart:
        rank = phases[0]
        homes = self.programs.homes
        local = {home.name: (value, home.placement) for value, home in homes.items()}
        parts: Values = {}
        for name in rank.stored:
            value, placement = local[name]
            parts[name] = part_of(stored[value], region_on(placement, rank.rank))
        for value, home in homes.items():
            if (rest := rest_argument(home.name)) in rank.rests:
                of = self._stored_as(value)
                part, held = part_and_rest(
                    stored[of], homes[of].placement, home.placement, rank.rank, _CPU
                )
                parts[homes[of].name] = part
                parts[rest] = part.clone() if held is None else held
        inputs = [
            {name: part_of(one[part.whole], part.region) for name, part in of.inputs.items()}
            for of, one in zip(phases, micro_batches, strict=True)
        ]
        written = {
            output.value: homes[self._written[output.whole]].name
            for output in rank.outputs
            if output.whole in self._written
        }
        return StepStart(parts, inputs, written)

    def _stored_as(self, rest: str) -> str:
        """The stored value that a value at rest is, by a name of its own."""
        (alias,) = self.graph.producers[rest].inputs
        (stored,) = self.graph.producers[alias].inputs
        return stored

    @cached_property
    def _turns(self) -> tuple[tuple[int, int], ...]:
        """(phase, micro-batch) of all runs of a step, in order."""
        phases, count = self.programs.order.phases, self.micro.count
        first, last = phases.number(Part.SETUP), phases.number(Part.REDUCE)
        own = self.rest is not None and self.rest.has_own_setup
        middle = ((phase, m) for m in range(count) for phase in range(first + 1, last))
        return *([(first, count - 1)] if own else []), (first, 0), *middle, (last, 0)

    def _run(self, values: Sequence[StepValues], turn: tuple[int, int], observe: Observe) -> None:
        """Run a phase of a micro-batch on all ranks that do something in it."""
        runs: dict[int, Run] = {}
        for rank, of in enumerate(values):
            runs.update((rank, run) for run in of.plan.runs if (run.phase, run.micro_batch) == turn)
        phase, micro_batch = turn
        modules = {r: self.phases[r][micro_batch].graphs[phase].module for r in runs}
        arguments = {rank: values[rank].arguments(run) for rank, run in runs.items()}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graphs have their casts
            results = run_lockstep(modules, arguments, observe)
        for rank, run in runs.items():
            for message, tensor in values[rank].finish(run, results[rank]):
                values[message.target].receive(message, micro_batch, tensor)

    @cached_property
    def _gradients(self) -> frozenset[str]:
        made = {v for n in self.graph.nodes if n.name in self.graph.backward for v in n.writes}
        return self._named(made.intersection(self.graph.outputs))

    @cached_property
    def _shown(self) -> frozenset[str]:
        return self._named(self.graph.outputs) - self._gradients - self._written.keys()

    def _named(self, values: Collection[str]) -> frozenset[str]:
        return frozenset(self.graph.output_names.get(value, value) for value in values)

    def _whole(
        self,
        values: Sequence[StepValues],
        names: Collection[str],
        micro_batch: int | None,
        ranks: Collection[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Outputs of a micro-batch, or of the whole step for None, joined of all or some ranks'."""
        by_output: dict[str, list[tuple[int, Output]]] = {}
        for phases in self.phases if ranks is None else (self.phases[rank] for rank in ranks):
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


# Lock-step ---------------------------------------------------------------------------------------


def run_lockstep(
    modules: Mapping[int, fx.GraphModule],
    arguments: Mapping[int, Sequence[Tensor | None]],
    observe: Observe = lambda _rank, _node, _result: None,
) -> dict[int, Sequence[Tensor]]:
    """Results of a pass, by rank; `observe` is shown the result of every node."""
    runs = {
        rank: _interpret(rank, module, arguments[rank], observe) for rank, module in modules.items()
    }
    done: dict[int, Sequence[Tensor]] = {}
    waiting: dict[int, Call] = {}
    answers: dict[int, Any] = dict.fromkeys(runs)
    while len(done) < len(runs):
        for rank in [r for r in runs if r not in done and r not in waiting]:
            try:
                waiting[rank] = runs[rank].send(answers[rank])
            except StopIteration as stop:
                done[rank] = stop.value
        ready = _ready(waiting)
        if not ready and len(done) < len(runs):
            where = ", ".join(f"rank {r} in {c[0]} of {c[2]}" for r, c in sorted(waiting.items()))
            raise BackendError(f"the ranks wait for each other: {where}")
        for ranks in ready:
            calls = [waiting.pop(rank) for rank in ranks]
            operators = {operator for operator, _, _ in calls}
            if len(operators) != 1:
                raise BackendError(
                    f"ranks of {calls[0][2]} are in different collectives: {operators}"
                )
            results = _COLLECTIVES[operators.pop()]([args for _, args, _ in calls])
            answers.update(zip(ranks, results, strict=True))
    return done


def _ready(waiting: Mapping[int, Call]) -> list[tuple[int, ...]]:
    """The groups whose ranks all wait in a collective of the group."""
    ready = []
    for name in sorted({call[2] for call in waiting.values()}):
        ranks = tuple(map(int, name.removeprefix("ranks_").split("_")))
        if all(rank in waiting and waiting[rank][2] == name for rank in ranks):
            ready.append(ranks)
    return ready


def _interpret(
    rank: int, module: fx.GraphModule, arguments: Sequence[Tensor | None], observe: Observe
) -> Passing:
    run = fx.Interpreter(module)
    run.args_iter = iter(arguments)
    for node in module.graph.nodes:
        args, kwargs = run.fetch_args_kwargs_from_env(node)
        if node.op == "output":
            results: Sequence[Tensor] = args[0]
            return results
        if node.target in _COLLECTIVES:
            run.env[node] = yield (node.target, args, args[-1])
        elif node.target in SENDING:
            run.env[node] = yield from SENDING[node.target](*args, **kwargs)
        elif node.target is c10d.wait_tensor.default:
            run.env[node] = args[0]
        else:
            run.env[node] = run.run_node(node)
        observe(rank, node, run.env[node])
        for dead in run.user_to_last_uses.get(node, ()):
            del run.env[dead]
    raise AssertionError("a graph without outputs")


def _all_reduce(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    total = combine([args[0] for args in calls], _REDUCE[calls[0][1]])
    return [total.clone() for _ in calls]


def _all_gather(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    whole = torch.cat([args[0] for args in calls])
    return [whole.clone() for _ in calls]


def _reduce_scatter(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    total = combine([args[0] for args in calls], _REDUCE[calls[0][1]])
    return [part.clone() for part in total.chunk(len(calls))]


def _all_to_all(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    parts = [args[0].split(list(args[2])) for args in calls]
    results = []
    for index, args in enumerate(calls):
        sizes = [part[index].numel() for part in parts]
        if sizes != list(args[1]):
            raise BackendError(f"all-to-all: {sizes} elements arrive, {list(args[1])} are awaited")
        results.append(torch.cat([part[index] for part in parts]))
    return results


_COLLECTIVES: Mapping[Any, Callable[[Sequence[tuple[Any, ...]]], list[Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
}
