"""Data parallelism, as one trains without a planner, to compare a plan with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Outcome, OutOfTime, best_of
from partitioner.search.request import Budget, Request
from partitioner.search.stages.micro_batch_counts import BatchBytes, Trial
from partitioner.search.stages.pipelines import least_memory
from partitioner.search.ways.parts import Parts
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.kinds.parallel import DATA
from partitioner.strategies.spaces import Family

#: Share of the time limit that it has at least, behind a search that took it all.
LEAST_SHARE = 0.1
#: Numbers of micro-batches that are tried at most.
MOST_COUNTS = 3
#: About the seconds that it takes for each node of a graph.
NODE_S = 1e-3


def beside_data_parallelism(outcome: Outcome, parts: Parts, left_s: float) -> Outcome:
    """Plan data parallelism of the whole batch, if no space that was searched is that.

    Where devices do not hold their parts of the batch at once, it is planned with as few
    micro-batches as they hold. Its plan is one more candidate. Where there is none, within memory
    or within the seconds that are left of the time limit, it is among what failed. The outcome is
    the same in inference, on one device, of data parallelism itself, and where devices have unequal
    parts of a batch or the whole batch has no graph.
    """
    cluster, request = parts.cluster, parts.request
    devices, graph = len(cluster), _whole(outcome)
    is_known = any(plan.space.name == DATA for plan in outcome.candidates)
    if graph is None or not graph.backward or devices == 1 or is_known or request.parallel == DATA:
        return outcome
    usual = Request(
        objective=request.objective,
        parallel=DATA,
        time_limit_s=request.time_limit_s,
        gap=request.gap,
        solver=request.solver,
        seed=request.seed,
    )
    seconds = max(left_s, LEAST_SHARE * request.time_limit_s)
    budget = Budget.of(usual, parts.clock.say).anew(seconds)
    late = OutOfTime(f"not planned within {request.time_limit_s:g} s")
    space = Family(DATA, (DeviceMesh.line(devices, DATA),), (), symmetric=False)
    try:
        asked = usual.over(devices).on(graph)
        asked.constraints.check(graph, devices)
        _check_room(graph, cluster)
        if NODE_S * len(graph.nodes) > seconds:
            raise late
        found = find_plan(graph, cluster, asked, budget)
    except (Infeasible, OutOfTime) as error:
        is_late = isinstance(error, Infeasible) and budget.work.stopped and not error.proven
        in_parts = None if is_late or error is late else _in_parts(usual, budget, parts)
        if in_parts is None:
            return replace(outcome, failed=(*outcome.failed, (space, late if is_late else error)))
        found = in_parts
    except PartitionerError:  # it has no such plan, whatever the memory is
        return outcome
    plan = best_of(found.candidates, request.objective, devices)
    found_plan = replace(plan, space=space, bounds_space=False)
    return replace(outcome, candidates=(*outcome.candidates, found_plan))


def _in_parts(request: Request, budget: Budget, parts: Parts) -> Outcome | None:
    """The plan in as few micro-batches as devices hold, of `MOST_COUNTS` numbers; None if none is.

    None, too, where a step in so many is not proven to compute what the whole batch does.
    """
    devices, limit = len(parts.cluster), least_memory(parts.cluster)
    try:
        counts = parts.model.even_counts()[1:]
    except PartitionerError:  # there is no batch
        return None
    kept, moving = parts.held()
    enough = (count for count in counts if kept + moving / (devices * count) <= limit)
    for count in islice(enough, MOST_COUNTS):
        if parts.why_not(count) or budget.work.late:
            break
        asked = replace(request, micro_batches=count)
        search = replace(parts, request=asked).search(
            lambda n: iter((parts.model.in_micro_batches(n),)), budget, (devices,)
        )
        with suppress(PartitionerError):
            return search.all((Trial(count),))
    return None


def _whole(outcome: Outcome) -> Graph | None:
    """The graph of the whole batch, which computes nothing again; None if there is none."""
    is_whole = outcome.plan.micro_batches is None and not outcome.plan.blocks
    graph = outcome.whole or (outcome.of if is_whole else None)
    return chosen(graph, frozenset()) if graph is not None and graph.optional else graph


def _check_room(graph: Graph, cluster: Cluster) -> None:
    """Refuse, by an Infeasible, what each device would hold at least: all weights, and its part."""
    held = BatchBytes.of(graph, cluster)
    least = held.kept + held.moving // len(cluster)
    limit = min(device.memory_bytes for device in cluster.devices)
    if least > limit:
        each = f"each device would hold {units.size(least)} of {units.size(limit)}"
        raise Infeasible(each, bytes_short=least - limit, proven=True)
