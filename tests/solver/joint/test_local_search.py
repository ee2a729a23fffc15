"""Moves, local search, and plans of short latency."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import hops, placement, shared_holds, spmd, uneven
from partitioner.solver.joint.incumbents import critical_path_s
from partitioner.solver.joint.local_search import State, local_search, tables
from partitioner.solver.problem import Edge, Problem
from partitioner.solver.referee import evaluate_choices, latency_s


@pytest.mark.parametrize("seed", range(5))
def test_moves_keep_the_sums(seed: int) -> None:
    problem = placement(seed, 8, 3, limit=20, per_group=2)
    rng = random.Random(seed)
    state = State(tables(problem), [0] * 8, bytes_matter=True)
    for _ in range(200):
        state.move(rng.randrange(8), rng.randrange(6))
    outcome = evaluate_choices(problem, state.chosen)
    assert state.load == pytest.approx(outcome.load_s)
    assert state.peaks() == pytest.approx(outcome.peak_bytes)
    assert state.excess_bytes() == pytest.approx(outcome.excess_bytes)


def test_local_search_improves_and_repeats_itself() -> None:
    problem = placement(4, 20, 3)
    worse = evaluate_choices(problem, [0] * 20).step_s
    first, second = (local_search(problem, [0] * 20, effort=3000, seed=7) for _ in range(2))
    assert first == second
    assert evaluate_choices(problem, first).step_s < 0.6 * worse


def test_local_search_takes_no_forbidden_pair() -> None:
    problem = placement(4, 12, 2)
    edges = tuple(replace(edge, forbidden=frozenset({(0, 1)})) for edge in problem.edges)
    problem = replace(problem, edges=edges)
    plan = local_search(problem, [1] * 12, effort=3000)
    assert evaluate_choices(problem, plan).step_s < evaluate_choices(problem, [1] * 12).step_s


@pytest.mark.parametrize("seed", range(5))
def test_the_critical_path_bounds_the_latency(seed: int) -> None:
    problem = placement(seed, 6, 2)
    best = brute_force(problem, "latency")
    assert best is not None
    assert critical_path_s(problem) <= best[1] * (1 + 1e-9)


def allowed(problem: Problem) -> Problem:
    """The problem without forbidden pairs."""
    edges = tuple(replace(edge, forbidden=frozenset()) for edge in problem.edges)
    return replace(problem, edges=edges)


def plain_latency_s(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of one request, counted plainly: `latency_s` says how."""
    free = [0.0] * problem.devices
    ready: dict[int, float] = {}  # seconds at which each item is there
    done: list[float] = []
    following: dict[int, list[tuple[int, int]]] = {}  # node -> (item, producer), in order
    for index, producer, anchor in _anchors(problem, chosen):
        following.setdefault(anchor, []).append((index, producer))
    operands: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        operands[edge.v].append((edge.u, edge.items.get(edge.pair(chosen), ())))
    for node, choices in enumerate(problem.nodes):
        start = 0.0
        for producer, items in operands[node]:
            start = (
                max([start, *(ready[i] for i in items)]) if items else max(start, done[producer])
            )
        done.append(_occupy(free, choices[chosen[node]].load_s, start))
        for index, producer in following.get(node, ()):
            ready[index] = _occupy(free, problem.items[index].load_s, done[producer])
    return max([0.0, *done, *free])


def _anchors(problem: Problem, chosen: Sequence[int]) -> list[tuple[int, int, int]]:
    """(item, producer, node after which it runs) of every item that takes time, in order."""
    last_busy = [-1] * problem.devices
    seen: set[int] = set()
    anchors = []
    incoming: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        incoming[edge.v].append(edge)
    for node, edges in enumerate(incoming):
        for edge in edges:
            source = problem.nodes[edge.u][chosen[edge.u]].load_s
            for index in edge.items.get(edge.pair(chosen), ()):
                if index in seen:
                    continue
                seen.add(index)
                load = problem.items[index].load_s
                receivers = [d for d in range(problem.devices) if load[d] > 0 and source[d] <= 0]
                anchor = min(max([edge.u, *(last_busy[d] for d in receivers)]), node - 1)
                anchors.append((index, edge.u, anchor))
        for device, seconds in enumerate(problem.nodes[node][chosen[node]].load_s):
            if seconds > 0:
                last_busy[device] = node
    alone: dict[int, int] = {}  # items of holds alone, each with the first of their nodes
    held = ((hold.node, i) for hold in problem.holds for i in hold.items[chosen[hold.node]])
    for node, index in held:
        if any(problem.items[index].load_s) and index not in seen:
            alone[index] = min(node, alone.get(index, node))
    following = sorted(alone.items(), key=lambda entry: (entry[1], entry[0]))
    return anchors + [(i, node, node) for i, node in following]


def _occupy(free: list[float], load: Sequence[float], start: float) -> float:
    """Run one task on the devices that it loads; return when it is finished."""
    used = [d for d, seconds in enumerate(load) if seconds > 0]
    start = max([start, *(free[d] for d in used)])
    for device in used:
        free[device] = start + load[device]
    return max([start, *(free[d] for d in used)])


LATE_PROBLEMS = {
    "one group": lambda seed: spmd(seed, 14, 4, forbid=0.0),
    "hops": lambda seed: allowed(hops(seed, 14)),
    "devices": lambda seed: placement(seed, 14, 3, per_group=2),
    "unlike devices": lambda seed: uneven(placement(seed, 14, 3)),
    "shared": lambda seed: shared_holds(placement(seed, 14, 2), seed),
}


@pytest.mark.parametrize("kind", LATE_PROBLEMS)
def test_the_referees_latency_is_that_counted_plainly(kind: str) -> None:
    for seed in range(12):
        problem: Problem = LATE_PROBLEMS[kind](seed)
        rng = random.Random(seed)
        for _ in range(20):
            chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
            assert latency_s(problem, chosen) == plain_latency_s(problem, chosen)
