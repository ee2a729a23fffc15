"""A small GPT as an ONNX model that takes its caches and gives them back, and runs of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from helpers.onnx_files import onnx_models

#: "written": a cache has a fixed length, and the token is written at its position. "grown": a token
#: is joined behind those before it, as exporters of decoders do.
Style = Literal["written", "grown"]
FEED = {"present.*": "past_key_values.*"}
VOCABULARY = 61


class _Nodes:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        self.weights[name] = (scale * self.rng.normal(size=shape)).astype(np.float32)
        return name

    def ints(self, name: str, *values: int) -> str:
        self.weights[name] = np.array(values, np.int64)
        return name

    def add(self, op: str, inputs: list[str], made: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [made], name=made, **attrs))
        return made


def gpt(
    style: Style, length: int = 16, *, layers: int = 2, heads: int = 4, width: int = 32
) -> onnx.ModelProto:
    """One token a call: ids, positions, a mask of grown caches, caches -> logits, caches.

    Caches are (1, heads, length, channels); the length of grown ones has the symbol ``past``.
    """
    channels, past = width // heads, "past" if style == "grown" else length
    held: list[int | str | None] = [1, heads, past, channels]
    given: list[int | str | None] = [1, heads, f"{past} + 1", channels]
    inputs: dict[str, tuple[str, Any]] = {
        "input_ids": ("int64", [1, 1]),
        "position_ids": ("int64", [1, 1]),
    }
    outputs: dict[str, tuple[str, Any]] = {"logits": ("float32", [1, 1, VOCABULARY])}
    build = _Nodes(0)
    if style == "grown":
        inputs["attention_mask"] = ("int64", [1, f"{past} + 1"])
        is_seen = build.add("Cast", ["attention_mask"], "is_seen", to=9)
    else:
        build.weights["places"] = np.arange(length).reshape(1, length)
        is_seen = build.add("LessOrEqual", ["places", "position_ids"], "is_seen")
        shape = build.ints("written_shape", 1, heads, 1, channels)
        at = build.add("Reshape", ["position_ids", build.ints("ones", 1, 1, 1, 1)], "at")
        build.add("Expand", [at, shape], "written_at")
    build.weights["hidden"] = np.array(-np.inf, np.float32)
    build.weights["scale"] = np.array(channels**-0.5, np.float32)
    build.ints("split", 1, 1, heads, channels)
    build.ints("joined", 1, 1, width)
    table = build.weight("embedding", VOCABULARY, width)
    places = build.weight("positions", 256, width)
    tokens = build.add("Gather", [table, "input_ids"], "tokens")
    x = build.add("Add", [tokens, build.add("Gather", [places, "position_ids"], "where")], "x")
    for layer in range(layers):
        p = f"layer{layer}."
        normed = build.add("LayerNormalization", [x, _gain(build, p + "gain", width)], p + "norm")
        parts = {}
        for kind in ("query", "key", "value"):
            weight = build.weight(f"{p}{kind}.weight", width, width, scale=width**-0.5)
            flat = build.add("MatMul", [normed, weight], f"{p}{kind}.flat")
            split = build.add("Reshape", [flat, "split"], f"{p}{kind}.split")
            parts[kind] = build.add("Transpose", [split], p + kind, perm=[0, 2, 1, 3])
        for kind in ("key", "value"):
            old, new = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            inputs[old] = ("float32", held)
            outputs[new] = ("float32", given if style == "grown" else held)
            if style == "grown":
                build.add("Concat", [old, parts[kind]], new, axis=2)
            else:
                build.add("ScatterElements", [old, "written_at", parts[kind]], new, axis=2)
            parts[kind] = new
        turned = build.add("Transpose", [parts["key"]], p + "keys", perm=[0, 1, 3, 2])
        scores = build.add("MatMul", [parts["query"], turned], p + "scores")
        scaled = build.add("Mul", [scores, "scale"], p + "scaled")
        seen = build.add("Where", [is_seen, scaled, "hidden"], p + "seen")
        weights = build.add("Softmax", [seen], p + "weights", axis=-1)
        mixed = build.add("MatMul", [weights, parts["value"]], p + "mixed")
        turned = build.add("Transpose", [mixed], p + "turned", perm=[0, 2, 1, 3])
        flat = build.add("Reshape", [turned, "joined"], p + "flat")
        weight = build.weight(p + "out.weight", width, width, scale=width**-0.5)
        x = build.add("Add", [x, build.add("MatMul", [flat, weight], p + "out")], p + "x")
        up = build.weight(p + "up.weight", width, 4 * width, scale=width**-0.5)
        down = build.weight(p + "down.weight", 4 * width, width, scale=(4 * width) ** -0.5)
        wide = build.add("Relu", [build.add("MatMul", [x, up], p + "up")], p + "relu")
        x = build.add("Add", [x, build.add("MatMul", [wide, down], p + "down")], p + "y")
    head = build.weight("head.weight", width, VOCABULARY)
    build.add("MatMul", [x, head], "logits")
    return onnx_models.model(build.nodes, inputs, outputs, build.weights, opset=17)


def _gain(build: _Nodes, name: str, width: int) -> str:
    build.weights[name] = np.ones(width, np.float32)
    return name


def held_names(names: Iterable[str]) -> list[str]:
    """The names of caches among those of inputs."""
    return [name for name in names if name.startswith("past_key_values")]


def calls(style: Style, length: int) -> Iterator[dict[str, np.ndarray]]:
    """The inputs of each call but ids and caches; a mask shows the tokens that there are."""
    for step in range(length):
        given = {"position_ids": np.array([[step]])}
        if style == "grown":
            given["attention_mask"] = (np.arange(length + 1) >= length - step).astype(np.int64)[
                None
            ]
        yield given


def whole_model(
    model: onnx.ModelProto, style: Style, count: int, first: int = 1
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Greedy tokens of the whole model in ONNX Runtime, and its last outputs.

    Caches that grow begin empty.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    shapes = {value.name: value.shape for value in session.get_inputs()}
    held = {
        name: np.zeros([size if isinstance(size, int) else 0 for size in shape], np.float32)
        for name, shape in shapes.items()
        if name.startswith("past")
    }
    tokens, outputs = [first], dict[str, np.ndarray]()
    for step in range(count):
        given: dict[str, np.ndarray] = {
            "input_ids": np.array([[tokens[-1]]]),
            "position_ids": np.array([[step]]),
        }
        if style == "grown":
            given["attention_mask"] = np.ones((1, step + 1), np.int64)
        outputs = dict(zip(names, session.run(None, {**given, **held}), strict=True))
        held = {name: outputs[name.replace("past_key_values", "present")] for name in held}
        tokens.append(int(outputs["logits"][0, -1].argmax()))
    return tokens[1:], outputs
