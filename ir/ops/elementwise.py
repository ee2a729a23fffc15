"""Elementwise ops with NumPy broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule

#: An exp, log, tanh or erf is a range reduction and a short polynomial: about 8 multiply-adds'
#: worth of vector work on CPUs and GPUs alike.
TRANSCENDENTAL = 8.0

#: FLOPs a result element. Ops that only move or re-type bits cost 0: their time is memory's.
FLOPS: Mapping[str, float] = {
    **dict.fromkeys(("BitCast", "Cast", "Identity"), 0.0),
    **dict.fromkeys(("Abs", "BitwiseNot", "Ceil", "Floor", "IsInf", "IsNaN", "Neg", "Not"), 1.0),
    **dict.fromkeys(("Reciprocal", "Relu", "Round", "Sign", "Sqrt"), 1.0),
    **dict.fromkeys(("Add", "Div", "Mod", "Mul", "Sub"), 1.0),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), 1.0),
    **dict.fromkeys(("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"), 1.0),
    **dict.fromkeys(("Where", "ThresholdedRelu"), 1.0),
    **dict.fromkeys(("Clip", "LeakyRelu", "PRelu", "Shrink"), 2.0),
    **dict.fromkeys(("HardSigmoid", "Softsign"), 3.0),
    "HardSwish": 4.0,
    **dict.fromkeys(("Acos", "Asin", "Atan", "Cos", "Sin", "Tan"), TRANSCENDENTAL),
    **dict.fromkeys(("Acosh", "Asinh", "Atanh", "Cosh", "Sinh", "Tanh"), TRANSCENDENTAL),
    **dict.fromkeys(("Erf", "Exp", "Log"), TRANSCENDENTAL),
    **dict.fromkeys(("Celu", "Elu", "Selu"), TRANSCENDENTAL + 2),
    **dict.fromkeys(("Sigmoid", "Softplus"), TRANSCENDENTAL + 2),
    "Swish": TRANSCENDENTAL + 3,
    **dict.fromkeys(("Gelu", "com.microsoft::Gelu"), TRANSCENDENTAL + 4),
    "com.microsoft::BiasGelu": TRANSCENDENTAL + 5,
    "com.microsoft::FastGelu": TRANSCENDENTAL + 6,
    "com.microsoft::QuickGelu": TRANSCENDENTAL + 3,
    "Pow": 2 * TRANSCENDENTAL,  # exp(y log x)
    "Mish": 3 * TRANSCENDENTAL,  # x tanh(log(1 + exp x))
}

#: Reduce the operands with each other: one FLOP an operand and element.
VARIADIC = ("Max", "Mean", "Min", "Sum")


def elementwise(view: OpView, flops: float = 1.0) -> Rule:
    """Every operand broadcasts to the result; each result element costs `flops`."""
    out = view.out_shape()
    operands = [None if shape is None else broadcast_dims(shape, len(out)) for shape in view.shapes]
    results = [broadcast_dims(out, len(out)) if name else None for name in view.node.outputs]
    return Rule.of(operands, results, view.shapes, view.out_shapes, flops=flops)


def variadic(view: OpView) -> Rule:
    """Any number of operands, reduced with each other."""
    return elementwise(view, float(len(view.node.inputs)))


def cast_like(view: OpView) -> Rule:
    """The second operand gives its element type only, whatever its shape."""
    dims = broadcast_dims(view.shape(0), len(view.shape(0)))
    like = dims if view.shape(1) == view.shape(0) else None
    return Rule.of([dims, like], [dims], view.shapes, view.out_shapes)


def dropout(view: OpView) -> Rule:
    """Inference: the result is the operand, the mask is all true.

    Raises:
        OpaqueError: `training_mode` is on, or is not known: the mask would be random.
    """
    if view.type(2) is not None and bool(view.constant(2).reshape(-1)[0]):
        raise OpaqueError("training_mode is on: the mask is drawn at random")
    return elementwise(view, 0.0)


def _with_flops(flops: float) -> Callable[[OpView], Rule]:
    return lambda view: elementwise(view, flops)


ROWS: Mapping[str, OpRow] = {
    **{op: OpRow(_with_flops(flops), view=op == "Identity") for op, flops in FLOPS.items()},
    **{op: OpRow(variadic) for op in VARIADIC},
    "CastLike": OpRow(cast_like),
    "Dropout": OpRow(dropout),
}
