"""The device that a process measures on, and the machine's GPUs as such devices."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import partitioner
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.clocks import StreamClock, timed_run
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.resolve import (
    cpu_fingerprint,
    device_type,
    gpu_fingerprint,
    is_of_gpu,
)
from partitioner.examples import build
from partitioner.ir.errors import OptionError
from partitioner.profiling.device import Device
from partitioner.profiling.profile import profile


def test_any_operand_can_be_read() -> None:
    device = Device.of("cpu")
    whole = torch.randn(4, 6).bfloat16()
    device.read([whole, whole.T, whole[:, 1:3], whole[:1].expand(3, 6), whole[:0], whole[0, 0]])
    device.read([np.zeros((3, 2)).T, np.zeros(0), np.zeros((), bool)])
    device.evict()
    assert device.others.min() == 1


def test_a_run_ends_on_a_gpu_with_its_last_kernel() -> None:
    """The processor has gone on long before."""
    calls: list[str] = []
    at_ms = iter([5.0, 9.0])

    class Event:
        def record(self) -> None:
            self.ms = next(at_ms)
            calls.append("record")

        def elapsed_time(self, later: Event) -> float:
            return later.ms - self.ms

    clock = StreamClock(Event, lambda: calls.append("synchronize"), now=lambda: 7.0)
    assert timed_run(clock, lambda: calls.append("run")) == pytest.approx(0.004)
    assert calls == ["synchronize", "record", "run", "record", "synchronize"]


def test_fingerprints_tell_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert device_type(cpu_fingerprint()) == "cpu"
    assert device_type(gpu_fingerprint("NVIDIA H200")) == "cuda"
    assert device_type(gpu_fingerprint("NVIDIA L4")) is None
    assert device_type("GPU NVIDIA H200 of another processor") is None
    assert device_type("another processor") is None
    assert is_of_gpu(gpu_fingerprint("NVIDIA L4"))
    assert not is_of_gpu(cpu_fingerprint())


def test_operators_of_onnx_models_are_not_measured_on_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiled = inspect.unwrap(profile)
    monkeypatch.setitem(profiled.__globals__, "device_type", lambda _: "cuda")
    with pytest.raises(CostError, match="only operators of PyTorch modules are measured"):
        partitioner.profile(build("mlp"), profile=tmp_path / "profile.sqlite")


def test_a_run_is_recorded_on_devices_that_are_there() -> None:
    example = (torch.randn(4, 8),)
    program = partitioner.compile(nn.Linear(8, 8), example, 2)
    with pytest.raises(OptionError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
        program.profile(*example, device="tpu")
    if torch.cuda.device_count() < 2:
        with pytest.raises(BackendError, match="the plan has 2 ranks, one GPU each; this machine"):
            program.profile(*example, device="cuda")
