"""Positions of the windows of pools and transposed convolutions, as ONNX Runtime counts them.

Shape inference counts others for pools that have dilation and automatic padding or whose window is
wider than the image, and for transposed convolutions whose stride is wider than their window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir
from onnx_ir import SymbolicDim

from partitioner.ir.ops.rules.sliding import Slide, same_pads

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})

Size = int | SymbolicDim
Sizes = Sequence[Size]


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a node."""

    node: onnx_ir.Node

    def ints(self, name: str, default: Sequence[int]) -> list[int]:
        """A list of integers."""
        attribute = self.node.attributes.get(name)
        return list(default if attribute is None else attribute.as_ints())

    @property
    def auto(self) -> str:
        """The kind of automatic padding; NOTSET for stated padding."""
        attribute = self.node.attributes.get("auto_pad")
        return "NOTSET" if attribute is None else attribute.as_string()

    @property
    def ceil(self) -> bool:
        """Tell whether a last window may reach beyond the padding."""
        attribute = self.node.attributes.get("ceil_mode")
        return attribute is not None and attribute.as_int() != 0

    def slides(self, kernel: Sequence[int]) -> list[Slide]:
        """The window of each spatial dim, padded as stated; none if the attributes do not fit."""
        count = len(kernel)
        strides, dilations = (self.ints(name, [1] * count) for name in ("strides", "dilations"))
        pads = self.ints("pads", [0] * (2 * count))
        if self.auto != "NOTSET":
            pads = [0] * (2 * count)
        sides = kernel, strides, dilations, pads[:count], pads[count:]
        fits = (
            all(len(side) == count for side in sides) and min((*strides, *dilations), default=0) > 0
        )
        return [Slide(*side) for side in zip(*sides, strict=True)] if fits else []


def pool_counts(node: onnx_ir.Node, image: Sizes, inferred: Sizes) -> list[Size]:
    """Sizes of a pool's result.

    Args:
        node: The pool.
        image: Sizes of its operand's spatial dims.
        inferred: Sizes of its result's, kept where an operand's is not known.
    """
    attributes = _Attributes(node)
    slides = attributes.slides(attributes.ints("kernel_shape", []))
    if len(slides) != len(image):
        return list(inferred)

    def count(slide: Slide, size: int) -> int:
        is_same = attributes.auto.startswith("SAME")
        padded = same_pads(slide, size, attributes.auto, dilated=False) if is_same else slide
        return padded.positions(size, ceil=attributes.ceil)

    return [
        count(slide, size) if isinstance(size, int) else kept
        for slide, size, kept in zip(slides, image, inferred, strict=True)
    ]


def state_pads(node: onnx_ir.Node) -> None:
    """Write automatic padding, in place, as the pads that it is where sizes are inferred wrongly.

    ONNX Runtime itself infers another size for such a node than it computes, and then refuses an
    output.
    """
    image = node.inputs[0] if node.inputs else None
    if node.domain or image is None or image.shape is None or not image.shape.is_static():
        return
    sizes = [int(size) for size in image.shape.numpy()[2:]]
    is_same = _Attributes(node).auto.startswith("SAME")
    if _Attributes(node).ceil and node.op_type in POOLS and not is_same:
        floors = onnx_ir.Node("", node.op_type, node.inputs, node.attributes.values())
        del floors.attributes["ceil_mode"]
        if pool_counts(node, sizes, sizes) == pool_counts(floors, sizes, sizes):
            del node.attributes["ceil_mode"]  # the last window would begin in the padding
            _narrow(node, sizes)
    if is_same:
        pads = _pool_pads(node, sizes) if node.op_type in POOLS else _back_pads(node, sizes)
        if pads and min(pads) >= 0:
            del node.attributes["auto_pad"]
            node.attributes["pads"] = onnx_ir.AttrInt64s("pads", pads)


def _narrow(node: onnx_ir.Node, sizes: Sequence[int]) -> None:
    """Write windows wider than the padded image, in place, as wide as that.

    With ceil_mode, ONNX Runtime counts the elements of a mean so; without it, it counts those of
    the window.
    """
    attributes = _Attributes(node)
    kernel = attributes.ints("kernel_shape", [])
    slides = attributes.slides(kernel)
    widths = [
        min(width, size + slide.before + slide.after) if slide.dilation == 1 else width
        for width, slide, size in zip(kernel, slides, sizes, strict=False)
    ]
    if len(widths) == len(kernel):
        node.attributes["kernel_shape"] = onnx_ir.AttrInt64s("kernel_shape", widths)


def _pool_pads(node: onnx_ir.Node, sizes: Sequence[int]) -> list[int]:
    """Pads of a pool with dilations; none for one without."""
    attributes = _Attributes(node)
    slides = attributes.slides(attributes.ints("kernel_shape", []))
    if len(slides) != len(sizes) or all(slide.dilation == 1 for slide in slides):
        return []
    padded = [
        same_pads(slide, size, attributes.auto, dilated=False)
        for slide, size in zip(slides, sizes, strict=True)
    ]
    return [*(slide.before for slide in padded), *(slide.after for slide in padded)]


def _back_pads(node: onnx_ir.Node, sizes: Sequence[int]) -> list[int]:
    """Pads of a transposed convolution with a stride wider than its window; none for others."""
    if node.op_type != "ConvTranspose" or "output_shape" in node.attributes:
        return []
    counts = transposed_counts(node, sizes, [2**62] * len(sizes))
    strides = _Attributes(node).ints("strides", [1] * len(sizes))
    totals = [
        int(count) - size * stride
        for count, size, stride in zip(counts, sizes, strides, strict=True)
        if isinstance(count, int)
    ]
    if len(totals) != len(sizes) or min(totals) >= 0:
        return []
    totals = [max(total, 0) for total in totals]
    is_upper = _Attributes(node).auto == "SAME_UPPER"
    firsts = [total // 2 if is_upper else -(-total // 2) for total in totals]
    return [*firsts, *(total - first for total, first in zip(totals, firsts, strict=True))]


def transposed_counts(node: onnx_ir.Node, image: Sizes, inferred: Sizes) -> list[Size]:
    """Sizes of a transposed convolution's result: at most what the windows reach, if not stated.

    Args:
        node: The convolution.
        image: Sizes of its operand's spatial dims.
        inferred: Sizes of its result's, kept where an operand's is not known.
    """
    attributes, weights = _Attributes(node), node.inputs[1]
    if not attributes.auto.startswith("SAME") or "output_shape" in node.attributes:
        return list(inferred)
    shape = [] if weights is None or weights.shape is None else list(weights.shape)[2:]
    slides = attributes.slides([size for size in shape if isinstance(size, int)])
    more = attributes.ints("output_padding", [0] * len(slides))
    if not len(slides) == len(more) == len(image):
        return list(inferred)
    return [
        min(kept, (size - 1) * slide.stride + slide.extent + extra)
        if isinstance(size, int) and isinstance(kept, int)
        else kept
        for slide, size, extra, kept in zip(slides, image, more, inferred, strict=True)
    ]
