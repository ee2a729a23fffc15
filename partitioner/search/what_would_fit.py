"""What would make an infeasible request feasible: computed relaxations, not guesses."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from partitioner import units
from partitioner.cost_model.cluster import Cluster
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.solver import Infeasible
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import SearchError

#: Seconds that looking for enough devices may take in all, and for one count.
BUDGET_S = 6.0
ONE_COUNT_S = 2.0
#: More than so many times the devices asked for are not looked at.
MOST_TIMES = 16
#: Multiples of the bytes that are short which are tried in turn where no plan is known to fit.
TIMES_SHORT = (1, 2, 4)
#: Any plan that fits will do.
ANY_GAP = 0.99


def relaxed(refusal: Infeasible, ways: tuple[str, ...]) -> Infeasible:
    """The refusal, with what would make it feasible in its message."""
    if not ways:
        return refusal
    return Infeasible(
        f"{refusal}; it fits {' or '.join(ways)}",
        device=refusal.device,
        position=refusal.position,
        name=refusal.name,
        bytes_short=refusal.bytes_short,
        proven=refusal.proven,
        closest=refusal.closest,
        relaxations=ways,
    )


def relaxations(
    graph: Graph, cluster: Cluster, request: Request, refusal: Infeasible, rules: Rules
) -> tuple[str, ...]:
    """Ways to make a refused request feasible, each tried: a plan for it is known.

    Memory: a limit that the plan nearest to fitting meets; the least one if the refusal is
    proven to be short of the fewest bytes. Devices: the least count found within `BUDGET_S`
    at the same limit, where all devices and links are alike.

    Args:
        graph: The model.
        cluster: What was asked for.
        request: What was asked of the search.
        refusal: Why it was refused.
        rules: The graph's rules.
    """
    found = []
    if refusal.device is not None and refusal.bytes_short > 0:
        held = cluster.devices[refusal.device].memory_bytes
        limits = [held + math.ceil(times * refusal.bytes_short) for times in TIMES_SHORT]
        known = refusal.closest is not None
        for limit in limits[:1] if known else limits:
            if known or _fits(graph, cluster.with_memory(limit), request, rules):
                found.append(f"with --memory {limit} ({units.size(limit)})")
                break
    free = not request.constraints.bound
    if cluster.is_uniform and free and request.mesh is None:
        count = _enough(graph, cluster, request, rules)
        if count is not None:
            found.append(f"on {count} devices")
    return tuple(found)


def _enough(graph: Graph, cluster: Cluster, request: Request, rules: Rules) -> int | None:
    """The least count of devices found that the request fits on; None if none was in time."""
    deadline = time.monotonic() + BUDGET_S
    asked = len(cluster)
    low, high = asked, 2 * asked
    while not _fits(graph, _of(cluster, high), request, rules):
        low, high = high, 2 * high
        if high > MOST_TIMES * asked or time.monotonic() > deadline:
            return None
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        if _fits(graph, _of(cluster, middle), request, rules):
            high = middle
        else:
            low = middle
    return high


def _of(cluster: Cluster, count: int) -> Cluster:
    """The same devices and links, of another number."""
    (level,) = cluster.levels
    devices = (cluster.devices[0],) * count
    return replace(cluster, devices=devices, levels=(replace(level, size=count),))


def _fits(graph: Graph, cluster: Cluster, request: Request, rules: Rules) -> bool:
    quick = replace(request, time_limit_s=ONE_COUNT_S, gap=ANY_GAP)
    try:
        find_plan(graph, cluster, quick, Budget.of(quick, lambda _text: None), rules)
    except (Infeasible, SearchError):  # no plan, or more devices than this is planned for
        return False
    return True
