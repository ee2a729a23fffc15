"""What a device holds from moment to moment: its largest is the referee's peak."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from helpers.plans import staged_plans
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.memory.lifetimes import (
    Lifetime,
    exact_lifetimes,
    safe_lifetimes,
    with_headroom,
)
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.ir.phases import Part
from partitioner.ir.plan import resolve


@pytest.mark.parametrize("name", staged_plans.CASES)
def test_the_largest_moment_is_the_peak(name: str) -> None:
    result = staged_plans.staged(name)
    safe, exact = result.evaluation.peak, result.evaluation.exact_peak
    for device in range(len(result.cluster)):
        for lifetimes, peak in ((safe_lifetimes, safe), (exact_lifetimes, exact)):
            lives = [life for life in lifetimes(result.schedule) if life.device == device]
            moments = StepLives.of(result.schedule, lives).moments(device)
            most = int((moments.activations + moments.buffers).max())
            assert sum(life.nbytes * n for life, n in moments.at(moments.peak)) == most
            reserved = with_headroom(most) if lifetimes is safe_lifetimes else most
            assert reserved == peak[device].activation_bytes


@pytest.mark.parametrize("name", staged_plans.CASES)
def test_a_device_frees_all_that_it_holds_of_each_micro_batch(name: str) -> None:
    result = staged_plans.staged(name)
    order = result.schedule.order
    for device in range(len(result.cluster)):
        for lifetimes in (safe_lifetimes, exact_lifetimes):
            lives = [life for life in lifetimes(result.schedule) if life.device == device]
            moments = StepLives.of(result.schedule, lives).moments(device)
            for counts in moments.in_flight:
                assert all(0 <= n <= order.table.micro_batches for n in counts.values())
            for (_, read), n in moments.in_flight[-1].items():
                assert n == 0 or order.phases.of(read)[0] is Part.REDUCE


def test_gpipe_holds_every_micro_batch_and_1f1b_those_that_its_stage_needs() -> None:
    most = {}
    for name in ("gpipe", "1f1b"):
        result = staged_plans.staged(name)
        lives = [life for life in safe_lifetimes(result.schedule) if life.device == 0]
        moments = StepLives.of(result.schedule, lives).moments(0)
        order = result.schedule.order
        pair = order.phases.number(Part.FORWARD, 0), order.phases.number(Part.BACKWARD, 0)
        most[name] = max(counts[pair] for counts in moments.in_flight)
    assert most == {"gpipe": 4, "1f1b": 2}


@pytest.mark.parametrize("lifetimes", [safe_lifetimes, exact_lifetimes])
def test_inference_holds_the_inputs_and_outputs_of_all_micro_batches_and_nothing_else(
    lifetimes: Callable[[Schedule], Iterator[Lifetime]],
) -> None:
    """Device 0 is fed all tokens at once, and keeps of other tensors one micro-batch's."""
    graph = staged_plans.traced(4, training=False).graph
    plan = staged_plans.staged_plan(graph, (((0,), (1,)), "forward", 4))
    tasks = schedule(graph, resolve(graph, plan), resolve_cluster(None, 2), pipeline=plan.pipeline)
    lives = StepLives.of(tasks, lifetimes(tasks))
    assert {value for _, (value, _) in tasks.feeds} == set(graph.inputs)
    held = {lives.tensors[i].local: lives.tensors[i].nbytes for i in np.flatnonzero(lives.always)}
    assert {local: held[local] for local in tasks.feeds} == {
        local: 4 * nbytes for local, nbytes in tasks.feeds.items()
    }
    made = {
        value
        for name, phase in tasks.order.numbers.items()
        for value in graph.by_name[name].writes
        if tasks.order.phases.is_once(phase)
    }
    assert {value for _, (value, _) in held.keys() - tasks.feeds.keys()} <= made
    end = tasks.order.phases.number(Part.REDUCE)
    assert {
        lives.tensors[i].value for i in np.flatnonzero(lives.kept & (lives.read == end))
    } == set(graph.outputs)
