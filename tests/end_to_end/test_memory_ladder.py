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
        Rung("mlp", 7, True, 4, 4),
        Rung("mlp", 4, True, 4, 8),
        Rung("mlp", 6, False, 4, 17),
        Rung("convnet", 3, True, 2, 6),
        Rung("convnet", 2, True, 1, 6),
        Rung("convnet", 6, True, 2, STEPS),
        Rung("convnet", 2, False, 2, 8),
        Rung("convnet", 4, False, 1, 7),
        Rung("convnet", 5, False, 4, 10),
    ],
    ids=str,
)
def test_a_rung_that_has_a_plan_keeps_it(rung: Rung) -> None:
    found = climbed(rung, 20.0)
    assert (found.outcome, found.broken.replace("late", "")) == ("plan", ""), found.text


@pytest.mark.slow
def test_a_rung_that_is_refused_has_no_forced_way_either() -> None:
    found = climbed(Rung("mlp", 5, False, 1, 1), 20.0)
    assert (found.outcome, found.forced) == ("refused", None)
    assert found.text.startswith("no plan was found that fits: ")
    assert "it fits with --memory " in found.text
