"""The batch is found and followed by the factor rules, wherever it lies."""

import pytest
import torch
from torch import Tensor, nn

from helpers.modules.batch_models import made
from helpers.modules.small_gpt import small_gpt
from partitioner import examples
from partitioner.frontends.model import open_model
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.strategies.kinds.batch import batch_of, follow


def module_graph(model: nn.Module, batch: tuple[Tensor, ...], *, training: bool = True) -> Graph:
    return open_model(model, batch, training=training).graph


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("time first", {"x": 1, "y": 0}),
        ("messages", {"x": 0, "y": 0}),
        ("bags", {"dense": 0, "y": 0}),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_the_batch_may_be_any_dim_of_some_inputs(
    name: str, inputs: dict[str, int], training: bool
) -> None:
    graph = module_graph(*made(name), training=training)
    batch = batch_of(graph)
    assert batch.inputs == inputs
    assert batch.size(graph) == {"messages": 9}.get(name, 7)


def test_sequences_are_a_batch_and_tokens_are_not() -> None:
    graph = module_graph(*small_gpt())
    batch = batch_of(graph)
    assert batch.inputs == {"ids": 0, "labels": 0}
    ahead = [node.name for node in graph.nodes if node.name not in graph.backward]
    alone = [name for name in ahead if not batch.factors.get(name, {"weights and tables"})]
    assert not alone  # each node that has the dim has a factor for it


def test_the_minor_part_of_a_flattened_dim_is_followed() -> None:
    """Rows (t b) of a product: its loop over rows is cut within each t."""
    graph = module_graph(*made("time first"), training=False)
    products = [n for n in graph.nodes if n.op == "aten::addmm"]
    batch = batch_of(graph)
    assert len(products) == 4
    assert all(batch.factors[node.name] for node in products)


@pytest.mark.parametrize(
    ("name", "options", "input_name"),
    [
        ("llama", {"batch": 3, "seq": 16}, "input_ids"),
        ("tiny", {"batch": 5}, "image"),
        ("mlp", {"batch": 7, "hidden": 16}, "x"),
    ],
)
def test_the_batch_of_onnx_models_is_dim_0(
    name: str, options: dict[str, int], input_name: str
) -> None:
    graph = load_onnx(examples.build(name, **options)).graph
    batch = batch_of(graph)
    assert batch.inputs == {input_name: 0}
    depending = {n.name for n in graph.nodes if batch.values.intersection(n.writes)}
    assert len(depending) > len(graph.nodes) / 2


def test_one_sample_has_no_batch() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(1, 2)).softmax(2) @ x

    graph = module_graph(Scores(), (torch.randn(1, 6, 4),), training=False)
    assert batch_of(graph).inputs == {}
    graph = module_graph(Scores(), (torch.randn(3, 6, 4),), training=False)
    assert batch_of(graph).inputs == {"x": 0}


def test_a_dim_that_meets_itself_is_followed_once() -> None:
    class Gram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    graph = module_graph(Gram(), (torch.randn(5, 3),), training=False)
    product = next(node for node in graph.nodes if node.op == "aten::mm")
    followed = follow(graph, [("x", 0)])
    assert len(followed.factors[product.name]) == 1
