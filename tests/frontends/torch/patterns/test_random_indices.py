"""Random integers of PyTorch's graphs lie within what they index."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module

MANY = 500
#: x is of 3 x 5 elements: which results read how many of them by the integers i.
READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "index of dim 0": (lambda x, i: x[i], 3),
    "index of dim 1": (lambda x, i: x[:, i], 5),
    "index of two dims": (lambda x, i: x[i, i], 3),
    "index_select": (lambda x, i: x.index_select(1, i), 5),
    "gather": (lambda x, i: x.gather(1, i[None].expand(3, -1)), 5),
    "index_put": (lambda x, i: x.index_put((i,), x[0], accumulate=True), 3),
    "index_add": (lambda x, i: x.index_add(1, i, x.new_ones(3, MANY)), 5),
    "scatter": (lambda x, i: x.scatter(1, i[None, :4].expand(3, -1), x), 5),
    "scatter_add": (lambda x, i: x.scatter_add(1, i[None].expand(3, -1), x.new_ones(3, MANY)), 5),
    "embedding": (lambda x, i: functional.embedding(i, x), 3),
    "cross_entropy": (lambda x, i: functional.cross_entropy(x[:1].expand(MANY, 5), i), 5),
    "nll_loss": (lambda x, i: functional.nll_loss(x[:1].expand(MANY, 5), i), 5),
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.read(x, i)


@pytest.mark.parametrize("name", READS)
def test_random_integers_cover_what_they_index_and_no_more(name: str) -> None:
    read, count = READS[name]
    example = Example((torch.randn(3, 5), torch.zeros(MANY, dtype=torch.int64)), {})
    graph = trace_module(Reading(read), example, ModuleOptions(training=False)).graph
    _, i = (random_inputs(graph, 0)[name] for name in graph.inputs)
    assert set(np.unique(i)) == set(range(count))
