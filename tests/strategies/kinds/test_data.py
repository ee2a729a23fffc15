"""The values that are parameters in the passes, and what can be cut."""

import pytest
import torch
from torch import Tensor, nn

from helpers.plans.cost_cases import graph as graph_of
from partitioner.frontends.model import open_model
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.strategies.kinds.data import (
    can_cut,
    is_again,
    is_read_whole,
    is_stored_again,
    parameter_uses,
)


class Net(nn.Module):
    """A trained layer, a frozen one, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.frozen = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(self.up(x)).relu()).square().mean()


@pytest.fixture(scope="module")
def trained() -> Graph:
    return open_model(Net(), (torch.randn(5, 4),), training=True).graph


def test_trained_parameters_have_the_names_and_views_of_both_passes(trained: Graph) -> None:
    uses = parameter_uses(trained)
    assert set(uses) == {"up.weight", "up.bias", "norm.weight", "norm.bias"}
    weight = uses["up.weight"]
    assert {"up.weight.forward", "t"} <= set(weight)
    assert all(trained.types[use].numel == 24 for use in weight)
    read = {value for node in trained.nodes for value in node.reads}
    assert any(use in read for use in weight)
    assert "up.weight" not in weight, "it is read by its other names alone"


def test_inference_stores_no_parameter() -> None:
    graph = open_model(Net().eval(), (torch.randn(5, 4),)).graph
    assert parameter_uses(graph) == {}


def test_other_names_of_a_value_are_told_from_it(trained: Graph) -> None:
    assert is_again(trained, "up.weight.forward")
    assert not is_again(trained, "up.weight")
    assert not is_again(trained, "t")
    assert not is_stored_again(trained, "up.weight.forward")


def test_a_node_without_a_rule_reads_values_whole() -> None:
    """Or one whose rule has an operand whole: what a reshape is to."""
    types = {name: TensorType.of("float32", (4,)) for name in ("x", "y", "z")}
    nodes = [Node("a", "Relu", ("x",), ("y",)), Node("b", "Unknown", ("y",), ("z",))]
    graph = graph_of(nodes, types, ("x",), ("z",))
    assert not is_read_whole(graph, "x")
    assert is_read_whole(graph, "y")
    assert not is_read_whole(graph, "z")


@pytest.mark.parametrize(
    ("shape", "parts", "fits"),
    [
        ((6, 4), (), True),
        ((6, 4), (2,), True),
        ((6, 4), (3,), True),
        ((6, 4), (5,), False),
        ((6, 4), (2, 2), True),
        ((6, 4), (4, 3), True),
        ((6, 4), (4, 4), False),  # each dim once for each number
        ((6, 4), (3, 2, 4), True),
        ((6, 4), (3, 2, 4, 2), False),
        ((6, 0), (2,), False),
        ((6, 0), (), False),
        ((), (), True),
        ((), (1,), False),
    ],
    ids=str,
)
def test_values_are_cut_in_equal_parts(
    shape: tuple[int, ...], parts: tuple[int, ...], fits: bool
) -> None:
    types = {name: TensorType.of("float32", shape) for name in "xy"}
    graph = graph_of([Node("a", "Relu", ("x",), ("y",))], types, ("x",), ("y",))
    assert can_cut(graph, "x", *parts) == fits
