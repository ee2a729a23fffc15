"""Costs of a plan with another strategy at one node, against the referee's of the changed plan."""

import pytest

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.evaluate import evaluate
from partitioner.search.neighbourhood import Neighbourhood, best_other

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
