"""Each idle device gets the node whose move costs least, if memory and the others allow it."""

import math
from collections.abc import Sequence

import pytest

from partitioner.problem.idle_devices import cover
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem


def problem(
    *nodes: Sequence[tuple[float, ...]],
    limits: Sequence[float] = (math.inf, math.inf, math.inf),
    edges: tuple[Edge, ...] = (),
    held: Sequence[float] = (),
) -> Problem:
    """Nodes by the seconds of their choices on three devices; `held` has the bytes of each node."""
    choices = tuple(
        tuple(Choice(load, at, f"choice {at}") for at, load in enumerate(loads)) for loads in nodes
    )
    items = tuple(
        Item((0.0,) * 3, tuple(nbytes * (load > 0) for load in loads), 0, len(nodes) - 1)
        for nbytes, of in zip(held, nodes, strict=False)
        for loads in of
    )
    counts = [len(of) for of in nodes]
    holds = tuple(
        Hold(node, tuple((sum(counts[:node]) + at,) for at in range(counts[node])))
        for node in range(len(held))
    )
    names = tuple(f"n{node}" for node in range(len(nodes)))
    return Problem(3, tuple(limits), choices, names, edges, holds, items)


def anywhere(seconds: float) -> list[tuple[float, ...]]:
    """A node that takes so long on each of the devices."""
    return [tuple(seconds * (device == at) for device in range(3)) for at in range(3)]


def test_each_idle_device_gets_the_node_whose_move_costs_least() -> None:
    """Device 1 relieves device 0 of most, device 2 gets the least of what is left there."""
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (0, 0, 0)) == (1, 0, 2)


def test_devices_with_work_before_an_idle_one_keep_it() -> None:
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (0, 1, 0)) == (0, 1, 2)


def test_a_plan_without_idle_devices_stays() -> None:
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (2, 0, 1)) == (2, 0, 1)


def test_no_plan_if_a_later_device_gets_nothing() -> None:
    """Two nodes are no work for three devices: a move would leave another one idle."""
    assert cover(problem(anywhere(3.0), anywhere(2.0)), (0, 0)) is None


def test_a_choice_on_two_devices_is_work_for_both() -> None:
    both = [(4.0, 0.0, 0.0), (0.0, 2.0, 2.0)]
    assert cover(problem(both, anywhere(1.0)), (0, 0)) == (1, 0)


def test_a_move_that_leaves_as_many_idle_is_none() -> None:
    """Device 2 would get the node that alone is the work of devices 0 and 1."""
    assert cover(problem([(2.0, 2.0, 0.0), (0.0, 0.0, 3.0)]), (0,)) is None


def test_of_equal_longest_loads_the_least_sum_decides() -> None:
    """Both small nodes can go to device 2 beside a longer one: the second is faster there."""
    slow, fast = [(1.0, 0.0, 0.0), (0.0, 0.0, 2.0)], [(1.0, 0.0, 0.0), (0.0, 0.0, 1.5)]
    assert cover(problem(anywhere(9.0), slow, fast), (1, 0, 0)) == (1, 0, 1)


def test_costs_that_differ_by_rounding_are_equal() -> None:
    """A longest load that is lower by rounding does not outweigh a longer sum."""
    slow, fast = [(1.0, 0.0, 0.0), (0.0, 0.0, 8.0)], [(1.0, 0.0, 0.0), (0.0, 0.0, 2.0)]
    longest = [(0.0, 9.0, 0.0)], [(0.0, 1e-15, 0.0)]
    assert cover(problem(*longest, slow, fast), (0, 0, 0, 0)) == (0, 0, 0, 1)


@pytest.mark.parametrize(("limit", "expected"), [(5.0, (1, 0, 2)), (4.0, (0, 1, 2)), (2.0, None)])
def test_a_device_gets_no_node_that_its_memory_does_not_hold(
    limit: float, expected: tuple[int, ...] | None
) -> None:
    nodes = [anywhere(seconds) for seconds in (3.0, 2.0, 1.0)]
    limits = math.inf, limit, math.inf
    assert cover(problem(*nodes, limits=limits, held=(5.0, 4.0, 3.0)), (0, 0, 0)) == expected


def test_a_forbidden_pair_is_no_move() -> None:
    """The longest node cannot leave the device of its neighbour."""
    others = frozenset((u, v) for u in range(3) for v in range(3) if u != v)
    edge = Edge(0, 1, (0, 1, 2), (0, 1, 2), {}, others)
    nodes = [anywhere(seconds) for seconds in (3.0, 2.0, 1.0, 0.5)]
    assert cover(problem(*nodes, edges=(edge,)), (0, 0, 0, 0)) == (0, 0, 1, 2)
