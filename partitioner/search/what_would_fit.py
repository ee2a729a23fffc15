"""Changes of a request that make it feasible, each proven by a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import now_s
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import SearchError

#: Seconds to look for enough devices, in all and for one count; never more than the request's.
BUDGET_S = 6.0
ONE_COUNT_S = 2.0
#: Most devices that are tried, as a multiple of those of the request.
MOST_TIMES = 16
#: Multiples of the missing bytes that are tried in turn where no plan is known to fit.
TIMES_SHORT = (1, 2, 4)
#: Gap of these searches: any plan that fits will do.
ANY_GAP = 0.99


@dataclass(frozen=True)
class Change:
    """A change of a request under which a plan is known."""

    text: str  #: In words, as of the command line.
    #: The limit of memory that it gives each device; None for another change.
    memory_bytes: int | None = None


def what_would_fit(
    refusal: Infeasible, graph: Graph, cluster: Cluster, request: Request, limit_s: float
) -> tuple[Change, ...]:
    """The changes of a refused request that make it feasible; a plan is known for each.

    Memory: a limit that the plan nearest to fitting meets; the least one if the refusal is
    proven to be short of the fewest bytes. Devices: the least count found within `BUDGET_S`
    at the same limit, where all devices and links are equal. `limit_s` is for all of it.
    """
    rules, deadline, longest_s = Rules.of(graph), now_s() + limit_s, 0.0

    def fits(target: Cluster) -> bool:
        nonlocal longest_s
        begin_s = now_s()
        left_s = min(ONE_COUNT_S, request.time_limit_s, deadline - begin_s)
        if left_s <= max(0.0, longest_s - ONE_COUNT_S):  # what a search takes behind its limit
            return False
        if left_s < ONE_COUNT_S and len(target) > len(cluster):
            return False  # on many devices a first plan is found, however long that takes
        quick = replace(request, time_limit_s=left_s, gap=ANY_GAP)
        try:
            find_plan(graph, target, quick, Budget.of(quick), rules)
        except (Infeasible, SearchError, ConstraintError):  # no plan, too many devices, no mesh
            return False
        finally:
            longest_s = max(longest_s, now_s() - begin_s)
        return True

    changes = []
    if refusal.device is not None and refusal.bytes_short > 0:
        memory = cluster.devices[refusal.device].memory_bytes
        limits = [memory + math.ceil(times * refusal.bytes_short) for times in TIMES_SHORT]
        # Of sessions, more bytes count than those of tensors.
        known = refusal.closest is not None and not executor_of(graph).in_sessions
        for limit in limits[:1] if known else limits:
            if known or fits(cluster.with_memory(limit)):
                text = f"with --memory {limit} ({units.size(limit)})"
                changes.append(Change(text, memory_bytes=limit))
                break
    if cluster.is_uniform and not request.constraints.bound and request.mesh is None:
        (level,), device = cluster.levels, cluster.devices[0]
        count = _least_count(
            len(cluster),
            lambda count: fits(
                replace(cluster, devices=(device,) * count, levels=(replace(level, size=count),))
            ),
            min(BUDGET_S, deadline - now_s()),
            math.ceil(kept_bytes(graph) / device.memory_bytes),
        )
        if count is not None:
            changes.append(Change(f"on {count} devices"))
    return tuple(changes)


def _least_count(
    devices: int, fits: Callable[[int], bool], limit_s: float, least: int
) -> int | None:
    """The least count above `devices` found to fit, by bisection; None if none was in time.

    None below `least` fits.
    """
    deadline = now_s() + limit_s
    low, high = devices, 2 * devices
    if least > MOST_TIMES * devices:
        return None
    while high < least or not fits(high):
        low, high = high, 2 * high
        if high > MOST_TIMES * devices or now_s() > deadline:
            return None
    while high - low > 1 and now_s() < deadline:
        middle = (low + high) // 2
        if middle >= least and fits(middle):
            high = middle
        else:
            low = middle
    return high
