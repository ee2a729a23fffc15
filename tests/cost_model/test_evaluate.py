import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans.cost_cases import TWO_LEVELS, chain_graph, flat, graph, matmul_graph
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan, PlanError
from partitioner.ir.rule import Cut
from partitioner.ir.types import TensorType

RELU_S = 8000e-9  #: Reads and writes 1000 float32.
SEND_S = 1e-6 + 1e-6 + 4000e-9  #: Start-up, latency, bytes.


def plan(
    owner: Graph,
    groups: tuple[DeviceMesh, ...],
    nodes: Mapping[str, tuple[int, Mapping[str, str]]],
) -> Plan:
    decisions = {
        name: NodePlan(group, {factor: Cut((axis,)) for factor, axis in cuts.items()})
        for name, (group, cuts) in nodes.items()
    }
    return Plan(owner.digest, {}, groups, decisions)


def test_the_whole_on_one_device() -> None:
    evaluation = one_device(chain_graph(3), flat(2))
    assert evaluation.load_s == {0: pytest.approx(3 * RELU_S), 1: 0}
    assert evaluation.comm_s == {0: 0, 1: 0}
    assert evaluation.latency_s == evaluation.step_s == evaluation.load_s[0]
    assert evaluation.throughput_per_s == pytest.approx(1 / (3 * RELU_S))
    assert {device: peak.bytes for device, peak in evaluation.peak.items()} == {
        0: 12000,
        1: 0,
    }  # head-room
    assert evaluation.devices_used == 1
    assert evaluation.sharded_flops_share == 0
    assert evaluation.sent_bytes == {0: 0, 1: 0}


def test_a_placement_there_and_back() -> None:
    owner = chain_graph(3)
    singles = (DeviceMesh.single(0), DeviceMesh.single(1))
    back = plan(owner, singles, {"relu0": (0, {}), "relu1": (1, {}), "relu2": (0, {})})
    evaluation = evaluate(owner, back, flat(2))
    assert evaluation.compute_s == {0: pytest.approx(2 * RELU_S), 1: pytest.approx(RELU_S)}
    assert evaluation.comm_s == dict.fromkeys((0, 1), pytest.approx(2 * SEND_S))
    assert evaluation.latency_s == pytest.approx(3 * RELU_S + 2 * SEND_S)
    assert evaluation.step_s == evaluation.load_s[0] == pytest.approx(2 * RELU_S + 2 * SEND_S)
    assert evaluation.sent_bytes == {0: 4000, 1: 4000}
    assert evaluation.devices_used == 2
    assert evaluation.exact_peak[1].bytes == 8000


def megatron() -> Graph:
    types = {
        "x": TensorType.of("float32", (64, 128)),
        "w": TensorType.of("float32", (128, 256)),
        "h": TensorType.of("float32", (64, 256)),
        "v": TensorType.of("float32", (256, 128)),
        "y": TensorType.of("float32", (64, 128)),
    }
    nodes = [Node("up", "MatMul", ("x", "w"), ("h",)), Node("down", "MatMul", ("h", "v"), ("y",))]
    return graph(nodes, types, ("x",), ("y",), ("w", "v"))


def test_column_then_row_then_one_all_reduce() -> None:
    owner = megatron()
    line = DeviceMesh.line(4, "tp")
    cut = plan(owner, (line,), {"up": (0, {"n": "tp"}), "down": (0, {"k": "tp"})})
    evaluation = evaluate(owner, cut, flat(4))
    matmul_s = 2 * 64 * 128 * 64 / 1e9
    y_bytes = 64 * 128 * 4
    reduce_s = 1e-6 + 6 * (1e-6 + y_bytes / 4 / 1e9)
    assert evaluation.load_s == dict.fromkeys(range(4), pytest.approx(2 * matmul_s + reduce_s))
    assert evaluation.latency_s == pytest.approx(evaluation.step_s)
    assert evaluation.sent_bytes == dict.fromkeys(range(4), 2 * 3 * y_bytes // 4)
    assert evaluation.sharded_flops_share == 1
    weights = 2 * 128 * 64 * 4
    # At the product: the h shard, y's partial sum, and (safe) its all-reduced copy.
    assert evaluation.exact_peak[0].resident_bytes == weights
    assert evaluation.exact_peak[0].activation_bytes == max(64 * 64 * 4 + y_bytes, 2 * y_bytes)
    assert evaluation.peak[0].activation_bytes == (64 * 64 * 4 + 2 * y_bytes) * 3 // 2  # head-room


def test_ideal_links_cost_nothing() -> None:
    owner = megatron()
    cut = plan(
        owner, (DeviceMesh.line(4, "tp"),), {"up": (0, {"n": "tp"}), "down": (0, {"k": "tp"})}
    )
    cluster = resolve_cluster("4xideal")
    evaluation = evaluate(owner, cut, cluster)
    assert set(evaluation.comm_s.values()) == {0}
    assert evaluation.step_s == pytest.approx(one_device(owner, cluster).step_s / 4)


def test_costs_by_objective_and_limits() -> None:
    evaluation = one_device(chain_graph(3), flat(1).with_memory(5000))
    assert evaluation.cost("throughput") == evaluation.step_s
    assert evaluation.cost("latency") == evaluation.latency_s
    assert evaluation.cost("memory") == 12000
    assert evaluation.over_bytes == {0: 7000}
    assert not evaluation.fits
    assert one_device(chain_graph(3), flat(1)).fits
    with pytest.raises(CostError, match="objective 'speed' is not one of throughput, latency"):
        evaluation.cost("speed")


def test_nothing_takes_no_time() -> None:
    empty = Graph("empty", (), (), (), {}, {}, {"": 17})
    evaluation = one_device(empty, flat(1))
    assert evaluation.throughput_per_s == math.inf
    assert evaluation.cost("memory") == 0


def test_plans_that_do_not_fit_are_refused() -> None:
    owner = chain_graph(1)
    far = plan(owner, (DeviceMesh.single(5),), {"relu0": (0, {})})
    with pytest.raises(CostError, match="plan uses device 5; cluster 'flat' has 2"):
        evaluate(owner, far, flat(2))
    with pytest.raises(PlanError, match="plan is for a graph with digest"):
        evaluate(matmul_graph(), far, flat(2))


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    latency_s=st.sampled_from([1e-6, 1e-4]),
)
def test_sums_hold_for_any_placement(owners: list[int], latency_s: float) -> None:
    owner = chain_graph(len(owners))
    singles = tuple(DeviceMesh.single(device) for device in range(4))
    nodes = {f"relu{i}": (device, {}) for i, device in enumerate(owners)}
    cluster = flat(4, latency_s)
    evaluation = evaluate(owner, plan(owner, singles, nodes), cluster)
    alone = one_device(owner, cluster)
    hops = sum(a != b for a, b in itertools.pairwise(owners))
    hop_s = 1e-6 + latency_s + 4000e-9
    assert sum(evaluation.compute_s.values()) == pytest.approx(alone.latency_s)
    assert sum(evaluation.comm_s.values()) == pytest.approx(2 * hops * hop_s)
    assert evaluation.latency_s == pytest.approx(alone.latency_s + hops * hop_s)
    assert evaluation.step_s <= evaluation.latency_s * (1 + 1e-9)
    assert sum(evaluation.sent_bytes.values()) == 4000 * hops
    assert evaluation.devices_used == len(set(owners))


def test_a_pipeline_over_two_levels_pays_the_outer_link() -> None:
    owner = chain_graph(2)
    groups = (DeviceMesh.single(0), DeviceMesh.single(1), DeviceMesh.single(2))
    near = plan(owner, groups, {"relu0": (0, {}), "relu1": (1, {})})
    far = plan(owner, groups, {"relu0": (0, {}), "relu1": (2, {})})
    gain = evaluate(owner, far, TWO_LEVELS).latency_s - evaluate(owner, near, TWO_LEVELS).latency_s
    assert gain == pytest.approx(9e-6 + 36e-6)
