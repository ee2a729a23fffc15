"""Well-known architectures through `partitioner.compile`: sharded, they compute the same."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_jobs import JOBS
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_jobs import RunJob, job_parameters
from torch_models import BUILDERS, build, gradients

import partitioner
from partitioner.compiled.module import ModuleProgram

#: Relative to the largest value of a result; of gradients, to the largest of all.
OUTPUTS, GRADIENTS = 1e-5, 1e-5
#: Least share of the FLOPs that is split where communication is free.
SPLIT = 0.9


@dataclass(frozen=True)
class Target:
    """Devices to compile for; on "ideal" ones communication is free, so that all is split."""

    devices: int
    mesh: Mapping[str, int] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"cluster": "ideal"})

    def compile(self, module: nn.Module, inputs: object, **more: Any) -> ModuleProgram:
        found = partitioner.compile(
            module, inputs, devices=self.devices, mesh=self.mesh, **self.options, **more
        )
        assert isinstance(found, ModuleProgram)
        return found


TARGETS = {
    "2": Target(2),
    "4": Target(4, {"tp": 4}),
    "2x2": Target(4, {"dp": 2, "tp": 2}),
    "default": Target(2, options={}),
}
#: The cases that are always run: one for each kind of operators.
FAST = {("mixtral", "2"), ("unet", "2")}
FAST_TRAINING = {("gpt2", "2"), ("resnet", "2")}


def _cases(fast: set[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(name, at, marks=() if (name, at) in fast else pytest.mark.slow)
        for name in BUILDERS
        for at in TARGETS
    ]


def difference(found: Tensor, expected: Tensor, largest: float | None = None) -> float:
    """Largest difference, by default relative to the largest value; 1 for unequal integers."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if not expected.is_floating_point():
        return float(not torch.equal(found, expected))
    scale = float(expected.abs().max()) if largest is None else largest
    return float((found - expected).abs().max()) / max(scale, 1e-30)


def assert_equal(found: object, expected: object) -> None:
    """Results of equal structure and, to rounding, values."""
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
    assert type(found) is type(expected)
    assert any(isinstance(want, Tensor) for _, want in pairs)
    for got, want in pairs:
        if isinstance(want, Tensor):
            assert difference(got, want.detach()) < OUTPUTS
        else:
            assert got == want


def assert_same_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    assert set(found) == set(expected)
    worst = {name: difference(found[name], expected[name], largest) for name in expected}
    assert max(worst.values()) < GRADIENTS, worst


def assert_split(program: ModuleProgram, at: str) -> None:
    """All operators have rows and, where it is free, nearly all work is split."""
    assert not program.summary["notes"]
    if at != "default":
        assert program.summary["sharded_flops_share"] > SPLIT


@pytest.mark.parametrize(("name", "at"), _cases(FAST))
def test_inference(name: str, at: str) -> None:
    model = build(name)
    program = TARGETS[at].compile(model.module, dict(model.inputs))
    assert_split(program, at)
    fresh = model.more_inputs(1)
    with torch.no_grad():
        assert_equal(program(**fresh), model.module(**fresh))


@pytest.mark.parametrize(("name", "at"), _cases(FAST_TRAINING))
def test_training(name: str, at: str) -> None:
    model = build(name, training=True)
    program = TARGETS[at].compile(model.module, dict(model.inputs), training=True)
    assert_split(program, at)
    fresh = model.more_inputs(1)
    found, gradient = program.gradients(**fresh)
    expected, own = gradients(copy.deepcopy(model.module), fresh)
    assert_equal(found, expected)
    assert_same_gradients(gradient, own)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "unet"])
@pytest.mark.slow
def test_dropout_does_not_depend_on_the_number_of_devices(name: str) -> None:
    model = build(name, training=True, dropout=0.3)
    one, two = (
        Target(count).compile(model.module, dict(model.inputs), training=True) for count in (1, 2)
    )
    assert two.summary["sharded_flops_share"] > SPLIT
    losses, found = {}, {}
    for seed in (5, 6):
        expected, own = one.gradients(**model.inputs, seed=seed)
        results, found[seed] = two.gradients(**model.inputs, seed=seed)
        assert_equal(results, expected)
        assert_same_gradients(found[seed], own)
        losses[seed] = float(results[0])
    assert losses[5] != losses[6]


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_on_processes(run_job: RunJob, job: str) -> None:
    """Losses and all final weights are those of one process."""
    run_job("model_jobs.py", job)
