"""Convolutions and their gradients: batch, groups, channels and space are cut.

A device reads its part of the image with a halo. PyTorch pads both ends of a dim alike: where a
part needs another padding at each end, it is padded by a node of its own, or alike and its first
or last positions are sliced off; and where a part of a gradient reaches beyond the device's
elements, these are sliced from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from partitioner.ir.graph import Attr, Node
from partitioner.ir.layout import Interval
from partitioner.ir.ops.local import own_groups
from partitioner.ir.ops.pieces import sliced
from partitioner.ir.ops.rules import sliding
from partitioner.ir.ops.rules.convolution import ConvDims, conv
from partitioner.ir.ops.rules.sliding import Slide
from partitioner.ir.ops.signature import Shape, names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

Pads = Sequence[tuple[int, int]]  #: Before and after, of each spatial dim.
FORWARD = "aten::convolution"
#: A part's convolution has at most one position in so many that is sliced off.
MOST_SLICED = 8


def setting(view: OpView, name: str, count: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Numbers of so many dims; one number is that of all dims."""
    numbers = view.ints(name) or default
    return numbers if len(numbers) == count else numbers * count


def planes(view: OpView, space: int, prefix: str = "s") -> list[str]:
    """Dims of a tensor whose last `space` dims are spatial: ``n0 n1 s0 s1``."""
    return [*names("n", view.rank() - space), *names(prefix, space)]


def _is_transposed(view: OpView) -> bool:
    return bool(view.attr("transposed"))


def _dims(view: OpView, weights: Shape) -> tuple[ConvDims, list[Slide]]:
    groups, kernel = view.int_attr("groups", 1), weights[2:]
    settings = "stride", "dilation", "padding", "padding"  # both ends are padded alike
    of = [setting(view, name, len(kernel)) for name in settings]
    slides = [Slide(*numbers) for numbers in zip(kernel, *of, strict=True)]
    return ConvDims.of(weights, groups, transposed=_is_transposed(view)), slides


def _forward(view: OpView) -> Rule:
    """A convolution without a bias is linear in the data."""
    (dims, slides), linear = _dims(view, view.shape(1)), [0] if view.type(2) is None else []
    operands = [dims.data, dims.weights, dims.channel]
    return conv(view, dims, operands, slides, bias=2, linear=linear)


def _grad_input(view: OpView) -> Rule:
    """``result, weights -> data`` sums output channels; it slides as the other kind does."""
    (dims, slides), transposed = _dims(view, view.shape(1)), _is_transposed(view)
    shapes = view.shape(), view.out_shape
    slid = sliding.windows(slides, *shapes, dims.data, transposed=not transposed)
    meets = 1.0 if transposed else math.prod(view.shape()[2:]) / math.prod(view.out_shape[2:])
    return view.rule(
        [dims.result, dims.weights],
        [dims.data],
        sizes=dims.sizes,
        reduce="co",
        whole=dims.kernel,
        windows=slid,
        linear=[0],
        flops=2 * meets,
    )


def _grad_weight(view: OpView) -> Rule:
    """``result, data -> weights`` sums the batch and the positions of the windows."""
    dims, slides = _dims(view, view.out_shape)
    slid = 0 if _is_transposed(view) else 1
    shapes = view.shape(slid), view.shape(1 - slid)
    windows = sliding.windows(slides, *shapes, dims.data, operand=slid)
    return view.rule(
        [dims.result, dims.data],
        [dims.weights],
        sizes=dims.sizes,
        reduce=["n", *dims.data[2:]],
        whole=dims.kernel,
        windows=windows,
        linear=[0],
        flops=2,
    )


def _local(view: OpView, local: LocalView, *, gradient: bool = False) -> LocalOp:
    """The result, or the data's gradient, which slides as the other kind of convolution does."""
    _, slides = _dims(view, view.shape(1))
    if _is_transposed(view) != gradient:
        return _spread(view, local, slides)
    size = {"input_size": local.out_shapes[0]} if gradient else {}
    return _gathered(view, local, slides, 0, local.out_regions, **size)


def _local_grad_weight(view: OpView, local: LocalView) -> LocalOp:
    slid, (_, slides) = 0 if _is_transposed(view) else 1, _dims(view, view.out_shape)
    positions, shape = local.regions[1 - slid : 2 - slid], local.out_shapes[0]
    return _gathered(view, local, slides, slid, positions, weight_size=shape)


def _gathered(
    view: OpView,
    local: LocalView,
    slides: Sequence[Slide],
    index: int,
    positions: Sequence[Sequence[Sequence[Interval]]],
    **attrs: Attr,
) -> LocalOp:
    """The node on its operand `index`, padded: each of the `positions` reads a window of it."""
    attrs = {**own_groups(local, "groups"), **attrs}
    node = replace(view.node, attrs={**view.node.attrs, **attrs})
    if not local.regions:
        return LocalOp((node,))
    spatial = [*zip(slides, local.regions[index][2:], positions[0][2:], strict=True)]
    pads = [slide.local_pads(read[0], at[0]) for slide, read, at in spatial]
    rest = [slide.local_rest(read[0], at[0]) for slide, read, at in spatial]
    more = tuple(rest) if _is_transposed(view) else (0,) * len(slides)
    node = replace(node, attrs={**node.attrs, "output_padding": more})
    alike = None
    is_forward = node.op == FORWARD and not _is_transposed(view)
    if is_forward and any(before != after for before, after in pads):
        alike = _alike(view, node, slides, local, pads)
    return alike or padded(view, node, index, local, pads)


def _alike(
    view: OpView, node: Node, slides: Sequence[Slide], local: LocalView, pads: Pads
) -> LocalOp | None:
    """A convolution padded alike, less its first or last positions; None unless these are few."""
    shape, crops, padding = list(local.out_shapes[0]), [], []
    for dim, (slide, (before, after)) in enumerate(zip(slides, pads, strict=True), 2):
        count, most = shape[dim], max(before, after)
        pad = most + (before - most) % slide.stride  # positions keep their places
        first = (pad - before) // slide.stride
        read = local.shapes[0][dim] + 2 * pad
        shape[dim] = (read - slide.extent) // slide.stride + 1
        if (shape[dim] - count) * MOST_SLICED > count:
            return None
        crops.append((first, shape[dim] - count - first))
        padding.append(pad)
    whole = replace(node, attrs={**node.attrs, "padding": tuple(padding)})
    return cropped(whole, view.out_type.with_shape(shape), local.out_shapes[0], crops)


def padded(
    view: OpView,
    node: Node,
    index: int,
    local: LocalView,
    pads: Pads,
    value: float = 0,
) -> LocalOp:
    """A local node with `padding`, of a pool at most half its window, or on a padded operand."""
    most = view.ints("kernel_size") or (math.inf,)
    if all(before == after <= min(most) / 2 for before, after in pads):
        padding = tuple(before for before, _ in pads)
        return LocalOp((replace(node, attrs={**node.attrs, "padding": padding}),))
    name, operand = f"{node.name}.padded", view.type(index)
    assert operand is not None
    shape = list(local.shapes[index])
    for dim, (before, after) in enumerate(pads, len(shape) - len(pads)):
        shape[dim] += before + after
    flat = tuple(size for pair in reversed(pads) for size in pair)
    pad: dict[str, Attr] = {"pad": flat, "value": value}
    inputs = tuple(name if i == index else value for i, value in enumerate(node.inputs))
    unpadded: dict[str, Attr] = {**node.attrs, "padding": (0,) * len(pads)}
    return LocalOp(
        (
            Node(name, "aten::constant_pad_nd", (node.inputs[index],), (name,), pad),
            replace(node, inputs=inputs, attrs=unpadded),
        ),
        types={name: operand.with_shape(shape)},
    )


def _spread(view: OpView, local: LocalView, slides: Sequence[Slide]) -> LocalOp:
    """A transposed convolution, or another's data gradient: its whole, then the device's part."""
    of_data = "input_size" in view.node.attrs
    attrs = own_groups(local, "groups")
    if not local.regions:
        attrs |= {"input_size": local.out_shapes[0]} if of_data else {}
        return LocalOp((replace(view.node, attrs={**view.node.attrs, **attrs}),))
    places = zip(slides, local.regions[0][2:], local.out_regions[0][2:], strict=True)
    crops = [slide.local_crops(read[0], written[0]) for slide, read, written in places]
    more = tuple(max(-after, 0) for _, after in crops)
    shape = list(local.out_shapes[0])
    for dim, (before, after) in enumerate(crops, 2):
        shape[dim] += before + max(after, 0)
    attrs |= {"padding": (0,) * len(slides)}
    attrs |= {"input_size": tuple(shape)} if of_data else {"output_padding": more}
    node = replace(view.node, attrs={**view.node.attrs, **attrs})
    return cropped(node, view.out_type.with_shape(shape), local.out_shapes[0], crops)


def cropped(node: Node, result: TensorType, shape: Shape, crops: Pads) -> LocalOp:
    """A local node, and its result without the `crops` of its last dims, which has this shape."""
    dims = range(len(shape) - len(crops), len(shape))
    cuts = {
        dim: (before, shape[dim])
        for dim, (before, _) in zip(dims, crops, strict=True)
        if result.shape[dim] != shape[dim]
    }
    if not cuts:
        return LocalOp((node,))
    whole = f"{node.name}.whole"
    part = sliced(whole, result, cuts, node.name, node.outputs[0])
    uncut = replace(node, name=whole, outputs=(whole,))
    return LocalOp((uncut, *part.nodes), types={whole: result, **part.types})


ROWS: Mapping[str, OpRow] = {
    FORWARD: OpRow(_forward, _local),
    "partitioner::convolution_grad_input": OpRow(_grad_input, partial(_local, gradient=True)),
    "partitioner::convolution_grad_weight": OpRow(_grad_weight, _local_grad_weight),
}
