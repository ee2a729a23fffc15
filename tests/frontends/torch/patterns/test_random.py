"""Random operators made of uniform numbers: their distributions and their traces."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import partitioner
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.graph import module_graph
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS as ALL
from partitioner.frontends.torch.tracing.capture import capture, export_module
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

SIZE = (400, 500)


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.GraphModule:
    trace = make_fx(function, decomposition_table=dict(DECOMPOSITIONS))(x)
    calls = {str(node.target) for node in trace.graph.nodes if node.op == "call_function"}
    random = {name for name in calls if "rand" in name or "bernoulli" in name or "normal" in name}
    assert random == {"aten.rand.default"}
    return trace


@pytest.mark.parametrize(
    ("function", "mean", "variance"),
    [
        (torch.rand_like, 1 / 2, 1 / 12),
        (torch.randn_like, 0, 1),
        (lambda x: torch.randn(x.shape), 0, 1),
        (torch.bernoulli, 0.3, 0.21),
        (lambda x: torch.bernoulli(x, 0.6), 0.6, 0.24),
        (lambda x: torch.bernoulli(x, 0.5), 0.5, 0.25),  # the default of p, which traces leave out
        (lambda x: torch.ops.aten.bernoulli.Tensor(x, x), 0.3, 0.21),
        (lambda x: torch.ops.aten.uniform(x, -1, 2), 0.5, 0.75),
        (lambda x: torch.ops.aten.exponential(x, 2), 0.5, 0.25),
        (lambda x: torch.ops.aten.normal_functional(x, 3, 0.5), 3, 0.25),
        (lambda x: torch.normal(x, 0.5), 0.3, 0.25),
        (lambda x: torch.normal(0.5, x), 0.5, 0.09),
        (lambda x: torch.normal(x, x), 0.3, 0.09),
        (lambda x: torch.normal(1, 0.5, x.shape, dtype=x.dtype), 1, 0.25),
        (lambda x: torch.randint(3, x.shape, dtype=x.dtype), 1, 2 / 3),
        (lambda x: torch.randint(2, 5, x.shape, dtype=x.dtype), 3, 2 / 3),
        (lambda x: torch.randint_like(x, 2, 5), 3, 2 / 3),
        (lambda x: torch.multinomial(x[:, :2], 1).to(x.dtype), 0.5, 0.25),
    ],
    ids=[
        *("rand_like", "randn_like", "randn", "bernoulli", "bernoulli of p", "bernoulli of 0.5"),
        *("bernoulli of tensors", "uniform", "exponential", "normal", "normal around tensors"),
        *("normal with deviations", "normal of tensors", "normal of a size", "integers"),
        *("integers from", "integers like", "multinomial"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distribution(
    function: Callable[[Tensor], Tensor], mean: float, variance: float, dtype: torch.dtype
) -> None:
    x = torch.full(SIZE, 0.3, dtype=dtype)
    torch.manual_seed(2)
    drawn = traced(function, x)(x)
    assert drawn.shape == function(x).shape
    assert drawn.dtype == function(x).dtype
    assert abs(drawn.mean().item() - mean) < 5 * (variance / drawn.numel()) ** 0.5
    assert abs(drawn.var().item() - variance) < 0.02


def test_normal_numbers_have_the_right_tails() -> None:
    torch.manual_seed(2)
    drawn = traced(torch.randn_like, torch.zeros(SIZE))(torch.zeros(SIZE))
    for bound, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert abs((drawn.abs() > bound).double().mean().item() - share) < 0.005


def test_exponential_numbers_are_above_zero() -> None:
    x = torch.zeros(1)
    trace = traced(torch.ops.aten.exponential, x)
    for node in trace.graph.find_nodes(op="call_function", target=torch.ops.aten.rand.default):
        node.target, node.args, node.kwargs = torch.ops.aten.zeros.default, ([1],), {}
    trace.recompile()
    assert 0 < trace(x).item() < 1e-6


@pytest.mark.parametrize("name", ["bernoulli_", "exponential_", "uniform_", "normal_"])
def test_a_generator_of_its_own_is_refused(name: str) -> None:
    class Drawn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            drawn = getattr(torch.empty_like(y), name)(generator=torch.Generator())
            return (y * drawn.detach()).sum()

    with pytest.raises(FrontendError, match="is not supported"):
        partitioner.compile(Drawn(8, 6), torch.randn(4, 8), 2, training=True)


def test_half_precision_draws_in_single() -> None:
    x = torch.full(SIZE, 0.001, dtype=torch.bfloat16)
    torch.manual_seed(2)
    drawn = traced(torch.bernoulli, x)(x)
    assert drawn.dtype == torch.bfloat16
    assert 0.0005 < drawn.float().mean().item() < 0.0015


class Depth(torch.nn.Module):
    """Stochastic depth, dropped channels and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        branch = functional.dropout(self.first(x), 0.5)
        x = x + branch * (torch.rand(x.shape[0], 1, 1, 1) + 0.8).floor()
        return functional.dropout2d(self.second(x), 0.2).square().sum()


def test_a_captured_module_draws_from_one_seed() -> None:
    module = Depth()
    program = export_module(module, (torch.randn(2, 4, 3, 3),), {})
    captured = capture(module, program, ALL, training=True)
    graph = module_graph(captured, "depth").graph
    assert "seed" in graph.inputs
    drawn = [node for node in graph.nodes if "seed" in node.inputs]
    assert [node.op for node in drawn] == [
        "partitioner::dropout",
        "partitioner::uniform",
        "partitioner::uniform",
    ]
    assert len({node.attrs["index"] for node in drawn}) == 3
    assert all(isinstance(rule_of(graph, node), Rule) for node in drawn)


class Drawing(nn.Module):
    """Drops elements, and has a parameter and arguments with names that a graph could take."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seed, self.rate = nn.Parameter(torch.rand(8)), rate

    def forward(self, x: Tensor, seed: Tensor, tangent: Tensor) -> Tensor:
        """Loss."""
        return (functional.dropout(x * self.seed, self.rate) * tangent + seed).square().mean()


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("devices", [1, 2])
def test_names_that_the_graph_needs_itself(rate: float, devices: int) -> None:
    module, batch = Drawing(rate), (torch.rand(6, 8), torch.tensor(2.0), torch.rand(6, 1))
    program = partitioner.compile(module, batch, devices=devices, cluster="ideal", training=True)
    loss, gradients = program.gradients(*batch, seed=5)
    if not rate:
        expected = module(*batch)
        expected.backward()
        torch.testing.assert_close((loss, gradients["seed"]), (expected, module.seed.grad))
    only_the_argument = program.gradients(*batch[:2], torch.zeros(6, 1), seed=7)[0]
    torch.testing.assert_close(only_the_argument, torch.tensor(4.0))
    assert loss.equal(program.gradients(*batch, seed=5)[0])
    assert loss.equal(program.gradients(*batch, seed=6)[0]) == (not rate)
