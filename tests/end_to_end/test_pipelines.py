"""Pipelines on gloo ranks train as one process that accumulates gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.stages.pipeline_model_jobs import JOBS
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import Plan
from partitioner.rewrites.staging import changing_nodes, stages_of_all
from partitioner.strategies.constraints import ConstraintError


@pytest.mark.one_in(2)
@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_are_those_of_one_process(run_job: RunJob, job: str) -> None:
    run_job("stages/pipeline_model_jobs.py", job)


STAGES: tuple[dict[str, Any], ...] = (
    {"parallel": "pp", "schedule": "1f1b"},
    {"parallel": "pp", "schedule": "zbv"},
    {"parallel": "pp", "schedule": "interleaved"},
    {"parallel": "dp"},
)


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_a_plan_in_stages_is_kept(options: dict[str, Any], tmp_path: Path) -> None:
    """The same stages, devices, micro-batches and order, also if a decision is left open."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fixed: dict[str, Any] = {"devices": 2, "cluster": "2xcpu", "training": True}
    module = nn.Sequential(module, nn.Flatten(0), Mean())
    example = (torch.randn(8, 8),)
    plan = partitioner.compile(module, example, micro_batches=4, **options, **fixed).plan
    assert plan.pipeline is not None
    (tmp_path / "plan.json").write_text(plan.to_json())
    kept = partitioner.compile(module, example, constraints=tmp_path / "plan.json", **fixed)
    assert kept.plan.digest == plan.digest
    certificate = kept.plan.certificate
    assert certificate is not None
    assert (certificate.bound, certificate.status) == (certificate.cost, "optimal")
    assert kept.verify()
    first, *rest = plan.nodes
    part = replace(plan, nodes={name: plan.nodes[name] for name in rest})
    kind = {"parallel": options["parallel"]}  # it decides what a trace stores
    again = partitioner.compile(module, example, constraints=part, **kind, **fixed).plan
    assert {name: again.nodes[name] for name in rest} == part.nodes
    assert first in again.nodes


class Towers(nn.Module):
    """Two stacks of layers, each with every second operator of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.one(x), self.other(x)
        return ((one.relu() + other.tanh()) ** 2).mean()


def staged_towers() -> Plan:
    """A plan whose first stage has one tower, edited by hand."""
    plan = towers().plan
    assert plan.pipeline is not None
    forward = dict.fromkeys(("/one/addmm", "/relu"), 0)
    units = changing_nodes(towers().graph)
    stages = stages_of_all(towers().graph, {n.name: forward.get(n.name, 1) for n in units})
    groups = [plan.stages.index(stage) for stage in (0, 1)]
    nodes = {n: replace(own, group=groups[stages[n]]) for n, own in plan.nodes.items()}
    return replace(plan, nodes=nodes, certificate=None)


def towers(**options: Any) -> ModuleProgram:
    options = options or {"parallel": "pp", "micro_batches": 2}
    return partitioner.compile(
        Towers(), torch.randn(4, 8), 2, cluster="2xcpu", training=True, **options
    )


def test_stages_that_are_kept_may_take_turns_in_the_trace() -> None:
    plan = staged_towers()
    kept = towers(constraints=plan)
    assert kept.plan.digest == plan.digest
    assert kept.verify()


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_in_stages_is_kept_in_part(backward: bool) -> None:
    """A stage is known by any of the nodes that belong to it, as those of its backward pass."""
    whole = towers()
    names = [name for name in whole.plan.nodes if (name in whole.graph.backward) is backward]
    part = replace(whole.plan, nodes={name: whole.plan.nodes[name] for name in names})
    kept = towers(constraints=part).plan
    assert {name: kept.nodes[name] for name in names} == part.nodes
    assert kept.stage_devices == whole.plan.stage_devices


def test_a_decision_that_stages_contradict_is_refused() -> None:
    plan, name = staged_towers(), "/one/weight/gradient"
    assert plan.pipeline is not None
    elsewhere = replace(plan.nodes[name], group=plan.stages.index(1))
    edited = replace(plan, nodes={**plan.nodes, name: elsewhere})
    text = f"has {name!r} on devices 1, and the nodes that it lists beside it bring it to 0: list"
    with pytest.raises(ConstraintError, match=text):
        towers(constraints=edited)


def test_a_plan_that_is_kept_says_how_the_batch_runs() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    example = (torch.randn(4, 8),)
    staged = partitioner.compile(module, example, 2, parallel="pp", micro_batches=2).plan
    whole = partitioner.compile(module, example, 2, parallel="dp").plan
    once = "the plan in constraints runs the whole batch at once"
    for plan, options, text in (
        (staged, {"micro_batches": 4}, "micro_batches 4: the plan in constraints runs 2 micro-"),
        (staged, {"schedule": "1f1b"}, "schedule '1f1b': the plan in constraints runs 2 micro-"),
        (whole, {"micro_batches": 2}, f"micro_batches 2: {once}"),
        (whole, {"mesh": {"pp": 2}}, rf"mesh {{'pp': 2}}: {once}"),
        (whole, {"parallel": "pp"}, f"parallel 'pp': {once}"),
    ):
        with pytest.raises(OptionError, match=text):
            partitioner.compile(module, example, 2, constraints=plan, **options)


class Mean(nn.Module):
    """The loss of a batch."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores**2).mean()


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
