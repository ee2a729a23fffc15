"""Compiled models with plans made by hand, for pictures and annotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from helpers.plans.whole_plans import Decision, hand_plan
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.mesh import DeviceMesh

TP2, TP3, GRID = (
    DeviceMesh.line(2, "tp"),
    DeviceMesh.line(3, "tp"),
    DeviceMesh.of({"dp": 2, "tp": 2}),
)
LATE = DeviceMesh.of({"tp": 2}, (2, 3))


def compiled(model: onnx.ModelProto | Path, devices: int, **decisions: Decision) -> Compiled:
    """A model under a hand-made plan (see `hand_plan`) on reference accelerators."""
    traced = load_onnx(model)
    cluster = resolve_cluster(None, devices)
    plan = hand_plan(traced.graph, **decisions)
    figures = evaluate(traced.graph, plan, cluster)
    return Compiled.of(OnnxModel(traced, model, {}, {}), cluster, plan, figures, {})


def mlp(**options: int) -> onnx.ModelProto:
    """Gemm "layer0.out", Relu "layer0.relu", Gemm "y" on 4 x 8 matrices."""
    return examples.build("mlp", **{"layers": 2, "hidden": 8, "batch": 4, **options})


def intra() -> Compiled:
    """Megatron's perceptron: columns, then rows, so that "y" is a pending sum."""
    return compiled(
        mlp(),
        2,
        **{
            "layer0.out": (TP2, {"n": "tp"}),
            "layer0.relu": (TP2, {"b1": "tp"}),
            "y": (TP2, {"k": "tp"}),
        },
    )


def inter() -> Compiled:
    """One layer a device."""
    return compiled(mlp(), 2, **{"layer0.out": 0, "layer0.relu": 0, "y": 1})


def hybrid() -> Compiled:
    """Two stages of two devices, each cut."""
    return compiled(
        mlp(),
        4,
        **{
            "layer0.out": (TP2, {"n": "tp"}),
            "layer0.relu": (TP2, {"b1": "tp"}),
            "y": (LATE, {"m": "tp"}),
        },
    )


def grid() -> Compiled:
    """Both axes of a 2 x 2 mesh, so that weights lie on device groups."""
    return compiled(
        mlp(),
        4,
        **{
            "layer0.out": (GRID, {"m": "dp", "n": "tp"}),
            "layer0.relu": (GRID, {"b0": "dp", "b1": "tp"}),
            "y": (GRID, {"m": "dp*tp"}),
        },
    )


PLANS: dict[str, Callable[[], Compiled]] = {
    "intra": intra,
    "inter": inter,
    "hybrid": hybrid,
    "grid": grid,
}


def renamed(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """The model with other names for nodes and values."""
    for node in model.graph.node:
        node.name = names.get(node.name, node.name)
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for item in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        item.name = names.get(item.name, item.name)
    return model
