"""A bound on steps in micro-batches, from the graph of the whole batch: no pipeline is below it."""

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.search.stages.least_step import LeastStep


class Loss(nn.Sequential):
    """Layers and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x).square().mean()
        return result


def mlp(width: int) -> nn.Module:
    return Loss(*(nn.Linear(width, width) for _ in range(3)))


def staged(module: nn.Module, batch: object, cluster: str, count: int) -> ModuleProgram:
    program = partitioner.compile(
        module,
        batch,
        cluster=cluster,
        training=True,
        parallel="pp",
        micro_batches=count,
        time_limit_s=60.0,
    )
    assert isinstance(program, ModuleProgram)
    return program


def bound_s(module: nn.Module, batch: object, cluster: str, count: int) -> float:
    whole = partitioner.compile(module, batch, devices=1, training=True)
    assert isinstance(whole, ModuleProgram)
    least = LeastStep(whole.traced.uncut, resolve_cluster(cluster), most=1, waits=True)
    return least.seconds(count)


@pytest.mark.parametrize(
    ("cluster", "width", "least"),
    [
        ("2xh100", 16, 0.3),
        pytest.param("2xh100", 2048, 0.3, marks=pytest.mark.slow),
        pytest.param("4xcpu", 256, 0.15, marks=pytest.mark.slow),
    ],
)
def test_no_step_is_below_the_bound(cluster: str, width: int, least: float) -> None:
    batch = (torch.zeros(8, width),)
    for count in (1, 4):
        cost_s = staged(mlp(width), batch, cluster, count).cost
        assert least * cost_s < bound_s(mlp(width), batch, cluster, count) <= cost_s


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 8])
def test_no_step_of_a_gpt_is_below_the_bound(count: int) -> None:
    module, batch = small_gpt(2)
    cost_s = staged(module, batch, "2xa100", count).cost
    assert 0 < bound_s(module, batch, "2xa100", count) <= cost_s


def test_launches_are_paid_for_each_micro_batch() -> None:
    module, batch = mlp(16), (torch.zeros(8, 16),)
    program = partitioner.compile(module, batch, cluster="2xh100", training=True, strategy="intra")
    assert isinstance(program, ModuleProgram)
    least = LeastStep(program.traced.uncut, resolve_cluster("2xh100"), most=1, waits=True)
    one, four, eight = map(least.seconds, (1, 4, 8))
    assert one < four < eight
    assert eight == pytest.approx(2 * four, rel=0.1)
    cluster = resolve_cluster("4xh100")
    stream = LeastStep(program.traced.uncut, cluster, most=1, waits=False)
    assert stream.seconds(1) < LeastStep(stream.graph, cluster, most=1, waits=True).seconds(1)
