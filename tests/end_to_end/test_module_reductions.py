"""PyTorch's reductions: cut along what they reduce with equal results, or not offered so."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.ir.loops.factors import FactorKind
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import Constraints, Pin

ROWS, SIZE = 4, 13

#: Results of which the parts of a cut dim can be joined.
JOINED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1)),
    "max": torch.max,
    "prod": lambda x: x.prod(1),
    "count": lambda x: torch.count_nonzero(x, 1),
}

#: Those that need the whole dim on a device.
WHOLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "max_dim": lambda x: x.max(1).indices,
    "topk": lambda x: x.topk(3, 1).values,
    "sort": lambda x: x.sort(1).values,
    "norm": lambda x: x.norm(dim=1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "std": lambda x: x.std(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "any": lambda x: (x > 0).any(1),
    "layer_norm": lambda x: nn.functional.layer_norm(x, x.shape[1:]),
}


class All(nn.Module):
    """The results of several functions."""

    def __init__(self, functions: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """By name."""
        return {name: function(x) for name, function in self.functions.items()}


def drawn() -> Tensor:
    """Rows with ties, an infinity and NaN."""
    x = torch.randn((ROWS, SIZE), generator=torch.Generator().manual_seed(0))
    x[0, [2, 9]] = 5
    x[1, 4] = -torch.inf
    x[2] = 0
    x[3, 11] = torch.nan
    return x


@pytest.mark.parametrize("mesh", [{"a": 3}, {"a": 2, "b": 3}], ids=str)
def test_cuts_along_the_dim_give_equal_results(mesh: Mapping[str, int]) -> None:
    devices = 6 if len(mesh) > 1 else 3
    program = partitioner.compile(
        All(JOINED),
        (drawn(),),
        cluster=f"{devices}xideal",
        strategy="intra",
        mesh=mesh,
        constraints=Constraints(
            tuple(Pin("cut", tensor="x", dim=1, axis=axis, side="read") for axis in mesh)
        ),
        time_limit_s=5,
    )
    readers = [node.name for node in program.graph.nodes if "x" in node.inputs]
    assert len(readers) == len(JOINED)
    assert all(program.plan.nodes[name].cuts for name in readers)
    found, expected = program(drawn()), All(JOINED)(drawn())
    for name, result in expected.items():
        torch.testing.assert_close(found[name], result, equal_nan=True, msg=name)


def test_the_others_are_whole_along_the_dim() -> None:
    graph = partitioner.compile(All(WHOLE), (drawn(),), devices=1).graph
    rules = {node.name: rule_of(graph, node) for node in graph.nodes}
    first = [node for node in graph.nodes if set(node.inputs) & {"x", "gt"}]
    along = [rules[n.name] for n in first if "gt" not in n.name]
    assert len(along) >= len(WHOLE)
    for rule in along:
        if isinstance(rule, Rule):
            assert rule.operands[0] is not None
            ((dim,),) = rule.operands[0][-1]
            assert rule.factors[dim].kind is FactorKind.WHOLE, rule
