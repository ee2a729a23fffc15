"""Phases of plans in stages: numbers, orders, and what cannot run."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.modules.staged_models import Plain, Tied, Towers, seeded
from helpers.plans.staged import equal_stages, staged_plan
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch
from partitioner.ir import phases as module
from partitioner.ir.graph import Graph, Node
from partitioner.ir.phases import Part, PhaseError, Phases, fixed_nodes, step_order
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.pipeline.text import to_csv
from partitioner.ir.plan import resolve


def graph_of(kind: type[Plain] | type[Tied] | type[Towers]) -> Graph:
    example = Example(kind.batch(0), {})
    return trace_micro_batch(seeded(kind), example, ModuleOptions(True), 4).graph


def test_numbers_and_parts_are_inverse() -> None:
    phases = Phases(3, splits=True)
    seen = []
    for part in Part:
        for stage in range(3) if part in (Part.FORWARD, Part.BACKWARD, Part.WEIGHT) else (0,):
            number = phases.number(part, stage)
            assert phases.of(number) == (part, stage)
            seen.append(number)
    assert sorted(seen) == list(range(12))
    assert [n for n in range(12) if phases.is_once(n)] == [0, 11]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1"])
def test_every_device_runs_all_its_phases(schedule: str) -> None:
    graph = graph_of(Plain)
    plan = staged_plan(graph, [(0,), (1,)], schedule, 4)
    assert plan.pipeline is not None
    order = step_order(graph, resolve(graph, plan), plan.pipeline)
    splits = schedule == "zb1"
    for device in range(2):
        runs = order.runs(device)
        parts = [Part.FORWARD, Part.BACKWARD, *([Part.WEIGHT] if splits else [])]
        wanted = {(order.phases.number(part, device), m) for part in parts for m in range(4)}
        wanted |= {(order.phases.number(Part.DELIVER), m) for m in range(4)}
        assert set(runs[1:-1]) == wanted
        assert len(runs) == len(set(runs))
        assert runs[0] == (0, 0)
        assert runs[-1] == (order.phases.number(Part.REDUCE), 0)


def test_weights_gradients_that_nothing_waits_for_are_apart() -> None:
    graph = graph_of(Plain)
    plan = staged_plan(graph, [(0,), (1,)], "zb1", 4)
    assert plan.pipeline is not None
    order = step_order(graph, resolve(graph, plan), plan.pipeline)
    parts = {order.phases.of(number)[0] for number in order.numbers.values()}
    assert Part.WEIGHT in parts
    made = {name: order.phases.of(number) for name, number in order.numbers.items()}
    awaited = [
        (node.name, reader.name)
        for node in graph.nodes
        if made[node.name][0] is Part.WEIGHT
        for value in node.writes
        for reader in graph.consumers[value]
        if made[reader.name][0] is Part.BACKWARD
    ]
    assert not awaited


def test_what_no_micro_batch_changes_is_fixed() -> None:
    graph = graph_of(Tied)
    fixed = fixed_nodes(graph)
    assert "/words/weight" in fixed
    assert "/norm/running_mean" not in fixed
    assert "/words/embedding" not in fixed


def test_towers_are_parallel_stages() -> None:
    graph = graph_of(Towers)
    left = {n: 0 if "left" in n else 1 if "right" in n else 2 for n in equal_stages(graph, 3)}
    plan = staged_plan(graph, [(0,), (1,), (2,)], "1f1b", 4, lambda _: left)
    assert plan.pipeline is not None
    order = step_order(graph, resolve(graph, plan), plan.pipeline)
    forward = [order.phases.number(Part.FORWARD, stage) for stage in range(3)]
    assert forward[0] not in order.before[forward[1]]
    assert {forward[0], forward[1]} <= order.before[forward[2]]
    assert not order.is_before(forward[0], forward[1], 1)
    assert order.is_before(forward[0], forward[2], 2)


def test_a_lane_has_parallel_stages_in_order() -> None:
    graph = graph_of(Towers)
    first, then = "/left/0/", ("/left/", "/right/", "")  # of stages 0, and 1 to 3
    stages = {
        name: 0 if name.startswith(first) else 1 + [*map(name.startswith, then)].index(True)
        for name in equal_stages(graph, 1)
    }
    plan = staged_plan(graph, [(0,), (1,), (1,), (0,)], "zbv", 4, lambda _: stages)
    assert plan.pipeline is not None
    order = step_order(graph, resolve(graph, plan), plan.pipeline)
    one, other = (order.phases.number(Part.FORWARD, stage) for stage in (1, 2))
    assert one not in order.before[other]
    assert order.is_before(one, other, 1)
    assert not order.is_before(other, one, 1)


def test_stages_that_run_backwards_are_refused() -> None:
    graph = graph_of(Plain)
    turned = {name: 1 - stage for name, stage in equal_stages(graph, 2).items()}
    plan = staged_plan(graph, [(0,), (1,)], "1f1b", 4, lambda _: turned)
    assert plan.pipeline is not None
    with pytest.raises(PhaseError, match=r"of stage 0 reads a value of .* of stage 1: values of"):
        step_order(graph, resolve(graph, plan), plan.pipeline)


def test_stages_that_share_some_devices_are_refused() -> None:
    graph = graph_of(Plain)
    plan = staged_plan(graph, [(0,), (0, 1)], "1f1b", 4)
    assert plan.pipeline is not None
    with pytest.raises(PhaseError, match=r"stages 0 and 1 are on devices .* share device 0"):
        step_order(graph, resolve(graph, plan), plan.pipeline)


def test_a_table_of_other_micro_batches_is_refused() -> None:
    graph = graph_of(Plain)
    one = staged_plan(graph, [(0,), (1,)], "1f1b", 2)
    assert one.pipeline is not None
    table = step_order(graph, resolve(graph, one), one.pipeline).table
    rows = tuple(to_csv(table).splitlines())
    plan = staged_plan(graph, [(0,), (1,)], rows, 4)
    assert plan.pipeline is not None
    with pytest.raises(PhaseError, match=r"table has 2 micro-batches .* the plan has 4"):
        step_order(graph, resolve(graph, plan), plan.pipeline)
    other = staged_plan(graph, [(0,), (1,)], "none", 4)
    assert other.pipeline is not None
    with pytest.raises(PipelineScheduleError, match="unknown schedule 'none'"):
        step_order(graph, resolve(graph, other), other.pipeline)


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "Neg"},
        {"inputs": ("z",)},
        {"attrs": {"axis": 2}},
        {"attrs": {"axis": 1.0}},
        {"attrs": {"other": 1}},
        {"attrs": {}},
        {"attrs": {"axis": 1, "more": 0}},
    ],
    ids=str,
)
def test_nodes_are_equal_in_all_that_they_compute(changes: dict[str, Any]) -> None:
    node = Node("a", "Relu", ("x",), ("y",), {"axis": 1})
    assert module._is_equal_node(node, replace(node))
    assert not module._is_equal_node(node, replace(node, **changes))
