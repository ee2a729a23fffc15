"""Segments of a rank compute the same wherever they are cut, in any layout of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, helper

from helpers.onnx_files.onnx_models import model
from helpers.plans import rank_programs as hand
from partitioner.api.profiling.sessions import in_phases
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.program import Comm, CommKind, Compute, Output, Part, Programs

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


class Net:
    """A model under construction: each method adds a node and returns its value's name."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        return name

    def constant(self, array: np.ndarray) -> str:
        self.weights[f"k{len(self.weights)}"] = array
        return f"k{len(self.weights) - 1}"

    def conv(self, value: str, before: int, after: int, kernel: int = 3, stride: int = 1) -> str:
        filters, bias = (
            self.constant(weights(after, before, kernel, kernel)),
            weights(after, 1)[:, 0],
        )
        attrs = {"pads": [kernel // 2] * 4, "strides": [stride] * 2}
        return self.add("Conv", value, filters, self.constant(bias), **attrs)

    def norm(self, value: str, channels: int) -> str:
        moments = [self.constant(np.linspace(0.5, 2, channels, dtype=np.float32)) for _ in range(4)]
        return self.add("BatchNormalization", value, *moments)

    def graph(self, shape: Sequence[int], result: str, out: Sequence[int]) -> Graph:
        ends = {"x": ("float32", shape)}, {result: ("float32", out)}
        return load_onnx(model(self.nodes, *ends, self.weights, opset=18)).graph


def image_net() -> Graph:
    """Residual blocks, a projection, channels that fill no block, a concatenation; odd sizes."""
    net = Net()
    first = net.add("Relu", net.conv("x", 3, 16))
    first = net.add("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2])
    inner = net.add("Relu", net.norm(net.conv(first, 16, 16), 16))
    block = net.add("Relu", net.add("Add", net.conv(inner, 16, 16), first))
    shortcut = net.conv(block, 16, 32, kernel=1, stride=2)
    low = net.add("Relu", net.add("Add", shortcut, net.conv(block, 16, 32, stride=2)))
    odd = net.add("Relu", net.conv(low, 32, 12))
    even = net.add("Sigmoid", net.conv(odd, 12, 24, kernel=1))
    more = net.add("Concat", even, net.conv(low, 32, 8), low, axis=1)
    pooled = net.add("Flatten", net.add("GlobalAveragePool", net.conv(more, 64, 20)))
    result = net.add("MatMul", pooled, net.constant(weights(20, 5)))
    return net.graph((1, 3, 18, 22), result, (1, 5))


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in graph.inputs}


def test_every_cut_computes_the_same() -> None:
    """Of each kind of value: sums over borders, images with odd channels, values read twice."""
    graph = image_net()
    fed = feeds(graph)
    (exact,) = Simulator(emit_models(uncut_programs(graph), graph)).run([fed])
    count = len(graph.nodes)
    for starts in [*([at] for at in range(1, count)), range(count), range(0, count, 3)]:
        models = emit_models(in_phases(uncut_programs(graph), list(starts)), graph)
        (cut,) = Simulator(models, optimization="all").run([fed])
        for name, expected in exact.outputs.items():
            np.testing.assert_allclose(cut.outputs[name], expected, rtol=1e-5, atol=1e-5)


SHAPE = (1, 16, 5, 7)


def there_and_back() -> hand.Case:
    """Rank 0 convolves, sends the image away and adds what comes back to a later convolution.

    What it sends is read again by two of its later segments, and what comes back by both.
    """
    image = hand.f32(*SHAPE)
    filters = {name: weights(16, 16, 3, 3) for name in ("w1", "w2", "w3", "w4")}
    types: Mapping[str, Any] = dict.fromkeys("xabcdefghy", image)

    def send(seq: int, source: int, target: int, *names: str, phase: int) -> Comm:
        moved = (hand.whole_to(source, target, SHAPE),)
        ends = phase, phase + 1
        return Comm(seq, CommKind.SEND, (0, 1), *names, "float32", moved, "", *ends)

    there = send(0, 0, 1, "b", "b1", phase=0)
    back = send(1, 1, 0, "r", "c", phase=1)

    def conv(before: str, weight: str, after: str, phase: int) -> Compute:
        return hand.op("Conv", f"{before} {weight}", after, phase, pads=(1, 1, 1, 1))

    first = [
        conv("x", "w1", "a", 0),
        hand.op("Relu", "a", "b", 0),
        there,
        back,
        conv("b", "w2", "d", 2),
        hand.op("Add", "d c", "e", 2),
        conv("e", "w3", "f", 3),
        hand.op("Add", "f b", "g", 3),
        hand.op("Add", "g c", "h", 3),
        conv("h", "w4", "y", 4),
    ]
    constants = {name: Part(name, None) for name in filters}
    ranks = (
        hand.rank(
            0,
            first,
            {**types, **{name: hand.f32(16, 16, 3, 3) for name in filters}},
            {"x": Part("x", None)},
            constants,
            outputs=[Output("y", "y", None)],
        ),
        hand.rank(
            1,
            [there, hand.op("Neg", "b1", "r", 1), back],
            dict.fromkeys(("b1", "r"), image),
        ),
    )
    x = hand.random(*SHAPE)
    return hand.Case(Programs(ranks, {"x": image}, {"y": image}), hand.graph(filters), {"x": x}, {})


@pytest.mark.parametrize("requests", [1, 3])
def test_images_that_are_sent_are_read_again(requests: int) -> None:
    case = there_and_back()
    models = emit_models(case.programs, case.graph)
    exact = Simulator(models).run([case.inputs] * requests)
    optimized = Simulator(models, optimization="all").run([case.inputs] * requests)
    for one, other in zip(exact, optimized, strict=True):
        np.testing.assert_allclose(other.outputs["y"], one.outputs["y"], rtol=1e-5, atol=1e-4)
