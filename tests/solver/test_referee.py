"""The referee against sums done by hand; the problem's own checks."""

import math
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.valid_problems import validate
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem, SolverError
from partitioner.solver.referee import evaluate_choices

INF = math.inf


def two_devices() -> Problem:
    """a -> b, a -> c; each node takes 3 s on either of two devices; a send takes 1 s on both."""
    on = (Choice((3.0, 0.0), 0), Choice((0.0, 3.0), 1))
    send = {(0, 1): (0,), (1, 0): (1,)}
    items = (
        Item((1.0, 1.0), (0.0, 4.0), 0, 2),
        Item((1.0, 1.0), (4.0, 0.0), 0, 2),
        Item((0.0, 0.0), (10.0, 0.0), 1, 1),
        Item((0.0, 0.0), (0.0, 10.0), 1, 1),
    )
    return Problem(
        2,
        (INF, INF),
        (on, on, on),
        ("a", "b", "c"),
        (Edge(0, 1, (0, 1), (0, 1), send), Edge(0, 2, (0, 1), (0, 1), send)),
        (Hold(1, ((2,), (3,))),),
        items,
    )


def test_items_are_paid_once() -> None:
    outcome = evaluate_choices(two_devices(), (0, 1, 1))
    assert outcome.load_s == (4.0, 7.0)
    assert outcome.step_s == 7.0


def test_bytes_live_in_their_interval() -> None:
    outcome = evaluate_choices(two_devices(), (0, 1, 1))
    assert outcome.peak_bytes == (0.0, 14.0)
    assert outcome.peak_position == (0, 1)
    short = replace(two_devices(), limit_bytes=(INF, 12.0))
    assert evaluate_choices(short, (0, 1, 1)).excess_bytes == 2.0
    assert evaluate_choices(short, (0, 0, 0)).excess_bytes == 0.0


def test_latency_is_the_longest_path() -> None:
    assert evaluate_choices(two_devices(), (0, 0, 0)).latency_s == 9.0
    # b stays while c goes: a 3 s, send 1 s, then both run
    assert evaluate_choices(two_devices(), (0, 0, 1)).latency_s == 7.0
    # one send for both: a 3 s, send 1 s, b 3 s, c 3 s
    assert evaluate_choices(two_devices(), (0, 1, 1)).latency_s == 10.0


def test_items_of_holds_alone_follow_their_node() -> None:
    problem = two_devices()
    late = Item((2.0, 0.0), (0.0, 0.0), 1, 2)
    holds = (*problem.holds, Hold(1, ((4,), ())), Hold(2, ((4,), ())))
    problem = replace(problem, items=(*problem.items, late), holds=holds)
    # a 3 s, b 3 s, the item 2 s before c, once though c holds it too
    assert evaluate_choices(problem, (0, 0, 0)).latency_s == 11.0
    # a 3 s, send 1 s, b 3 s, the item 2 s; c beside them
    assert evaluate_choices(problem, (0, 0, 1)).latency_s == 9.0
    assert evaluate_choices(problem, (0, 1, 1)).latency_s == 10.0


def test_brute_force_finds_the_least_of_each_objective() -> None:
    problem = two_devices()
    assert brute_force(problem, "throughput") == ((0, 0, 1), 7.0)
    assert brute_force(problem, "latency") == ((0, 0, 1), 7.0)
    assert brute_force(problem, "memory") == ((0, 0, 0), 10.0)
    assert brute_force(replace(problem, limit_bytes=(9.0, 9.0)), "throughput") is None


def test_forbidden_pairs_are_refused() -> None:
    problem = two_devices()
    edge = replace(problem.edges[0], forbidden=frozenset({(0, 1)}))
    problem = replace(problem, edges=(edge, problem.edges[1]))
    with pytest.raises(SolverError, match=r"'a' and 'b' take the forbidden pair \(0, 1\)"):
        evaluate_choices(problem, (0, 1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "0 devices: at least one is needed"),
        ({"limit_bytes": (1.0,)}, "1 memory limits for 2 devices"),
        ({"names": ("a",)}, "1 names for 3 nodes"),
        ({"nodes": ((), (), ())}, "node 'a' has no choice"),
        (
            {"nodes": ((Choice((1.0,), 0),),) * 3},
            "load of choice 0 of node 'a' has 1 entries for 2 devices",
        ),
        (
            {"nodes": ((Choice((-1.0, 0.0), 0),),) * 3},
            r"is \(-1.0, 0.0\): entries must be finite and not negative",
        ),
        (
            {"items": (Item((0.0, 0.0), (0.0, 0.0), 0, 3),) * 4},
            "item 0 lives from 0 to 3, not within 0 to 2",
        ),
        ({"items": ()}, "item 0 is not within 0 items"),
        ({"holds": (Hold(7, ()),)}, "hold of node 7, not within 3 nodes"),
        ({"holds": (Hold(1, ((),)),)}, "hold of node 'b' has 1 entries for 2 choices"),
        ({"edges": (Edge(1, 1, (0, 1), (0, 1), {}),)}, "from 1 to 1 does not go forward"),
        ({"edges": (Edge(0, 1, (0,), (0, 1), {}),)}, "has 1 classes for 2 choices of node 'a'"),
    ],
)
def test_malformed_problems_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(SolverError, match=message):
        validate(replace(two_devices(), **change))


def test_a_plan_has_one_choice_a_node() -> None:
    with pytest.raises(SolverError, match="2 choices for 3 nodes"):
        evaluate_choices(two_devices(), (0, 0))
