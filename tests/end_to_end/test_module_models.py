"""Well-known architectures, compiled by `partitioner.compile`, compute the same when sharded."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import partitioner
from helpers.modules.torch_models import BUILDERS, build, gradients
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.model_jobs import JOBS
from partitioner.api.compiled.module import ModuleProgram

#: Differences relative to the largest value of a result, and of all gradients.
OUTPUTS, GRADIENTS = 1e-5, 1e-5
#: Least share of the FLOPs that is split where communication is free.
SPLIT = 0.9


@dataclass(frozen=True)
class Target:
    """Devices to compile for; by default ideal ones, whose communication costs nothing."""

    devices: int
    mesh: Mapping[str, int] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"cluster": "ideal"})

    def compile(self, module: nn.Module, inputs: object, **more: Any) -> ModuleProgram:
        program = partitioner.compile(
            module, inputs, devices=self.devices, mesh=self.mesh, **self.options, **more
        )
        assert isinstance(program, ModuleProgram)
        return program


TARGETS = {
    "2": Target(2),
    "4": Target(4, {"tp": 4}),
    "2x2": Target(4, {"dp": 2, "tp": 2}),
    "default": Target(2, options={}),
}
#: The cases of the default suite, which together call operators of every family.
FAST = {("mixtral", "2"), ("unet", "2")}
FAST_TRAINING = {("gpt2", "2"), ("resnet", "2")}


def _cases(fast: set[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(name, at, marks=() if (name, at) in fast else pytest.mark.slow)
        for name in BUILDERS
        for at in TARGETS
    ]


def difference(actual: Tensor, expected: Tensor, largest: float | None = None) -> float:
    """Largest difference relative to `largest`, by default the largest value; 1 for integers."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if not expected.is_floating_point():
        return float(not torch.equal(actual, expected))
    scale = float(expected.abs().max()) if largest is None else largest
    return float((actual - expected).abs().max()) / max(scale, 1e-30)


def assert_equal(actual: object, expected: object) -> None:
    """Results of equal structure and, to rounding, values."""
    pairs = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True))
    assert type(actual) is type(expected)
    assert any(isinstance(leaf, Tensor) for _, leaf in pairs)
    for actual_leaf, leaf in pairs:
        if isinstance(leaf, Tensor):
            assert difference(actual_leaf, leaf.detach()) < OUTPUTS
        else:
            assert actual_leaf == leaf


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    assert set(actual) == set(expected)
    differences = {name: difference(actual[name], expected[name], largest) for name in expected}
    assert max(differences.values()) < GRADIENTS, differences


def assert_split(program: ModuleProgram, at: str) -> None:
    """All operators have rows and, where communication is free, nearly all work is split."""
    known = ("results whole", "at once, the best plan takes")
    assert all(any(text in note for text in known) for note in program.summary["notes"])
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
    results, sharded_gradients = program.gradients(**fresh)
    expected, whole_gradients = gradients(copy.deepcopy(model.module), fresh)
    assert_equal(results, expected)
    assert_same_gradients(sharded_gradients, whole_gradients)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "unet"])
@pytest.mark.slow
def test_dropout_does_not_depend_on_the_number_of_devices(name: str) -> None:
    model = build(name, training=True, dropout=0.3)
    one, two = (
        Target(count).compile(model.module, dict(model.inputs), training=True) for count in (1, 2)
    )
    assert two.summary["sharded_flops_share"] > SPLIT
    losses = []
    for seed in (5, 6):
        expected, whole_gradients = one.gradients(**model.inputs, seed=seed)
        results, sharded_gradients = two.gradients(**model.inputs, seed=seed)
        assert_equal(results, expected)
        assert_same_gradients(sharded_gradients, whole_gradients)
        losses.append(float(results[0]))
    assert losses[0] != losses[1]


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_on_processes(run_job: RunJob, job: str) -> None:
    """Losses and all final weights are those of one process."""
    run_job("kinds/model_jobs.py", job)
