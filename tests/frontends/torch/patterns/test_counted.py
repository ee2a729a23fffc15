"""Indices that count whole dims are views; all others stay as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.frontends.torch.patterns.composites import REPLACEMENTS
from partitioner.frontends.torch.patterns.rewrite import replace_calls


class Lambda(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def count(size: int, *shape: int) -> Tensor:
    return torch.arange(size).view(shape)


def shifted() -> Tensor:
    numbers = torch.arange(4)
    numbers.add_(1)
    return numbers - 1


@pytest.mark.parametrize(
    ("run", "replaced"),
    [
        (lambda x: x[count(4, 4, 1, 1), count(5, 1, 1, 5)], 1),
        (lambda x: x[count(4, 1, 4), count(5, 5, 1)], 1),  # transposed
        (lambda x: x[count(4, 4, 1, 1) + 0, count(5, 5, 1), count(3, 3)], 1),
        (lambda x: x[torch.arange(4)], 1),
        (lambda x: x[:, :, 0][count(4, 4, 1), torch.arange(5)] * 2, 1),
        (lambda x: x[:1][count(1, 1, 1), count(5, 5, 1)], 1),
        (lambda x: x[torch.arange(4), torch.arange(4)], 0),  # a diagonal
        (lambda x: x[torch.arange(3)], 0),
        (lambda x: x[torch.arange(4).flip(0)], 0),
        (lambda x: x[count(4, 2, 2)], 0),
        (lambda x: x[:, torch.arange(5)], 0),
        (lambda x: x[count(4, 4, 1), (x[0, :, 0] > 0).long()], 0),
        (lambda x: x[torch.arange(4), torch.randint(5, (4,)) * 0], 0),
        (lambda x: x[shifted()], 0),  # the numbers are written to
    ],
)
def test_views(run: Callable[[Tensor], Tensor], replaced: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)
    graph = torch.export.export(Lambda(run), (x,), strict=False).module()
    assert isinstance(graph, torch.fx.GraphModule)
    assert replace_calls(graph, REPLACEMENTS) == replaced
    assert torch.equal(graph(x), run(x))


def test_what_is_written_to_the_result_is_not_written_to_the_operand() -> None:
    def run(x: Tensor) -> Tensor:
        x = x * 2
        y = x[count(4, 4, 1), count(5, 5)]
        y += 1
        return x.sum() + y.sum()

    x = torch.randn(4, 5)
    graph = torch.export.export(Lambda(run), (x,), strict=False).module()
    assert isinstance(graph, torch.fx.GraphModule)
    assert replace_calls(graph, REPLACEMENTS) == 1
    torch.testing.assert_close(graph(x), run(x))
