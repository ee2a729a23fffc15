"""Executors of programs, and the graphs that they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from partitioner.cost_model.cluster.resolve import resolve_cluster
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
    assert given.run_by(ONNX_RUNTIME) is given


def test_a_measured_border_goes_before_that_of_the_device() -> None:
    border = LinkEntry("border", 2, 0, 7e-6, 0.0, 5, "any", "2026-11-28")
    profile = Profile(Path("none"), "cpu", 1, 2, {}, border=border)
    cluster = resolve_cluster("a100", 2)
    given = replace(
        cluster,
        devices=tuple(replace(d, border_s=3e-6, profile=profile) for d in cluster.devices),
    )
    assert [spec.border_s for spec in given.run_by(ONNX_RUNTIME).devices] == [7e-6] * 2
