"""Executors of programs, and the graphs that they run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.executors import (
    EXECUTORS,
    ONNX_RUNTIME,
    PYTORCH,
    Executor,
    executor_of,
)
from partitioner.cost_model.profiles.database import LinkEntry, Profile
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.pieces import added, joined
from partitioner.ir.types import TensorType


def _graph(op: str, **opsets: int) -> Graph:
    domains = {name.replace("onnx", ""): version for name, version in opsets.items()}
    type_ = TensorType.of("float32", (4,))
    node = Node("node", op, ("x",), ("y",))
    return Graph("one", ("x",), ("y",), (node,), {"x": type_, "y": type_}, {}, domains)


def test_the_operators_of_a_graph_name_its_executor() -> None:
    assert executor_of(_graph("Relu", onnx=17)) is ONNX_RUNTIME
    assert executor_of(replace(_graph("Relu"), opsets={"": 17, "ai.onnx.ml": 3})) is ONNX_RUNTIME
    assert executor_of(_graph("aten::relu", aten=1)) is PYTORCH


def test_each_executor_has_operators_of_its_own_for_pieces() -> None:
    for domain, op in (("", "Concat"), ("aten", "aten::cat")):
        graph = replace(_graph("any"), opsets={domain: 17})
        assert joined(graph, ("x", "y"), 0, "z").op == op
        assert added(graph, "x", "y", "z").op.removeprefix("aten::").lower().startswith("add")
        assert EXECUTORS[graph.domain] is executor_of(graph)


@pytest.mark.parametrize(("executor", "border_s"), [(ONNX_RUNTIME, 3e-6), (PYTORCH, None)])
def test_only_sessions_have_borders(executor: Executor, border_s: float | None) -> None:
    cluster = resolve_cluster("a100", 2)
    given = replace(cluster, devices=tuple(replace(d, border_s=3e-6) for d in cluster.devices))
    assert [spec.border_s for spec in given.run_by(executor).devices] == [border_s] * 2
    run = given.run_by(executor)
    assert run.run_by(executor) is run


def test_executors_submit_kernels_where_the_cluster_leaves_it_to_them() -> None:
    cluster = resolve_cluster("a100", 2)
    for executor, training in itertools.product(EXECUTORS.values(), (False, True)):
        (spec,) = cluster.run_by(executor, training=training).first_of_spec
        name = executor.submits(training=training)
        assert (spec.launched_by, spec.launch_s) == (name, launches()[name].kernel_s)
        (asked,) = cluster.with_launches("graphs").run_by(executor, training=training).first_of_spec
        assert asked.launched_by == "graphs"
    assert [PYTORCH.submits(training=training) for training in (False, True)] == [
        "eager", "autograd",
    ]  # fmt: skip


def test_a_time_that_somebody_put_in_place_stays() -> None:
    cluster = resolve_cluster("a100", 1)
    own = replace(cluster, devices=(replace(cluster.devices[0], launch_s=9e-6),))
    (spec,) = own.run_by(PYTORCH).devices
    assert (spec.launched_by, spec.launch_s) == (None, 9e-6)


def test_launches_of_measured_kernels_cannot_be_others() -> None:
    cluster = resolve_cluster("a100", 2)
    profile = Profile(Path("none"), "gpu", 1, 2, {2: {}})
    measured = replace(cluster, devices=tuple(replace(d, profile=profile) for d in cluster.devices))
    with pytest.raises(CostError, match="kernels of device 'a100-80g' are measured"):
        measured.with_launches("graphs")


def test_a_border_of_sessions_submits_the_next_graph() -> None:
    graphs = resolve_cluster("a100", 2).with_launches("graphs")
    graph_s = launches()["graphs"].graph_s
    assert graph_s == pytest.approx(2.5e-6)
    assert [spec.border_s for spec in graphs.run_by(ONNX_RUNTIME).devices] == [graph_s] * 2
    assert [spec.border_s for spec in graphs.run_by(PYTORCH).devices] == [None] * 2


def test_a_measured_border_goes_before_that_of_the_device() -> None:
    border = LinkEntry("border", 2, 0, 7e-6, 0.0, 5, "any", "2026-11-28")
    profile = Profile(Path("none"), "cpu", 1, 2, {}, border=border)
    cluster = resolve_cluster("a100", 2)
    given = replace(
        cluster,
        devices=tuple(replace(d, border_s=3e-6, profile=profile) for d in cluster.devices),
    )
    assert [spec.border_s for spec in given.run_by(ONNX_RUNTIME).devices] == [7e-6] * 2
