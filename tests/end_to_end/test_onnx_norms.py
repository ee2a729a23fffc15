"""ONNX's norms of groups and instances cut along space: statistics are those of the whole image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.strategies.constraints import Constraints, Pin

FORMS: Sequence[tuple[str, int, dict[str, Any]]] = (
    ("InstanceNormalization", 8, {"epsilon": 0.1}),
    ("InstanceNormalization", 17, {}),
    ("InstanceNormalization", 22, {}),
    ("GroupNormalization", 21, {"num_groups": 3}),
    ("GroupNormalization", 22, {"num_groups": 1, "epsilon": 0.01}),
    ("MeanVarianceNormalization", 9, {}),
    ("MeanVarianceNormalization", 13, {"axes": [1, 2, 3]}),
)


def net(op: str, opset: int, attrs: Mapping[str, Any], batch: int = 2) -> onnx.ModelProto:
    """A convolution whose result is far from zero, a norm, and a convolution."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(6, 2, 3, 3)).astype(np.float32),
        "far": np.full(6, 50, np.float32),
        "w2": rng.normal(size=(2, 6, 3, 3)).astype(np.float32),
    }
    operands = ["a"]
    if op != "MeanVarianceNormalization":
        operands += ["scale", "bias"]
        weights |= {name: rng.normal(size=6).astype(np.float32) for name in operands[1:]}
    nodes = [
        helper.make_node("Conv", ["x", "w", "far"], ["a"], name="a", pads=[1] * 4),
        helper.make_node(op, operands, ["b"], name="norm", **attrs),
        helper.make_node("Relu", ["b"], ["c"], name="c"),
        helper.make_node("Conv", ["c", "w2"], ["y"], name="y", pads=[1] * 4),
    ]
    values = {"x": ("float32", [batch, 2, 13, 11])}, {"y": ("float32", [batch, 2, 13, 11])}
    return onnx_models.model(nodes, *values, weights, opset=opset)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "mesh",
    [
        *(pytest.param({"h": ranks}, marks=pytest.mark.sweep) for ranks in (2, 3)),
        {"w": 5},
        {"h": 2, "w": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("op", "opset", "attrs"), FORMS, ids=str)
def test_norms_cut_along_space(
    op: str, opset: int, attrs: Mapping[str, Any], mesh: Mapping[str, int], tmp_path: Path
) -> None:
    ranks = int(np.prod([*mesh.values()]))
    compiled = partitioner.compile(
        net(op, opset, attrs),
        cluster=f"{ranks}xideal",
        parallel="spatial",
        mesh=mesh,
        time_limit_s=3,
    )
    whole = [
        name
        for name, node in compiled.plan.nodes.items()
        if ("ReduceSumSquare" in name or "Sub" in name) and len(node.cuts) < len(mesh)
    ]
    assert not whole
    assert any("ReduceSumSquare" in name for name in compiled.plan.nodes)
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5, str(found)
    compiled.save(tmp_path / "saved")
    assert partitioner.load(tmp_path / "saved").verify(seed=0).equal


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 0.0])
def test_small_deviations(scale: float) -> None:
    """ONNX Runtime's kernel adds nothing to a deviation, nor do the nodes that are cut."""
    norm = helper.make_node("MeanVarianceNormalization", ["x"], ["y"], name="norm")
    shapes = {"x": ("float32", [2, 3, 4, 5])}, {"y": ("float32", [2, 3, 4, 5])}
    model = onnx_models.model([norm], *shapes, opset=13)
    rows = Constraints((Pin("rows", tensor="y", dim=2, side="made"),))
    compiled = partitioner.compile(
        model, cluster="2xideal", strategy="intra", mesh={"h": 2}, constraints=rows
    )
    assert "norm" not in compiled.plan.nodes
    x = scale * np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    (expected,) = onnx_models.run(model, {"x": x})
    np.testing.assert_allclose(compiled.run({"x": x})["y"], expected, rtol=1e-4)
    assert np.isnan(expected).all() == (scale == 0.0)


def test_a_kernel_stays_where_space_is_whole() -> None:
    """One device runs the operator itself, and so do devices that cut the batch."""
    model = net("InstanceNormalization", 17, {})
    alone = partitioner.compile(model, devices=1)
    assert "norm" in alone.plan.nodes
    by_batch = partitioner.compile(model, devices=2, parallel="dp")
    assert "norm" in by_batch.plan.nodes
    kept = partitioner.compile(model, devices=2, parallel="dp", constraints=by_batch.plan)
    assert kept.plan.nodes == by_batch.plan.nodes


def test_a_plan_of_a_norm_in_parts_is_kept() -> None:
    model = net("InstanceNormalization", 17, {})
    options: dict[str, Any] = {"devices": 3, "cluster": "3xideal", "mesh": {"h": 3}}
    compiled = partitioner.compile(model, parallel="spatial", **options)
    kept = partitioner.compile(model, constraints=compiled.plan, **options)
    assert kept.plan.nodes == compiled.plan.nodes
    assert kept.verify(seed=0).equal


def test_pins_along_space() -> None:
    """A pin that the operator cannot meet is met in parts; one that neither can is refused."""
    rows = tuple(Pin("rows", tensor=value, dim=2, side="made") for value in "abc")
    options: dict[str, Any] = {"mesh": {"tp": 3}, "cluster": "3xideal", "strategy": "intra"}
    model = net("InstanceNormalization", 17, {})
    compiled = partitioner.compile(model, constraints=Constraints(rows), **options)
    assert compiled.verify(seed=0).equal
    wrong = Constraints((Pin("none", tensor="nothing", dim=2),))
    with pytest.raises(PartitionerError, match="nothing"):
        partitioner.compile(model, constraints=wrong, **options)


def test_what_has_no_form_in_parts() -> None:
    """Half precision, and a mean of one element."""
    norm = helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], name="n", num_groups=2)
    for dtype, shape in (("float16", [1, 4, 6]), ("float32", [1, 2, 1])):
        values = {"x": (dtype, shape), "s": (dtype, [shape[1]])}, {"y": (dtype, shape)}
        graph = load_onnx(onnx_models.model([norm], *values, opset=21)).graph
        assert [node.op for node in graph.nodes] == ["GroupNormalization"]
