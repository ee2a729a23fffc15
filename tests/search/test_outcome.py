"""Results of a search: what a refusal blames, which plan wins, and how its devices are numbered."""

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import partitioner
from helpers.plans.cost_cases import chain_graph, flat
from helpers.problems.solver_instances import placement
from partitioner import examples
from partitioner.api.tuning import kept
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.lives import MemoryPeak
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Certificate, NodePlan, Pipeline, Plan
from partitioner.ir.rule import Cut
from partitioner.search.outcome import (
    Candidate,
    Outcome,
    SpaceResult,
    best_of,
    in_executor,
    in_order_of_use,
    numbers_by_use,
    stopped_refusal,
)
from partitioner.search.request import Request
from partitioner.solver.outcome import Infeasible, Solution, returns
from partitioner.solver.progress import Progress
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.spaces import Family

GRAPH = chain_graph(2, 4)
SINGLES = DeviceMesh.single(0), DeviceMesh.single(1)
PAIR = DeviceMesh.line(2, "tp")


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
    return Infeasible("4 bytes are short", device=1, name="n", bytes_short=4.0, proven=proven)


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
    assert outcome.certified(space="stages").certificate == replace(certificate, space="stages")


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


def cluster(names: str, *sizes: int) -> Cluster:
    """Devices "aab" of kinds a and b; groups of each level's size, innermost first."""
    plain = resolve_cluster(f"{len(names)}xh100", None)
    (spec,) = plain.first_of_spec
    level = plain.levels[-1]
    return Cluster(
        names,
        tuple(replace(spec, name=name, launch_s=ord(name) * 1e-6) for name in names),
        tuple(
            replace(level, name=f"level{n}", size=size, table=None, bandwidth_bytes_per_s=1e9 / n)
            for n, size in enumerate((*sizes, len(names)), 1)
        ),
    )


def is_allowed(target: Cluster, numbers: dict[int, int], fixed: set[int]) -> bool:
    """Whether numbers leave all specifications, links and fixed devices as they are."""
    devices = range(len(target))
    return (
        sorted(numbers.values()) == list(devices)
        and all(target.devices[numbers[d]] == target.devices[d] for d in devices)
        and all(numbers[d] == d for d in fixed)
        and all(
            target.level((numbers[a], numbers[b])) == target.level((a, b))
            for a, b in itertools.combinations(devices, 2)
        )
    )


@pytest.mark.parametrize(
    ("names", "sizes"),
    [("aaaaaa", ()), ("aaaaaa", (2,)), ("aaaaaa", (3,)), ("ababba", (2,)), ("aabbaa", (2,))],
)
def test_the_numbers_are_the_first_of_all_that_change_no_cost(
    names: str, sizes: tuple[int, ...]
) -> None:
    target, rng = cluster(names, *sizes), random.Random(names + str(sizes))
    devices = range(len(target))
    moved = 0
    for _ in range(6):
        first_use = rng.sample(devices, rng.randint(1, 6))
        fixed = set(rng.sample(devices, rng.choice([0, 0, 1])))
        numbers = numbers_by_use(target, first_use, fixed)
        ways = (dict(enumerate(way)) for way in itertools.permutations(devices))
        allowed = [way for way in ways if is_allowed(target, way, fixed)]
        least = min([way[device] for device in first_use] for way in allowed)
        assert numbers in allowed
        assert [numbers[device] for device in first_use] == least
        moved += least != first_use
    assert moved


def graph() -> Graph:
    return partitioner.compile(examples.build("mlp", layers=4, hidden=8, batch=4)).graph


def candidate_on(target: Cluster, groups: tuple[DeviceMesh, ...], at: list[int]) -> Candidate:
    """The nodes of `graph` on these of some groups, in turn."""
    model = graph()
    at = [at[index * len(at) // len(model.nodes)] for index in range(len(model.nodes))]
    nodes = {n.name: NodePlan(g) for n, g in zip(model.nodes, at, strict=True)}
    plan = Plan(model.digest, target.to_data(), groups, nodes)
    family = Family("inter", groups, groups, symmetric=False)
    evaluation = evaluate(model, plan, target)
    cost = evaluation.cost("throughput")
    return Candidate(family, model, plan, evaluation, Solution((), cost, 0.0, "feasible", None, ""))


FOUR = tuple(map(DeviceMesh.single, range(4)))


def test_a_plan_is_renumbered_at_the_same_cost() -> None:
    target = cluster("aaaa", 2)
    before = candidate_on(target, FOUR, [3, 2, 1, 0])
    after = before.numbered(Request(), target)
    assert after.plan.groups == FOUR
    assert [node.group for node in after.plan.nodes.values()] == sorted(
        node.group for node in after.plan.nodes.values()
    )
    assert after.cost("throughput") == pytest.approx(before.cost("throughput"), rel=1e-12)
    loads = [sorted(plan.evaluation.load_s.values()) for plan in (before, after)]
    assert loads[0] == pytest.approx(loads[1])
    assert after.numbered(Request(), target) is after


def test_unlike_devices_keep_their_work() -> None:
    target = cluster("abba")
    before = candidate_on(target, FOUR, [3, 2, 1, 0])
    after = before.numbered(Request(), target)
    assert [mesh.devices for mesh in after.plan.groups] == [(0,), (1,), (2,), (3,)]
    kinds = [
        [target.devices[plan.groups[node.group].devices[0]].name for node in plan.nodes.values()]
        for plan in (before.plan, after.plan)
    ]
    assert kinds[0] == kinds[1]


def test_groups_and_stages_move_with_their_devices() -> None:
    target = cluster("aaaa", 2)
    pair = DeviceMesh.of({"tp": 2}, (3, 2))
    before = candidate_on(target, (FOUR[1], pair), [1, 0]).plan
    before = replace(before, pipeline=Pipeline("gpipe", 2), stages=(1, 0))
    after = in_order_of_use(before, target, Constraints())
    assert [mesh.devices for mesh in after.groups] == [(0, 1), (2,)]
    assert after.groups[0].axes == pair.axes
    assert (after.pipeline, after.stages) == (Pipeline("gpipe", 2), (0, 1))
    assert next(iter(after.nodes.values())).group == 0


@pytest.mark.parametrize("keeps_plan", [True, False])
def test_devices_that_constraints_name_keep_their_numbers(keeps_plan: bool) -> None:
    target = cluster("aaaa")
    before = candidate_on(target, FOUR, [3, 2, 1, 0])
    pins = Constraints.of({"pin": [{"op": "Relu", "device": 3}]})
    constraints = Constraints(plan=before.plan) if keeps_plan else pins
    after = in_order_of_use(before.plan, target, constraints)
    first_use = [
        after.groups[g].devices[0] for g in dict.fromkeys(n.group for n in after.nodes.values())
    ]
    assert first_use == ([3, 2, 1, 0] if keeps_plan else [3, 0, 1, 2])


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("options", [{"strategy": "inter"}, {"objective": "latency"}, {}])
def test_compiled_plans_use_devices_in_order(devices: int, options: dict[str, Any]) -> None:
    model = examples.build("mlp", layers=7, hidden=512, batch=64)
    result = partitioner.compile(model, devices=devices, cluster=f"{devices}xa100", **options)
    used = dict.fromkeys(device for placed in result.placed for device in placed.mesh.devices)
    assert list(used) == sorted(used)
    assert result.cost == pytest.approx(result.plan.certificate.cost, rel=1e-9)


def test_stages_of_a_module_are_on_devices_in_order() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    program = partitioner.compile(
        module, torch.zeros(8, 64), devices=3, parallel="pp", micro_batches=4
    )
    used = dict.fromkeys(device for placed in program.placed for device in placed.mesh.devices)
    assert list(used) == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ([], 0),
        ([{0}, {0}, {1}], 0),
        ([{0}, {1}, {0}, {1}], 2),
        ([{0, 1}, {0}, {0, 1}], 1),
        ([{0}, {1}, {2, 0}], 1),
    ],
)
def test_returns(groups: list[set[int]], count: int) -> None:
    assert returns(map(frozenset, groups)) == count


def test_of_equal_costs_fewer_returns_win() -> None:
    target = resolve_cluster("2xideal", None)
    there_and_back = candidate_on(target, FOUR[:2], [0, 1, 0])
    once = candidate_on(target, FOUR[:2], [0, 0, 1])
    free = [
        replace(c, evaluation=replace(c.evaluation, compute_s={0: 0.0, 1: 0.0}))
        for c in (there_and_back, once)
    ]
    assert len({c.cost("throughput") for c in free}) == 1
    assert (free[0].returns, free[1].returns) == (1, 0)
    assert best_of(free, "throughput", 2) is free[1]
    assert best_of(free[::-1], "throughput", 2) is free[1]


def test_a_solver_keeps_the_plan_with_fewer_returns() -> None:
    problem = placement(0, 4, 2)
    node = problem.nodes[0]
    problem = replace(problem, nodes=(node,) * 4, items=(), edges=(), holds=())
    progress = Progress(problem, "throughput", 0.0, Work(), 0)
    for chosen in [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 1, 0)]:
        progress.offer(chosen, "offered")
    assert progress.best == (0, 0, 1, 1)
