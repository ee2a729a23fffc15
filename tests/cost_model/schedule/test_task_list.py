"""Schedules: what is paid once, where communications stand, phases, outputs, zeros."""

import json

import pytest

from helpers.plans.cost_cases import SLOW
from helpers.plans.whole_plans import build, hand_plan, tasks_of, weight
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.schedule.readings import timeline_json
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.task_list import schedule as scheduled
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import Part
from partitioner.ir.plan import resolve

PAIR = DeviceMesh.line(2, "tp")
LATE = DeviceMesh.of({"tp": 2}, (2, 3))


def chain(*ops: str, extra: tuple[Node, ...] = (), outputs: tuple[str, ...] = ()) -> Graph:
    """``v0 -> v1 -> ...``, nodes named a, b, c, ..."""
    nodes = [Node("abcdefgh"[i], op, (f"v{i}",), (f"v{i + 1}",)) for i, op in enumerate(ops)]
    nodes += extra
    values = {"v0", *(value for node in nodes for value in (*node.inputs, *node.outputs))}
    last = (f"v{len(ops)}",)
    return build(nodes, dict.fromkeys(values, (4,)), ["v0"], outputs or last)


def names(schedule: Schedule) -> list[str]:
    return [task.name for task in schedule.tasks]


def matmul() -> Graph:
    nodes = [
        Node("mm", "MatMul", ("x", "w"), ("h",)),
        Node("p", "Relu", ("h",), ("yp",)),
        Node("q", "Neg", ("h",), ("yq",)),
    ]
    shapes = dict.fromkeys(("x", "h", "yp", "yq"), (4, 4))
    return build(nodes, shapes, ["x"], ["yp", "yq"], {"w": weight(4, 4)})


def test_two_consumers_pay_once() -> None:
    graph = matmul()
    schedule = tasks_of(graph, hand_plan(graph, mm=(PAIR, {"k": "tp"}), _=PAIR), 2)
    assert names(schedule) == ["mm", "all_reduce h", "p", "q"]
    comm = schedule.tasks[1].comm
    assert comm is not None
    assert comm.why == "p"


def test_consumers_of_different_devices_pay_each() -> None:
    graph = matmul()
    schedule = tasks_of(graph, hand_plan(graph, mm=0, p=1, q=2), 3)
    assert names(schedule) == ["mm", "send h", "send h", "p", "q"]


def test_a_send_goes_as_early_as_its_receiver_is_free() -> None:
    """v1 goes to device 1 once that is done with its own chain, before 0 goes on."""
    extra = (
        Node("x", "Relu", ("v0",), ("u",)),
        Node("y", "Add", ("v1", "u"), ("z",)),
    )
    graph = chain("Relu", "Neg", "Neg", extra=extra, outputs=("v3", "z"))
    schedule = tasks_of(graph, hand_plan(graph, a=0, b=0, c=0, x=1, y=1), 2)
    assert names(schedule) == ["a", "b", "c", "x", "send v1", "y"]
    nodes = (extra[0], *graph.nodes[:3], extra[1])
    early = build(nodes, dict.fromkeys(graph.types, (4,)), ["v0"], ["v3", "z"])
    schedule = tasks_of(early, hand_plan(early, a=0, b=0, c=0, x=1, y=1), 2)
    assert names(schedule) == ["x", "a", "send v1", "b", "c", "y"]


def test_the_order_of_communications_ascends() -> None:
    graph = chain("Relu", "Neg", "Abs", "Sign")
    schedule = tasks_of(graph, hand_plan(graph, a=0, b=1, c=2, d=0), 3)
    numbers = [task.comm.seq for task in schedule.tasks if task.comm]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 3


def test_tasks_count_hops_between_groups() -> None:
    graph = chain("Relu", "Neg", "Abs")
    schedule = tasks_of(graph, hand_plan(graph, a=0, b=1, c=0), 2)
    assert [(t.hops, t.target_hops) for t in schedule.tasks] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 2),
    ]


def test_a_whole_batch_is_one_phase_of_one_micro_batch() -> None:
    graph = chain("Relu", "Neg", "Abs")
    schedule = tasks_of(graph, hand_plan(graph, a=0, b=1, c=0), 2)
    order = schedule.order
    assert order.is_whole
    assert order.lanes == ((0, 1),)
    (phase,) = {phase for task in schedule.tasks for phase in (task.phase, task.target_phase)}
    assert order.phases.of(phase) == (Part.FORWARD, 0)
    assert all(list(schedule.runs(device)).count(phase) == 1 for device in (0, 1))
    assert {schedule.times(task) for task in schedule.tasks} == {1}


def test_between_groups_that_share_a_device_is_no_hop() -> None:
    graph = chain("Relu", "Neg", "Abs")
    schedule = tasks_of(graph, hand_plan(graph, a=PAIR, b=0, c=PAIR), 2)
    assert {task.hops for task in schedule.tasks} == {0}
    apart = tasks_of(graph, hand_plan(graph, a=PAIR, b=PAIR, c=LATE), 4)
    assert [task.hops for task in apart.tasks if task.placed] == [0, 0, 1]


def test_pending_outputs_are_reduced() -> None:
    node = Node("mm", "MatMul", ("x", "w"), ("y",))
    graph = build([node], {"x": (4, 4), "y": (4, 4)}, ["x"], ["y"], {"w": weight(4, 4)})
    schedule = tasks_of(graph, hand_plan(graph, mm=(PAIR, {"k": "tp"})), 2)
    assert names(schedule) == ["mm", "all_reduce y"]
    value, at = schedule.output_keys["y"]
    assert not at.sharding.partial
    assert schedule.outputs == {(0, (value, at)), (1, (value, at))}


def test_outputs_stay_where_they_are() -> None:
    graph = matmul()
    schedule = tasks_of(graph, hand_plan(graph, mm=0, p=0, q=1), 2)
    assert {k: at.mesh.devices for k, (_, at) in schedule.output_keys.items()} == {
        "yp": (0,),
        "yq": (1,),
    }


def test_bytes_of_feeds_and_residents() -> None:
    graph = matmul()
    schedule = tasks_of(graph, hand_plan(graph, mm=(PAIR, {"k": "tp:1,3"}), _=PAIR), 2)
    assert {d: size for (d, _), size in schedule.feeds.items()} == {0: 16, 1: 48}
    assert {d: size for (d, _), size in schedule.residents.items()} == {0: 16, 1: 48}


def test_an_input_is_fed_in_every_placement_that_is_read() -> None:
    nodes = [Node("mm", "MatMul", ("x", "x"), ("y",))]
    graph = build(nodes, {"x": (4, 4), "y": (4, 4)}, ["x"], ["y"])
    schedule = tasks_of(graph, hand_plan(graph, mm=(PAIR, {"m": "tp"})), 2)
    assert sorted(schedule.feeds.values()) == [32, 32, 64, 64]
    assert names(schedule) == ["mm"]


def test_zeros_of_a_bias_are_resident() -> None:
    node = Node("fc", "Gemm", ("x", "w", "c"), ("y",))
    for fed in (False, True):
        shapes = {"x": (4, 4), "y": (4, 4), **({"c": (4,)} if fed else {})}
        weights = {"w": weight(4, 4), **({} if fed else {"c": weight(4)})}
        graph = build([node], shapes, ["x", "c"] if fed else ["x"], ["y"], weights)
        schedule = tasks_of(graph, hand_plan(graph, fc=(PAIR, {"k": "tp"})), 2)
        assert [(d, key[0], schedule.residents[d, key]) for d, key in schedule.zeros] == [
            (1, "c", 16)
        ]


def training(overlap: float) -> Schedule:
    """A stored weight that is gathered for its use, and its gradient, on two devices."""
    nodes = [
        Node("w", "partitioner::state", (), ("w",)),
        Node("first", "aten::neg", ("x",), ("e",)),
        Node("use", "aten::mm", ("e", "w"), ("y",)),
        Node("gradient", "aten::mm", ("e", "y"), ("g",)),
        Node("turned", "aten::t", ("g",), ("t",)),
        Node("write", "partitioner::update", ("t", "w"), ("w.gradient",)),
        Node("last", "aten::mm", ("y", "y"), ("z",)),
    ]
    shapes = dict.fromkeys(("x", "w", "e", "y", "g", "t", "w.gradient", "z"), (64, 64))
    graph = build(nodes, shapes, ["x"], ["w.gradient", "z"])
    cut = (PAIR, {"d0": "tp"})
    pending = {"gradient": (PAIR, {"k": "tp"}), "turned": (PAIR, {"+": "tp"})}
    plan = hand_plan(graph, w=cut, **pending, write=cut, _=PAIR)
    cluster = Cluster("pair", (SLOW,) * 2, (LinkLevel("link", 2, 1e6, 0.0, overlap=overlap),))
    return scheduled(graph, resolve(graph, plan), cluster)


def test_what_nobody_waits_for_at_once_passes_beside_compute() -> None:
    """A weight is gathered ahead of its use; of its gradient's sum, a part is hidden as well."""
    plain, hidden = training(0.0), training(0.75)
    assert names(plain) == names(hidden)
    assert names(plain)[:4] == ["w", "all_gather w", "first", "use"]
    assert names(plain)[-2:] == ["write", "last"]
    comms = [(a, b) for a, b in zip(plain.tasks, hidden.tasks, strict=True) if a.kind == "comm"]
    assert {task.name for task, _ in comms} >= {"all_gather w", "reduce_scatter t"}
    for whole, part in comms:
        assert not whole.hidden
        beside = whole.name in ("all_gather w", "reduce_scatter t")
        for device, seconds in whole.devices.items():
            shown = 0.25 * seconds if beside else seconds
            assert part.devices[device] == pytest.approx(shown)
            assert part.devices[device] + part.hidden.get(device, 0) == pytest.approx(seconds)
    for schedule, lanes in ((plain, {0, 1}), (hidden, {0, 1, 2})):
        events = json.loads(timeline_json(simulate(schedule)))["traceEvents"]
        assert {event["tid"] for event in events if event["ph"] == "X"} == lanes
