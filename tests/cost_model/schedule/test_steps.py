"""Steps of plans in stages: simulated seconds, and memory by the micro-batches in flight."""

import itertools
from dataclasses import replace

import pytest

from helpers.modules.staged_models import Plain, UNet, seeded
from helpers.plans.staged import equal_stages, staged, staged_plan
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.lifetimes import safe_lifetimes
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.prices.collectives import comm_cost
from partitioner.cost_model.schedule.simulate import simulate, step_seconds
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Graph
from partitioner.ir.phases import Part, step_order
from partitioner.ir.plan import resolve
from partitioner.ir.program import Comm, CommKind
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request

#: A message without elements.
EMPTY = Transfer(0, 1, (((0, 0),),), (((0, 0),),))
NOTHING = Comm(0, CommKind.SEND, (0, 1), "x", "x", "float32", (EMPTY,))
LANES = {
    "gpipe": [(0,), (1,)],
    "1f1b": [(0,), (1,)],
    "zb1": [(0,), (1,)],
    "interleaved": [(0,), (1,), (0,), (1,)],
    "zbv": [(0,), (1,), (1,), (0,)],
    "dualpipev": [(0,), (1,), (1,), (0,)],
}


def graph_of(kind: type[Plain] | type[UNet], micro_batches: int, size: int = 8) -> Graph:
    example = Example(kind.batch(0, size), {})
    return trace_micro_batch(seeded(kind), example, ModuleOptions(True), micro_batches).graph


def evaluated(
    graph: Graph, name: str, micro_batches: int, devices: list[tuple[int, ...]] | None = None
) -> Evaluation:
    devices = devices or LANES[name]
    plan = staged_plan(graph, devices, name, micro_batches)
    return evaluate(graph, plan, resolve_cluster(None, 1 + max(map(max, devices))))


@pytest.mark.parametrize("name", LANES)
def test_every_phase_runs_once_and_no_device_does_two_things(name: str) -> None:
    graph = graph_of(UNet, 4)
    plan = staged_plan(graph, LANES[name], name, 4)
    assert plan.pipeline is not None
    placed, cluster = resolve(graph, plan), resolve_cluster(None, 2)
    tasks = schedule(graph, placed, cluster, pipeline=plan.pipeline)
    timeline = simulate(tasks)
    order = step_order(graph, placed, plan.pipeline)
    runs = [(e.device, e.task, e.request) for e in timeline.events if e.kind == "compute"]
    assert len(runs) == len(set(runs))
    counts = {
        task.name: 1 if order.phases.is_once(task.phase) else 4
        for task in tasks.tasks
        if task.placed is not None
    }
    for name_of, count in counts.items():
        events = [e for e in timeline.events if e.kind == "compute" and e.name == name_of]
        assert len(events) == count
    for device in range(2):
        of_device = [e for e in timeline.events if e.device == device]
        for one, other in itertools.pairwise(of_device):
            assert one.end_s <= other.start_s + 1e-15


def test_values_are_sent_before_they_are_read() -> None:
    graph = graph_of(UNet, 4)
    devices = [(0,), (1,), (2,), (3,)]
    plan = staged_plan(graph, devices, "1f1b", 4)
    tasks = schedule(graph, resolve(graph, plan), resolve_cluster(None, 4), pipeline=plan.pipeline)
    timeline = simulate(tasks)
    made: dict[tuple[str, int], float] = {}
    for event in timeline.events:
        task = tasks.tasks[event.task]
        if task.placed is not None:
            for value in task.placed.node.writes:
                made[value, event.request] = event.end_s
    compared = 0
    for event in timeline.events:
        task = tasks.tasks[event.task]
        for value in task.placed.node.reads if task.placed is not None else ():
            if (value, event.request) in made:
                assert made[value, event.request] <= event.start_s + 1e-15
                compared += 1
    assert compared > 100


def test_more_micro_batches_take_longer_on_equal_micro_batches_but_less_than_in_turn() -> None:
    graph = graph_of(Plain, 4)
    seconds = [evaluated(graph, "1f1b", count).latency_s for count in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 8 * seconds[0]


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    graph = graph_of(Plain, 8, size=8 * 64)
    held = {
        (name, count): evaluated(graph, name, count).peak[0].activation_bytes
        for name in ("gpipe", "1f1b")
        for count in (2, 4, 8)
    }
    assert held["gpipe", 2] < held["gpipe", 4] < held["gpipe", 8]
    assert held["1f1b", 2] == held["1f1b", 4] == held["1f1b", 8]
    last = evaluated(graph, "1f1b", 8).peak[1].activation_bytes
    assert last < held["1f1b", 8] + evaluated(graph, "gpipe", 8).peak[1].activation_bytes


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_gradients_are_held_once_as_a_sum_and_their_sums_over_devices_when_they_run(
    parallel: str,
) -> None:
    """A communication of the end of the step is not held while the passes run."""
    module = staged(seeded(Plain), Plain.batch(0), [(0, 1), (2, 3)], parallel=parallel)
    tasks = module.schedule
    phases = [task.phase for task in tasks.tasks]
    assert phases == sorted(phases)
    lives = StepLives.of(tasks, safe_lifetimes(tasks))
    end = tasks.order.phases.number(Part.REDUCE)
    for first, last in zip(lives.first.tolist(), lives.last.tolist(), strict=True):
        once = {tasks.order.phases.is_once(p) for p in phases[first : last + 1]}
        assert last < first or len(once) == 1, (
            "a tensor of the end of the step is held while passes run"
        )
    gradients = [n for n in module.graph.nodes if n.attrs.get("role") == "gradient"]
    nbytes = sum(module.graph.types[node.outputs[0]].nbytes for node in gradients)
    assert gradients
    assert lives.nbytes[lives.always].sum() >= nbytes
    assert {tasks.order.numbers[node.name] for node in gradients} <= {*phases, end}


def test_weights_are_where_their_stage_is() -> None:
    graph = graph_of(Plain, 4)
    plan = staged_plan(graph, [(0,), (1,)], "1f1b", 4)
    resident = evaluate(graph, plan, resolve_cluster(None, 2)).peak
    whole = evaluate(graph, staged_plan(graph, [(0,)], "gpipe", 4), resolve_cluster(None, 1)).peak
    total = sum(peak.resident_bytes for peak in resident.values())
    assert total == whole[0].resident_bytes
    assert all(0 < peak.resident_bytes < total for peak in resident.values())
    assert set(equal_stages(graph, 2).values()) == {0, 1}


def test_a_step_runs_in_sequence() -> None:
    graph = graph_of(Plain, 4)
    evaluation = evaluated(graph, "1f1b", 4)
    assert evaluation.step_s == evaluation.latency_s
    assert evaluation.step_s >= max(evaluation.load_s.values()) * (1 - 1e-9)


@pytest.mark.parametrize("name", LANES)
def test_seconds_of_a_step_are_those_of_its_timeline(name: str) -> None:
    graph = graph_of(UNet, 4)
    plan = staged_plan(graph, LANES[name], name, 4)
    tasks = schedule(graph, resolve(graph, plan), resolve_cluster(None, 2), pipeline=plan.pipeline)
    assert step_seconds(tasks) == pytest.approx(simulate(tasks).makespan_s, rel=1e-12)


def test_seconds_of_a_step_where_devices_of_a_lane_differ_and_wait_in_collectives() -> None:
    example = Example(Plain.batch(0, 12), {})
    module = trace_micro_batch(seeded(Plain), example, ModuleOptions(True), 3)
    graph, pair = module.graph, resolve_cluster(None, 2)
    request = Request(parallel="tp", time_limit_s=60)
    spaces = request.over(2).on(graph)
    outcome = find_plan(graph, pair, spaces, Budget.of(spaces))
    plan = staged_plan(graph, [(0, 1), (2, 3)], "zb1", 3, cuts=outcome.plan)
    cluster = resolve_cluster(None, 4)
    slow = replace(cluster.devices[0], memory_bytes_per_s=1e9)
    uneven = replace(cluster, devices=(cluster.devices[0], slow, slow, cluster.devices[0]))
    placed = resolve(outcome.graph, plan)
    tasks = schedule(outcome.graph, placed, uneven, pipeline=plan.pipeline)
    inside = [t for t in tasks.tasks if t.comm is not None and t.phase == t.target_phase]
    assert any(len(task.devices) == 2 for task in inside), "a collective of a lane"
    assert step_seconds(tasks) == pytest.approx(simulate(tasks).makespan_s, rel=1e-12)


def test_what_passes_between_two_phases_pays_one_start_up() -> None:
    graph = graph_of(UNet, 4)
    plan = staged_plan(graph, LANES["1f1b"], "1f1b", 4)
    cluster = resolve_cluster(None, 2)
    tasks = schedule(graph, resolve(graph, plan), cluster, pipeline=plan.pipeline).tasks
    messages: dict[tuple[int, int], list[Task]] = {}
    for task in tasks:
        if task.comm is not None and task.phase != task.target_phase:
            messages.setdefault((task.phase, task.target_phase), []).append(task)
    assert max(map(len, messages.values())) > 1, "a skip connection crosses the cut"
    for parts in messages.values():
        alone_s = [comm_cost(task.comm, 0, cluster).seconds[0] for task in parts if task.comm]
        start_s = comm_cost(NOTHING, 0, cluster).seconds[0]
        one_s = sum(task.devices[0] + task.hidden.get(0, 0.0) for task in parts)
        expected_s = sum(alone_s) - (len(parts) - 1) * start_s
        assert one_s == pytest.approx(expected_s, rel=1e-3)
