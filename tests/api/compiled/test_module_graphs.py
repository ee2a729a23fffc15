"""Graphs of micro-batches that are guessed, and what comes of wrong guesses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.sized_models import Loss
from partitioner.api.compiled.module_graphs import ModuleGraphs
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.foundations.files import ResultError
from partitioner.frontends.model import ModuleInput, open_model
from partitioner.search.request import Request, StageClock
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError


class Branching(nn.Module):
    """Does more with two samples or fewer: no size of a larger batch tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return (x.tanh() if x.shape[0] <= 2 else x).square().mean()


def graphs(module: nn.Module, *shape: int, training: bool = True) -> ModuleGraphs:
    opened = open_model(module, (torch.randn(*shape),), training=training)
    assert isinstance(opened, ModuleInput)
    cluster = resolve_cluster("2xh100").run_by(opened.executor)
    return ModuleGraphs(opened, cluster, Request(), StageClock(lambda _: None))


def test_the_second_number_of_micro_batches_is_guessed_and_confirmed() -> None:
    found = graphs(Branching(), 24, 16)
    assert [found.is_there(count) for count in (1, 2, 3)] == [True, False, False]
    found.in_micro_batches(2)
    assert [found.is_there(count) for count in (2, 3, 24)] == [True, True, False]
    guess = found.in_micro_batches(3)
    assert (found.is_guessed(2), found.is_guessed(3)) == (False, True)
    assert found.confirms(3)
    assert not found.is_guessed(3)
    assert found.in_micro_batches(3).digest == guess.digest


def test_a_wrong_guess_is_found_out_and_no_other_is_made() -> None:
    found = graphs(Branching(), 24, 16)
    found.in_micro_batches(2)
    guess, offered = found.in_micro_batches(12), found.offered_in(12)
    assert not found.confirms(12)
    traced = found.in_micro_batches(12)
    assert any(node.op == "aten::tanh" for node in traced.nodes)
    assert traced.digest != guess.digest
    assert offered is not None
    found.in_micro_batches(3)
    assert not found.is_guessed(3)
    assert found.confirms(12)


def test_inference_is_guessed_too() -> None:
    found = graphs(Branching(), 24, 16, training=False)
    found.in_micro_batches(2)
    guess = found.in_micro_batches(4)
    assert found.is_guessed(4)
    assert found.confirms(4)
    assert found.in_micro_batches(4).digest == guess.digest


@pytest.mark.parametrize("batch", [12, 18])
def test_a_plan_is_of_the_traced_graph_whatever_was_guessed(batch: int) -> None:
    """Where memory leaves micro-batches alone, those of two samples have nodes of their own."""
    module, inputs = Branching(), torch.randn(batch, 16)
    program = partitioner.compile(
        module, inputs, devices=2, training=True, parallel="pp", schedule="1f1b"
    )
    assert isinstance(program, partitioner.ModuleProgram)
    assert program.plan.graph_digest == program.graph.digest
    program.verify()


def test_micro_batches_of_unlike_sizes_do_not_run_in_blocks() -> None:
    """The blocks of a smaller last one would be others: no rank could run the plan."""
    found = graphs(Branching(), 24, 16)
    assert found.uncut_in(8).nodes
    with pytest.raises(Infeasible, match=r"all have one size: the last of 5 is smaller") as refused:
        found.uncut_in(5)
    assert not refused.value.proven


class Added(nn.Module):
    """Adds up along all dims of images but the batch, which alone is cut for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).cumsum(1).cumsum(2).cumsum(3)
        return y


def test_a_plan_is_searched_that_fits_a_smaller_last_micro_batch() -> None:
    """The last one of two images cannot be cut in four parts, as the others are at best."""
    options: dict[str, Any] = {"cluster": "ideal", "strategy": "intra", "time_limit_s": 2.0}
    x = torch.randn(10, 3, 8, 8)
    program = partitioner.compile(Added(), x, devices=4, micro_batches=3, **options)
    assert isinstance(program, partitioner.ModuleProgram)
    assert program.verify().equal
    module = graphs(Added(), 10, 3, 8, 8, training=False)
    last = module.last_in(3)
    assert last is not None
    assert last.types["x"].shape[0] == 2
    assert module.last_in(5) is None


@pytest.mark.slow
def test_changes_of_a_plan_fit_a_smaller_last_micro_batch() -> None:
    """The last one of one row cannot be cut in two, as others in stages are at best."""
    options: dict[str, Any] = {"cluster": "ideal", "mesh": {"pp": 2, "a": 2}, "time_limit_s": 4.0}
    layers = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4))
    module, x = Loss(nn.Sequential(*layers)), torch.randn(5, 64)
    program = partitioner.compile(module, x, devices=4, micro_batches=3, training=True, **options)
    assert isinstance(program, partitioner.ModuleProgram)
    assert program.verify().equal


def test_a_kind_that_a_smaller_last_micro_batch_cannot_have_is_refused() -> None:
    x = torch.randn(10, 3, 8, 8)
    match = r"^the last micro-batch, which is smaller: parallel dp: .* 2 elements, .* that divide"
    with pytest.raises(ConstraintError, match=match):
        partitioner.compile(Added(), x, devices=4, micro_batches=3, parallel="dp")


def test_a_last_micro_batch_of_another_graph_is_refused_by_compile() -> None:
    match = r"^with the last micro-batch, which is smaller, the model is .* without '/relu_2"
    with pytest.raises(ResultError, match=match):
        partitioner.compile(
            Branching(), torch.randn(10, 16), devices=2, micro_batches=3, training=True
        )
