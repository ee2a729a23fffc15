"""Estimated FLOPs of nodes without a rule."""

import pytest

from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.types import TensorType

Shape = tuple[int, ...]


def estimate(op: str, x: Shape, y: Shape, *weights: tuple[str, Shape], **attrs: Attr) -> float:
    names = [f"w{index}" for index in range(len(weights))]
    types = {"x": TensorType.of("float32", x), "y": TensorType.of("float32", y)}
    types |= {n: TensorType.of(*weight) for n, weight in zip(names, weights, strict=True)}

    def unread() -> None:
        raise AssertionError("contents are not read")

    constants = {name: Constant(types[name], unread) for name in names}  # type: ignore[arg-type]
    node = Node("node", op, ("x", *names), ("y",), attrs)
    graph = Graph("g", ("x",), ("y",), (node,), types, constants, {"": 17})
    return estimated_flops(graph, node)


CASES = [
    pytest.param("acme::Twirl", (4, 8), (4, 8), [("float32", (8, 8))], {}, 128, id="by elements"),
    pytest.param("acme::MatMulX", (4, 8), (4, 6), [("float32", (8, 6))], {}, 384, id="product"),
    pytest.param(
        "acme::MatMulNBits", (4, 64), (4, 6), [("uint8", (6, 4, 8))], {"K": 64, "N": 6}, 3072,
        id="packed, by K and N",
    ),
    pytest.param(
        "acme::MatMulX", (4, 64), (4, 6), [("uint8", (6, 32))], {"bits": 4}, 3072,
        id="packed, by bits",
    ),
    pytest.param(
        "com.microsoft::NhwcFusedConv", (1, 5, 5, 3), (1, 5, 5, 7), [("float32", (7, 3, 3, 3))],
        {}, 2 * 25 * 189, id="channels last",
    ),
    pytest.param(
        "com.microsoft::FusedConv", (1, 3, 5, 5), (1, 7, 5, 5), [("float32", (7, 3, 3, 3))],
        {}, 2 * 25 * 189, id="channels first",
    ),
    pytest.param(
        "com.microsoft::MoE", (4, 8), (4, 8), [("float32", (4, 8, 16))], {"k": 1},
        2 * 4 * 8 * 16, id="one of four experts",
    ),
    pytest.param(
        "com.microsoft::QMoE", (4, 8), (4, 8), [("uint8", (4, 16, 4))],
        {"k": 2, "expert_weight_bits": 4}, 2 * 4 * 8 * 16 * 2, id="two of four packed experts",
    ),
    pytest.param(
        "DequantizeLinear", (64, 64), (64, 64), [("float32", (64, 4))], {}, 2 * 4096 + 256,
        id="not a product",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "x", "y", "weights", "attrs", "flops"), CASES)
def test_flops(
    op: str,
    x: Shape,
    y: Shape,
    weights: list[tuple[str, Shape]],
    attrs: dict[str, Attr],
    flops: float,
) -> None:
    assert estimate(op, x, y, *weights, **attrs) == flops
