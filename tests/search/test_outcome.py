"""Results of a search: what a refusal blames, and which of several plans wins."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.plans.cost_cases import chain_graph, flat
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.memory.lives import MemoryPeak
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Certificate, NodePlan, Plan
from partitioner.ir.rule import Cut
from partitioner.search.outcome import (
    Candidate,
    Outcome,
    SpaceResult,
    best_of,
    in_executor,
    stopped_refusal,
)
from partitioner.search.tried import kept
from partitioner.solver import Infeasible, Solution
from partitioner.solver.work import Work
from partitioner.strategies.spaces import Family

GRAPH = chain_graph(2, 4)
SINGLES = DeviceMesh.single(0), DeviceMesh.single(1)
PAIR = DeviceMesh.line(2)


def peaks(nbytes: Mapping[int, int]) -> Mapping[int, MemoryPeak]:
    return {device: MemoryPeak(size, size, 0, "") for device, size in nbytes.items()}


def figures(
    *,
    step_s: float = 1.0,
    used: int = 2,
    held: Mapping[int, int] | None = None,
    executor: Mapping[int, int] | None = None,
    limits: Mapping[int, int] | None = None,
) -> Evaluation:
    """An evaluation of a stream in which device 0 is busiest."""
    peak = peaks(held or {0: 1, 1: 1})
    return Evaluation(
        {0: step_s, 1: 0.0},
        {0: 0.0, 1: 0.0},
        step_s,
        peak,
        peak,
        peaks(executor or {}),
        limits or {0: 100, 1: 100, 2: 400},
        {},
        used,
        0.0,
    )


def candidate(
    *nodes: NodePlan, evaluation: Evaluation, groups: tuple[DeviceMesh, ...]
) -> Candidate:
    names = [node.name for node in GRAPH.nodes]
    plan = Plan(GRAPH.digest, {}, groups, dict(zip(names, nodes, strict=True)))
    solution = Solution((0, 0), 1.0, 0.5, "optimal", None, "by hand")
    return Candidate(Family("intra", groups, (), True), GRAPH, plan, evaluation, solution)


@pytest.mark.parametrize(
    ("executor", "blamed"),
    [
        ({0: 120, 1: 190, 2: 430}, (1, 90)),
        ({0: 100, 1: 101, 2: 399}, (1, 1)),
        ({0: 100, 1: 100, 2: 400}, None),
        ({1: 100}, None),
        ({2: 401}, (2, 1)),
        ({}, None),
    ],
)
def test_an_executor_is_blamed_on_the_device_that_exceeds_its_memory_most(
    executor: Mapping[int, int], blamed: tuple[int, int] | None
) -> None:
    assert in_executor(figures(executor=executor)) == blamed


def refusal(*, proven: bool) -> Infeasible:
    return Infeasible(
        "4 bytes are short", device=1, position=2, name="n", bytes_short=4.0, proven=proven
    )


@pytest.mark.parametrize("work", [Work(stopped=True), Work(deadline=-math.inf)])
def test_a_refusal_blames_the_clock_that_stopped_the_search(work: Work) -> None:
    error = refusal(proven=False)
    said = stopped_refusal(error, work)
    assert str(said) == (
        "4 bytes are short; the time limit stopped the search: "
        "with a longer one a plan may be found"
    )
    assert vars(said) == vars(error)


def test_no_other_refusal_blames_the_clock() -> None:
    proven, searched = refusal(proven=True), refusal(proven=False)
    assert stopped_refusal(proven, Work(stopped=True)) is proven
    assert stopped_refusal(searched, Work()) is searched


def test_the_cheapest_plan_wins_whatever_it_leaves_idle() -> None:
    """Of equal costs, one that is no copy, then one that leaves none idle, and so on."""
    cut = NodePlan(0, {"b0": Cut(("tp",))})
    whole, first, second = NodePlan(0), NodePlan(0), NodePlan(1)
    ranked = [
        candidate(whole, whole, evaluation=figures(step_s=0.5, used=1), groups=SINGLES),
        candidate(cut, cut, evaluation=figures(held={0: 3, 1: 3}), groups=(PAIR,)),
        candidate(cut, cut, evaluation=figures(held={0: 2, 1: 5}), groups=(PAIR,)),
        candidate(cut, cut, evaluation=figures(held={0: 4, 1: 5}), groups=(PAIR,)),
        candidate(first, second, evaluation=figures(used=1), groups=SINGLES),
        candidate(whole, whole, evaluation=figures(), groups=(PAIR,)),
    ]
    for start in range(len(ranked)):
        plans = ranked[start:]
        assert best_of(plans, "throughput", 2) is plans[0]
        assert best_of(plans[::-1], "throughput", 2) is plans[0]


def test_for_another_objective_idle_devices_do_not_matter() -> None:
    idle = candidate(NodePlan(0), NodePlan(1), evaluation=figures(used=1), groups=SINGLES)
    busy = candidate(
        NodePlan(0), NodePlan(1), evaluation=figures(held={0: 2, 1: 2}), groups=SINGLES
    )
    assert best_of([busy, idle], "latency", 2) is idle
    assert best_of([busy, idle], "throughput", 2) is busy


def test_a_plan_of_single_devices_is_no_copy() -> None:
    plans = (SINGLES, False), ((PAIR,), True)
    for groups, is_copied in plans:
        plan = candidate(NodePlan(0), NodePlan(0), evaluation=figures(), groups=groups)
        assert plan.is_copied == is_copied


def test_a_space_costs_no_less_than_its_bounds() -> None:
    plan = candidate(NodePlan(0), NodePlan(1), evaluation=figures(), groups=SINGLES)
    lower = replace(plan, solution=replace(plan.solution, bound=0.25))
    assert SpaceResult(plans=(plan, lower), bound=0.1).least == 0.25
    assert SpaceResult(bound=0.1).least == 0.1


def test_what_is_said_of_an_outcome_is_in_its_certificate_and_notes() -> None:
    plan = candidate(NodePlan(0), NodePlan(1), evaluation=figures(), groups=SINGLES)
    certificate = Certificate("throughput", 1.0, 0.5, "feasible", "inter", "by hand", "all", 0)
    outcome = Outcome(
        GRAPH,
        replace(plan.plan, certificate=certificate),
        plan.evaluation,
        (plan,),
        (),
        notes=("b",),
    )
    assert outcome.noted("a").notes == ("a", "b")
    assert outcome.stopped().plan.certificate == replace(certificate, status="time_limit")
    assert outcome.limited_to("stages").plan.certificate == replace(
        certificate, space="all: stages"
    )


def test_a_plan_is_numbered_by_use_if_the_referee_finds_it_no_dearer() -> None:
    from partitioner.cost_model.evaluate import evaluate
    from partitioner.search.request import Request

    cluster = flat(2)
    nodes = dict(zip([node.name for node in GRAPH.nodes], [NodePlan(1), NodePlan(0)], strict=True))
    plan = Plan(GRAPH.digest, cluster.to_data(), SINGLES, nodes)
    solution = Solution((0, 0), 1.0, 0.5, "optimal", None, "by hand")
    evaluation = evaluate(GRAPH, plan, cluster)
    last_first = Candidate(
        Family("inter", SINGLES, SINGLES, True), GRAPH, plan, evaluation, solution
    )
    numbered = last_first.numbered(Request(), cluster)
    placed = [numbered.plan.groups[node.group].devices for node in numbered.plan.nodes.values()]
    assert placed == [(0,), (1,)]
    cheaper = replace(last_first, evaluation=figures(step_s=evaluation.step_s / 2))
    assert cheaper.numbered(Request(), cluster) is cheaper


def test_a_plan_that_measurements_keep_has_its_own_notes() -> None:
    plan = candidate(NodePlan(0), NodePlan(1), evaluation=figures(), groups=SINGLES)
    other = candidate(NodePlan(1), NodePlan(0), evaluation=figures(), groups=SINGLES)
    certificate = Certificate("throughput", 1.0, 0.5, "feasible", "inter", "by hand", "all", 0)
    best = replace(plan.plan, certificate=certificate)
    whole = Outcome(GRAPH, best, plan.evaluation, (plan, replace(other, notes=("of other",))), ())
    outcome = whole.noted("of all")
    assert kept(outcome, outcome.candidates[0], (), 0.01).notes == ("of all",)
    assert kept(outcome, outcome.candidates[1], (), 0.01).notes == ("of all", "of other")
    assert kept(whole.noted("of the best"), replace(other, notes=()), (), 0.01).notes == ()
