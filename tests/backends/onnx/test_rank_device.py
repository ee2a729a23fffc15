"""All ranks of an ONNX plan run on GPUs, or none; a record says on which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.distributed as dist

import partitioner
from partitioner import examples
from partitioner.backends.onnx import rank as rank_process
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.rank import RankProcess, rank_device
from partitioner.backends.onnx.sessions.segments import SessionConfig

CPU = torch.device("cpu")
BUILT = ("CUDAExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("gpus", "providers", "others", "expected"),
    [
        (2, BUILT, 1, torch.device("cuda", 1)),
        (3, BUILT, 1, torch.device("cuda", 1)),
        (1, BUILT, 1, CPU),  # rank 0 alone would have a GPU
        (2, BUILT[1:], 1, CPU),
        (2, BUILT, 0, CPU),  # a rank on another machine has none
        (0, BUILT, 1, CPU),
    ],
)
def test_ranks_agree_on_their_devices(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    providers: tuple[str, ...],
    others: int,
    expected: torch.device,
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [*providers])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def all_reduce(flag: torch.Tensor, op: object) -> None:
        assert op == dist.ReduceOp.MIN
        flag.clamp_(max=others)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert rank_device(1, 2) == expected


def test_a_record_has_the_name_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A record without one is taken for the processor's, and would be calibrated as its prices."""
    model = examples.build("mlp", layers=1, hidden=4, batch=2)
    saved = partitioner.compile(model, cluster="1xideal").save(tmp_path / "mlp.partition")
    named: list[torch.device] = []

    def gpu_name(device: torch.device) -> str:
        named.append(device)
        return "NVIDIA H200"

    monkeypatch.setattr(rank_process, "gpu_name", gpu_name)
    config = SessionConfig(optimization="all", threads=1, profile=tmp_path, optimized=tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        process = RankProcess(load_rank(saved / "rank0.onnx"), CPU, config)
        log = process.record({"x": np.zeros((2, 4), np.float32)}, steps=1)
    finally:
        dist.destroy_process_group()
    assert log.gpu == "NVIDIA H200"
    assert named == [CPU]
