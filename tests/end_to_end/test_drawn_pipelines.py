"""Random modules in random stages: gradients and buffers are those of plain accumulation."""

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from helpers.drawn.drawn_modules import Drawn, batch, drawn_stages
from helpers.plans.cost_cases import far_apart
from helpers.plans.staged import on_trace, staged_plan, traced
from partitioner.backends.torch.graphs.micro_batches import micro_batch_sizes
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline.actions import PipelineScheduleError

#: Schedules, and the device of each stage.
WAYS = (
    ("gpipe", (0,)),
    ("gpipe", (0, 1)),
    ("gpipe", (0, 1, 0)),
    ("1f1b", (0, 1)),
    ("1f1b", (0, 1, 2)),
    ("1f1b", (0, 1, 0)),
    ("1f1b", (0, 1, 1, 0)),
    ("interleaved", (0, 1, 0, 1)),
    ("interleaved", (0, 1, 2, 0, 1, 2)),
    ("zb1", (0, 1)),
    ("zb1", (0, 1, 2)),
    ("zbv", (0, 1, 1, 0)),
    ("dualpipev", (0, 1, 1, 0)),
)
PLANS = 4


def accumulated(module: torch.nn.Module, whole: tuple[torch.Tensor, ...], count: int) -> object:
    """The loss of micro-batches, weighed by size, and all scores, if the module returns any."""
    loss, scores = torch.zeros((), dtype=torch.float64), []
    for part in zip(*(tensor.chunk(count) for tensor in whole), strict=True):
        result = module(*part)
        share = (result[0] if isinstance(result, tuple) else result) * len(part[0]) / len(whole[0])
        share.backward()
        loss += share.detach()
        scores += [result[1]] if isinstance(result, tuple) else []
    return (loss, torch.cat(scores)) if scores else loss


def check(seed: int, *, is_even: bool = True, in_pairs: bool = False) -> int:
    """Some plans of one module; returns how many could run in micro-batches.

    Args:
        is_even: Whether micro-batches have equal sizes.
        in_pairs: Whether a lane is a node of two devices, which hold the same and share sends.
    """
    draw = random.Random(seed)
    module = Drawn(draw).double()
    count = draw.randint(1, 5)
    size = count * draw.randint(1, 3) if is_even else draw.randint(count, 4 * count)
    whole = batch(draw, size)
    count = len(micro_batch_sizes(whole, count))
    trace = traced(module, whole, count)
    start = copy.deepcopy(module)
    ran = 0
    for schedule, lanes in draw.sample(WAYS, PLANS):
        stages = partial(drawn_stages, draw, stages=len(lanes))
        devices = [(2 * lane, 2 * lane + 1) if in_pairs else (lane,) for lane in lanes]
        plan = staged_plan(trace.graph, devices, schedule, count, stages)
        cluster = far_apart(nodes=1 + max(lanes), devices=2) if in_pairs and any(lanes) else None
        try:
            program = on_trace(trace, plan, cluster=cluster)
        except (PhaseError, PipelineScheduleError):  # buffers join stages; counts do not fit
            continue
        plain = copy.deepcopy(start)
        module.load_state_dict(start.state_dict())
        results, gradients = program.gradients(*whole)
        what = f"seed {seed}, {schedule} on {lanes}: "
        torch.testing.assert_close(results, accumulated(plain, whole, count), msg=_after(what))
        for name, parameter in plain.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            own = gradients.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(own, expected, msg=_after(what + name))
        for (name, own), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own, expected, msg=_after(what + name))
        ran += 1
    return ran


def _after(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


# 105, 133: stages read the contents of a buffer that another one writes over; 141: messages of
# elements of several types
@pytest.mark.parametrize(
    "seed",
    [*(pytest.param(seed, marks=pytest.mark.one_in(4)) for seed in range(8)), 105, 133, 141],
)
def test_gradients_are_those_of_accumulation(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", [402, pytest.param(417, marks=pytest.mark.slow)])
def test_devices_that_share_sends_have_the_gradients_of_accumulation(seed: int) -> None:
    assert check(seed, in_pairs=True) > 2


# 3005, 3012: zeros as long as the micro-batch, which do not depend on its contents
@pytest.mark.parametrize("seed", [3005, pytest.param(3012, marks=pytest.mark.slow), 3083])
def test_gradients_with_a_smaller_last_micro_batch(seed: int) -> None:
    assert check(seed, is_even=False)


@pytest.mark.parametrize(
    ("first", "least"),
    [
        pytest.param(100, 62, marks=pytest.mark.slow),
        pytest.param(125, 62, marks=pytest.mark.sweep),
    ],
)
def test_many_plans(first: int, least: int) -> None:
    assert sum(check(seed) for seed in range(first, first + 25)) > least
