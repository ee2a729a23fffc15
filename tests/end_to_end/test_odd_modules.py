"""Modules of rare kinds compute and differentiate as by themselves, or are refused by name."""

import re

import pytest
import torch

from helpers.modules.odd_modules import MODULES, REFUSED, outcome

#: The cases of the default suite.
FAST = {"nested inputs", "oblique weights", "unregistered parameters", "attribute set in forward"}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MODULES]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_odd_modules(name: str, devices: int) -> None:
    said = outcome(name, devices)
    if name in REFUSED:
        assert re.match(f"refused: .*{REFUSED[name]}", said)
        assert "\n" not in said
    else:
        assert said == "equal"


#: Modules that were refused by some kind of parallelism though nothing stands in its way.
RARE = (
    *("tied", "frozen parameters written", "keywords as names", "one output", "no elements"),
    *("mask indexed by counts", "SyncBatchNorm"),
)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param(name, parallel, marks=() if parallel == fast else pytest.mark.slow)
        for name, fast in zip(RARE, ("zero1", "dp", "tp", "tp", "zero3", "dp", "dp"), strict=True)
        for parallel in ("dp", "zero1", "zero2", "zero3", "tp")
    ],
)
def test_rare_modules_in_kinds_of_parallelism(name: str, parallel: str) -> None:
    assert outcome(name, 2, parallel) == "equal"


def test_a_sync_batch_norm_is_one_of_the_whole_batch_in_any_world() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert outcome("SyncBatchNorm", 2, "dp") == "equal"
    finally:
        torch.distributed.destroy_process_group()
