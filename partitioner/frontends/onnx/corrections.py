"""Corrections of onnx_shape_inference: element types of ONNX Runtime's operators that it gets wrong.

A comparison of every operator of com.microsoft with ONNX Runtime's schemas finds these
(tests/frontends/onnx/test_corrections.py).
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir
from onnx_ir import DataType
from onnx_shape_inference import registry

_DOMAIN = "com.microsoft"


def _zero_point(index: int) -> Callable[[onnx_ir.Node], DataType | None]:
    """The type of the result's zero point, float without one."""

    def dtype(node: onnx_ir.Node) -> DataType | None:
        value = node.inputs[index] if index < len(node.inputs) else None
        return DataType.FLOAT if value is None else value.dtype

    return dtype


#: Element type of the first result; None while it is not known.
_RESULTS: dict[str, Callable[[onnx_ir.Node], DataType | None]] = {
    "QEmbedLayerNormalization": lambda _: DataType.FLOAT,
    "QGemm": _zero_point(8),
    "QLinearConcat": _zero_point(1),
}


def correct_inference() -> None:
    """Put the corrections before the library's own inference, which keeps a type that it finds."""
    registry.collect()
    for op, dtype in _RESULTS.items():
        _register(op, dtype)


def _register(op: str, dtype: Callable[[onnx_ir.Node], DataType | None]) -> None:
    infer = registry.get(_DOMAIN, op, 1)
    assert infer is not None

    def typed(context: object, node: onnx_ir.Node) -> None:
        result = dtype(node)
        if node.outputs and node.outputs[0].dtype is None and result is not None:
            node.outputs[0].dtype = result
        infer(context, node)

    registry.register(_DOMAIN, op)(typed)
