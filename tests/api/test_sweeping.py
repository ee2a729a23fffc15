"""Points of a sweep are the plans that `compile` finds, in whatever way they run."""

import torch
from torch import Tensor, nn

import partitioner
from partitioner import examples


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_point_that_fits_in_blocks_alone_is_planned_as_compile_does() -> None:
    model = examples.build("mlp", layers=2, hidden=32, batch=2)
    program = partitioner.compile(model, devices=2, cluster="ideal", memory=3_900, time_limit_s=2)
    swept = partitioner.sweep(
        model, devices=[2], clusters=["ideal"], memory=[3_900], time_limit_s=2
    )
    (point,) = swept.data["points"]
    assert program.plan.blocks
    assert point["step_s"] == program.evaluation.step_s
    assert point["verdict"] == program.verdict().line


def test_points_of_stages_run_in_micro_batches() -> None:
    swept = partitioner.sweep(
        _Chain(),
        torch.randn(8, 16),
        [2],
        clusters=["ideal"],
        training=True,
        parallel="pp",
        time_limit_s=2,
    )
    (point,) = swept.data["points"]
    assert point["strategy"] == "pipeline"
    assert point["speedup"] is not None
