"""What the safe memory formula refuses is looked at again with exact liveness."""

import itertools

import pytest

from helpers.plans.searching import search
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan
from partitioner.ir.types import TensorType
from partitioner.search.neighbourhood import Neighbourhood
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request
from partitioner.solver.outcome import Infeasible
from partitioner.solver.referee import Objective
from partitioner.strategies.constraints import Constraints, Pin

SIZE = 1 << 20


def _there_and_back() -> Graph:
    """a, on device 0, goes to 1 for b and is read again by z on 0: the copy dies early."""
    sizes = {"x": SIZE, "a": SIZE, "b": SIZE, "c": SIZE, "d": 1, "z": 1}
    types = {name: TensorType.of("float32", (size,)) for name, size in sizes.items()}
    reads = {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("c",), "z": ("d", "a")}
    nodes = tuple(Node(f"n_{out}", "custom::Op", ins, (out,)) for out, ins in reads.items())
    return Graph("back", ("x",), ("z",), nodes, types, {}, {"": 17, "custom": 1})


PINS = Constraints(
    (
        Pin("ends", nodes=("n_a", "n_z"), devices=(0,)),
        Pin("middle", nodes=("n_b", "n_c", "n_d"), devices=(1,)),
    )
)


_SOME_PINS = (
    Pin("ends", nodes=("n_a", "n_z"), devices=(0,)),
    Pin("middle", nodes=("n_b",), devices=(1,)),
)


def _cluster(tensors: int) -> Cluster:
    return resolve_cluster("2xh100").with_memory(with_headroom(tensors * 4 * SIZE) + 1024)


def _search(tensors: int, objective: Objective = "throughput", pins: Constraints = PINS) -> Outcome:
    request = Request(objective, "inter", constraints=pins, time_limit_s=5)
    return search(_there_and_back(), _cluster(tensors), request)


def test_between_the_exact_and_the_safe_peak() -> None:
    assert _search(3).evaluation.fits
    tight = _search(2)
    assert not tight.evaluation.fits
    assert tight.evaluation.fits_exactly
    certificate = tight.plan.certificate
    assert certificate is not None
    assert certificate.bound <= certificate.cost


def test_the_best_of_all_plans_that_fit_exactly_is_found() -> None:
    graph, cluster = _there_and_back(), _cluster(2)
    outcome = _search(2, pins=Constraints(_SOME_PINS))
    certificate = outcome.plan.certificate
    assert certificate is not None
    names = [node.name for node in graph.nodes]
    costs = {}
    for homes in itertools.product((0, 1), repeat=len(names)):
        where = dict(zip(names, homes, strict=True))
        if (where["n_a"], where["n_b"], where["n_z"]) != (0, 1, 0):
            continue
        nodes = {name: NodePlan(home, {}) for name, home in where.items()}
        groups = (DeviceMesh.single(0), DeviceMesh.single(1))
        plan = Plan(graph.digest, cluster.to_data(), groups, nodes)
        evaluation = evaluate(graph, plan, cluster)
        assert not evaluation.fits
        if evaluation.fits_exactly:
            costs[homes] = evaluation.cost("throughput")
    assert len(set(costs.values())) > 1
    assert certificate.cost == min(costs.values())
    assert certificate.bound <= certificate.cost


def test_the_memory_objective_counts_the_bytes_that_fit() -> None:
    outcome = _search(2, "memory")
    certificate = outcome.plan.certificate
    assert certificate is not None
    limit = _cluster(2).devices[0].memory_bytes
    assert 0 < certificate.cost == max(outcome.evaluation.needed_bytes.values()) <= limit
    assert certificate.bound <= certificate.cost


def test_the_refusal_stands_where_exact_liveness_does_not_fit_either() -> None:
    refusal = r"no plan fits: .* bytes are short on device .* in the model's order"
    with pytest.raises(Infeasible, match=refusal):
        _search(1)


def test_whether_a_changed_plan_fits_is_told_exactly() -> None:
    """The safe formula calls the plan itself, and every change of it, too large."""
    outcome, graph, cluster = _search(2), _there_and_back(), _cluster(2)
    neighbourhood = Neighbourhood(graph, outcome.plan, cluster)
    told = set()
    for node in graph.nodes:
        for entry in neighbourhood.alternatives(node):
            exact = evaluate(graph, neighbourhood.changed(entry.placed), cluster).fits_exactly
            assert neighbourhood.fits(entry) == (entry.over_bytes <= 0 or exact)
            told.add((entry.over_bytes > 0, exact))
    assert {(True, True), (True, False)} <= told


def test_a_bound_covers_plans_that_executors_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan of their space may fit, and cost no more than they do."""
    graph = load_onnx(examples.build("mlp")).graph
    cluster, request = resolve_cluster("2xh100"), Request("throughput", "auto", time_limit_s=5)
    before = search(graph, cluster, request)
    cheapest = before.evaluation.cost("throughput")
    monkeypatch.setattr(
        Evaluation, "fits_exactly", property(lambda figures: figures.cost("throughput") > cheapest)
    )
    after = search(graph, cluster, request)
    assert after.plan.certificate is not None
    assert before.plan.certificate is not None
    assert after.plan.certificate.cost > cheapest
    assert after.plan.certificate.bound <= before.plan.certificate.bound
