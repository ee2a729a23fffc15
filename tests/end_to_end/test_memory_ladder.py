"""Models at limits of memory between what fits nothing and what fits whole: plans where any fit."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import partitioner
from helpers.modules.sized_models import Loss, perceptron
from helpers.plans.memory_rungs import STEPS, Rung, climbed
from partitioner.ir.errors import PartitionerError


def test_a_limit_of_all_devices_below_one_s_need_is_searched_with_offers_alone() -> None:
    """No plan that keeps all values fits then, and the search does not look for one."""
    told: list[str] = []
    options = {"training": True, "time_limit_s": 4.0, "progress": told.append}
    with torch.device("meta"):
        module = Loss(perceptron(4, 32))
    whole = partitioner.compile(module, torch.zeros(1024, 32), devices=1, training=True)
    memory = max(whole.evaluation.exact_bytes.values()) // 2 - 4096
    with suppress(PartitionerError):
        partitioner.compile(module, torch.zeros(1024, 32), devices=2, memory=memory, **options)
    searched = [line for line in told if line.startswith(("searching ", "allowing"))]
    assert searched[0] == "allowing values to be computed again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "rung",
    [
        Rung("mlp", 4, True, 2, 3),
        Rung("convnet", 3, True, 2, 2),
        Rung("convnet", 4, True, 1, 8),
        Rung("mlp", 6, False, 1, 1),
        Rung("gpt", 2, False, 2, 3),
        Rung("gpt", 2, True, 4, 4),
        Rung("mlp", 2, True, 1, STEPS),
    ],
    ids=str,
)
def test_a_rung_has_a_plan_wherever_a_forced_way_has_one(rung: Rung) -> None:
    found = climbed(rung, 10.0)
    assert found.broken in ("", "late"), (found.text, found.forced)
    assert found.outcome == "plan" or rung.step < STEPS
