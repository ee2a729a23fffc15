"""Placement problems as files of msr-fiddle/dnn-partitioning, and what these cannot say."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import placement
from helpers.problems.valid_problems import validate
from partitioner.solver.formats.dnnp import Instance, parse
from partitioner.solver.formats.dnnp_problem import to_file, to_problem
from partitioner.solver.joint.solve import solve
from partitioner.solver.problem import Item, Problem
from partitioner.solver.referee import evaluate_choices


def two_values(seed: int) -> Problem:
    """Every second node makes two values; its last reader reads the second."""
    problem = placement(seed, 6, 3)
    items, edges = list(problem.items), list(problem.edges)
    for node in range(0, 6, 2):
        outgoing = [index for index, edge in enumerate(edges) if edge.u == node]
        if len(outgoing) < 2:
            continue
        last = outgoing[-1]
        table = {}
        for pair, paid in edges[last].items.items():
            old = items[paid[0]]
            items.append(replace(old, load_s=tuple(2 * s for s in old.load_s)))
            table[pair] = (len(items) - 1,)
        edges[last] = replace(edges[last], items=table)
    return replace(problem, items=tuple(items), edges=tuple(edges))


def same_plan(instance: Instance, chosen: Sequence[int]) -> list[int]:
    return [chosen[min(group)] for group in instance.members]


def spread(problem: Problem, chosen: Sequence[int]) -> bool:
    """Whether some node's results go to several other devices."""
    away: dict[int, set[int]] = {}
    for edge in problem.edges:
        if chosen[edge.v] != chosen[edge.u]:
            away.setdefault(edge.u, set()).add(chosen[edge.v])
    return any(len(devices) > 1 for devices in away.values())


@pytest.mark.parametrize("draw", [lambda seed: placement(seed, 6, 3), two_values])
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_costs_the_same_but_for_repeated_sends(
    draw: Callable[[int], Problem], seed: int
) -> None:
    problem = draw(seed)
    file = to_file(problem)
    assert file.uneven == file.pinned == 0
    instance = parse(file.data)
    again = to_problem(instance)
    validate(again)
    assert len(again.nodes) == len(problem.nodes)
    rng = random.Random(seed)
    equal = 0
    for _ in range(60):
        chosen = [rng.randrange(3) for _ in problem.nodes]
        true, written = (
            evaluate_choices(problem, chosen).load_s,
            evaluate_choices(again, same_plan(instance, chosen)).load_s,
        )
        assert all(b <= a + 1e-9 for a, b in zip(true, written, strict=True))
        if not spread(problem, chosen):
            assert written == pytest.approx(true)
            equal += 1
    assert equal


@pytest.mark.parametrize("seed", range(6))
def test_on_two_devices_the_optimum_is_the_same(seed: int) -> None:
    problem = placement(seed, 7, 2)
    best = brute_force(problem, "throughput")
    assert best is not None
    answer = solve(to_problem(parse(to_file(problem).data)), gap=0.0)
    assert answer.cost == pytest.approx(best[1], rel=1e-4)


def test_sizes_are_all_that_a_node_holds_and_the_limit_is_the_smallest() -> None:
    problem = replace(placement(1, 4, 2), limit_bytes=(20.0, 30.0))
    data = to_file(problem).data
    assert data["maxSizePerFPGA"] == 20.0
    held = [sum(problem.items[i].bytes[0] for i in hold.items[0]) for hold in problem.holds]
    assert [node["size"] for node in data["nodes"]] == held
    free = to_file(replace(problem, limit_bytes=(math.inf,) * 2)).data
    assert free["maxSizePerFPGA"] == sum(held)


def test_unlike_devices_are_counted_and_the_largest_written() -> None:
    problem = placement(2, 4, 2)
    first = tuple(
        replace(choice, load_s=tuple((1 + d) * s for d, s in enumerate(choice.load_s)))
        for choice in problem.nodes[0]
    )
    slow = max(max(choice.load_s) for choice in first)
    file = to_file(replace(problem, nodes=(first, *problem.nodes[1:])))
    assert file.uneven == 1
    assert file.figures > 1
    assert file.data["nodes"][0]["fpgaLatency"] == slow


def test_nodes_pinned_to_one_device_share_a_colour() -> None:
    problem = placement(0, 5, 2)

    def pin(node: int, device: int, of: Problem) -> Problem:
        edges = tuple(
            replace(
                edge,
                out_class=(edge.out_class[device],) if edge.u == node else edge.out_class,
                in_class=(edge.in_class[device],) if edge.v == node else edge.in_class,
            )
            for edge in of.edges
        )
        nodes = tuple((c[device],) if v == node else c for v, c in enumerate(of.nodes))
        holds = tuple(
            replace(hold, items=(hold.items[device],)) if hold.node == node else hold
            for hold in of.holds
        )
        return replace(of, nodes=nodes, edges=edges, holds=holds)

    file = to_file(pin(4, 0, pin(3, 1, pin(1, 1, problem))))
    assert file.pinned == 3
    colours = [node["colorClass"] for node in file.data["nodes"]]
    assert colours == [None, 1, None, 1, 0]
    assert len(parse(file.data).members) == 4


def test_a_value_that_costs_nothing_is_an_edge_all_the_same() -> None:
    problem = placement(0, 3, 2)
    free = tuple(Item((0.0, 0.0), item.bytes, item.first, item.last) for item in problem.items)
    data = to_file(replace(problem, items=free)).data
    assert {edge["cost"] for edge in data["edges"]} == {0.0}
    assert len(data["edges"]) == len({(edge.u, edge.v) for edge in problem.edges})
