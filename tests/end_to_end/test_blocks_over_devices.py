"""Models that fit no plan over several devices run there in blocks, each rank within its limit."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.unets import exported, unet
from helpers.plans.measured import measured_bytes
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends.onnx.local import run_local
from partitioner.cli.main import main
from partitioner.frontends.inputs import random_inputs


def check(model: Path, devices: int, share: float, folder: Path) -> Compiled:
    """Compile for a share of what the whole model needs; compare, and measure each rank."""
    needs = partitioner.compile(model, devices=1).summary["peak_bytes"][0]
    limit = int(needs * share)
    compiled = partitioner.compile(model, devices=devices, memory=limit)
    assert compiled.plan.blocks
    assert compiled.evaluation.devices_used == devices
    assert max(compiled.summary["peak_bytes"]) <= limit
    certificate = compiled.plan.certificate
    assert certificate is not None
    assert 0 < certificate.bound <= certificate.cost
    assert f"stages of {devices} devices in their order" in certificate.space
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5
    compiled.save(folder)
    feeds = random_inputs(compiled.graph, 0)
    for rank in range(devices):
        assert 0 < measured_bytes(folder, rank, feeds).total <= limit
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_blocks_of_a_unet_run_on_all_devices(
    devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No device holds a layer as a whole: each runs some of the tiles."""
    model = exported(unet(8, 2), (1, 3, 146, 102), tmp_path / "unet.onnx")
    compiled = check(model, devices, 0.27, tmp_path / "out")
    (stretch,) = [s for s in compiled.plan.blocks.stretches if s.chunks]
    assert stretch.blocks >= devices
    line = f"on devices {', '.join(map(str, range(devices)))}"
    assert line in str(compiled)
    assert main(["show", str(tmp_path / "out")]) == 0
    assert line in capsys.readouterr().out
    again = partitioner.load(tmp_path / "out")
    assert isinstance(again, Compiled)
    assert again.plan == compiled.plan
    assert not again.warnings


@pytest.mark.parametrize(("devices", "share"), [(2, 0.3), (3, 0.27)])
def test_each_device_loads_the_weights_of_its_stage_in_turn(
    devices: int, share: float, tmp_path: Path
) -> None:
    """All devices hold less than the weights; launched ranks give what one process does."""
    model = tmp_path / "mlp.onnx"
    onnx.save(examples.build("mlp", layers=8, hidden=512), model)
    compiled = check(model, devices, share, tmp_path / "out")
    text = str(compiled)
    assert f"constants in turn on device {devices - 1}" in text
    peaks = compiled.evaluation.exact_peak
    weights = 4 * 512 * 512
    # A device holds the constants of one block and of the next that it runs, of no other device's.
    assert all(2 * weights <= peaks[d].resident_bytes < 3 * weights for d in range(devices))
    feeds = random_inputs(compiled.graph, 0)
    launched = run_local(tmp_path / "out", feeds, 2, optimization="basic")
    simulated = compiled.run(feeds)
    for name, value in launched.outputs.items():
        np.testing.assert_allclose(value, simulated[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_module_in_blocks_over_devices(devices: int) -> None:
    """Activations of no layer fit a device whole; odd sizes."""
    example = (torch.randn(1, 3, 137, 104),)
    module = nn.Sequential(*unet().down[:1], nn.MaxPool2d(2, ceil_mode=True))
    needs = partitioner.compile(module, example, devices=1).summary["peak_bytes"][0]
    # The strategy leaves operators whole: else halos over devices would do.
    compiled = partitioner.compile(
        module, example, devices=devices, memory=int(0.5 * needs), strategy="inter"
    )
    assert compiled.plan.blocks
    assert compiled.evaluation.devices_used == devices
    assert compiled.evaluation.fits_exactly
    assert "blocks of dim" in str(compiled)
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    torch.testing.assert_close(compiled(*example), module(*example), rtol=1e-5, atol=1e-5)
