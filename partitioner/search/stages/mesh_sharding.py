"""Shardings of a whole graph over one mesh within a limit of memory: stages are cut from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.search.stages.figures import Sharding
from partitioner.solver import Infeasible
from partitioner.solver.joint.shortage import shortage_message

#: Shardings that were found, by the digest of the graph that was searched, the number of its nodes
#: that may be left out, the size of the mesh and the limit.
Known = dict[tuple[str, int, int, int], Sharding]
#: Limits that are tried where the first is a guess: within the least bytes that are proven to be
#: needed a search may find no plan, though there is one.
GUESSES = 3


def sharded_within(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    size: int,
    micro_batches: int,
    known: Known,
    limit: int,
) -> Sharding:
    """The best plan of the graph on one mesh of so many devices, of `limit` bytes each.

    It takes half of what is left of the clock: its cuts take the rest, in training half of the
    steps, too. One that is `known` is not searched again, and a new one becomes known.
    """
    key = graph.digest, len(graph.optional), size, limit
    if key in known:
        return known[key]
    first = cluster.first(size).with_memory(max(1, limit))
    spaces = request.inside_stages(size, micro_batches, len(cluster) // size).over(size).on(graph)
    work = budget.work.share(2 if graph.backward else 1).of_the_clock(2)
    try:
        outcome = find_plan(graph, first, spaces, replace(budget, work=work, best_s=math.inf))
    finally:
        if work.stopped:
            budget.work.cut_off()
    known[key] = Sharding(outcome.graph, outcome.plan)
    return known[key]


def first_sharding(
    sharded: Callable[[int], Sharding], limit: int, memory: int, *, is_guess: bool
) -> Sharding:
    """The best plan within a limit or, if that is a guess, the one that is short of fewest bytes.

    The limit of several lanes is a guess: stages of that plan may fit, or show which does not.

    Args:
        sharded: Gives the best plan of a mesh whose devices have so many bytes.
        memory: Bytes that each device has, which a refusal names.
        is_guess: Whether stages of a plan above the limit may fit.

    Raises:
        Infeasible: Nothing fits the limit, and it is no guess, or no such plan was found.
    """
    for left in reversed(range(GUESSES)):
        try:
            return sharded(limit)
        except Infeasible as error:
            if not (is_guess and left and error.bytes_short):
                raise _of_devices(error, limit, memory) from None
            limit += math.ceil(error.bytes_short)
    raise AssertionError("the last guess returns or raises")


def _of_devices(error: Infeasible, limit: int, memory: int) -> Infeasible:
    """A refusal of devices of `limit` bytes, as one of devices that have `memory`."""
    held = limit + math.ceil(error.bytes_short)
    if error.device is None or held <= memory or limit == memory:
        return error
    where = f"on device {error.device}" + (f" at {error.name!r}" if error.name else "")
    text = shortage_message(
        proven=False, least=False, where=where, short=held - memory, held=held, limit=memory
    )
    return Infeasible(
        text,
        device=error.device,
        position=error.position,
        name=error.name,
        bytes_short=held - memory,
        proven=False,
    )


def least_memory(cluster: Cluster) -> int:
    """Bytes of the device that has fewest."""
    return min(device.memory_bytes for device in cluster.devices)


def limit_bytes(graph: Graph, cluster: Cluster, size: int) -> int:
    """Bytes that the whole model may take on each device of one mesh.

    A device holds what is kept of one stage alone. But the first of several stages holds the
    activations of as many micro-batches as there are stages, which are as many bytes as those of
    one micro-batch of the whole model.
    """
    if size == 1 and not graph.optional:  # there is one plan
        return 4 * sum(type_.nbytes for type_ in graph.types.values())
    lanes = len(cluster) // size
    return least_memory(cluster) + kept_bytes(graph) // size * (lanes - 1) // lanes


def sharded_for(
    sizes: Sequence[int],
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    micro_batches: int,
    known: Known,
) -> dict[int, Sharding]:
    """A sharding of one graph for each of these numbers of devices of a stage, ascending.

    Raises:
        Infeasible: One was not found.
    """
    shardings: dict[int, Sharding] = {}
    for index, size in enumerate(sizes):
        share, limit = budget.share(len(sizes) - index), limit_bytes(graph, cluster, size)
        sharded = partial(
            sharded_within, graph, cluster, request, share, size, micro_batches, known
        )
        shardings[size] = first_sharding(sharded, limit, least_memory(cluster), is_guess=True)
        graph = shardings[size].graph
    return shardings
