"""Halos fused over chains of convolutions: taken where they pay, and nowhere else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.loops.factors import FactorKind
from partitioner.ir.mesh import DeviceMesh
from partitioner.search.spaces import explicit
from partitioner.strategies.derive import Rules, strategies

HEIGHT, LAYERS = 24, 4


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Four convolutions of 3 x 3, each after a ReLU: "a0", "c0", "a1" and so on."""
    nodes, value = [], "x"
    for layer in range(LAYERS):
        result = f"c{layer}" if layer + 1 < LAYERS else "y"
        nodes += [
            helper.make_node("Relu", [value], [f"a{layer}"], name=f"a{layer}"),
            helper.make_node("Conv", [f"a{layer}", "w"], [result], name=result, pads=[1] * 4),
        ]
        value = result
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4, 3, 3)).astype(np.float32)}
    tensor = ("float32", [1, 4, HEIGHT, 10])
    model = onnx_models.model(nodes, {"x": tensor}, {"y": tensor}, weights)
    path = tmp_path / "chain.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def cluster(devices: int, latency_s: float, flops_per_s: float) -> Cluster:
    spec = DeviceSpec("made", {"float32": flops_per_s}, 1e12, 1 << 30, launch_s=0.0)
    return Cluster("made", (spec,) * devices, (LinkLevel("link", devices, 1e9, latency_s),))


def compiled(path: Path, devices: int, latency_s: float, flops_per_s: float) -> Compiled:
    made = cluster(devices, latency_s, flops_per_s)
    return partitioner.compile(
        path, cluster=made, parallel="spatial", mesh={"h": devices}, gap=0.0, time_limit_s=20
    )


def repeated_rows(result: Compiled) -> dict[str, int]:
    """Rows of each node that devices compute more than once."""
    layouts: dict[str, Any] = {
        name: cut.layout(HEIGHT, result.plan.groups[decision.group])
        for name, decision in result.plan.nodes.items()
        for cut in decision.cuts.values()
    }
    return {name: sum(layout.sizes()) - layout.size for name, layout in layouts.items()}


@pytest.mark.parametrize("devices", [2, 3])
def test_rows_are_computed_twice_where_messages_are_slow(chain: Path, devices: int) -> None:
    slow = compiled(chain, devices, latency_s=1e-2, flops_per_s=1e12)
    rows = repeated_rows(slow)
    assert [rows[f"c{layer}"] for layer in (0, 1, 2)] == [r * (devices - 1) for r in (6, 4, 2)]
    assert rows["y"] == 0
    assert slow.plan.certificate is not None
    assert slow.plan.certificate.cost == pytest.approx(slow.evaluation.step_s)
    assert slow.verify(seed=0).equal


@pytest.mark.parametrize("devices", [2, 3])
def test_no_row_is_computed_twice_where_messages_are_quick(chain: Path, devices: int) -> None:
    quick = compiled(chain, devices, latency_s=0.0, flops_per_s=1e6)
    assert not any(repeated_rows(quick).values())
    assert quick.verify(seed=0).equal


def test_the_choice_is_the_cheapest(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each latency, no dearer than the plans with and without rows computed twice."""
    for latency_s in (0.0, 1e-6, 1e-5, 1e-4):
        both = compiled(chain, 2, latency_s, flops_per_s=1e9).evaluation.step_s
        with monkeypatch.context() as patch:
            patch.setattr(explicit, "FUSED", ())
            plain = compiled(chain, 2, latency_s, flops_per_s=1e9)
        fused = compiled(chain, 2, latency_s=1.0, flops_per_s=1e9)
        made = cluster(2, latency_s, 1e9)
        fused_s = evaluate(fused.graph, fused.plan, made).step_s
        assert both <= min(plain.evaluation.step_s, fused_s) * (1 + 1e-9)


def test_rows_computed_twice_cost_their_flops(chain: Path) -> None:
    """The busiest device computes the rows of its windows, no more and no fewer."""
    result = compiled(chain, 2, latency_s=10.0, flops_per_s=1e6)
    flops = sum(2 * 4 * 4 * 9 * 10 * rows for rows in (12 + 3, 12 + 2, 12 + 1, 12))
    relus = 4 * 10 * (16 + 15 + 14 + 13)
    assert repeated_rows(result)["c0"] == 6
    assert result.evaluation.step_s == pytest.approx((flops + relus) / 1e6, rel=1e-3)


def test_only_loops_that_pass_have_parts_that_overlap(chain: Path) -> None:
    graph = partitioner.compile(chain, devices=1).graph
    rules, mesh = Rules.of(graph), DeviceMesh.of({"h": 2})
    offered = strategies(graph, rules, mesh, fused=4)
    plain = strategies(graph, rules, mesh)
    overlapping = 0
    for node in graph.nodes:
        assert offered[node.name][: len(plain[node.name])] == plain[node.name]
        for placed in offered[node.name]:
            assert placed.rule is not None
            names = [name for name, layout in placed.layouts.items() if layout.windows]
            assert all(placed.rule.factors[name].kind is FactorKind.PASS for name in names)
            overlapping += bool(names)
    assert overlapping
    assert not any(
        at.layouts and any(x.windows for x in at.layouts.values()) for at in offered["y"]
    )


def test_large_problems_are_offered_none(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "MOST_WITH_FUSED", 10)
    assert not any(repeated_rows(compiled(chain, 2, 1e-2, 1e12)).values())
