"""The least number of devices that a refused request would fit on."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.drawn.drawn_plans import mlp
from helpers.modules.small_gpt import small_gpt
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.frontends.onnx.load import load_onnx
from partitioner.search.ways.way import MOST_TIMES, _least_count
from partitioner.solver.outcome import Infeasible


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("enough", [6, 7, 11, 16])
@pytest.mark.parametrize("least", [0, 4])
def test_the_least_count_is_found_and_none_is_tried_that_cannot_fit(
    devices: int, enough: int, least: int
) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count >= enough

    assert _least_count(devices, fits, 10.0, least) == enough
    assert min(tried) > devices
    assert all(count >= least for count in tried)


def test_numbers_of_devices_without_a_mesh_of_two_kinds_do_not_fit() -> None:
    """Of the numbers up to twice as many as asked for, some are prime.

    Weights of a module stay, so that blocks need no less.
    """
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with pytest.raises(Infeasible, match=r"it fits .*on 6 devices"):
        partitioner.compile(
            module, torch.ones(8, 64), cluster="4xh100", parallel="dp+tp", memory=34_000
        )


def test_nothing_is_tried_where_the_weights_alone_want_too_many_devices() -> None:
    def fits(count: int) -> bool:
        raise AssertionError(count)

    assert _least_count(2, fits, 10.0, 2 * MOST_TIMES + 1) is None


@pytest.mark.parametrize(
    ("parallel", "devices"), [("dp", 1), ("zero3", 2), ("zero3", 3), ("zero1", 3), ("tp", 2)]
)
def test_no_devices_keep_less_together_in_training(parallel: str, devices: int) -> None:
    model, batch = small_gpt()
    options = {"parallel": parallel} if devices > 1 else {}
    program = partitioner.compile(
        *(model, batch, devices), training=True, time_limit_s=10, **options
    )
    peaks = program.evaluation.peak.values()
    together = sum(peak.resident_bytes for peak in peaks)
    assert kept_bytes(program.graph) <= together
    if devices == 1:
        assert kept_bytes(program.graph) == together


def test_what_devices_keep_together_are_the_weights() -> None:
    graph = load_onnx(mlp(layers=3, hidden=8, batch=4)).graph
    weights = sum(constant.load().nbytes for constant in graph.constants.values())
    assert kept_bytes(graph) == weights > 3 * 8 * 8 * 4


class Stack(nn.Module):
    """Matrices that take more than all values."""

    nbytes = 8 * 256 * 256 * 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        result: torch.Tensor = self.layers(x).square().sum()
        return result


def trained(cluster: str, memory: int, **options: Any) -> Any:
    """The stack's plan with AdamW: 4.5 times its bytes with head-room, and 5 in a step on a GPU."""
    batch = (torch.ones(4, 256),)
    options |= {"training": True, "time_limit_s": 10}
    return partitioner.compile(Stack(), batch, cluster=cluster, memory=memory, **options)


@pytest.mark.slow
@pytest.mark.parametrize("times", [4.0, 4.7])
def test_memory_that_would_fit_has_room_for_a_step_of_the_optimizer(times: float) -> None:
    with pytest.raises(Infeasible) as refused:
        trained("1xh100", int(times * Stack.nbytes))
    text = str(refused.value)
    assert re.search(r"at '/layers.*/gradient' in PyTorch's kernels", text), text
    (limit,) = re.findall(r"it fits with --memory (\d+)", text)
    assert int(limit) >= 5 * Stack.nbytes
    assert trained("1xh100", int(limit)).evaluation.fits_exactly


@pytest.mark.slow
def test_where_a_step_of_the_optimizer_does_not_fit_others_share_it() -> None:
    program = trained("2xh100", int(4.7 * Stack.nbytes))
    assert program.evaluation.fits_exactly
    assert max(program.evaluation.needed_bytes.values()) < 4.7 * Stack.nbytes


@pytest.mark.slow
def test_a_refusal_in_stages_names_the_step_of_the_optimizer() -> None:
    in_stages = {"parallel": "pp", "micro_batches": 2, "optimizer": "adagrad"}
    with pytest.raises(Infeasible) as refused:
        trained("2xh100", int(2.41 * Stack.nbytes), **in_stages)
    error, text = refused.value, str(refused.value)
    found = re.search(
        r"(\d+) bytes are short on device (\d) at '/layers.*/gradient' of stage (\d) in PyTorch's "
        r"kernels \((\d+) bytes held, .*; without them it holds .* optimizer's state",
        text,
    )
    assert found, text
    short, device, stage, held = map(int, found.groups())
    assert (device, short) == (error.device, error.bytes_short)
    assert device == stage
    assert abs(held - 2.5 * Stack.nbytes) <= 2**15
