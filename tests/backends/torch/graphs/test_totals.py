"""Passes that add results to their sums over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import partitioner.backends.torch.operators  # noqa: F401 - registers operators
from partitioner.backends.torch.graphs.eager import (
    _ADDING,
    add,
    add_product,
    add_products,
    add_rows,
    direct,
    eager,
)
from partitioner.backends.torch.graphs.notes import note_tasks, noted_tasks
from partitioner.ir.ops import ROWS

aten = torch.ops.aten


def sums_of(
    module: fx.GraphModule, summed: Sequence[int], micro_batches: Sequence[Sequence[Tensor]]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The pass that adds, and its sums; they are compared with those of plain additions."""
    adding = direct(eager(module, boxed=True, summed=summed))
    sums: list[Any] = [None] * len(summed)
    expected: list[Any] = [0.0] * len(summed)
    with torch.no_grad():
        for number, arguments in enumerate(micro_batches):
            results, plain = adding([*arguments, *sums]), module(*arguments)
            for place, position in enumerate(summed):
                assert not number or results[position] is sums[place]
                sums[place] = results[position]
                expected[place] = expected[place] + plain[position]
            for position in set(range(len(plain))).difference(summed):
                torch.testing.assert_close(results[position], plain[position])
    rounding = {"rtol": 2e-2, "atol": 2e-2} if sums[0].dtype is torch.bfloat16 else {}
    torch.testing.assert_close(sums, expected, **rounding)
    return adding, sums


def called(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def linear_gradients(*, also_reads: bool) -> fx.GraphModule:
    """Gradients of a linear layer's weight, as PyTorch traces it, and of its bias."""
    graph = fx.Graph()
    x, grad = graph.placeholder("x"), graph.placeholder("grad")
    weight = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (grad,)), x))
    note_tasks([weight], ["weight"])
    for _ in range(2):
        weight = graph.call_function(aten.t.default, (weight,))
    bias = graph.call_function(aten.sum.dim_IntList, (grad, [0], True))
    bias = graph.call_function(aten.reshape.default, (bias, [-1]))
    norm = graph.call_function(aten.mul.Tensor, (weight if also_reads else bias, 2))
    graph.output((weight, bias, norm))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_adds_its_result_to_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batches = [[torch.randn(7, 5).to(dtype), torch.randn(7, 3).to(dtype)] for _ in range(3)]
    module = linear_gradients(also_reads=False)
    adding, (weight, _) = sums_of(module, (0, 1), batches)
    assert weight.shape == (3, 5)
    assert called(adding).count(add_product) == 1
    assert torch.mm not in called(adding)
    (product,) = (node for node in adding.graph.nodes if node.target is add_product)
    assert noted_tasks(product) == ("weight",)


def test_a_batch_of_products_adds_its_results_to_the_sum() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    turned = graph.call_function(aten.transpose.int, (a, 1, 2))
    graph.output((graph.call_function(aten.bmm.default, (turned, b)),))
    batches = [[torch.randn(2, 7, 3), torch.randn(2, 7, 5)] for _ in range(3)]
    adding, (total,) = sums_of(fx.GraphModule(torch.nn.Module(), graph), (0,), batches)
    assert total.shape == (2, 3, 5)
    assert called(adding).count(add_products) == 1
    assert torch.bmm not in called(adding)


def test_results_that_are_priced_as_added_by_their_kernel_are_added_by_it() -> None:
    """The op table says so to the cost model, by the name of the method that adds them."""
    adding = {f"aten::{op._schema.name.removeprefix('aten::')}": add for op, add in _ADDING.items()}
    priced = {op: row.adds for op, row in ROWS.items() if row.adds}
    assert priced == {"aten::mm": "addmm_", "aten::bmm": "baddbmm_"}
    assert priced.keys() <= adding.keys()
    for op, method in priced.items():
        assert method in adding[op].__code__.co_names


def test_a_product_that_something_else_reads_stays_as_it_is() -> None:
    batches = [[torch.randn(4, 5), torch.randn(4, 3)] for _ in range(2)]
    adding, _ = sums_of(linear_gradients(also_reads=True), (0, 1), batches)
    assert add_product not in called(adding)
    assert called(adding).count(add) == 2


def test_results_of_every_kind_are_added() -> None:
    """An argument, one value as two results, and operands that are sliced and transposed."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    part = graph.call_function(aten.slice.Tensor, (x, 1, 1, 4))
    product = graph.call_function(
        aten.mm.default, (graph.call_function(aten.t.default, (part,)), y)
    )
    turned = graph.call_function(aten.t.default, (product,))
    twice = graph.call_function(aten.mm.default, (y, product))
    graph.output((turned, twice, twice, x))
    module = fx.GraphModule(torch.nn.Module(), graph)
    batches = [[torch.randn(3, 5).clone(), torch.randn(3, 3)] for _ in range(3)]
    expected = sum(x.clone() for x, _ in batches)
    adding = eager(module, boxed=True, summed=(0, 1, 2))
    assert called(adding).count(add) == 3
    _, sums = sums_of(module, (0, 1), batches)
    assert sums[0].stride() == (1, 3)
    first = batches[0][0].clone()  # a sum begins in its first result, here in an argument's memory
    batches[0][0] = first
    _, sums = sums_of(module, (3,), [[x.clone(), y] for x, y in batches])
    torch.testing.assert_close(sums[0], expected)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("shape", [(11,), (3, 5), (0,)])
def test_rows_of_a_table_are_added(shape: tuple[int, ...], padding: int, is_scaled: bool) -> None:
    torch.manual_seed(0)
    graph = fx.Graph()
    grad, ids = graph.placeholder("grad"), graph.placeholder("ids")
    args = grad, ids, 7, padding, is_scaled
    graph.output((graph.call_function(aten.embedding_dense_backward.default, args),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    batches = [
        [torch.randn(3, *shape).movedim(0, -1), torch.randint(7, shape)]  # strided gradients
        for _ in range(3)
    ]
    adding, (total,) = sums_of(module, (0,), batches)
    assert called(adding) == [add_rows]
    assert total.shape == (7, 3)
    if padding >= 0:
        assert not total[padding].any()
