"""Operators that are measured on every device, whatever the model: copies and products by size.

An estimate compares an operator with what the device attains at its size. A model whose tensors fit
the caches shows nothing of memory, nor one of convolutions of small products: these do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType

#: Bytes that copies move, half of them written: from a cache's to those of a large model's tensor.
MOVED_BYTES = tuple(2**power for power in (16, 20, 22, 24, 26, 28))
#: The largest copy moves at most this share of a device's memory.
_MEMORY_SHARE = 1 / 16
#: Rows, sums and columns of products: square ones, and a vector by a matrix.
PRODUCTS = ((128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (1, 2048, 2048))
_OPSET = 17


def yardsticks(memory_bytes: float, *, is_module: bool) -> Graph:
    """The operators as a graph, each with inputs of its own.

    Args:
        memory_bytes: Of a device.
        is_module: Whether PyTorch runs them, not ONNX Runtime.
    """
    copy, product, attrs = "Relu", "MatMul", dict[str, Any]()
    if is_module:
        copy, product = "aten::clone", "aten::mm"
        attrs = {"memory_format": "contiguous_format"}
    types: dict[str, TensorType] = {}
    nodes: list[Node] = []

    def add(op: str, shapes: Sequence[tuple[int, ...]], **attrs: Any) -> None:
        name = f"yardstick {len(nodes)}"
        *operands, result = names = [f"{name} {index}" for index in range(len(shapes))]
        types.update(zip(names, (TensorType.of("float32", one) for one in shapes), strict=True))
        nodes.append(Node(name, op, tuple(operands), (result,), attrs))

    for nbytes in MOVED_BYTES:
        if nbytes <= memory_bytes * _MEMORY_SHARE:
            shape = nbytes // 8 // 1024, 1024
            add(copy, (shape, shape), **attrs)
    for m, k, n in PRODUCTS:
        add(product, ((m, k), (k, n), (m, n)))
    made = {value for node in nodes for value in node.outputs}
    return Graph(
        "yardsticks",
        tuple(value for value in types if value not in made),
        tuple(value for value in types if value in made),
        tuple(nodes),
        types,
        {},
        {"aten": 1} if is_module else {"": _OPSET},
    )
