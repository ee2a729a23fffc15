"""Elementwise ops with NumPy broadcasting."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from partitioner.ir.ops.signature import Signature, broadcast, names
from partitioner.ir.rule import Rule

#: An exp, log, tanh or erf is a range reduction and a short polynomial: about 8 multiply-adds'
#: worth of vector work on CPUs and GPUs alike.
TRANSCENDENTAL = 8.0

#: FLOPs a result element of functions, where not 1, by names in lower case without underscores.
#: Functions that only move or re-type bits cost 0: their time is memory's.
FLOPS: Mapping[str, float] = {
    **dict.fromkeys(("bitcast", "cast", "clone", "copy", "identity", "tocopy"), 0.0),
    **dict.fromkeys(("dropout", "liftfreshcopy", "maskedfill"), 0.0),
    **dict.fromkeys(("clamp", "clampmax", "clampmin", "clip", "hardtanh", "leakyrelu"), 2.0),
    **dict.fromkeys(("prelu", "rsqrt", "shrink", "softshrink"), 2.0),
    **dict.fromkeys(("addcdiv", "addcmul", "hardsigmoid", "lerp", "softsign"), 3.0),
    **dict.fromkeys(("hardswish", "hypot"), 4.0),
    **dict.fromkeys(("acos", "asin", "atan", "atan2", "cos", "sin", "tan"), TRANSCENDENTAL),
    **dict.fromkeys(("acosh", "asinh", "atanh", "cosh", "sinh", "tanh"), TRANSCENDENTAL),
    **dict.fromkeys(("erf", "erfc", "exp", "exp2", "expm1"), TRANSCENDENTAL),
    **dict.fromkeys(("log", "log10", "log1p", "log2", "xlogy"), TRANSCENDENTAL),
    **dict.fromkeys(("celu", "elu", "selu", "logit", "sigmoid", "softplus"), TRANSCENDENTAL + 2),
    **dict.fromkeys(("quickgelu", "silu", "swish"), TRANSCENDENTAL + 3),
    "gelu": TRANSCENDENTAL + 4,
    "biasgelu": TRANSCENDENTAL + 5,
    "fastgelu": TRANSCENDENTAL + 6,
    "logsigmoidforward": 2 * TRANSCENDENTAL,  # log(1 + exp -|x|)
    "pow": 2 * TRANSCENDENTAL,  # exp(y log x)
    "mish": 3 * TRANSCENDENTAL,  # x tanh(log(1 + exp x))
}


def flops_of(op: str) -> float:
    """FLOPs a result element of an op: ``LeakyRelu``, ``com.microsoft::Gelu``, ``pow.Scalar``."""
    function = op.rpartition("::")[2].partition(".")[0]
    return FLOPS.get(function.replace("_", "").lower(), 1.0)


def elementwise(
    signature: Signature,
    flops: float = 1.0,
    sums: Iterable[int] = (),
    places: Container[int] | None = None,
) -> Rule:
    """Operands (those at `places`, if given) broadcast to the result, of `flops` an element."""
    out = names("b", len(signature.out_shape))
    operands = [
        None if shape is None or not (places is None or i in places) else broadcast(shape, out)
        for i, shape in enumerate(signature.shapes)
    ]
    results = [broadcast(signature.out_shape, out)] * len(signature.out_types)
    return signature.rule(operands, results, flops=flops, sums=sums)
