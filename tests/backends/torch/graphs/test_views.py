"""Fewer views in passes that run without compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from partitioner.backends.torch.graphs.eager import eager

aten = torch.ops.aten


def chain(*calls: tuple[Any, ...], shows: int = 1) -> fx.GraphModule:
    """Calls of which each takes the result before it; the last few results are returned."""
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for target, *args in calls:
        made.append(graph.call_function(target, (made[-1], *args)))
    graph.output(tuple(made[-shows:]))
    return fx.GraphModule(torch.nn.Module(), graph)


def shape(*sizes: int) -> tuple[Any, ...]:
    return aten.reshape.default, list(sizes)


T = (aten.t.default,)
SWAP = aten.transpose.int, 0, 1


def permute(*dims: int) -> tuple[Any, ...]:
    return aten.permute.default, list(dims)


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (chain(shape(3, 10), shape(2, -1), shape(30)), 1),
        (chain(T, shape(3, 10), shape(-1)), 2),
        (chain(T, T), 0),
        (chain(T, T, T), 1),
        (chain(shape(10, 3), T, T, shape(30)), 1),
        (chain(SWAP, (aten.transpose.int, 1, 0)), 0),
        (chain(shape(5, 2, 3), SWAP, (aten.transpose.int, 0, 2)), 3),
        (chain(shape(5, 2, 3), permute(1, 2, 0), permute(-1, 0, 1)), 1),
        (chain(shape(5, 2, 3), permute(1, 2, 0), permute(1, 2, 0)), 3),
        (chain(shape(5, 2, 3), permute(1, 2, 0), SWAP, SWAP, permute(2, 0, 1)), 1),
        (chain(T, shape(3, 10), shape(-1), shows=2), 3),  # both are read: one copy serves both
    ],
)
def test_views_in_a_row(module: fx.GraphModule, count: int) -> None:
    short = eager(module)
    x = torch.arange(30.0).reshape(6, 5)
    for one in (x, x.T, x.expand(6, 5), torch.arange(60.0).reshape(6, 10)[:, ::2]):
        torch.testing.assert_close(short(one), module(one), rtol=0, atol=0)
    assert sum(node.op == "call_function" for node in short.graph.nodes) == count
