"""The device that a process measures on, and the machine's GPUs as such devices."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import partitioner
from partitioner.api.compiled import reload
from partitioner.api.compiled.base import Compiled
from partitioner.api.profiling.candidates import candidates
from partitioner.api.profiling.profile import profile
from partitioner.api.profiling.rank import Device, LastCache, last_cache
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.measuring import timing as torch_timing
from partitioner.backends.torch.measuring.clocks import StreamClock, timed_run
from partitioner.cost_model.cluster.resolve import (
    cpu_fingerprint,
    device_type,
    gpu_fingerprint,
    is_of_gpu,
    local_cluster,
)
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import write_entries
from partitioner.cost_model.profiles.entries import Entry
from partitioner.examples import build
from partitioner.frontends.model import open_model
from partitioner.ir.errors import OptionError
from partitioner.run import local


def test_any_operand_can_be_read() -> None:
    device = Device.of("cpu")
    whole = torch.randn(4, 6).bfloat16()
    device.read([whole, whole.T, whole[:, 1:3], whole[:1].expand(3, 6), whole[:0], whole[0, 0]])
    device.read([np.zeros((3, 2)).T, np.zeros(0), np.zeros((), bool)])
    device.evict()
    assert device.others.min() == 1


@pytest.mark.parametrize(
    ("share", "processes", "nbytes"),
    [(1.0, 1, 3 * 2**26), (1.0, 2, 3 * 2**25), (1.0, 8, 2**26), (0.5, 3, 3 * 2**26)],
)
def test_processes_drive_all_else_out_of_the_last_cache_that_they_share(
    monkeypatch: pytest.MonkeyPatch, share: float, processes: int, nbytes: int
) -> None:
    cache = LastCache(3 * 2**26, share)
    monkeypatch.setattr("partitioner.api.profiling.rank.last_cache", lambda: cache)
    device = Device.of("cpu")
    device.evict(processes)
    assert device.others.count_nonzero() == nbytes, "at least 64 MiB"


@pytest.mark.parametrize(
    ("processors", "sharing", "share"), [(2, "0-1", 1.0), (8, "0-1", 0.25), (8, "0,4-6", 0.5)]
)
def test_the_last_cache_is_that_of_the_highest_level(
    tmp_path: Path, processors: int, sharing: str, share: float
) -> None:
    assert last_cache(tmp_path, processors) == LastCache(0, 1.0)
    for index, (level, size) in enumerate((("1", "48K"), ("3", "32M"), ("2", "2048K"))):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", sharing)):
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "index9").mkdir()
    last_cache.cache_clear()
    assert last_cache(tmp_path, processors) == LastCache(2**25, share)


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

    clock = StreamClock(
        event=Event, synchronize=lambda: calls.append("synchronize"), now=lambda: 7.0
    )
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
    monkeypatch.setitem(profiled.__globals__, "_runs_on", lambda *_: "cuda")
    with pytest.raises(CostError, match="only operators of PyTorch modules are measured"):
        partitioner.profile(build("mlp"), profile=tmp_path / "profile.sqlite")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str = "NVIDIA H200") -> None:
    """Let this machine have so many GPUs, as far as it is asked about them."""
    gpu = SimpleNamespace(name=name, total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)


CLUSTER = """
[[devices]]
preset = "h200"
count = {count}
profile = {{ file = "{file}", device = "{device}", threads = 1 }}
[[levels]]
name = "node"
bandwidth_bytes_per_s = 1e11
latency_s = 1e-6
{level}
"""


def cluster_file(folder: Path, count: int, device: str, level: str = "") -> Path:
    path = folder / "lab.toml"
    path.write_text(
        CLUSTER.format(count=count, file=folder / "p.sqlite", device=device, level=level)
    )
    return path


def test_gpus_that_are_not_here_are_not_measured_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their entries would have the seconds of this machine's processor."""
    example, far = (torch.randn(4, 8),), gpu_fingerprint("NVIDIA L4")
    for count in (0, 2):
        gpus(monkeypatch, count)
        with pytest.raises(CostError, match=r"has GPU NVIDIA L4 of .*, which this machine has not"):
            partitioner.profile(
                nn.Linear(8, 8), example, cluster=cluster_file(tmp_path, 2, far), time_limit_s=1
            )
    here = gpu_fingerprint("NVIDIA H200")
    with pytest.raises(CostError, match="has 3 GPUs in a machine, and this one has 2: measure"):
        partitioner.profile(
            nn.Linear(8, 8), example, cluster=cluster_file(tmp_path, 3, here), time_limit_s=1
        )
    assert not (tmp_path / "p.sqlite").exists()


def test_links_between_gpus_are_not_measured_between_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes of torchrun would measure gloo, and plans of GPUs run over NCCL."""
    gpus(monkeypatch, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    here = gpu_fingerprint("NVIDIA H200")
    level = f'profile = {{ file = "{tmp_path / "p.sqlite"}", device = "{here}", threads = 1 }}'
    for cluster in ("local", cluster_file(tmp_path, 2, here, level)):
        with pytest.raises(CostError, match="communications between GPUs are not measured"):
            partitioner.profile(nn.Linear(8, 8), (torch.randn(4, 8),), cluster=cluster)


def test_plans_for_gpus_are_priced_and_shown_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus(monkeypatch, 2)
    file, model = tmp_path / "p.sqlite", tmp_path / "mlp.onnx"
    onnx.save(build("mlp", layers=2, hidden=8, batch=6), model)
    options: dict[str, Any] = {"cluster": "local", "profile": file}
    graph, cluster = open_model(model).graph, local_cluster(2, profile=file)
    known = cluster.devices[0].profile
    assert known is not None
    assert known.device == gpu_fingerprint("NVIDIA H200")
    entries = [
        Entry(
            one.form.key,
            one.form.family,
            one.dtype,
            one.flops,
            one.moved_bytes,
            1e-3,
            0,
            9,
            torch_timing.NAME,
            "2026",
            processes,
        )
        for one in candidates(graph, cluster, "auto", None)
        for processes in (1, 2)
    ]
    write_entries(file, known.device, known.threads, entries)
    program = partitioner.compile(model, **options)
    assert program.summary["cost_sources"] == {"measured": pytest.approx(1.0)}
    assert program.measuring_device == "cuda"
    saved = program.save(tmp_path / "mlp.partition", plan_only=True)
    gpus(monkeypatch, 0)
    loaded = partitioner.load(saved)
    assert loaded.measuring_device == "cpu"
    assert loaded.evaluation.step_s == program.evaluation.step_s
    (device,) = {spec.profile.device for spec in loaded.cluster.devices if spec.profile}
    assert device == known.device


def test_a_run_is_recorded_on_devices_that_are_there() -> None:
    example = (torch.randn(4, 8),)
    program = partitioner.compile(nn.Linear(8, 8), example, 2)
    with pytest.raises(OptionError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
        program.profile(*example, device="tpu")
    if torch.cuda.device_count() < 2:
        with pytest.raises(BackendError, match="the plan has 2 ranks, one GPU each; this machine"):
            program.profile(*example, device="cuda")


class Loss(nn.Module):
    """A number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        result: torch.Tensor = self.linear(x).square().mean()
        return result


@pytest.mark.parametrize("training", [False, True])
def test_a_saved_run_is_recorded_on_devices_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training: bool
) -> None:
    """A plan for two GPUs of a machine that has one of them now."""
    batch = (torch.randn(4, 8),)
    module = Loss() if training else nn.Linear(8, 8)
    program = partitioner.compile(module, batch, 2, training=training)
    saved = program.save(tmp_path / "linear.partition")
    gpus(monkeypatch, 1)
    monkeypatch.setattr(Compiled, "measuring_device", "cuda")
    for loader in ("look", "load_named"):
        monkeypatch.setattr(reload, loader, lambda *_: program)
    (name,) = program.graph.inputs[:1]
    monkeypatch.setattr(local, "draw_inputs", lambda *_: {name: batch[0].numpy()})
    with pytest.raises(BackendError, match="the plan has 2 ranks, one GPU each; this machine has"):
        local.run_directory(saved, None, None, steps=1)
