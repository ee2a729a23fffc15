"""Detectors of the kind of YOLOv8: SiLU, split and joined channels, pools, upsampling."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_UPSAMPLING = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}


@dataclass
class Net:
    """A net that grows; a value is a name and its number of channels."""

    rng: random.Random
    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    channels: dict[str, int] = field(default_factory=dict)

    def constant(self, array: np.ndarray) -> str:
        """The name of a new constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, *inputs: str, channels: int, **attrs: Any) -> str:
        """The result of a new node."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        self.channels[name] = channels
        return name

    def conv(
        self,
        x: str,
        after: int,
        kernel: int = 3,
        stride: int = 1,
        group: int = 1,
        activation: str = "silu",
    ) -> str:
        """A convolution and its activation."""
        before = self.channels[x]
        draws = np.random.default_rng(len(self.nodes))
        shape = (after, before // group, kernel, kernel)
        weight = (draws.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        reads = [x, self.constant(weight), self.constant(np.full(after, 0.1, np.float32))]
        pads, size = [kernel // 2] * 4, [kernel] * 2
        attrs: dict[str, Any] = {"kernel_shape": size, "pads": pads, "strides": [stride] * 2}
        made = self.node("Conv", *reads, channels=after, group=group, **attrs)
        return self.activated(made, activation)

    def activated(self, x: str, activation: str) -> str:
        """An activation, none if it is "none"."""
        channels = self.channels[x]
        if activation == "none":
            return x
        if activation == "silu":
            return self.node(
                "Mul", x, self.node("Sigmoid", x, channels=channels), channels=channels
            )
        return self.node(activation, x, channels=channels)

    def joined(self, *values: str) -> str:
        """Values joined along channels."""
        return self.node("Concat", *values, channels=sum(self.channels[v] for v in values), axis=1)

    def split(self, x: str) -> tuple[str, str]:
        """Both halves of the channels."""
        half = self.channels[x] // 2
        first = self.node("Split", x, self.constant(np.array([half, half])), channels=half, axis=1)
        second = f"{first}_b"
        self.nodes[-1].output.append(second)
        self.channels[second] = half
        return first, second

    def bottlenecks(self, x: str, after: int, count: int, *, adds: bool, activation: str) -> str:
        """YOLOv8's C2f: half of the channels passes through all of them, and all are joined."""
        parts = [*self.split(self.conv(x, after, 1, activation=activation))]
        for _ in range(count):
            half = after // 2
            y = self.conv(
                self.conv(parts[-1], half, activation=activation), half, activation=activation
            )
            parts.append(self.node("Add", parts[-1], y, channels=half) if adds else y)
        return self.conv(self.joined(*parts), after, 1, activation=activation)

    def pooled(self, x: str, activation: str) -> str:
        """YOLO's SPPF: pools of stride 1, one after the other, joined."""
        channels = self.channels[x]
        parts = [self.conv(x, channels // 2, 1, activation=activation)]
        for _ in range(3):
            attrs: dict[str, Any] = {"kernel_shape": [5, 5], "pads": [2] * 4}
            parts.append(self.node("MaxPool", parts[-1], channels=channels // 2, **attrs))
        return self.conv(self.joined(*parts), channels, 1, activation=activation)

    def upsampled(self, x: str) -> str:
        """The image twice as large."""
        scales = self.constant(np.array([1, 1, 2, 2], np.float32))
        return self.node("Resize", x, "", scales, channels=self.channels[x], **_UPSAMPLING)

    def model(self, size: int, outputs: dict[str, list[int]], batch: int) -> onnx.ModelProto:
        """The net on images of 3 channels."""
        graph = helper.make_graph(
            self.nodes,
            "detector",
            [helper.make_tensor_value_info("x", 1, (batch, 3, size, size))],
            [helper.make_tensor_value_info(name, 1, shape) for name, shape in outputs.items()],
            self.constants,
        )
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def detector(
    size: int, width: int = 16, activation: str = "silu", seed: int = 0
) -> onnx.ModelProto:
    """A small YOLOv8: a body of three levels, and a head on the two coarser ones."""
    net = Net(random.Random(seed))
    net.channels["x"] = 3
    act = {"activation": activation}
    low = net.conv("x", width, stride=2, **act)
    low = net.conv(low, 2 * width, stride=2, **act)
    fine = net.bottlenecks(low, 2 * width, 1, adds=True, **act)
    middle = net.bottlenecks(
        net.conv(fine, 4 * width, stride=2, **act), 4 * width, 2, adds=True, **act
    )
    coarse = net.pooled(net.conv(middle, 8 * width, stride=2, **act), **act)
    middle = net.bottlenecks(
        net.joined(net.upsampled(coarse), middle), 4 * width, 1, adds=False, **act
    )
    fine = net.bottlenecks(net.joined(net.upsampled(middle), fine), 2 * width, 1, adds=False, **act)
    ends, places = [], 0
    for level, step in ((fine, 4), (middle, 8), (coarse, 16)):
        boxes = net.conv(net.conv(level, 4 * width, **act), 64, 1, activation="none")
        classes = net.conv(net.conv(level, 4 * width, **act), 18, 1, activation="none")
        both = net.joined(boxes, classes)
        flat = net.constant(np.array([1, 82, -1]))
        ends.append(net.node("Reshape", both, flat, channels=82))
        places += (size // step) ** 2
    joined = net.node("Concat", *ends, channels=82, axis=2)
    sizes = net.constant(np.array([64, 18]))
    boxes = net.node("Split", joined, sizes, channels=64, axis=1)
    net.nodes[-1].output.append("scores")
    shape = net.constant(np.array([1, 4, 16, places]))
    bins = net.node("Reshape", boxes, shape, channels=4)
    moved = net.node("Transpose", bins, channels=16, perm=[0, 2, 1, 3])
    share = net.node("Softmax", moved, channels=16, axis=1)
    net.channels[share] = 16
    distance = net.conv(share, 1, 1, activation="none")
    flat = net.node("Reshape", distance, net.constant(np.array([1, 4, places])), channels=4)
    net.channels["scores"] = 18
    scores = net.node("Sigmoid", "scores", channels=18)
    end = net.node("Concat", flat, scores, channels=22, axis=1)
    return net.model(size, {end: [1, 22, places]}, 1)


def drawn_net(seed: int) -> onnx.ModelProto:
    """A random net of the same parts, in an order of its own."""
    rng = random.Random(seed)
    net = Net(rng)
    net.channels["x"] = 3
    size, width = rng.choice((32, 48, 64)), rng.choice((4, 8, 16, 16, 20, 24, 32))
    acts = rng.choice((["silu"], ["Relu"], ["silu", "Relu"], ["silu", "Sigmoid", "HardSwish"]))
    values = [net.conv("x", width, rng.choice((1, 3)), activation=rng.choice(acts))]
    side = size
    for _ in range(rng.randint(3, 9)):
        x, act = rng.choice(values[-2:]), rng.choice(acts)
        kind = rng.choice((*_KEEPING, *_KEEPING, "down", "pool", "up"))
        if kind in _KEEPING:
            values.append(_kept(net, kind, x, values, width, act))
        elif kind == "up" and side < size:
            side, values = 2 * side, [net.upsampled(x)]
        elif kind == "down" and side > size // 4:
            side, values = side // 2, [net.conv(x, 2 * width, stride=2, activation=act)]
        elif kind == "pool" and side > size // 4:
            window: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
            made = net.node("AveragePool", x, channels=net.channels[x], **window)
            side, values = side // 2, [made]
    last = net.conv(values[-1], 6, 1, activation="none")
    flat = net.node("Reshape", last, net.constant(np.array([1, 6, side * side])), channels=6)
    moved = net.node("Transpose", flat, channels=side * side, perm=[0, 2, 1])
    out = net.node("Softmax", moved, channels=side * side, axis=2)
    return net.model(size, {out: [1, side * side, 6]}, 1)


#: Parts that keep the size of the image.
_KEEPING = ("conv", "depthwise", "c2f", "sppf", "join", "add", "global")


def _kept(net: Net, kind: str, x: str, values: list[str], width: int, act: str) -> str:
    rng, channels = net.rng, net.channels[x]
    alike = [y for y in values if net.channels[y] == channels and y != x]
    if kind == "depthwise":
        return net.conv(x, channels, 3, group=channels, activation=act)
    if kind == "c2f":
        count, adds = rng.randint(1, 2), rng.random() < 0.5
        return net.bottlenecks(x, 2 * width, count, adds=adds, activation=act)
    if kind == "sppf" and channels % 2 == 0:
        return net.pooled(x, act)
    if kind == "join" and len(values) > 1:
        return net.joined(*rng.sample(values, 2))
    if kind == "add" and alike:
        return net.node(rng.choice(("Add", "Mul")), x, rng.choice(alike), channels=channels)
    if kind == "global":
        mean = net.node("GlobalAveragePool", x, channels=channels)
        return net.node(
            "Mul", x, net.conv(mean, channels, 1, activation="Sigmoid"), channels=channels
        )
    return net.conv(x, rng.choice((width, 2 * width)), rng.choice((1, 3)), activation=act)
