"""Results that ranks gather for the caller are spoken of, and priced where it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from partitioner.cost_model.evaluate import evaluate


class Scores(nn.Module):
    """A loss and, if wanted, the scores that it is of."""

    def __init__(self, *, scores: bool, classes: int = 4096) -> None:
        super().__init__()
        self.scores, self.head = scores, nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.head(x)
        loss = scores.square().mean()
        return (loss, scores) if self.scores else loss


def compiled(*, scores: bool, devices: int = 2, classes: int = 4096) -> Any:
    return partitioner.compile(
        Scores(scores=scores, classes=classes).train(),
        (torch.ones(64, 16),),
        devices,
        training=True,
        cluster=f"{devices}xh100",
        parallel="dp",
    )


def notes(program: Any) -> list[str]:
    return [note for note in program.summary["notes"] if "results whole" in note]


@pytest.mark.parametrize("devices", [2, 3])
def test_scores_that_ranks_gather_are_spoken_of(devices: int) -> None:
    (note,) = notes(compiled(scores=True, devices=devices))
    assert "to gather 1 MiB of them (the largest is float32[64,4096])" in note


def test_a_loss_alone_is_no_matter() -> None:
    assert not notes(compiled(scores=False))


def test_scores_of_less_than_a_mebibyte_are_no_matter() -> None:
    assert not notes(compiled(scores=True, classes=2048))


def test_their_bytes_and_seconds_count_where_it_is_asked_for() -> None:
    program = compiled(scores=True)
    with_results = evaluate(program.graph, program.plan, program.cluster, program.model.delivered)
    without = program.evaluation
    whole = 64 * 4096 * 4
    assert with_results.step_s > without.step_s
    assert with_results.exact_peak[0].bytes >= without.exact_peak[0].bytes + whole / 2
    assert with_results.sent_bytes[0] == without.sent_bytes[0] + whole / 2
