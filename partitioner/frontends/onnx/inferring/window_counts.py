"""Positions of the windows of pools and transposed convolutions, as ONNX Runtime counts them.

Shape inference counts others for pools that have dilation and automatic padding or whose window is
wider than the image, and for transposed convolutions whose stride is wider than their window.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir
from onnx_ir import SymbolicDim

from partitioner.ir.ops.rules.sliding import Slide, same_pads

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})

Size = int | SymbolicDim
Sizes = Sequence[Size]


def _ints(node: onnx_ir.Node, name: str, default: Sequence[int]) -> list[int]:
    return list(node.attributes.get_ints(name, default))


def _auto(node: onnx_ir.Node) -> str:
    return node.attributes.get_string("auto_pad", "NOTSET")


def _slides(node: onnx_ir.Node, kernel: Sequence[int]) -> list[Slide]:
    """The window of each spatial dim, padded as stated; none if the attributes do not fit."""
    count = len(kernel)
    strides, dilations = (_ints(node, name, [1] * count) for name in ("strides", "dilations"))
    pads = [0] * (2 * count)
    if _auto(node) == "NOTSET":
        pads = _ints(node, "pads", pads)
    sides = kernel, strides, dilations, pads[:count], pads[count:]
    is_moving = min((*strides, *dilations), default=0) > 0
    fits = is_moving and all(len(side) == count for side in sides)
    return [Slide(*side) for side in zip(*sides, strict=True)] if fits else []


def pool_counts(node: onnx_ir.Node, image: Sizes, inferred: Sizes) -> list[Size]:
    """Sizes of a pool's spatial dims; the `inferred` ones where that of the image is not known."""
    slides, auto = _slides(node, _ints(node, "kernel_shape", [])), _auto(node)
    if len(slides) != len(image):
        return list(inferred)

    def count(slide: Slide, size: int) -> int:
        padded = same_pads(slide, size, auto, dilated=False) if auto.startswith("SAME") else slide
        return padded.positions(size, ceil=node.attributes.get_int("ceil_mode", 0) != 0)

    return [
        count(slide, size) if isinstance(size, int) else kept
        for slide, size, kept in zip(slides, image, inferred, strict=True)
    ]


def state_pads(node: onnx_ir.Node) -> None:
    """Write automatic padding, in place, as pads where ONNX Runtime infers wrong sizes itself."""
    image = node.inputs[0] if node.inputs else None
    if node.domain or image is None or image.shape is None or not image.shape.is_static():
        return
    sizes = [int(size) for size in image.shape.numpy()[2:]]
    is_same = _auto(node).startswith("SAME")
    if node.op_type in POOLS and node.attributes.get_int("ceil_mode", 0) != 0 and not is_same:
        floors = onnx_ir.Node("", node.op_type, node.inputs, node.attributes.values())
        del floors.attributes["ceil_mode"]
        if pool_counts(node, sizes, sizes) == pool_counts(floors, sizes, sizes):
            del node.attributes["ceil_mode"]  # the last window would begin in the padding
            # Windows wider than the padded image are written as wide as that: with ceil_mode, ONNX
            # Runtime counts the elements of a mean so; without it, it counts those of the window.
            kernel = _ints(node, "kernel_shape", [])
            widths = [
                min(width, size + slide.before + slide.after) if slide.dilation == 1 else width
                for width, slide, size in zip(kernel, _slides(node, kernel), sizes, strict=False)
            ]
            if len(widths) == len(kernel):
                node.attributes["kernel_shape"] = onnx_ir.AttrInt64s("kernel_shape", widths)
    if is_same:
        pads = _pool_pads(node, sizes) if node.op_type in POOLS else _back_pads(node, sizes)
        if pads and min(pads) >= 0:
            del node.attributes["auto_pad"]
            node.attributes["pads"] = onnx_ir.AttrInt64s("pads", pads)


def _pool_pads(node: onnx_ir.Node, sizes: Sequence[int]) -> list[int]:
    """Pads of a pool with dilations; none for one without."""
    slides = _slides(node, _ints(node, "kernel_shape", []))
    if len(slides) != len(sizes) or all(slide.dilation == 1 for slide in slides):
        return []
    padded = [
        same_pads(slide, size, _auto(node), dilated=False)
        for slide, size in zip(slides, sizes, strict=True)
    ]
    return [*(slide.before for slide in padded), *(slide.after for slide in padded)]


def _back_pads(node: onnx_ir.Node, sizes: Sequence[int]) -> list[int]:
    """Pads of a transposed convolution with a stride wider than its window; none for others."""
    if node.op_type != "ConvTranspose" or "output_shape" in node.attributes:
        return []
    counts = transposed_counts(node, sizes, [2**62] * len(sizes))
    strides = _ints(node, "strides", [1] * len(sizes))
    totals = [
        int(count) - size * stride
        for count, size, stride in zip(counts, sizes, strides, strict=True)
        if isinstance(count, int)
    ]
    if len(totals) != len(sizes) or min(totals) >= 0:
        return []
    totals = [max(total, 0) for total in totals]
    firsts = [total // 2 if _auto(node) == "SAME_UPPER" else -(-total // 2) for total in totals]
    return [*firsts, *(total - first for total, first in zip(totals, firsts, strict=True))]


def transposed_counts(node: onnx_ir.Node, image: Sizes, inferred: Sizes) -> list[Size]:
    """Sizes of a transposed convolution's spatial dims: at most what the windows reach."""
    weights = node.inputs[1]
    if not _auto(node).startswith("SAME") or "output_shape" in node.attributes:
        return list(inferred)
    shape = [] if weights is None or weights.shape is None else list(weights.shape)[2:]
    slides = _slides(node, [size for size in shape if isinstance(size, int)])
    more = _ints(node, "output_padding", [0] * len(slides))
    if not len(slides) == len(more) == len(image):
        return list(inferred)
    return [
        min(kept, (size - 1) * slide.stride + slide.extent + extra)
        if isinstance(size, int) and isinstance(kept, int)
        else kept
        for slide, size, extra, kept in zip(slides, image, more, inferred, strict=True)
    ]
