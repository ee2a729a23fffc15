"""Pipelines on gloo ranks train as one process that accumulates gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.stages.pipeline_model_jobs import JOBS
from partitioner.backends.errors import BackendError
from partitioner.ir.errors import OptionError
from partitioner.strategies.constraints import ConstraintError


@pytest.mark.one_in(2)
@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_are_those_of_one_process(run_job: RunJob, job: str) -> None:
    run_job("stages/pipeline_model_jobs.py", job)


def test_a_plan_in_stages_is_no_constraint(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    example = (torch.randn(4, 8),)
    options: Any = {"devices": 2, "micro_batches": 2}
    plan = partitioner.compile(module, example, **options).plan
    assert plan.pipeline is not None
    (tmp_path / "plan.json").write_text(plan.to_json())
    for more in ({}, {"micro_batches": 2}):
        with pytest.raises(OptionError, match="a plan in stages cannot be kept: pin groups of"):
            partitioner.compile(module, example, 2, constraints=tmp_path / "plan.json", **more)
    (tmp_path / "mesh.json").write_text(partitioner.compile(module, example, 2).plan.to_json())
    with pytest.raises(ConstraintError, match="a plan on one mesh is no constraint of stages"):
        partitioner.compile(module, example, constraints=tmp_path / "mesh.json", **options)


class Whole(nn.Module):
    """Results that are no parts of the batch: a matrix and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.down(self.up(x).relu())
        return scores.square().mean(), scores.mT @ scores, scores.argmax()


def test_one_micro_batch_gives_any_results() -> None:
    torch.manual_seed(0)
    module, x = Whole(), torch.randn(6, 8)
    options = {"devices": 2, "training": True, "parallel": "pp", "schedule": "gpipe"}
    program = partitioner.compile(module, x, micro_batches=1, **options)
    torch.testing.assert_close(program(x), module(x))
    with pytest.raises(BackendError, match=r"result 'mm' is .*, or give micro_batches=1$"):
        partitioner.compile(module, x, micro_batches=2, **options)
