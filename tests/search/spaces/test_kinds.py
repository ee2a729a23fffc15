"""The usual kinds of parallelism are tried where the search of a mesh proves no plan the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import partitioner
from helpers.plans.searching import search
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.examples import build
from partitioner.frontends.onnx.load import load_onnx
from partitioner.problem.build import Built
from partitioner.search.find_plan import KIND_STEPS, LOOK_PART, find_plan
from partitioner.search.outcome import OutOfTime, Refused, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.explicit import JointSearch, JointSpace, KindSpace
from partitioner.strategies.derive import Rules


class Blocks(nn.Module):
    """A residual network of wide layers, whose result is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x**2).mean()


def compiled(**options: Any) -> Any:
    inputs = (torch.ones(4096, 64),)
    return partitioner.compile(
        Blocks(), inputs, 2, training=True, cluster="2xh100", launches="native", **options
    )


@pytest.fixture(scope="module")
def kinds() -> Mapping[str, Any]:
    return {kind: compiled(parallel=kind) for kind in ("dp", "tp", "zero3")}


@pytest.fixture
def stuck(kinds: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of all plans of a mesh ends with its worst kind and half its cost as the bound."""
    poor = max(kinds.values(), key=lambda one: one.evaluation.step_s)
    solved = JointSpace._solved

    def ended(
        space: JointSpace, built: Built, budget: Budget, *more: Any, **options: Any
    ) -> SpaceResult:
        result = solved(space, built, budget, *more, **options)
        if space.family.name != "intra":
            return result
        (plan, *_) = result.plans
        solution = replace(plan.solution, bound=poor.evaluation.step_s / 2)
        found = replace(
            plan, plan=poor.plan, evaluation=poor.evaluation, graph=poor.graph, solution=solution
        )
        return SpaceResult((found,), result.searched)

    monkeypatch.setattr(JointSpace, "_solved", ended)


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("strategy", ["auto", "intra"])
def test_no_kind_of_a_searched_mesh_is_cheaper_than_the_plan(
    kinds: Mapping[str, Any], strategy: str
) -> None:
    costs = [kind.evaluation.step_s for kind in kinds.values()]
    plan = compiled(strategy=strategy)
    assert min(costs) < 0.9 * max(costs)
    assert plan.evaluation.step_s <= min(costs) * (1 + 1e-9)
    certificate = plan.plan.certificate
    assert certificate.status == "feasible"  # the gap is stated
    assert certificate.bound < certificate.cost / 1.5


@pytest.mark.usefixtures("stuck")
def test_a_kind_within_the_gap_has_a_look_and_its_cheaper_plan_is_taken(
    kinds: Mapping[str, Any],
) -> None:
    costs = [kind.evaluation.step_s for kind in kinds.values()]
    said: list[str] = []
    plan = compiled(strategy="intra", gap=0.6, progress=said.append)
    assert plan.evaluation.step_s <= min(costs) * (1 + 1e-9)
    assert plan.plan.certificate.status == "optimal"
    assert plan.plan.certificate.bound < plan.plan.certificate.cost / 1.5
    assert [space["space"] for space in plan.summary["spaces"]] == ["dp (dp=2)", "intra (x=2)"]
    assert not [line for line in said if line.startswith("going on")]


def test_kinds_but_the_usual_one_are_not_searched_where_the_plan_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []
    search = KindSpace.search

    def noted(space: KindSpace, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        result = search(space, budget, others)
        searched.extend(space.kind for _ in result.plans)
        return result

    monkeypatch.setattr(KindSpace, "search", noted)
    certificate = compiled(strategy="intra").plan.certificate
    assert certificate.status == "optimal"
    assert searched == ["dp"]  # to compare with, the others not


def test_joined_kinds_are_tried_on_all_meshes_of_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Mapping[str, int] | None]] = []

    def noted(space: KindSpace, _budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        asked.append((space.kind, space.mesh))
        return SpaceResult()

    monkeypatch.setattr(KindSpace, "search", noted)
    graph, request = load_onnx(build("tiny")).graph, Request()
    find_plan(graph, resolve_cluster("6xideal"), request, Budget.of(request).of_clock(1e12))
    assert asked == [
        ("dp", None),
        ("tp", None),
        ("dp+tp", {"dp": 2, "tp": 3}),
        ("dp+tp", {"dp": 3, "tp": 2}),
    ]


def test_a_search_that_the_clock_ended_goes_on_with_the_spaces_that_it_did_not_reach() -> None:
    graph, cluster = load_onnx(build("tiny")).graph, resolve_cluster("4xideal")
    request = Request()
    whole = find_plan(graph, cluster, request, Budget.of(request))
    over = Budget.of(request).of_clock(1e12)
    first = find_plan(graph, cluster, request, over)
    assert first.more is not None
    assert any(isinstance(error, OutOfTime) for _, error in first.failed)
    then = first.more(Budget.of(request))
    assert not then.failed
    assert then.evaluation.step_s == pytest.approx(whole.evaluation.step_s)
    assert whole.plan.certificate is not None
    assert then.plan.certificate is not None
    assert then.plan.certificate.space == whole.plan.certificate.space


def test_kinds_have_steps_and_a_third_of_the_clock_whatever_the_spaces_before_them_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, shares = [0.0], list[Budget]()
    monkeypatch.setattr("partitioner.solver.work.now_s", lambda: now[0])
    whole = Budget.of(Request(time_limit_s=30))

    def greedy(_space: JointSpace, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        budget.work.spend(whole.work.steps)
        now[0] += budget.work.left_s
        return SpaceResult()

    def noted(_space: KindSpace, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        shares.append(budget)
        assert budget.work.left_s >= whole.work.left_s / 3
        return SpaceResult()

    monkeypatch.setattr(JointSpace, "search", greedy)
    monkeypatch.setattr(KindSpace, "search", noted)
    graph, request = load_onnx(build("tiny")).graph, Request()
    found = find_plan(graph, resolve_cluster("4xideal"), request, whole)
    assert found.plan.kind == "single"  # the plan of one device alone is known here
    assert len(shares) == 3
    assert all(share.work.left >= KIND_STEPS for share in shares)


def test_kinds_look_within_the_gap_until_that_took_a_share_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, joint = list[bool](), [1000.0]

    def spends(_space: JointSpace, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        budget.work.spend(joint.pop() if joint else 0.0)
        return SpaceResult()

    def noted(space: KindSpace, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        looks.append(space.may_look)
        budget.work.spend(0.6 * LOOK_PART * 1000)
        return SpaceResult()

    monkeypatch.setattr(JointSpace, "search", spends)
    monkeypatch.setattr(KindSpace, "search", noted)
    graph, request = load_onnx(build("tiny")).graph, Request()
    found = find_plan(graph, resolve_cluster("6xideal"), request, Budget.of(request))
    assert found.plan.kind == "single"  # the plan of one device alone is known here
    assert looks == [True, True, False, False]


def test_a_kind_that_was_refused_goes_on_beside_a_known_plan_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cluster, request = load_onnx(build("tiny")).graph, resolve_cluster("2xideal"), Request()
    known = search(graph, cluster, request).candidates[0]
    refused = SpaceResult(refused=cast("Refused", object()), more=lambda _budget: SpaceResult())
    monkeypatch.setattr(JointSpace, "search", lambda *_: refused)
    rules, prices = Rules.of(graph), DeviceColumns(graph, Resharder(cluster))
    kind = KindSpace(JointSearch(graph, cluster, request, rules, prices), "dp")
    budget = Budget.of(request)
    assert kind.search(budget, (SpaceResult(failed=()),)).more is None
    worse = replace(known, solution=replace(known.solution, bound=0.0))
    beside = replace(budget, best_s=known.cost("throughput"))
    assert kind.search(beside, (SpaceResult((worse,)),)).more is not None
    near = replace(known, solution=replace(known.solution, bound=0.995 * beside.best_s))
    assert kind.search(beside, (SpaceResult((near,)),)).more is None
    said: list[str] = []
    replace(kind, may_look=False).search(replace(beside, say=said.append), (SpaceResult((near,)),))
    assert not said
