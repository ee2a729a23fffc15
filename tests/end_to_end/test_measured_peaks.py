"""Bytes that ranks of PyTorch hold on processors: as foretold, within 5 %, and hardly ever more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import (
    ChannelsLast,
    Gpt,
    Loss,
    convolutions,
    ids,
    normalised_convolutions,
    perceptron,
)
from helpers.plans.memory_rungs import OFF

#: Of a measured peak, the share by which that of a prediction may be less.
LESS = 0.005


class Sized(NamedTuple):
    """A model with a batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


def uneven() -> nn.Module:
    """Layers of sizes that 3 and 5 ranks do not share evenly."""
    sizes = (131, 257), (257, 193), (193, 389), (389, 61)
    return nn.Sequential(*(m for a, b in sizes for m in (nn.Linear(a, b), nn.Tanh())))


MLP = Sized(partial(perceptron, 3, 512), partial(torch.randn, 64, 512))
UNEVEN = Sized(uneven, partial(torch.randn, 75, 131))
CONVNET = Sized(partial(convolutions, 4), partial(torch.randn, 8, 3, 32, 32))
LAST = Sized(lambda: ChannelsLast(convolutions(4)), partial(torch.randn, 8, 3, 32, 32))
NORMALISED = Sized(
    lambda: ChannelsLast(normalised_convolutions(48)), partial(torch.randn, 12, 3, 32, 32)
)
GPT = Sized(partial(Gpt, 2, 64, 512), partial(ids, 24, 16))
ODD_GPT = Sized(partial(Gpt, 2, 72, 509), partial(ids, 15, 17))

TRAINING: dict[str, Any] = {"training": True}
IN_FOUR: dict[str, Any] = {"parallel": "pp", "micro_batches": 4}
IN_THREE: dict[str, Any] = {"parallel": "pp", "micro_batches": 3, "optimizer": "sgd", **TRAINING}


def of(kind: str, optimizer: str = "sgd", count: int = 0, **mesh: int) -> dict[str, Any]:
    """Options of a training with a kind of parallelism."""
    options: dict[str, Any] = {"parallel": kind, "optimizer": optimizer, **TRAINING}
    options |= {"micro_batches": count} if count else {}
    return options | ({"mesh": mesh} if mesh else {})


CASES: dict[str, tuple[Sized, int, dict[str, Any]]] = {
    "the optimizer's step beside all gradients": (MLP, 2, of("dp", "adamw")),
    "all-reduces in place": (MLP, 2, of("dp")),
    "parts of gradients, gathered weights": (MLP, 4, of("zero3")),
    "parameters at rest beside their parts": (MLP, 2, of("zero2", "adamw")),
    "whole gradients at rest": (MLP, 2, of("zero1", count=4)),
    "parts of gradients of micro-batches": (MLP, 2, of("zero3", count=4)),
    "parts of weights": (MLP, 2, of("tp", "adamw")),
    "sums of micro-batches": (MLP, 2, {"optimizer": "sgd", **IN_FOUR, **TRAINING}),
    "sums that the stages reduce once": (MLP, 4, of("pp+dp", count=4, pp=2, dp=2)),
    "sums that the first run begins": (UNEVEN, 3, IN_THREE),
    "messages of images, both ways": (CONVNET, 2, {"optimizer": "sgd", **IN_FOUR, **TRAINING}),
    "messages of a stage that runs ahead": (CONVNET, 4, IN_FOUR),
    "parts of uneven weights on 3 ranks": (UNEVEN, 3, of("tp", "adamw")),
    "uneven micro-batches on 5 ranks": (UNEVEN, 5, of("zero2", count=3)),
    "images with channels last": (LAST, 4, of("zero3")),
    "messages of images with channels last": (LAST, 2, of("pp", count=4)),
    "pools and norms of channels that lie last": (NORMALISED, 2, of("tp")),
}
WITH_GPTS: dict[str, tuple[Sized, int, dict[str, Any]]] = {
    "messages of several tensors": (GPT, 3, IN_THREE),
    "parts that are joined": (ODD_GPT, 3, of("tp")),
    "stages of parts that are gathered": (GPT, 4, of("pp+tp", count=4, pp=2, tp=2)),
    "uneven parts in one gather, freed behind the last": (ODD_GPT, 3, of("zero2")),
    "uneven parts in one gather, joined before the last": (ODD_GPT, 3, of("zero3")),
    "two axes of 2 and 3": (GPT, 6, of("dp+tp", dp=2, tp=3)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_what_is_foretold(case: str) -> None:
    check(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_GPTS)
def test_ranks_of_transformers_hold_what_is_foretold(case: str) -> None:
    check(*WITH_GPTS[case])


def check(sized: Sized, devices: int, options: dict[str, Any]) -> None:
    """Hold the measured bytes of each rank beside those foretold."""
    torch.manual_seed(0)
    module = Loss(sized.make()) if "training" in options else sized.make()
    batch = sized.batch()
    program = partitioner.compile(module, (batch,), cluster=f"{devices}xcpu", **options)
    peaks = program.evaluation.executor_peak
    for rank, measured in enumerate(program.profile(batch, steps=1).measured.ranks):
        assert measured.peak_bytes is not None
        off = peaks[rank].bytes / measured.peak_bytes - 1
        assert -LESS <= off <= OFF, (rank, off, peaks[rank])
