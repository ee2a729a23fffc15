"""Forms of operators that read indices are run as measured, on parts of tables of few rows."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from helpers.modules.expert_models import Experts
from helpers.plans.cost_cases import flat
from partitioner.api.profiling.candidates import candidates, is_cold, local_graph
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.torch.measuring.timing import prepared
from partitioner.cost_model.profiles.forms import call_form
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module
from partitioner.ir.graph import Graph

ROWS = 4


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 6, mode=mode)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().sum()


class Words(nn.Module):
    """Rows of a table, and as many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, 6), nn.Linear(6, ROWS)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.table(ids))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Pools(nn.Module):
    def __init__(self, space: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[space - 2](3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * self.scale).square().sum()


class Chosen(nn.Module):
    """A layer of four experts, of which each token meets two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Experts(experts=ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


IDS = torch.arange(8).reshape(4, 2) % ROWS
MODULES = {
    "sum": (lambda: Bags("sum"), IDS),
    "mean": (lambda: Bags("mean"), IDS),
    "max": (lambda: Bags("max"), IDS),
    "words": (Words, IDS),
    "pool of planes": (lambda: Pools(2), torch.randn(2, 2, 2, 4)),
    "pool of volumes": (lambda: Pools(3), torch.randn(2, 2, 2, 2, 2)),
    "experts": (Chosen, torch.randn(8, 8)),
}


def traced(name: str) -> Graph:
    torch.manual_seed(0)
    make, example = MODULES[name]
    options = ModuleOptions(training=True)
    return trace_module(make().train(), Example((example,), {}), options).graph


@pytest.mark.parametrize("name", MODULES)
def test_forms_run_on_drawn_operands(name: str) -> None:
    graph, cluster = traced(name), flat(2)
    ran = []
    for candidate in candidates(graph, cluster, "intra", None):
        if candidate.form.op == "partitioner::update":  # of parts: it wants a process group
            continue
        part = local_graph(graph, candidate, cluster)
        prepared(uncut_programs(part), part, random_inputs(part, seed=0), threads=1)
        ran.append(candidate.form.op)
    assert any("backward" in op or "grad" in op for op in ran)


def test_a_view_is_one_form_for_all_shapes_and_moves_nothing() -> None:
    graph = traced("words")
    found = candidates(graph, flat(3), "intra", None)
    views = {one.form.op: one for one in found if not one.moved_bytes}
    assert len(views) == sum(not one.moved_bytes for one in found)
    calls = Counter(node.op for node in graph.nodes if call_form(node) is not None)
    assert views.keys() == calls.keys()
    assert max(calls.values()) > 1
    assert {"partitioner::alias", "partitioner::state"}.isdisjoint(views)
    for op, one in views.items():
        assert one.weight_s == pytest.approx(calls[op] * 1e-6), "a launch each"
        assert one.is_whole
        assert not is_cold(graph, one)
