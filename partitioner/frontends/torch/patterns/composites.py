"""Keeps operators whole that a trace would take apart.

A trace replaces upsampling by index computations, RMS norm by pointwise operators, and the average
of a plane in some memory formats by writes through strides, before it asks any decomposition table.
So they are replaced in the exported graph, before the trace. Adaptive pools become pools where
their windows are of one size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import (
    Arguments,
    Replacement,
    Rewriter,
    replace_calls,
    value,
)

_aten = torch.ops.aten


def keep_composites(module: fx.GraphModule) -> None:
    """Replace upsampling, RMS norm and adaptive pools of equal windows in place."""
    replace_calls(module, _REPLACEMENTS)


def _upsample(mode: str, write: Rewriter, args: Arguments) -> fx.Node:
    size = list(value(write.node).shape[2:])
    settings = (mode, size, bool(args.get("align_corners", False)), args["scale_factors"] or [])
    return write.call(torch.ops.partitioner.upsample.default, args["input"], *settings)


def _rms_norm(write: Rewriter, args: Arguments) -> fx.Node:
    operands = (args[name] for name in ("input", "normalized_shape", "weight", "eps"))
    norm = write.call(torch.ops.partitioner.rms_norm.default, *operands)
    return write.call(operator.getitem, norm, 0)


def _adaptive_average(dims: int, write: Rewriter, args: Arguments) -> fx.Node | None:
    """The average of whole planes, or of windows of one size, which can be cut."""
    if all(size == 1 for size in value(write.node).shape[-dims:]):
        return write.call(_aten.mean.dim, args["self"], list(range(-dims, 0)), True)
    kernel = _window(value(args["self"]), value(write.node), dims)
    if kernel is None:
        return None
    pool = getattr(_aten, f"avg_pool{dims}d").default
    return write.call(pool, args["self"], kernel, kernel)


def _adaptive_max(dims: int, write: Rewriter, args: Arguments) -> fx.Node | None:
    """Maxima of windows of one size; indices count in the whole plane in both."""
    kernel = _window(value(args["self"]), write.node.meta["val"][0], dims)
    if kernel is None:
        return None
    pool = getattr(_aten, f"max_pool{dims}d_with_indices").default
    return write.call(pool, args["self"], kernel, kernel)


def _window(data: torch.Tensor, result: torch.Tensor, dims: int) -> list[int] | None:
    """Sizes of the windows of an adaptive pool; None if they are not equal and apart."""
    sizes = list(zip(data.shape[-dims:], result.shape[-dims:], strict=True))
    if any(after == 0 or before % after for before, after in sizes):
        return None
    return [before // after for before, after in sizes]


_MODES: Mapping[str, str] = {
    "_upsample_bicubic2d_aa": "cubic-antialias",
    "_upsample_bilinear2d_aa": "linear-antialias",
    "_upsample_nearest_exact1d": "nearest-exact",
    "_upsample_nearest_exact2d": "nearest-exact",
    "_upsample_nearest_exact3d": "nearest-exact",
    "upsample_bicubic2d": "cubic",
    "upsample_bilinear2d": "linear",
    "upsample_linear1d": "linear",
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "upsample_trilinear3d": "linear",
}

_REPLACEMENTS: Mapping[torch._ops.OpOverload, Replacement] = {
    **{getattr(_aten, name).vec: partial(_upsample, mode) for name, mode in _MODES.items()},
    _aten.adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    _aten.adaptive_avg_pool3d.default: partial(_adaptive_average, 3),
    _aten.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
    _aten.adaptive_max_pool3d.default: partial(_adaptive_max, 3),
    _aten.rms_norm.default: _rms_norm,
}
