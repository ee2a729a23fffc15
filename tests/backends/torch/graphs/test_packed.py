"""Tensors that are packed by one call."""

import pytest
import torch
from torch import fx

from partitioner.backends.torch.graphs.eager import eager, packed

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def graph_of(*, shape: list[int], dim: int, count: int, shows: bool = False) -> fx.GraphModule:
    """A pass that brings its arguments into a shape and puts them behind each other."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{index}") for index in range(count)]
    lines = [
        graph.call_function(aten.reshape.default, (graph.call_method("contiguous", (x,)), shape))
        for x in given
    ]
    joined = graph.call_function(aten.cat.default, (lines, dim))
    graph.output((joined, lines[0]) if shows else (joined,))
    return fx.GraphModule(torch.nn.Module(), graph)


def calls_of(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_lines_are_packed_at_once(dtype: torch.dtype) -> None:
    numbers = torch.arange(60).to(dtype)
    tensors = [
        *(numbers[:12].view(3, 4), numbers[12:24].view(3, 4).t(), numbers[::7]),
        *(numbers[3], numbers[:0], numbers[:1].expand(2, 2)),
    ]
    module = graph_of(shape=[-1], dim=0, count=len(tensors))
    joined = eager(module)
    assert calls_of(joined) == [packed]
    (result,), (expected,) = joined(*tensors), module(*tensors)
    assert torch.equal(result, expected)
    assert result.data_ptr() not in {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize(
    ("shape", "dim", "count", "shows"),
    [([2, -1], 0, 2, False), ([2, -1], 1, 2, False), ([-1], 0, 1, False), ([-1], 0, 2, True)],
)
def test_other_tensors_are_joined_as_they_are(
    shape: list[int], dim: int, count: int, shows: bool
) -> None:
    """Rows, one tensor alone, and lines that something else reads."""
    module = graph_of(shape=shape, dim=dim, count=count, shows=shows)
    joined = eager(module)
    assert aten.cat.default in calls_of(joined)
    tensors = [torch.arange(6.0) + index for index in range(count)]
    torch.testing.assert_close(joined(*tensors), module(*tensors))


@pytest.mark.parametrize(
    ("cuts", "count"),
    [
        ([(0, 6, [2, 3]), (6, 7, []), (7, 10, [3])], 1),
        ([(7, 10, [3]), (0, 6, [3, 2]), (6, 7, [1])], 1),
        ([(0, 6, [2, 3])], 0),
        ([(0, 6, [2, 3]), (7, 10, [3])], 0),
        ([(0, 6, [2, 3]), (6, 6, [0, 2]), (6, 10, [4])], 0),
    ],
)
def test_lines_that_arrive_are_taken_apart_at_once(
    cuts: list[tuple[int, int, list[int]]], count: int
) -> None:
    """One line alone, lines with a gap between, and empty ones stay as they are."""
    graph = fx.Graph()
    flat = graph.call_function(c10d.wait_tensor.default, (graph.placeholder("x"),))
    shaped = [
        graph.call_function(
            aten.reshape.default,
            (graph.call_function(aten.slice.Tensor, (flat, 0, start, end)), shape),
        )
        for start, end, shape in cuts
    ]
    graph.output(tuple(shaped))
    module = fx.GraphModule(torch.nn.Module(), graph)
    apart, x = eager(module), torch.arange(10.0)
    names = [getattr(target, "__name__", "") for target in calls_of(apart)]
    assert names.count("unpacked") == count
    assert (aten.slice.Tensor in calls_of(apart)) is (count == 0)
    results = apart(x)
    assert all(map(torch.equal, results, module(x)))
    assert {one.untyped_storage().data_ptr() for one in results} == {x.data_ptr()}
