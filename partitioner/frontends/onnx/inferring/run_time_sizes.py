"""Shapes of results whose sizes or axes are operands that are computed at run time: unknown.

onnx_shape_inference reads such an operand as an absent one: it takes Split's parts to be equal,
Squeeze's axes to be all dims of size 1, and fails on Pad's axes. Where the shape of one branch of
an If is unknown, it takes the other's. A guess is worse than no shape, because it contradicts what
the model declares. Here the unknown stays unknown, so that the model's declaration decides.

It also follows the elements of every vector that Concat makes, as sizes, one symbol each. Here it
does so up to a number that a shape can have.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir
from onnx_shape_inference import ShapeInferenceContext, registry

from partitioner.frontends.onnx.inferring.check_nodes import MAX_RANK
from partitioner.frontends.onnx.inferring.contents import MOST_FOLLOWED

_Infer = Callable[[ShapeInferenceContext, onnx_ir.Node], None]

#: Operators whose last operand is a shape (Tile's: repeats), and their first opset with it.
_SHAPED = (("ConstantOfShape", 9), ("Expand", 8), ("Reshape", 5), ("Tile", 6))


def never_guess() -> None:
    """Register these rules in the registry of onnx_shape_inference, once a process."""
    registry.collect()
    for op_type, since, operand, unknown in _RULES:
        known = registry.get("", op_type, since)
        if known is not None and not hasattr(known, "unknown"):
            registry.register("", op_type, since)(_Rule(known, operand, unknown))
    for op_type, since in _SHAPED:
        known = registry.get("", op_type, since)
        if known is not None and not hasattr(known, "known"):
            registry.register("", op_type, since)(_Shaped(known))
    for op_type, since, rule in (("Concat", 4, _Concat), ("If", 1, _If)):
        known = registry.get("", op_type, since)
        if known is not None and not hasattr(known, "known"):
            registry.register("", op_type, since)(rule(known))


class _Rule:
    """A registered rule, which is asked only where an operand is absent or constant.

    Attributes:
        known: The registered rule.
        operand: Index of the operand.
        unknown: The rule where that operand is computed at run time.
    """

    def __init__(self, known: _Infer, operand: int, unknown: _Infer) -> None:
        self.known, self.operand, self.unknown = known, operand, unknown

    def __call__(self, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
        value = node.inputs[self.operand] if len(node.inputs) > self.operand else None
        computed = value is not None and onnx_ir.convenience.get_const_tensor(value) is None
        (self.unknown if computed else self.known)(context, node)


class _Concat:
    """The registered rule of Concat, which is asked only where it follows few elements."""

    def __init__(self, known: _Infer) -> None:
        self.known = known

    def __call__(self, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
        lengths = [_length(value) for value in node.inputs]
        total = sum(length for length in lengths if length is not None)
        if total <= MOST_FOLLOWED or None in lengths:
            self.known(context, node)
            return
        first = node.inputs[0]
        assert first is not None  # it has a length
        context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape([total]), first.dtype)


class _If:
    """The registered rule of If, less the shapes of results that one branch alone knows."""

    def __init__(self, known: _Infer) -> None:
        self.known = known

    def __call__(self, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
        before = [value.shape for value in node.outputs]
        self.known(context, node)
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        results = zip(node.outputs, before, *(branch.outputs for branch in branches), strict=False)
        for value, shape, then, other in results:
            if (then.shape is None) != (other.shape is None):
                value.shape = shape


class _Shaped:
    """The registered rule of an operator whose last operand is a shape, of at most NumPy's dims."""

    def __init__(self, known: _Infer) -> None:
        self.known = known

    def __call__(self, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
        rank = _length(node.inputs[-1]) if node.inputs else None
        if rank is not None and rank > MAX_RANK:
            raise ValueError(f"its shape has {rank} dims; at most {MAX_RANK} are supported")
        self.known(context, node)


def _length(value: onnx_ir.Value | None) -> int | None:
    """Elements of a vector; None if that is not known, or the value is no vector."""
    if value is None or value.shape is None or len(value.shape) != 1:
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else None


def _split(context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """All sizes are the operand's but those along the axis."""
    data = node.inputs[0]
    assert data is not None
    axis = node.attributes.get_int("axis", 0) or 0
    for value in node.outputs:
        shape = None
        if data.shape is not None and -len(data.shape) <= axis < len(data.shape):
            dims = list(data.shape.dims)
            dims[axis] = context.new_symbolic_dim()
            shape = onnx_ir.Shape(dims)
        context.set_shape_and_dtype(value, shape, data.dtype)


def _squeeze(context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Not even the rank is known: axes may be listed twice, counted from both ends."""
    data = node.inputs[0]
    assert data is not None
    context.set_shape_and_dtype(node.outputs[0], None, data.dtype)


def _pad(context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """The rank is the operand's."""
    data = node.inputs[0]
    assert data is not None
    shape = None
    if data.shape is not None:
        shape = onnx_ir.Shape([context.new_symbolic_dim() for _ in data.shape])
    context.set_shape_and_dtype(node.outputs[0], shape, data.dtype)


#: Operator, first opset with the operand, the operand's index, the rule where it is computed.
_RULES: tuple[tuple[str, int, int, _Infer], ...] = (
    ("Pad", 18, 3, _pad),
    ("Split", 13, 1, _split),
    ("Squeeze", 13, 1, _squeeze),
)
