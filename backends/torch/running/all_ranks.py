"""All ranks of a module in one process, in lock-step: no torch.distributed, always the same order.

Each rank interprets its graph up to a collective; when all ranks of the collective's group have
reached it, it is carried out and they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import combine
from partitioner.backends.torch.graphs.emit import PassGraph, RankGraphs, emit_rank
from partitioner.backends.torch.graphs.notes import noted_values
from partitioner.backends.torch.operators.sent import SENDING, Call
from partitioner.backends.torch.state.shards import part_of, region_on, whole_of
from partitioner.ir.graph import Graph
from partitioner.ir.program import Output, Programs

c10d = torch.ops._c10d_functional
_REDUCE = {"sum": "sum", "product": "prod", "max": "max", "min": "min"}

Values = dict[str, Tensor]
#: Shows a rank's node and its result.
Observe = Callable[[int, fx.Node, object], None]
#: A rank's pass: yields a collective, is sent its result, and returns the pass's results.
Run = Generator[Call, Any, Sequence[Tensor]]


@dataclass(frozen=True)
class Step:
    """Whole results of a step, by value of the graph.

    Attributes:
        results: Outputs of the forward pass, written buffers included.
        gradients: Outputs of the backward pass; empty for inference.
        kept: The local values to keep, by rank and name, as far as the graphs make them.
    """

    results: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


class AllRanks:
    """The graphs of all ranks, run in lock-step.

    Args:
        ranks: Their graphs; None makes them.

    Raises:
        BackendError: A graph cannot be made.
    """

    def __init__(
        self, programs: Programs, graph: Graph, ranks: Sequence[RankGraphs] | None = None
    ) -> None:
        self.programs = programs
        self.graph = graph
        if ranks is None:
            cpu = torch.device("cpu")
            ranks = [emit_rank(programs, rank, graph, cpu) for rank in range(len(programs.ranks))]
        self.ranks = tuple(ranks)

    def step(
        self,
        inputs: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        keep: Mapping[int, Collection[str]] | None = None,
    ) -> Step:
        """Run the forward pass and, in training, the backward pass.

        Args:
            keep: Local values to return beside the outputs, by rank.

        Raises:
            BackendError: The ranks deadlock.
        """
        kept: dict[int, Values] = {}

        def observe(rank: int, node: fx.Node, result: object) -> None:
            if keep:
                kept.setdefault(rank, {}).update(noted_values(node, result, keep.get(rank, ())))

        values = self.start(inputs, stored)
        self._run(values, {r: graphs.forward for r, graphs in enumerate(self.ranks)}, observe)
        backward = {r: g.backward for r, g in enumerate(self.ranks) if g.backward is not None}
        if not backward:
            return Step(dict(self._whole(values, late=False)), {}, kept)
        self._run(values, backward, observe)
        late = dict(self._whole(values, late=True))
        return Step(dict(self._whole(values, late=False)), late, kept)

    def start(self, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[Values]:
        """The local values of each rank before a step, from whole ones."""
        return [self._start(rank, inputs, stored) for rank in self.ranks]

    def _start(
        self, rank: RankGraphs, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> Values:
        """Local values before a step."""
        values = {
            name: part_of(inputs[part.whole], part.region) for name, part in rank.inputs.items()
        }
        local = {home.name: (value, home.placement) for value, home in self.programs.homes.items()}
        for name in rank.stored:
            value, placement = local[name]
            values[name] = part_of(stored[value], region_on(placement, rank.rank))
        return values

    def _run(
        self, values: Sequence[Values], passes: Mapping[int, PassGraph], observe: Observe
    ) -> None:
        """Run a pass, whose results are added to the values by rank."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graphs have their casts
            results = run_lockstep(
                {rank: graph.module for rank, graph in passes.items()},
                {r: [values[r][name] for name in graph.arguments] for r, graph in passes.items()},
                observe,
            )
        for rank, tensors in results.items():
            values[rank].update(zip(passes[rank].results, tensors, strict=True))

    def _whole(self, values: Sequence[Values], *, late: bool) -> Iterator[tuple[str, Tensor]]:
        """Outputs of the forward pass or, `late`, of the backward pass, joined of all ranks'."""
        by_output: dict[str, list[tuple[int, Output]]] = {}
        for rank, graphs in enumerate(self.ranks):
            for output in graphs.outputs:
                if (output.value in graphs.forward.results) != late:
                    by_output.setdefault(output.whole, []).append((rank, output))
        for name, outputs in by_output.items():
            parts = [(output.region, values[rank][output.value]) for rank, output in outputs]
            yield name, whole_of(parts, self.programs.outputs[name].shape)


# Lock-step ---------------------------------------------------------------------------------------


def run_lockstep(
    modules: Mapping[int, fx.GraphModule],
    arguments: Mapping[int, Sequence[Tensor]],
    observe: Observe = lambda _rank, _node, _result: None,
) -> dict[int, Sequence[Tensor]]:
    """Results of a pass, by rank.

    Args:
        observe: Is shown the result of every node.

    Raises:
        BackendError: The ranks wait for each other for ever.
    """
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
    rank: int, module: fx.GraphModule, arguments: Sequence[Tensor], observe: Observe
) -> Run:
    values: dict[fx.Node, Any] = {}
    left = iter(arguments)
    last_reads = _last_reads(module.graph)
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(left)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "output":
            results: Sequence[Tensor] = args[0]
            return results
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.target in _COLLECTIVES:
            values[node] = yield (node.target, args, args[-1])
        elif node.target in SENDING:
            values[node] = yield from SENDING[node.target](*args, **kwargs)
        elif node.target is c10d.wait_tensor.default:
            values[node] = args[0]
        else:
            values[node] = node.target(*args, **kwargs)
        observe(rank, node, values[node])
        for dead in last_reads.get(node, ()):
            values.pop(dead, None)
    raise AssertionError("a graph without outputs")


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes whose results each node is the last to read."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    last_reads: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.users:
            last_reads.setdefault(max(node.users, key=order.__getitem__), []).append(node)
    return last_reads


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
