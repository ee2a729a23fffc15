"""Experts and tables of ONNX models, cut by row: equal to the whole model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import partitioner
from partitioner.api.compiled.base import Compiled
from partitioner.ir.plan import resolve

TOKENS, WIDTH, INNER, EXPERTS, ROWS = 6, 8, 4, 5, 11


def _save(
    path: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], ids: bool
) -> Path:
    given = TensorProto.INT64 if ids else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", given, [TOKENS, 2] if ids else [TOKENS, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def _experts(path: Path) -> Path:
    """The best expert of each token, whose weights are gathered."""
    draw = np.random.default_rng(0)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, INNER, WIDTH),
        "down": (EXPERTS, WIDTH, INNER),
    }
    weights = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"one": np.array([1]), "last": np.array([-1]), "flat": np.array([-1])}
    weights["rows"] = np.array([TOKENS, WIDTH])
    calls = [
        ("MatMul", "x router", "logits"),
        ("TopK", "logits one", "best which"),
        ("Reshape", "which flat", "ids"),
        ("Gather", "up ids", "ups"),
        ("Gather", "down ids", "downs"),
        ("Unsqueeze", "x last", "column"),
        ("MatMul", "ups column", "before"),
        ("Relu", "before", "inner"),
        ("MatMul", "downs inner", "results"),
        ("Reshape", "results rows", "out"),
        ("Mul", "out best", "y"),
    ]
    nodes = [helper.make_node(op, a.split(), b.split(), name=b.split()[0]) for op, a, b in calls]
    return _save(path / "experts.onnx", nodes, weights, ids=False)


def _table(path: Path) -> Path:
    draw = np.random.default_rng(0)
    weights = {"table": draw.normal(size=(ROWS, WIDTH)).astype(np.float32)}
    weights["after"] = draw.normal(size=(WIDTH, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"], name="rows"),
        helper.make_node("MatMul", ["rows", "after"], ["y"], name="y"),
    ]
    return _save(path / "table.onnx", nodes, weights, ids=True)


@pytest.mark.parametrize("devices", [2, 3])
def test_experts_are_cut(tmp_path: Path, devices: int) -> None:
    """Five experts: each device has its own, and gives zeros for tokens of others."""
    result = partitioner.compile(
        _experts(tmp_path), devices=devices, parallel="ep", time_limit_s=10
    )
    assert isinstance(result, Compiled)
    sizes = (3, 2) if devices == 2 else (2, 2, 1)
    gathers = [p for p in resolve(result.graph, result.plan) if p.node.op == "Gather"]
    assert len(gathers) == 2
    for placed in gathers:
        at = placed.ins[0]
        assert at is not None
        assert at.sharding.dims[0].sizes() == sizes
        out = placed.outs[0]
        assert out is not None
        assert out.sharding.partial == (("ep", "sum"),)
    assert result.verify(seed=1)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_is_cut(tmp_path: Path, devices: int, dim: int) -> None:
    pins = tmp_path / "pins.toml"
    pins.write_text(f'[[pin]]\ntensor = "table"\ndim = {dim}\n')
    result = partitioner.compile(
        _table(tmp_path), devices=devices, constraints=pins, strategy="intra", time_limit_s=10
    )
    assert isinstance(result, Compiled)
    (placed,) = [p for p in resolve(result.graph, result.plan) if p.node.op == "Gather"]
    at = placed.ins[0]
    assert at is not None
    assert len(at.sharding.dims[dim].sizes()) == devices
    assert result.verify(seed=1)
