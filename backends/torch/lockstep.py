"""All ranks of a module in one process, in lock-step: no torch.distributed, always the same order.

Each rank interprets its graph until it meets a collective; when all ranks of the collective's
group are there, it is carried out and they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import combine
from partitioner.backends.torch.values import noted_values

c10d = torch.ops._c10d_functional
_REDUCE = {"sum": "sum", "product": "prod", "max": "max", "min": "min"}

#: A collective that a rank waits in: the operator, its arguments, the group's name.
Call = tuple[Any, tuple[Any, ...], str]
Run = Generator[Call, Any, Sequence[torch.Tensor]]


@dataclass
class Watch:
    """Values inside the graphs to be kept, and those that were made.

    Attributes:
        names: Local values by rank.
        seen: Their contents by rank, as far as the graphs that ran make them.
    """

    names: Mapping[int, Collection[str]] = field(default_factory=dict)
    seen: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def see(self, rank: int, node: fx.Node, made: object) -> None:
        """Keep what was asked for of what a node gave."""
        if self.names:
            wanted = self.names.get(rank, ())
            self.seen.setdefault(rank, {}).update(noted_values(node, made, wanted))


def run_lockstep(
    modules: Mapping[int, fx.GraphModule],
    inputs: Mapping[int, Sequence[torch.Tensor]],
    watch: Watch | None = None,
) -> dict[int, Sequence[torch.Tensor]]:
    """Run a pass on all ranks.

    Args:
        modules: Graph by rank.
        inputs: Arguments by rank.
        watch: Is shown what the graphs compute.

    Returns:
        Results by rank.

    Raises:
        BackendError: The ranks wait for each other for ever.
    """
    look = watch or Watch()
    runs = {
        rank: _interpret(module, inputs[rank], partial(look.see, rank))
        for rank, module in modules.items()
    }
    done: dict[int, Sequence[torch.Tensor]] = {}
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
            answers.update(zip(ranks, _carry_out(calls), strict=True))
    return done


def _ready(waiting: Mapping[int, Call]) -> list[tuple[int, ...]]:
    """Groups all of whose ranks wait in it."""
    found = []
    for name in sorted({call[2] for call in waiting.values()}):
        ranks = tuple(map(int, name.removeprefix("ranks_").split("_")))
        if all(rank in waiting and waiting[rank][2] == name for rank in ranks):
            found.append(ranks)
    return found


def _interpret(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], see: Callable[[fx.Node, object], None]
) -> Run:
    values: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    dying = _last_reads(module.graph)
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "output":
            results: Sequence[torch.Tensor] = args[0]
            return results
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.target in _COLLECTIVES:
            values[node] = yield (node.target, args, args[-1])
        elif node.target is c10d.wait_tensor.default:
            values[node] = args[0]
        else:
            values[node] = node.target(*args, **kwargs)
        see(node, values[node])
        for dead in dying.get(node, ()):
            values.pop(dead, None)
    raise AssertionError("a graph without outputs")


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What is read for the last time by each node."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.users:
            dying.setdefault(max(node.users, key=order.__getitem__), []).append(node)
    return dying


def _carry_out(calls: Sequence[Call]) -> list[torch.Tensor]:
    ops = {call[0] for call in calls}
    if len(ops) != 1:
        raise BackendError(f"ranks of {calls[0][2]} are in different collectives: {ops}")
    return _COLLECTIVES[calls[0][0]]([call[1] for call in calls])


def _all_reduce(calls: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    total = combine([args[0] for args in calls], _REDUCE[calls[0][1]])
    return [total.clone() for _ in calls]


def _all_gather(calls: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    whole = torch.cat([args[0] for args in calls])
    return [whole.clone() for _ in calls]


def _reduce_scatter(calls: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    total = combine([args[0] for args in calls], _REDUCE[calls[0][1]])
    return [part.clone() for part in total.chunk(len(calls))]


def _all_to_all(calls: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    parts = [args[0].split(list(args[2])) for args in calls]
    found = []
    for index, args in enumerate(calls):
        sizes = [part[index].numel() for part in parts]
        if sizes != list(args[1]):
            raise BackendError(f"all-to-all: {sizes} elements arrive, {list(args[1])} are awaited")
        found.append(torch.cat([part[index] for part in parts]))
    return found


_COLLECTIVES: Mapping[Any, Callable[[Sequence[tuple[Any, ...]]], list[torch.Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
}
