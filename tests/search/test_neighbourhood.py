"""Plans with another strategy at one node: their costs, and that a search takes the better ones."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import partitioner
from helpers.modules.sized_models import Gpt, Loss, ids, perceptron
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.pieces.folding import blocks
from partitioner.ir.plan import NodePlan
from partitioner.report.page.data import block_moves, report_data
from partitioner.search.neighbourhood import (
    Neighbourhood,
    best_other,
    block_changes,
    improved,
)
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints

SMALL = {"mlp": {"layers": 4, "hidden": 64}, "llama": {"layers": 1}}


@pytest.fixture(scope="module", params=["mlp inter", "mlp intra", "llama auto", "llama intra"])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    name, strategy = request.param.split()
    model = examples.build(name, **SMALL[name])
    return partitioner.compile(model, devices=4, strategy=strategy, time_limit_s=3)


@pytest.mark.slow
def test_each_alternative_costs_what_the_referee_says(compiled: Compiled) -> None:
    neighbourhood = Neighbourhood(compiled.graph, compiled.plan, compiled.cluster)
    tried = 0
    for node in compiled.graph.nodes:
        first, *others = neighbourhood.alternatives(node)
        assert first.chosen
        assert first.step_s == pytest.approx(compiled.evaluation.step_s)
        for entry in others:
            plan = neighbourhood.changed(entry.placed)
            figures = evaluate(compiled.graph, plan, compiled.cluster)
            assert entry.step_s == pytest.approx(figures.step_s)
            assert entry.work_s == pytest.approx(sum(figures.load_s.values()))
            tried += 1
    assert tried >= 10


def test_alternatives_are_the_same_when_listed_again(compiled: Compiled) -> None:
    neighbourhood = Neighbourhood(compiled.graph, compiled.plan, compiled.cluster)
    node = compiled.graph.nodes[0]
    once, again = neighbourhood.alternatives(node), neighbourhood.alternatives(node)
    assert [entry.placed for entry in once] == [entry.placed for entry in again]
    assert [entry.step_s for entry in once] == pytest.approx([entry.step_s for entry in again])


def test_of_an_optimal_plan_no_single_change_is_better() -> None:
    model = examples.build("mlp", layers=3, hidden=32)
    result = partitioner.compile(model, devices=2, strategy="intra", gap=0.0, time_limit_s=10)
    assert result.plan.certificate is not None
    assert result.plan.certificate.status == "optimal"
    neighbourhood = Neighbourhood(result.graph, result.plan, result.cluster)
    for node in result.graph.nodes:
        best = best_other(neighbourhood.alternatives(node))
        assert best is None or best.step_s >= result.evaluation.step_s * (1 - 2e-4)


def test_the_runner_up_fits_if_any_does() -> None:
    model = examples.build("mlp", layers=4, hidden=64)
    result = partitioner.compile(model, devices=2, memory="48KiB", time_limit_s=5)
    neighbourhood = Neighbourhood(result.graph, result.plan, result.cluster)
    over = 0
    for node in result.graph.nodes:
        alternatives = neighbourhood.alternatives(node)
        others = [a for a in alternatives if not a.chosen]
        over += sum(a.over_bytes > 0 for a in others)
        best = best_other(alternatives)
        assert best is not None
        if any(a.over_bytes <= 0 for a in others):
            assert best.over_bytes <= 0
    assert over


#: Model, devices and strategy, or kind of parallelism; those with "trains" are training steps.
OFFERED = [
    "mlp 2xh100 auto",
    "mlp 3xh100 inter",
    "mlp 5xh100 auto",
    "mlp 6xideal x=2,y=3",
    "mlp trains 2xh100 auto",
    "mlp trains 3xh100 inter",
    "mlp trains 6xh100 x=2,y=3",
    "mlp trains 2xh100 pp",
    "mlp trains 4xh100 pp+tp",
    "gpt trains 3xh100 inter",
    "gpt trains 4xideal pp+tp",
    "gpt 5xideal auto",
    "llama 5xh100 auto",
    "tiny 3xideal auto",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OFFERED)
def test_no_plan_is_offered_a_better_move(case: str) -> None:
    name, cluster, how = case.replace(" trains", "-trains").split()
    result = _planned(name, cluster, how)
    certificate = result.plan.certificate
    assert certificate is not None
    reasons = _offers(result)
    if certificate.status != "time_limit":
        assert reasons == []
    assert all(why.startswith("the time limit ended the search") for why in reasons)


def _planned(name: str, cluster: str, how: str) -> Compiled:
    options: dict[str, Any] = {"cluster": cluster, "time_limit_s": 5}
    if how.startswith("pp"):
        options |= {"parallel": how, "micro_batches": 3}
    elif "=" in how:
        options["mesh"] = {"x": 2, "y": 3}
    else:
        options["strategy"] = how
    name, _, trains = name.partition("-")
    if not trains and name != "gpt":
        return partitioner.compile(examples.build(name), **options)
    with torch.device("meta"):
        module = perceptron(3, 512) if name == "mlp" else Gpt(1, 128, 256)
        inputs = torch.zeros(96, 512) if name == "mlp" else ids(6, 32)
        if not trains:
            return partitioner.compile(module, inputs, **options)
        return partitioner.compile(Loss(module), inputs, training=True, **options)


def _offers(result: Compiled) -> list[str]:
    """The reasons of the report for each change that would make the plan cheaper."""
    rows = [node["runner_up"] for node in report_data(result)["nodes"]]
    groups = [result.plan.nodes[node.name].group for node in result.graph.nodes]
    moves = block_moves(result, blocks(result.graph, groups))
    better = [move["reason"] for move in moves if move["fits"] and move["change"] < -1e-15]
    return [row["why"] for row in rows if row is not None and row["why"]] + better


@pytest.fixture(scope="module")
def poor() -> tuple[Compiled, Outcome]:
    """A plan that has all layers on one of three devices, as the outcome of a search."""
    model = examples.build("mlp", layers=6, hidden=512, batch=64)
    result = partitioner.compile(model, cluster="3xideal", strategy="inter")
    certificate = result.plan.certificate
    assert certificate is not None
    nodes = {name: NodePlan(0) for name in result.plan.nodes}
    plan = replace(result.plan, nodes=nodes)
    figures = evaluate(result.graph, plan, result.cluster)
    cost = figures.step_s
    certificate = replace(certificate, cost=cost, bound=certificate.bound, status="feasible")
    return result, Outcome(result.graph, replace(plan, certificate=certificate), figures, (), ())


def test_changes_are_taken_until_none_is_better(poor: tuple[Compiled, Outcome]) -> None:
    result, outcome = poor
    better = improved(outcome, result.cluster, Request(), Work())
    certificate, before = better.plan.certificate, outcome.plan.certificate
    assert certificate is not None
    assert before is not None
    assert better.evaluation.step_s < 0.5 * outcome.evaluation.step_s
    assert certificate.cost == better.evaluation.step_s
    assert certificate.bound == before.bound
    assert evaluate(result.graph, better.plan, result.cluster) == better.evaluation
    assert _offers(replace(result, plan=better.plan, evaluation=better.evaluation)) == []
    groups = [better.plan.groups[node.group] for node in better.plan.nodes.values()]
    used = list(dict.fromkeys(device for mesh in groups for device in mesh.devices))
    assert used == sorted(used)  # numbered by their first use
    again = improved(outcome, result.cluster, Request(), Work())
    assert again.plan == better.plan


def test_pinned_nodes_stay_where_they_are(poor: tuple[Compiled, Outcome]) -> None:
    result, outcome = poor
    data = {"pin": [{"nodes": ["*"], "device": 0}]}
    asked = Request(constraints=Constraints.of(data))
    assert improved(outcome, result.cluster, asked, Work()).plan == outcome.plan
    first, *_ = result.graph.nodes
    data = {"pin": [{"nodes": [first.name], "device": 0}]}
    asked = Request(constraints=Constraints.of(data))
    better = improved(outcome, result.cluster, asked, Work())
    assert better.evaluation.step_s < outcome.evaluation.step_s
    assert better.plan.groups[better.plan.nodes[first.name].group].devices == (0,)


def test_nodes_of_a_kept_plan_stay_where_they_are(poor: tuple[Compiled, Outcome]) -> None:
    result, outcome = poor
    asked = Request(constraints=Constraints(plan=outcome.plan))
    assert improved(outcome, result.cluster, asked, Work()).plan == outcome.plan


def test_a_clock_that_ends_the_changes_is_told(poor: tuple[Compiled, Outcome]) -> None:
    result, outcome = poor
    late = improved(outcome, result.cluster, Request(), Work(deadline=-math.inf))
    assert late.plan.certificate is not None
    assert late.plan.certificate.status == "time_limit"
    assert late.plan.nodes == outcome.plan.nodes


@pytest.mark.parametrize(("devices", "is_priced"), [(2, True), (4, False)])
def test_fewer_pairs_are_priced_on_more_devices(
    devices: int, is_priced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = examples.build("mlp", **SMALL["mlp"])
    result = partitioner.compile(model, devices=devices, strategy="intra", time_limit_s=3)
    near = Neighbourhood(result.graph, result.plan, result.cluster)
    monkeypatch.setattr("partitioner.search.neighbourhood.PAIR_DEVICES", 2)
    monkeypatch.setattr("partitioner.search.neighbourhood.MAX_PAIRS", near.pairs)
    assert near.is_priced_soon == is_priced


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"x": 4}},
        {"parallel": "pp+tp", "mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "micro_batches": 2},
    ],
    ids=["a step at once", "in stages"],
)
def test_changes_of_training_steps_are_taken(options: dict[str, Any]) -> None:
    chosen = {"cluster": "4xideal", "training": True, "time_limit_s": 5, **options}
    with torch.device("meta"):
        module, inputs = Loss(perceptron(2, 512)), torch.zeros(96, 512)
        result = partitioner.compile(module, inputs, **chosen)
    plan, certificate = result.plan, result.plan.certificate
    assert certificate is not None
    whole = [node.name for node in result.graph.nodes if "relu" in node.name]
    nodes = {**plan.nodes, **{name: replace(plan.nodes[name], cuts={}) for name in whole}}
    assert nodes != plan.nodes
    worse = replace(plan, nodes=nodes)
    figures = evaluate(result.graph, worse, result.cluster)
    assert figures.step_s > result.evaluation.step_s
    certificate = replace(certificate, cost=figures.step_s, bound=0.0, status="feasible")
    outcome = Outcome(result.graph, replace(worse, certificate=certificate), figures, (), ())
    better = improved(outcome, result.cluster, Request(), Work())
    assert better.evaluation.step_s <= result.evaluation.step_s * (1 + 1e-9)
    assert evaluate(result.graph, better.plan, result.cluster) == better.evaluation
    assert _offers(replace(result, plan=better.plan, evaluation=better.evaluation)) == []


def test_no_change_makes_a_plan_that_does_not_fit(poor: tuple[Compiled, Outcome]) -> None:
    result, outcome = poor
    held = max(outcome.evaluation.needed_bytes.values())
    cluster = result.cluster.with_memory(held)
    better = improved(outcome, cluster, Request(), Work())
    assert better.evaluation.fits_exactly
    assert better.evaluation.step_s < outcome.evaluation.step_s


def test_a_block_moves_to_a_group_that_it_exchanges_values_with(
    poor: tuple[Compiled, Outcome],
) -> None:
    result, outcome = poor
    names = [node.name for node in result.graph.nodes]
    half = len(names) // 2
    nodes = {name: NodePlan(int(place >= half)) for place, name in enumerate(names)}
    plan = replace(outcome.plan, nodes=nodes)
    groups = [plan.nodes[name].group for name in names]
    for change in block_changes(result.graph, plan, blocks(result.graph, groups)):
        assert change.to == 1 - change.group
        assert {node.group for node in change.of(plan).nodes.values()} <= {0, 1}
        assert change.of(plan).nodes != plan.nodes
