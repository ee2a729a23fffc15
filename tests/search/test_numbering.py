"""Numbers of interchangeable devices, and plans of equal cost that return to devices."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import partitioner
from helpers.problems.solver_instances import placement
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.search.numbering import in_order_of_use, numbers_by_use
from partitioner.search.outcome import Candidate, best_of
from partitioner.search.request import Request
from partitioner.solver import Solution
from partitioner.solver.outcome import returns
from partitioner.solver.progress import Progress
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.spaces import Family


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


def candidate(target: Cluster, groups: tuple[DeviceMesh, ...], at: list[int]) -> Candidate:
    """The nodes of `graph` on these of some groups, in turn."""
    model = graph()
    at = [at[index * len(at) // len(model.nodes)] for index in range(len(model.nodes))]
    nodes = {n.name: NodePlan(g) for n, g in zip(model.nodes, at, strict=True)}
    plan = Plan(model.digest, target.to_data(), groups, nodes)
    family = Family("inter", groups, groups, symmetric=False)
    evaluation = evaluate(model, plan, target)
    cost = evaluation.cost("throughput")
    return Candidate(family, model, plan, evaluation, Solution((), cost, 0.0, "feasible", None, ""))


SINGLES = tuple(map(DeviceMesh.single, range(4)))


def test_a_plan_is_renumbered_at_the_same_cost() -> None:
    target = cluster("aaaa", 2)
    before = candidate(target, SINGLES, [3, 2, 1, 0])
    after = before.numbered(Request(), target)
    assert after.plan.groups == SINGLES
    assert [node.group for node in after.plan.nodes.values()] == sorted(
        node.group for node in after.plan.nodes.values()
    )
    assert after.cost("throughput") == pytest.approx(before.cost("throughput"), rel=1e-12)
    loads = [sorted(plan.evaluation.load_s.values()) for plan in (before, after)]
    assert loads[0] == pytest.approx(loads[1])
    assert after.numbered(Request(), target) is after


def test_unlike_devices_keep_their_work() -> None:
    target = cluster("abba")
    before = candidate(target, SINGLES, [3, 2, 1, 0])
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
    before = candidate(target, (SINGLES[1], pair), [1, 0]).plan
    before = replace(before, pipeline=Pipeline("gpipe", 2, (1, 0)))
    after = in_order_of_use(before, target, Constraints())
    assert [mesh.devices for mesh in after.groups] == [(0, 1), (2,)]
    assert after.groups[0].axes == pair.axes
    assert after.pipeline == Pipeline("gpipe", 2, (0, 1))
    assert next(iter(after.nodes.values())).group == 0


@pytest.mark.parametrize("keeps_plan", [True, False])
def test_devices_that_constraints_name_keep_their_numbers(keeps_plan: bool) -> None:
    target = cluster("aaaa")
    before = candidate(target, SINGLES, [3, 2, 1, 0])
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
    there_and_back = candidate(target, SINGLES[:2], [0, 1, 0])
    once = candidate(target, SINGLES[:2], [0, 0, 1])
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
