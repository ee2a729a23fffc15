"""A batch that fits no plan runs in micro-batches, where that changes no result or is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.pages.command_line import one_line
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cli.main import main
from partitioner.ir.errors import PartitionerError
from partitioner.solver.outcome import Infeasible

SAMPLES = 256
#: Holds the weights and some samples of the models below.
MEMORY = 900_000


#: A file whose `build` gives a module with a batch norm.
FACTORY = """
import torch
from torch import nn

class Loss(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def build():
    torch.manual_seed(0)
    layers = nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 16)
    return Loss(*layers), (torch.randn(256, 16),)
"""


class Layers(nn.Module):
    """Wide layers, whose activations are most of the bytes of a large batch."""

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.relu(self.up(x)))
        return self.dropout(self.norm(h) + x).square().mean()


def planned(module: nn.Module | None = None, **options: Any) -> ModuleProgram:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 16)
    chosen = {"devices": 1, "training": True, "memory": MEMORY, "time_limit_s": 6.0, **options}
    program = partitioner.compile(module or Layers(), batch, **chosen)
    assert isinstance(program, ModuleProgram)
    return program


@pytest.mark.slow
def test_the_fewest_micro_batches_that_fit_compute_the_same() -> None:
    torch.manual_seed(0)
    module = Layers()
    program = planned(module)
    count = program.plan.micro_batches
    assert count is not None
    assert count > 1
    assert program.evaluation.fits
    with pytest.raises(Infeasible, match=r"it fits with --micro-batches \d+ \("):
        planned(module, micro_batches=count // 2, recompute=False)
    assert planned(module, micro_batches=count // 2).plan.blocks.stretches
    assert program.summary["notes"][0] == (
        f"no plan of the whole batch was found to fit: it runs in {count} micro-batches, whose "
        "gradients are added up; results are those of the whole batch"
    )
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 16)
    loss, gradients = program.gradients(batch)
    whole = module(batch)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_that_fits_is_not_cut() -> None:
    for asked in (None, "auto"):
        assert planned(memory="1GB", micro_batches=asked).plan.pipeline is None


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Layers(batch_norm=True), "/norm/batch_norm_statistics combines the samples of a batch"),
        pytest.param(
            *(Layers(dropout=0.1), "/dropout/dropout draws other random numbers"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["batch norm", "dropout"],
)
def test_results_that_would_change_are_asked_for(module: nn.Module, reason: str) -> None:
    with pytest.raises(Infeasible) as refused:
        planned(module, recompute=False)
    text = str(refused.value)
    assert "it fits with --memory" in text
    assert f"a step), which changes the results: {reason}" in text
    assert text.endswith("; blocks are not searched with recompute=False")
    assert refused.value.relaxations[-1].startswith("with --micro-batches ")
    program = planned(module, micro_batches="auto", recompute=False)
    (note, *_) = program.summary["notes"]
    assert f"results differ from those of the whole batch: {reason}" in note
    assert f"with --micro-batches {program.plan.micro_batches} (" in text
    assert program.verify().equal


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"parallel": "dp"}),
        pytest.param(2, {"parallel": "tp"}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_plans_on_several_devices_run_in_parts_too(devices: int, options: dict[str, Any]) -> None:
    program = planned(devices=devices, memory=MEMORY // 2 - 1000, **options)
    assert (program.plan.micro_batches or 1) > 1
    assert program.plan.pipeline is not None
    assert not options or set(program.plan.stages) == {0}
    assert program.verify().equal


def test_inference_runs_in_parts() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 4096), nn.Linear(4096, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    program = planned(Rows().eval(), training=False, memory="2.5MB")
    assert (program.plan.micro_batches or 1) > 1
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, 16)
    torch.testing.assert_close(program(batch), program.whole(batch), rtol=1e-4, atol=1e-5)
    assert "gradients" not in program.summary["notes"][0]


@pytest.mark.slow
def test_stages_take_more_micro_batches_where_the_usual_ones_do_not_fit() -> None:
    options: dict[str, Any] = {"parallel": "pp", "schedule": "1f1b", "time_limit_s": 20.0}
    program = planned(devices=2, memory=300_000, **options)
    assert (program.plan.micro_batches or 1) > 8
    assert program.verify().equal


def test_options_that_have_no_meaning() -> None:
    text = "micro_batches is 'many', not 'auto' or a whole number"
    with pytest.raises(PartitionerError, match=text):
        planned(micro_batches="many")


@pytest.mark.slow
def test_the_command_line_takes_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch_norms.py").write_text(FACTORY)
    words = ["batch_norms:build", "--training", "--memory", str(MEMORY), "--time-limit", "6"]
    words += ["--recompute", "no"]  # and so no blocks, which compute again
    assert main([*words, "-q"]) == 3
    assert "which changes the results: " in one_line(capsys.readouterr().err)
    assert main([*words, "--micro-batches", "auto", "-o", "p"]) == 0
    assert "results differ from those of the whole batch" in capsys.readouterr().out
    assert main(["verify", "p", "--module", "batch_norms:build"]) == 0
    assert main([*words, "--micro-batches", "0"]) == 2
