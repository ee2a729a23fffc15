"""Corrections of onnx_shape_inference, which is wrong on some operators.

It gives other element types than ONNX Runtime's schemas to some operators of com.microsoft. It
takes the operands of MelWeightMatrix for each other, and knows no aspect ratio in Resize: these
shapes are left to ONNX's own inference. A comparison with all those schemas, and with the results
of ONNX's own node cases, finds these (tests/frontends/onnx/test_corrections.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    registry.register("", "MelWeightMatrix", 17)(_leave)
    resize = registry.get("", "Resize", 18)
    assert resize is not None
    registry.register("", "Resize", 18)(partial(_resize, resize))


def _leave(_: object, node: onnx_ir.Node) -> None:
    """Infer nothing."""


def _resize(
    infer: Callable[[object, onnx_ir.Node], None], context: object, node: onnx_ir.Node
) -> None:
    policy = node.attributes.get("keep_aspect_ratio_policy")
    if policy is None or policy.as_string() == "stretch":
        infer(context, node)


def _register(op: str, dtype: Callable[[onnx_ir.Node], DataType | None]) -> None:
    infer = registry.get(_DOMAIN, op, 1)
    assert infer is not None

    def typed(context: object, node: onnx_ir.Node) -> None:
        result = dtype(node)
        if node.outputs and node.outputs[0].dtype is None and result is not None:
            node.outputs[0].dtype = result
        infer(context, node)

    registry.register(_DOMAIN, op)(typed)
