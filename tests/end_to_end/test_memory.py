"""A model over one device's memory: four parts fit, also when measured; two do not."""

import math
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import partitioner
from helpers.plans.measured import measured_bytes
from partitioner import examples
from partitioner.cli.main import main
from partitioner.frontends.inputs import random_inputs
from partitioner.solver.outcome import Infeasible

MIB = 2**20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Some 27 MiB of weights in 8 layers."""
    onnx.save(examples.build("mlp", layers=8, hidden=1024), tmp_path / "mlp.onnx")
    return tmp_path / "mlp.onnx"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "intra", "inter"])
def test_four_parts_fit_and_measure_within_the_limit(model: Path, strategy: str) -> None:
    limit = 12 * MIB
    result = partitioner.compile(
        model, devices=4, memory="12MiB", strategy=strategy, time_limit_s=10
    )  # type: ignore[arg-type]
    assert result.one_device.held_bytes > 2 * limit
    assert max(result.summary["peak_bytes"]) <= limit
    result.save(model.parent / "out")
    inputs = random_inputs(result.graph, 0)
    for rank in range(4):
        measured = measured_bytes(model.parent / "out", rank, inputs)
        assert 0 < measured.total <= limit
        assert measured.peak <= 2 * MIB


@pytest.mark.slow
def test_two_parts_do_not_fit_and_the_refusal_says_by_how_much() -> None:
    """Of a module, whose weights stay."""
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    options: dict[str, Any] = {"strategy": "intra", "time_limit_s": 10}
    x = (torch.zeros(4, 1024),)
    with pytest.raises(Infeasible) as refusal:
        partitioner.compile(module, x, devices=2, memory="12MiB", **options)
    error = refusal.value
    assert error.bytes_short > 0
    memory, devices = error.relaxations
    enough = int(re.fullmatch(r"with --memory (\d+) \(.*MiB\)", memory)[1])  # type: ignore[index]
    assert enough == 12 * MIB + math.ceil(error.bytes_short)
    assert partitioner.compile(module, x, devices=2, memory=enough, **options).evaluation.fits
    assert devices == "on 3 devices"
    assert partitioner.compile(module, x, devices=3, memory="12MiB", **options).evaluation.fits


@pytest.mark.slow
def test_what_no_blocks_fit_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(examples.build("mlp"), tmp_path / "mlp.onnx")
    where = ["--devices", "2", "--memory", "16KiB", "--strategy", "intra"]
    code = main([str(tmp_path / "mlp.onnx"), *where, "-q", "-o", str(tmp_path / "two")])
    assert code == 3
    said = capsys.readouterr().err
    assert "bytes are short on device" in said
    assert "at '" in said
    assert "; it fits in blocks with --memory " in said
    assert re.search(r"limit 16384: [\d.]+ KiB against 16 KiB\)", said)
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.onnx"]
    (enough,) = re.findall(r"it fits in blocks with --memory (\d+)", said)
    where = ["--devices", "2", "--memory", enough, "--strategy", "intra"]
    assert main([str(tmp_path / "mlp.onnx"), *where, "-q", "-o", str(tmp_path / "two")]) == 0
