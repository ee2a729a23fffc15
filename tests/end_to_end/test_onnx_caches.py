"""ONNX decoders: keys of a cache and rows of causal attention are cut, against ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from helpers.onnx_files.decoders import are_cut_along_keys, writes
from partitioner.api.compiled.base import Compiled
from partitioner.backends.errors import BackendError
from partitioner.ir.plan import resolve
from partitioner.strategies.constraints import Constraints, Pin

HEADS, KV, WIDTH = 4, 2, 6


def cut(model: onnx.ModelProto, devices: int, parallel: str = "cp", **more: Any) -> Compiled:
    result = partitioner.compile(model, devices=devices, parallel=parallel, time_limit_s=3, **more)
    assert isinstance(result, Compiled)
    return result


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
    assert are_cut_along_keys(result)
    assert len(writes(result)) == 2
    if options.get("rows", 1) == 1:
        assert all({"a0", "a1"} == placed.layouts.keys() for placed in writes(result))
    verified = result.verify(seed=1)
    assert verified.equal, str(verified)


def drawn(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    dims = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input}
    return {
        name: rng.normal(size=[dim.dim_value for dim in shape]).astype(np.float32)
        for name, shape in dims.items()
    }


@pytest.mark.parametrize("causal", [0, 1])
def test_rows_that_see_no_key(causal: int) -> None:
    """The lowest number in a mask hides a key, as in ONNX Runtime; a number near it does not."""
    lowest, rows, past = np.finfo(np.float32).min, 6, 14
    proto = operator({"is_causal": causal}, rows=rows, past=past, mask="float32")
    result = cut(proto, 3)
    assert are_cut_along_keys(result)
    inputs = drawn(proto)
    mask = np.zeros((1, 1, rows, past + rows), np.float32)
    mask[..., 0, :] = lowest
    mask[..., 1, :] = -np.inf
    mask[..., 2, :], mask[..., 2, 3] = -np.inf, lowest
    mask[..., 3, :] = np.nextafter(lowest, np.float32(0))
    mask[..., 4, :past] = lowest  # all that one of the devices has
    mask[..., 0, -1] = 0 if causal else lowest  # hidden from the first row
    inputs["mask"] = mask
    (expected, *_) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    assert not expected[:, :, :3].any()
    assert expected[:, :, 3:].any(axis=(0, 1, 3)).all()
    np.testing.assert_allclose(result.run(inputs)["result"], expected, rtol=1e-5, atol=2e-6)


def test_no_number_under_a_causal_mask_counts() -> None:
    proto = operator({"is_causal": 1}, rows=2, past=12, mask="float32")
    result = cut(proto, 2)
    inputs = drawn(proto)
    inputs["mask"][..., 0, -1] = np.inf
    (expected, *_) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    np.testing.assert_allclose(result.run(inputs)["result"], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mode", [1, 3])
def test_scores_of_packed_operands_are_a_result(mode: int) -> None:
    """Without past keys, whose absence left present keys with a wrong shape."""
    shapes = {
        "query": [2, 5, HEADS * WIDTH],
        "key": [2, 7, KV * WIDTH],
        "value": [2, 7, KV * WIDTH],
    }
    inputs = {name: ("float32", shape) for name, shape in shapes.items()}
    outputs = {"result": inputs["query"], "scores": ("float32", [2, HEADS, 5, 7])}
    attrs = {"q_num_heads": HEADS, "kv_num_heads": KV, "qk_matmul_output_mode": mode}
    node = helper.make_node(
        "Attention", [*inputs], ["result", "", "", "scores"], name="attention", **attrs
    )
    proto = onnx_models.model([node], inputs, outputs, opset=23)
    heads = Constraints((Pin("heads", tensor="scores", dim=1),))
    for how, factor in (("dp", "b"), ("cp", "q"), (heads, "h")):
        kind: dict[str, Any] = {"parallel" if isinstance(how, str) else "constraints": how}
        result = partitioner.compile(proto, devices=2, time_limit_s=3, **kind)
        assert isinstance(result, Compiled)
        assert factor in result.plan.nodes["attention"].cuts
        verified = result.verify(seed=1)
        assert verified.equal, str(verified)


def lines(rows: int, keys: int, opset: int, width: int = WIDTH) -> onnx.ModelProto:
    """Attention as exporters write it: two products, a mask and a softmax."""
    inputs = {
        "query": ("float32", [1, HEADS, rows, width]),
        "key": ("float32", [1, HEADS, keys, width]),
        "value": ("float32", [1, HEADS, keys, width]),
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
    outputs = {"result": ("float32", [1, HEADS, rows, width])}
    scale = {"scale": np.array(width**-0.5, np.float32)}
    return onnx_models.model(nodes, inputs, outputs, scale, opset=opset)


@pytest.mark.parametrize("opset", [13, 18])
def test_attention_in_lines(opset: int, tmp_path: Path) -> None:
    result = cut(lines(rows=2, keys=13, opset=opset), 3)
    cuts = result.plan.nodes
    assert cuts["scores"].cuts.keys() == {"n"}
    assert cuts["result"].cuts.keys() == {"k"}
    assert are_cut_along_keys(result)
    assert result.verify(seed=1).equal
    result.save(tmp_path / "saved")
    assert partitioner.load(tmp_path / "saved").verify(seed=0).equal


WRITES: Mapping[str, tuple[int, list[int], dict[str, Any]]] = {
    "TensorScatter": (2, [2], {}),
    "ScatterElements": (2, [2, KV, 2, WIDTH], {"axis": 2}),
    "ScatterND": (0, [2, 1], {}),
}


@pytest.mark.parametrize("op", WRITES)
def test_a_cache_that_a_step_writes(op: str) -> None:
    """Two tokens over eleven positions, of which each of three devices has its part."""
    rows, size = 2, 11
    dim, places, attrs = WRITES[op]
    shape = [2, KV, size, WIDTH] if dim == 2 else [size, 2, KV, WIDTH]
    new = [*shape[:dim], rows, *shape[dim + 1 :]]
    kinds = "key", "value"
    inputs = {"query": ("float32", [2, HEADS, rows, WIDTH]), "at": ("int64", places)}
    for kind in kinds:
        inputs |= {f"cache_{kind}": ("float32", shape), f"new_{kind}": ("float32", new)}
    nodes, outputs = [], {"result": inputs["query"]}
    for kind in kinds:
        cache, written = f"cache_{kind}", f"next_{kind}"
        order = ["at", f"new_{kind}"]
        operands = [cache, *(reversed(order) if op == "TensorScatter" else order)]
        nodes.append(helper.make_node(op, operands, [written], name=written, **attrs))
        outputs[written] = inputs[cache]
        if dim != 2:
            turned = helper.make_node("Transpose", [written], [kind], name=kind, perm=[1, 2, 0, 3])
            nodes.append(turned)
    names = [*kinds] if dim != 2 else [f"next_{kind}" for kind in kinds]
    inputs["lengths"] = ("int64", [2])
    nodes.append(
        helper.make_node(
            *("Attention", ["query", *names, "", "", "", "lengths"], ["result"]),
            name="attention",
            is_causal=1,
        )
    )
    proto = onnx_models.model(nodes, inputs, outputs, opset=24)
    result = cut(proto, 3)
    assert are_cut_along_keys(result)
    written = [p for p in resolve(result.graph, result.plan) if p.node.op == op]
    assert len(written) == 2
    assert all(p.layouts.keys() == {"v" if op != "ScatterND" else "v0"} for p in written)
    arrays = drawn(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for first, second in ((3, 7), (0, 9), (8, 2)):  # over the border of two parts, and at the ends
        arrays["lengths"] = np.array([first + 2, second + 2])
        starts = np.array([first, second])
        if op == "TensorScatter":
            arrays["at"] = starts
        elif op == "ScatterND":
            arrays["at"] = np.array([[first], [first - size + 1]])
        else:
            at = (starts[:, None] + np.arange(rows))[:, None, :, None]
            arrays["at"] = np.broadcast_to(at, places).copy()
        for name, expected in zip(outputs, session.run(None, arrays), strict=True):
            np.testing.assert_allclose(result.run(arrays)[name], expected, rtol=1e-5, atol=2e-6)
    arrays["at"] = np.full(places, size)
    with pytest.raises(Exception, match=r"(?i)out of|indice|index"):
        result.run(arrays)


def test_a_circular_cache_is_not_written_from_a_negative_position() -> None:
    """ONNX Runtime refuses one; it would be a position from the end in a part."""
    inputs = {
        "cache": ("float32", [2, KV, 7, WIDTH]),
        "new": ("float32", [2, KV, 3, WIDTH]),
        "at": ("int64", [2]),
    }
    node = helper.make_node(
        "TensorScatter", [*inputs], ["next"], name="next", axis=2, mode="circular"
    )
    proto = onnx_models.model([node], inputs, {"next": inputs["cache"]}, opset=24)
    along = Constraints((Pin("positions", tensor="next", dim=2),))
    result = partitioner.compile(proto, devices=3, constraints=along, time_limit_s=3)
    assert isinstance(result, Compiled)
    assert "v" in result.plan.nodes["next"].cuts
    arrays = {**drawn(proto), "at": np.array([6, 0])}
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, arrays)
    np.testing.assert_array_equal(result.run(arrays)["next"], expected)
    with pytest.raises(BackendError, match="out of data bounds"):
        result.run({**arrays, "at": np.array([-1, 0])})


def test_a_long_cache_is_cut_without_being_asked_for() -> None:
    """Each of five devices has a part of the keys."""
    result = partitioner.compile(
        lines(rows=1, keys=100_000, opset=18, width=128), devices=5, mesh={"x": 5}
    )
    print(
        result, [(n, {k: str(v) for k, v in p.cuts.items()}) for n, p in result.plan.nodes.items()]
    )
    assert result.plan.nodes["scores"].cuts.keys() == {"n"}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("mask", ["", "bool"])
@pytest.mark.parametrize("past", [0, 3])
def test_rows_of_causal_attention(past: int, mask: str, devices: int) -> None:
    """Seven rows of a batch of two: of as many keys, and over a short cache."""
    names = {"query": HEADS, "key": KV, "value": KV}
    inputs: dict[str, tuple[str, list[int]]] = {"x": ("float32", [2, 7, 8])}
    rng = np.random.default_rng(0)
    weights = {
        f"w_{name}": rng.normal(size=(8, n * WIDTH)).astype(np.float32) for name, n in names.items()
    }
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name], name=name) for name in names]
    if mask:
        inputs["mask"] = (mask, [7, 7 + past])
    operands, results = [*names, "mask" if mask else ""], ["result"]
    if past:
        operands += ["past_key", "past_value"]
        inputs |= dict.fromkeys(operands[4:], ("float32", [2, KV, past, WIDTH]))
        results += ["present_key", "present_value"]
    attrs = {"is_causal": 1, "q_num_heads": HEADS, "kv_num_heads": KV}
    nodes.append(helper.make_node("Attention", operands, results, name="attention", **attrs))
    outputs = {"result": ("float32", [2, 7, HEADS * WIDTH])}
    outputs |= dict.fromkeys(results[1:], ("float32", [2, KV, 7 + past, WIDTH]))
    result = cut(onnx_models.model(nodes, inputs, outputs, weights, opset=23), devices)
    (attention,) = (p for p in resolve(result.graph, result.plan) if p.node.op == "Attention")
    assert attention.layouts.keys() == {"q"}
    verified = result.verify(seed=1)
    assert verified.equal, str(verified)
