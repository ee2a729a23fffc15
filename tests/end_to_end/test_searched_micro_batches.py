"""Numbers of micro-batches that are searched compute what the whole batch does."""

import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules import batch_losses
from partitioner.api.compiled.module import ModuleProgram
from partitioner.frontends.model import ModuleInput, open_model
from partitioner.frontends.torch.building.graph import SEED
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch, trace_module
from partitioner.ir.errors import PartitionerError
from partitioner.rewrites.same_in_parts import difference
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError

#: The cut of a batch into three, and into samples.
COUNTS = (3, batch_losses.SAMPLES)
#: Requests whose numbers of micro-batches are searched, each on two devices.
REQUESTS: tuple[dict[str, Any], ...] = (
    {"parallel": "pp"},
    {"parallel": "pp", "schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "zb1", "objective": "latency"},
    {"memory": 0.7},  # of what the whole batch takes
    {"memory": 0.7, "parallel": "dp"},
    {"memory": 0.7, "micro_batches": "auto"},
    {"parallel": "pp", "micro_batches": "auto"},
)


def planned(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> ModuleProgram:
    chosen = {"devices": 2, "cluster": "ideal", "training": True, "time_limit_s": 6.0, **options}
    program = partitioner.compile(module, inputs, **chosen)
    assert isinstance(program, ModuleProgram)
    return program


def of_loss(name: str, **options: Any) -> ModuleProgram:
    return planned(batch_losses.module(name), batch_losses.batch(), **options)


def is_whole_batch(program: ModuleProgram, name: str) -> bool:
    """Whether a step's loss and gradients are those of the whole batch."""
    result, gradients = program.gradients(*batch_losses.batch())
    loss, *others = result if isinstance(result, tuple) else (result,)
    values = {f"result {index}": value for index, value in enumerate(others)}
    ours = {"loss": loss, **gradients, **values}
    whole = batch_losses.accumulated(name, 1)
    read = {n: value for n, value in ours.items() if n in whole or value.any()}
    return batch_losses.alike(read, whole)


def notes_of(program: ModuleProgram) -> str:
    return "\n".join(program.summary["notes"])


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("pairs", "/mm"),
        ("half ignored", "/sum_1"),
        pytest.param("class weights", "/div", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_computes_the_whole_batch(name: str, node: str) -> None:
    program = of_loss(name, parallel="pp", schedule="gpipe")
    assert program.plan.micro_batches == 1
    assert re.search(
        r"not in 2, (3, )?4 or (6|12) micro-batches, which are not proven to compute what the "
        rf"whole batch does: {node} \w+.*; give micro_batches=N for N of them all the same",
        notes_of(program),
    )
    assert is_whole_batch(program, name)


def test_five_samples_under_a_batch_norm_are_no_error() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)
            return y.square().mean()

    module, x = Mean(), torch.randn(5, 6)
    program = planned(module, (x,), parallel="pp", schedule="gpipe")
    assert "not in 5 micro-batches" in notes_of(program)
    torch.testing.assert_close(program(x), module(x).detach())


@pytest.mark.slow
def test_what_is_proven_is_taken_without_a_word() -> None:
    program = of_loss("1 - cosine", parallel="pp", schedule="gpipe")
    assert (program.plan.micro_batches or 1) > 1
    assert "micro-batches" not in notes_of(program)
    assert is_whole_batch(program, "1 - cosine")


def test_a_mean_over_targets_is_taken_if_those_of_the_example_are_as_many() -> None:
    program = of_loss("cross entropy", parallel="pp", schedule="gpipe")
    assert (program.plan.micro_batches or 1) > 1
    assert "if as many targets are ignored in each" in notes_of(program)


def test_a_dropout_of_each_sample_is_told() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(8, 6)
    program = planned(module, (x,), training=False, parallel="pp", schedule="forward")
    assert (program.plan.micro_batches or 1) > 1
    assert "/1/dropout draws other random numbers" in notes_of(program)


@pytest.mark.slow
def test_what_samples_share_is_not_drawn_for_each_micro_batch() -> None:
    program = of_loss("noise of the batch", parallel="pp", schedule="gpipe")
    assert program.plan.micro_batches == 1
    assert "draws other random numbers, which samples share" in notes_of(program)


def test_a_number_that_is_given_is_taken_with_a_note() -> None:
    program = of_loss("pairs", parallel="pp", schedule="gpipe", micro_batches=3)
    assert program.plan.micro_batches == 3
    assert notes_of(program).startswith(
        "in 3 micro-batches results are not proven to be those of the whole batch: "
        "/mm combines the samples of a batch"
    )
    verified = program.verify()
    assert verified.equal
    text = str(verified)
    assert text.startswith("equal: 2 ranks against accumulation of 3 micro-batches, seed 0")
    assert "  against the whole batch: differs because of micro-batches: loss (relative" in text


def test_a_smaller_last_micro_batch_has_a_note() -> None:
    module, inputs = batch_losses.module("mse"), batch_losses.batch(5)
    program = planned(module, inputs, parallel="pp", schedule="gpipe", micro_batches=2)
    assert "of the whole batch: the last micro-batch is smaller than the others" in notes_of(
        program
    )


def test_verify_names_the_whole_batch_that_is_equal() -> None:
    program = of_loss("mse", parallel="pp", schedule="gpipe", micro_batches=3)
    assert "micro-batches" not in notes_of(program)
    text = str(program.verify())
    assert text.startswith("equal: 2 ranks against accumulation of 3 micro-batches, seed 0")
    assert text.endswith("  against the whole batch: equal")


class TwoAtMost(nn.Module):
    """Refuses more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            raise ValueError("at most two samples")
        return self.layer(x).pow(2).mean()


def test_a_module_that_refuses_the_whole_batch_is_verified() -> None:
    program = planned(TwoAtMost(), (torch.randn(4, 4),), micro_batches=2)
    verification = program.verify()
    assert verification.equal
    assert str(verification).endswith(
        "not compared with the whole batch: the module refuses it (at most two samples)"
    )


@pytest.mark.slow
def test_a_refusal_for_memory_names_what_was_left_out() -> None:
    with pytest.raises(Infeasible, match=r"; not in 2, .* micro-batches, which are not proven"):
        of_loss("pairs", parallel="pp", schedule="gpipe", memory=1000)


@pytest.mark.slow
def test_many_devices_refuse_what_is_not_proven() -> None:
    with pytest.raises(ConstraintError, match="which are not proven to compute what the whole"):
        of_loss("pairs", devices=24, cluster=None, parallel="pp+dp", mesh={"pp": 12, "dp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_proof_is_wrong(part: int) -> None:
    """What is proven of a loss holds for its numbers; what is refused has a reason."""
    proven, wrong = 0, []
    for name in list(batch_losses.LOSSES)[part::4]:
        module, example = batch_losses.module(name), Example(batch_losses.batch(), {})
        whole = trace_module(module, example, ModuleOptions(training=True))
        results = tuple(filter(None, whole.traced.call.results))
        for count in COUNTS:
            try:
                cut = trace_micro_batch(module, example, ModuleOptions(training=True), count)
            except PartitionerError:  # there are no such micro-batches
                continue
            assert cut.micro is not None
            split = cut.micro.split
            found = difference(whole.graph, cut.graph, split, results, count, SEED)
            if found.reasons or found.counted:
                continue
            proven += 1
            some, others = (batch_losses.accumulated(name, n) for n in (1, count))
            wrong += [] if batch_losses.alike(some, others) else [(name, count)]
    assert wrong == []
    assert proven >= 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_no_plan_trains_another_loss_silently(part: int) -> None:
    """Plans of a drawn request for each loss: those of the whole batch, or with a note."""
    draw, silent, planned_in_parts = random.Random(part), [], 0
    for name in list(batch_losses.LOSSES)[part::12]:
        options = dict(draw.choice(REQUESTS))
        if "memory" in options:
            room = max(of_loss(name, devices=1).evaluation.needed_bytes.values())
            options["memory"] = int(options["memory"] * room)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = of_loss(name, **options, time_limit_s=2.0)
            except (Infeasible, ConstraintError):
                continue
        planned_in_parts += (program.plan.micro_batches or 1) > 1
        if is_whole_batch(program, name) or "dropout" in name or "noise" in name:
            continue
        asked = options.get("micro_batches") == "auto"
        told = re.search("not proven to be those|results differ from", notes_of(program))
        silent += [] if asked and told else [(name, options)]
    assert silent == []
    assert planned_in_parts or part


def test_one_micro_batch_is_the_trace_of_the_whole_batch() -> None:
    opened = open_model(nn.Linear(4, 4), (torch.randn(6, 4),))
    assert isinstance(opened, ModuleInput)
    assert opened.in_micro_batches(1).traced is opened.traced.traced
    two = opened.in_micro_batches(2)
    assert two.micro is not None
    assert two.micro.sizes == (3, 3)
    assert two.graph.digest != opened.graph.digest
