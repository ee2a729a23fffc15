"""Operators of quantised elements that ONNX Runtime writes (``com.microsoft``), less products.

Operands come with a scale and a zero point each, and the result's. Those are numbers for the whole
tensor, except in a convolution, where the weight may have one for each output channel. The windows
of images are not cut along space; those with channels last stand so in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from partitioner.ir.ops.onnx.reduction import softmax_dims
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL, elementwise
from partitioner.ir.ops.rules.reduction import along
from partitioner.ir.ops.signature import OpaqueError, broadcast, names
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

Dims = Sequence[str] | None


def _concat(view: OpView) -> Rule:
    """The result's settings, then each operand with its own; the joined dim is whole."""
    rank = len(view.out_shape)
    axis, dims = view.dim("axis", 0, rank), names("d", rank)
    operands: list[Dims] = [None] * len(view.types)
    whole = {dims[axis]}
    for index in range(2, len(view.types), 3):
        part = f"p{index}"
        operands[index] = [*dims[:axis], part, *dims[axis + 1 :]]
        whole.add(part)
    return view.rule(operands, [dims], whole=whole, points=dims, flops=2)


def _image(view: OpView, *, last: bool | None = None) -> Rule:
    """Batch and channels are cut, space is whole; a FLOP a point of the window, or of all space."""
    last = bool(view.int_attr("channels_last", 0)) if last is None else last

    def space(shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[1:-1] if last else shape[2:])

    kernel = view.ints("kernel_shape") or space(view.shape())
    before = names("x", view.rank() - 2)
    after = broadcast(space(view.out_shape), names("y", view.rank() - 2))
    data = ["n", *before, "c"] if last else ["n", "c", *before]
    result = ["n", *after, "c"] if last else ["n", "c", *after]
    whole = {*before, *(name for name in after if name != "1")}
    points = [name for name in result if name != "1"]
    flops = float(math.prod(kernel))
    return view.rule([data], [result], whole=whole, points=points, flops=flops)


def _conv(view: OpView) -> Rule:
    """QLinearConv with channels last: batch and, without groups, output channels are cut."""
    if not view.int_attr("channels_last", 0):
        raise OpaqueError("channels_last is 0")
    space = view.rank() - 2
    before, after, kernel = names("x", space), names("y", space), names("k", space)
    inner = "ci" if view.int_attr("group", 1) == 1 else "cg"
    sizes = dict(zip(after, view.out_shape[1:-1], strict=True))
    shape = {name: size for name, size in sizes.items() if size != 1}
    weights = ["co", inner, *broadcast(view.shape(3)[2:], kernel)]
    settings = map(view.type, (4, 5))
    per_channel: list[Dims] = [["co"] if s is not None and s.numel > 1 else None for s in settings]
    operands: list[Dims] = [["n", *before, "ci"], None, None, weights, *per_channel, None, None]
    result = ["n", *(name if name in shape else "1" for name in after), "co"]
    whole = {*before, *shape, "ci", *(name for name in weights[1:] if name != "1")}
    if inner == "cg":
        whole.add("co")
    points = ["n", *shape, "co", *(name for name in weights[1:] if name != "1")]
    return view.rule([*operands, ["co"]], [result], whole=whole, points=points, flops=2)


ROWS: Mapping[str, OpRow] = {
    "com.microsoft::NhwcMaxPool": OpRow(partial(_image, last=True)),
    "com.microsoft::QLinearAdd": OpRow(partial(elementwise, flops=6, places=(0, 3))),
    "com.microsoft::QLinearAveragePool": OpRow(_image),
    "com.microsoft::QLinearConcat": OpRow(_concat),
    "com.microsoft::QLinearConv": OpRow(_conv),
    "com.microsoft::QLinearGlobalAveragePool": OpRow(_image),
    "com.microsoft::QLinearLeakyRelu": OpRow(partial(elementwise, flops=5, places=(0,))),
    "com.microsoft::QLinearMul": OpRow(partial(elementwise, flops=6, places=(0, 3))),
    "com.microsoft::QLinearSigmoid": OpRow(partial(elementwise, flops=8, places=(0,))),
    "com.microsoft::QLinearSoftmax": OpRow(
        lambda view: along(
            view, softmax_dims(view, view.int_attr("opset", 13)), flops=TRANSCENDENTAL + 6
        )
    ),
    "com.microsoft::QLinearWhere": OpRow(partial(elementwise, flops=4, places=(0, 1, 4))),
}
