"""Rules are computed once for all nodes of a form: they are those of each node by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from partitioner.frontends.model import open_model
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.table import OpaqueError, OpView
from partitioner.ir.rule import Rule


def check(graph: Graph) -> None:
    for node in graph.nodes:
        rule, row = rule_of(graph, node), row_of(node)
        if row is None:
            assert rule == f"op {node.op!r} has no row in the op table"
            continue
        try:
            own: Rule | str = row.rule(OpView(node, graph))
        except OpaqueError as error:
            own = str(error)
        assert isinstance(rule, Rule) == isinstance(own, Rule), node
        if isinstance(rule, Rule) and isinstance(own, Rule):
            assert rule.key == own.key, node
        else:
            assert rule == own


@pytest.mark.parametrize("name", ["densenet121", "llama", "mlp"])
def test_of_onnx(name: str, zoo: Callable[[str], Path]) -> None:
    check(open_model(zoo(name)).graph)


class Alike(nn.Module):
    """Operators of one kind and one type whose attributes, constants or operands differ."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x))
        y = y.sum(0, keepdim=True) + y.sum(1, keepdim=True) + y * y + y * x
        return torch.cat([y, x]).index_select(0, torch.tensor([1, 3])) @ (y @ y)


@pytest.mark.parametrize("training", [False, True])
def test_of_pytorch(training: bool) -> None:
    class Loss(Alike):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    check(open_model(Loss(), torch.randn(8, 8), training=training).graph)
