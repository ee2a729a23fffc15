"""Bytes that ranks of PyTorch hold on processors: as foretold, within 5 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partitioner
from helpers.modules.sized_models import Loss, convolutions, perceptron
from helpers.plans.memory_rungs import OFF

MLP = perceptron, (3, 512), (64, 512)
CONVNET = convolutions, (4,), (8, 3, 32, 32)
TRAINING: dict[str, Any] = {"training": True}
IN_FOUR: dict[str, Any] = {"parallel": "pp", "micro_batches": 4}
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "the optimizer's step beside all gradients": (MLP, 2, {"parallel": "dp", **TRAINING}),
    "all-reduces in place": (MLP, 2, {"parallel": "dp", "optimizer": "sgd", **TRAINING}),
    "parts of gradients, gathered weights": (
        *(MLP, 4),
        {"parallel": "zero3", "optimizer": "sgd", **TRAINING},
    ),
    "parameters at rest beside their parts": (MLP, 2, {"parallel": "zero2", **TRAINING}),
    "whole gradients at rest": (
        *(MLP, 2),
        {"parallel": "zero1", "optimizer": "sgd", "micro_batches": 4, **TRAINING},
    ),
    "parts of gradients of micro-batches": (
        *(MLP, 2),
        {"parallel": "zero3", "optimizer": "sgd", "micro_batches": 4, **TRAINING},
    ),
    "parts of weights": (MLP, 2, {"parallel": "tp", **TRAINING}),
    "sums of micro-batches": (MLP, 2, {"optimizer": "sgd", **IN_FOUR, **TRAINING}),
    "messages of images, both ways": (CONVNET, 2, {"optimizer": "sgd", **IN_FOUR, **TRAINING}),
    "messages of a stage that runs ahead": (CONVNET, 4, IN_FOUR),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_what_is_foretold(case: str) -> None:
    (make, sizes, shape), devices, options = CASES[case]
    torch.manual_seed(0)
    module = Loss(make(*sizes)) if "training" in options else make(*sizes)
    batch = torch.randn(shape)
    program = partitioner.compile(module, (batch,), cluster=f"{devices}xcpu", **options)
    peaks = program.evaluation.executor_peak
    for rank, measured in enumerate(program.profile(batch, steps=1).measured.ranks):
        assert measured.peak_bytes is not None
        assert abs(peaks[rank].bytes / measured.peak_bytes - 1) <= OFF, (rank, peaks[rank])
