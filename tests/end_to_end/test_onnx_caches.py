"""ONNX decoders: keys of a cache and rows of causal attention are cut, against ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models
import pytest
from onnx import helper

import partitioner
from partitioner.compiled.base import Compiled
from partitioner.ir.plan import PlacedNode, resolve

HEADS, KV, WIDTH = 4, 2, 6


def cut(model: onnx.ModelProto, devices: int, parallel: str = "cp", **more: Any) -> Compiled:
    result = partitioner.compile(model, devices=devices, parallel=parallel, time_limit_s=3, **more)
    assert isinstance(result, Compiled)
    return result


def products(result: Compiled) -> list[PlacedNode]:
    """Products of the scores and of the values in parts, with the reductions over keys."""
    ops = ("MatMul", "ReduceMax", "ReduceSum")
    return [
        p for p in resolve(result.graph, result.plan) if p.node.op in ops and "keys" in p.node.name
    ]


def are_cut(nodes: Sequence[PlacedNode]) -> bool:
    return bool(nodes) and all(
        any("cp" in layout.axes for layout in placed.layouts.values()) for placed in nodes
    )


def operator(
    attrs: Mapping[str, Any], *, packed: bool = False, past: int = 12, rows: int = 1, mask: str = ""
) -> onnx.ModelProto:
    """Attention over past keys and those of some rows, with present keys as results."""
    sizes = {"query": HEADS, "key": KV, "value": KV}
    inputs: dict[str, tuple[str, list[int]]] = {
        name: ("float32", [2, rows, heads * WIDTH] if packed else [2, heads, rows, WIDTH])
        for name, heads in sizes.items()
    }
    total = past + rows
    if mask:
        inputs["mask"] = (mask, [1, 1, rows, total])
    for name in ("past_key", "past_value"):
        inputs[name] = ("float32", [2, KV, past, WIDTH])
    if packed:
        attrs = {**attrs, "q_num_heads": HEADS, "kv_num_heads": KV}
    operands = ["query", "key", "value", "mask" if mask else "", "past_key", "past_value"]
    results = ["result", "present_key", "present_value"]
    outputs = {
        "result": ("float32", inputs["query"][1]),
        **{name: ("float32", [2, KV, total, WIDTH]) for name in results[1:]},
    }
    node = helper.make_node("Attention", operands, results, name="attention", **attrs)
    return onnx_models.model([node], inputs, outputs, opset=23)


CASES: Sequence[tuple[dict[str, Any], int]] = (
    ({}, 2),
    ({"packed": True}, 3),
    ({"mask": "bool", "rows": 3}, 3),
    ({"mask": "float32", "rows": 2, "attrs": {"is_causal": 1}}, 2),
    ({"rows": 3, "attrs": {"is_causal": 1, "scale": 0.3}, "past": 14}, 5),
    ({"mask": "bool", "rows": 2, "attrs": {"is_causal": 1}, "packed": True}, 2),
)


@pytest.mark.parametrize(("options", "devices"), CASES, ids=str)
def test_attention_with_past_keys(options: dict[str, Any], devices: int) -> None:
    result = cut(operator(**{"attrs": {}, **options}), devices)
    assert are_cut(products(result))
    joins = [p for p in resolve(result.graph, result.plan) if p.node.op == "Concat"]
    assert are_cut(joins)
    verified = result.verify(seed=1)
    assert verified.equal, str(verified)


def lines(rows: int, keys: int, opset: int) -> onnx.ModelProto:
    """Attention as exporters write it: two products, a mask and a softmax."""
    inputs = {
        "query": ("float32", [1, HEADS, rows, WIDTH]),
        "key": ("float32", [1, HEADS, keys, WIDTH]),
        "value": ("float32", [1, HEADS, keys, WIDTH]),
        "mask": ("float32", [1, 1, rows, keys]),
    }
    nodes = [
        helper.make_node("Transpose", ["key"], ["kt"], name="kt", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "kt"], ["scores"], name="scores"),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"], name="scaled"),
        helper.make_node("Add", ["scaled", "mask"], ["masked"], name="masked"),
        helper.make_node("Softmax", ["masked"], ["weights"], name="weights", axis=-1),
        helper.make_node("MatMul", ["weights", "value"], ["result"], name="result"),
    ]
    outputs = {"result": ("float32", [1, HEADS, rows, WIDTH])}
    scale = {"scale": np.array(WIDTH**-0.5, np.float32)}
    return onnx_models.model(nodes, inputs, outputs, scale, opset=opset)


@pytest.mark.parametrize("opset", [13, 18])
def test_attention_in_lines(opset: int, tmp_path: Path) -> None:
    result = cut(lines(rows=2, keys=13, opset=opset), 3)
    names = ("scores", "result")
    assert are_cut([p for p in resolve(result.graph, result.plan) if p.node.name in names])
    assert are_cut(products(result))
    assert result.verify(seed=1).equal
    result.save(tmp_path / "saved")
    assert partitioner.load(tmp_path / "saved").verify(seed=0).equal


def test_a_long_cache_is_cut_without_being_asked_for() -> None:
    result = partitioner.compile(lines(rows=1, keys=100_000, opset=18), devices=5)
    assert any("/keys/" in name for name in result.plan.nodes)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("mask", ["", "bool"])
def test_rows_of_causal_attention(mask: str, devices: int) -> None:
    """Of as many rows as keys, without a cache and over one."""
    for past in (0, 3):
        model = operator({"is_causal": 1}, past=past, rows=7, mask=mask) if past else plain(mask)
        result = cut(model, devices)
        nodes = [p for p in resolve(result.graph, result.plan) if p.node.op == "Attention"]
        assert nodes
        assert all("q" in placed.layouts for placed in nodes)
        verified = result.verify(seed=1)
        assert verified.equal, str(verified)


def plain(mask: str) -> onnx.ModelProto:
    """Causal attention of seven rows."""
    names = {"query": HEADS, "key": KV, "value": KV}
    inputs: dict[str, tuple[str, list[int]]] = {
        name: ("float32", [2, 7, heads * WIDTH]) for name, heads in names.items()
    }
    if mask:
        inputs["mask"] = (mask, [7, 7])
    attrs = {"is_causal": 1, "q_num_heads": HEADS, "kv_num_heads": KV}
    node = helper.make_node("Attention", list(inputs), ["result"], name="attention", **attrs)
    return onnx_models.model([node], inputs, {"result": inputs["query"]}, opset=23)
