"""Names of dims stand for dims of tensors, of what nodes or modules make, or of operators."""

import pytest
import torch
from torch import Tensor, nn

from partitioner.frontends.model import open_model
from partitioner.ir.graph import Graph
from partitioner.strategies.constraints import ConstraintError, NamedDims
from partitioner.strategies.named_dims import bound, check_named


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Net(nn.Module):
    """Two blocks, and a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x)
        return (self.two(first) + first).square().mean()


@pytest.fixture(scope="module", params=[False, True], ids=["inference", "training"])
def graph(request: pytest.FixtureRequest) -> Graph:
    return open_model(Net(), (torch.randn(6, 4),), training=request.param).graph


def bound_nodes(graph: Graph, pattern: str) -> set[str]:
    """The products of the forward pass with a loop that is the dim."""
    named = NamedDims({"name": (pattern,)}, {"name": ("tp",)})
    (along,) = bound(named, graph, {"tp": 2})
    assert along.axes == ("tp",)
    products = {node.name for node in graph.nodes if node.op == "aten::addmm"}
    return {name.removesuffix("/addmm") for name in along.factors.keys() & products}


ALL = {"/one/up", "/one/down", "/two/up", "/two/down"}


@pytest.mark.parametrize(
    ("pattern", "products"),
    [
        ("x.0", ALL),
        ("one.up.weight.0", {"/one/up", "/one/down"}),  # rows of `up` are columns of `down`
        ("*.up.weight.0", ALL),
        ("/one/up/addmm.-1", {"/one/up", "/one/down"}),
        ("one.0", ALL),  # what leaves the module, as it is read outside
        ("one.1", {"/one/down", "/two/up", "/two/down"}),
        ("addmm.0", ALL),
    ],
)
def test_a_dim_is_followed_from_what_its_name_stands_for(
    graph: Graph, pattern: str, products: set[str]
) -> None:
    assert bound_nodes(graph, pattern) == products


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("three.0", "dim name: 'three' matches no tensor, node, module or operator"),
        ("x.2", r"'x.2' matches 'x', which is float32\[6,4\] and has no dim 2"),
    ],
)
def test_a_name_of_nothing_is_refused(graph: Graph, pattern: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        check_named(NamedDims({"name": (pattern,)}, {}), graph)
