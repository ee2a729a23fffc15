"""Calls that are made as one have the results of the single ones, and others stay as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import partitioner.backends.torch.operators  # noqa: F401 - registers operators
from partitioner.backends.torch.graphs.joined_calls import join_calls

aten = torch.ops.aten
operators = torch.ops.partitioner
Draw = Callable[[fx.Graph, list[fx.Node]], Any]


def bucket(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    """Several tensors as one line, and taken apart again in another order."""
    dense = [graph.call_method("contiguous", (x,)) for x in xs]
    lines = [graph.call_function(aten.reshape.default, (x, [-1])) for x in dense]
    flat = graph.call_function(aten.cat.default, (lines, 0))
    twice = graph.call_function(aten.mul.Tensor, (flat, 2))
    sizes = [(6, 8, [2]), (0, 6, [3, 2])]
    return tuple(part(graph, twice, *one) for one in sizes)


def part(graph: fx.Graph, flat: fx.Node, start: int, end: int, shape: list[int]) -> fx.Node:
    rows = graph.call_function(aten.slice.Tensor, (flat, 0, start, end))
    return graph.call_function(aten.reshape.default, (rows, shape))


def called(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op.startswith("call_")]


def joined(draw: Draw, *given: Tensor) -> tuple[fx.GraphModule, Any, Any]:
    """A pass with calls made as one, its results, and those before."""
    graph = fx.Graph()
    graph.output(draw(graph, [graph.placeholder(f"x{i}") for i in range(len(given))]))
    module = fx.GraphModule(torch.nn.Module(), graph)
    expected = module(*given)
    made = join_calls(module)
    made.graph.lint()
    return made, made(*given), expected


X, Y = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).T, torch.tensor([5.0, -7.0])


def test_a_bucket_is_packed_and_unpacked_by_one_call_each() -> None:
    module, results, expected = joined(bucket, X, Y)
    pack, double, unpack, *taken = called(module.graph)
    assert pack is torch._C._nn.flatten_dense_tensors
    assert double is aten.mul.Tensor
    assert unpack.__name__ == "take_apart"
    assert len(taken) == 2
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr()


def gap(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    return part(graph, xs[0], 0, 1, [1]), part(graph, xs[0], 2, 4, [2])


def beginning(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    return part(graph, xs[0], 1, 2, [1]), part(graph, xs[0], 2, 4, [2])


def nothing(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    return part(graph, xs[0], 0, 0, [0, 3]), part(graph, xs[0], 0, 4, [4])


def columns(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    sides = [graph.call_function(aten.slice.Tensor, (xs[1], 1, i, i + 1)) for i in range(2)]
    return tuple(graph.call_function(aten.reshape.default, (one, [-1])) for one in sides)


def read_whole(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    return *(part(graph, xs[0], i, i + 2, [2]) for i in (0, 2)), xs[0]


def same_line(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    line = graph.call_function(aten.reshape.default, (xs[1], [-1]))
    return graph.call_function(aten.cat.default, ([line, line], 0))


def one_line(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    line = graph.call_function(aten.reshape.default, (xs[1], [-1]))
    return graph.call_function(aten.cat.default, ([line], 0))


def matrices(graph: fx.Graph, xs: list[fx.Node]) -> Any:
    rows = [
        graph.call_function(aten.reshape.default, (xs[1], shape)) for shape in ([1, -1], [1, 6])
    ]
    return graph.call_function(aten.cat.default, (rows, 0))


@pytest.mark.parametrize(
    "draw", [gap, beginning, nothing, columns, read_whole, same_line, one_line, matrices]
)
def test_other_calls_stay(draw: Draw) -> None:
    given = torch.arange(4.0), torch.arange(6.0).reshape(3, 2)
    graph = fx.Graph()
    draw(graph, [graph.placeholder("x"), graph.placeholder("y")])
    module, results, expected = joined(draw, *given)
    assert called(module.graph) == called(graph)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


def normalized(dtype: torch.dtype, *, apart: bool = False) -> Draw:
    """Gradients of a layer norm, from what its backward pass is given."""

    def draw(graph: fx.Graph, xs: list[fx.Node]) -> Any:
        grad, x, mean, rstd, weight = xs
        first = graph.call_function(
            operators.layer_norm_grad_input.default, (grad, x, [64], mean, rstd, weight)
        )
        if apart:
            first = graph.call_function(aten.neg.default, (first,))
        pair = graph.call_function(
            operators.layer_norm_grad_weight.default, (grad, x, [64], mean, rstd, dtype)
        )
        return first, pair

    return draw


WIDE, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("of_data", "of_weight"), [(WIDE, WIDE), (HALF, HALF), (HALF, WIDE)])
def test_gradients_of_a_layer_norm(
    of_data: torch.dtype, of_weight: torch.dtype, apart: bool
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(50, 64).to(of_data), torch.randn(50, 64).to(of_data)
    weight = torch.randn(64).to(of_weight)
    _, mean, rstd = aten.native_layer_norm(x, [64], weight, None, 1e-5)
    given = grad, x, mean, rstd, weight
    module, (data, pair), expected = joined(normalized(of_weight, apart=apart), *given)
    is_joined = operators.layer_norm_grad_weight.default not in called(module.graph)
    assert is_joined is not apart
    for one, other in zip((data, *pair), (expected[0], *expected[1]), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
