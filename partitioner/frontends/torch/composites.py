"""Operators that a capture would take apart, kept whole.

A trace replaces upsampling by index computations, RMS norm by pointwise operators, and the average
of a plane in some memory formats by writes through strides, before any decomposition table is
asked. So they are replaced in the exported graph, before the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators

aten = torch.ops.aten
own = torch.ops.partitioner

Arguments = Mapping[str, Any]  #: Of a call, by name.
#: From the call's arguments and result size: the new call's arguments; None to leave it.
Rewrite = Callable[[Arguments, tuple[int, ...]], tuple[Any, ...] | None]


def _upsample(mode: str, call: Arguments, size: tuple[int, ...]) -> tuple[Any, ...]:
    scales = list(call["scale_factors"] or ())
    corners = bool(call.get("align_corners", False))
    return call["input"], mode, list(size[2:]), corners, scales


def _rms_norm(call: Arguments, _: tuple[int, ...]) -> tuple[Any, ...]:
    return call["input"], call["normalized_shape"], call["weight"], call["eps"]


def _plane_mean(space: int, call: Arguments, size: tuple[int, ...]) -> tuple[Any, ...] | None:
    if any(n != 1 for n in size[-space:]):
        return None
    return call["self"], list(range(-space, 0)), True


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

_REWRITES: Mapping[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Rewrite]] = {
    **{
        getattr(aten, name).vec: (own.upsample.default, partial(_upsample, mode))
        for name, mode in _MODES.items()
    },
    aten.adaptive_avg_pool2d.default: (aten.mean.dim, partial(_plane_mean, 2)),
    aten.adaptive_avg_pool3d.default: (aten.mean.dim, partial(_plane_mean, 3)),
    aten.rms_norm.default: (own.rms_norm.default, _rms_norm),
}


def keep_composites(module: fx.GraphModule) -> None:
    """Replace calls in an exported program's graphs, in place, unless their sizes are not known."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _keep_in(part)


def _keep_in(module: fx.GraphModule) -> None:
    changed = False
    for node in list(module.graph.nodes):
        found = _REWRITES.get(node.target) if node.op == "call_function" else None
        size = tuple(node.meta["val"].shape) if found else ()
        if found is None or not all(isinstance(n, int) for n in size):
            continue
        args = found[1](_arguments(node), size)
        if args is not None:
            _become(module.graph, node, found[0], args)
            changed = True
    if changed:
        module.recompile()


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by name, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def _become(
    graph: fx.Graph, node: fx.Node, target: torch._ops.OpOverload, args: tuple[Any, ...]
) -> None:
    """Turn a node into a call, or the first of its results; it keeps its name and notes."""
    if len(target._schema.returns) == 1:
        node.target, node.args, node.kwargs = target, args, {}
        return
    with graph.inserting_before(node):
        call = graph.call_function(target, args)
    call.meta.update({key: note for key, note in node.meta.items() if key != "val"})
    node.target, node.args, node.kwargs = operator.getitem, (call, 0), {}
