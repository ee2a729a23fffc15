import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans.cost_cases import compute, flat, graph, key, placed, send, tasks
from partitioner.cost_model.memory.lifetimes import (
    exact_lifetimes,
    loaded_lifetimes,
    safe_lifetimes,
)
from partitioner.cost_model.memory.lives import MemoryPeak, Peaks, StepLives, peak_bytes
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.task_list import schedule as scheduled
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.table import OpRow
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import TensorType


def exact_curve(schedule: Schedule, device: int = 0) -> list[int]:
    return list(StepLives.of(schedule, exact_lifetimes(schedule)).curves()[device])


def safe_curve(schedule: Schedule, device: int = 0) -> list[int]:
    return list(StepLives.of(schedule, safe_lifetimes(schedule)).curves()[device])


def test_a_chain_holds_two_values_at_a_time() -> None:
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 20}),
        compute("b", 0, ("p", "w"), {"q": 30}),
        compute("c", 0, ("q",), {"y": 5}),
        feeds={"x": 10},
        residents={"w": 1000},
        outputs=("y",),
    )
    assert exact_curve(schedule) == safe_curve(schedule) == [10 + 20, 20 + 30, 30 + 5]
    assert Peaks.of(schedule).exact == {0: MemoryPeak(1050, 1000, 50, "b")}
    assert peak_bytes(schedule) == {0: MemoryPeak(1075, 1000, 75, "b")}


def test_a_skip_connection_holds_its_value() -> None:
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 20}),
        compute("b", 0, ("p",), {"q": 30}),
        compute("c", 0, ("q",), {"r": 40}),
        compute("d", 0, ("p", "r"), {"y": 5}),
        feeds={"x": 10},
        outputs=("y",),
    )
    assert exact_curve(schedule) == [30, 50, 20 + 30 + 40, 20 + 40 + 5]


def test_inputs_arrive_with_their_first_reader_and_outputs_stay() -> None:
    schedule = tasks(
        compute("a", 0, ("x",), {"y": 7}),
        compute("b", 0, ("x", "late"), {"z": 3}),
        compute("c", 0, ("z",), {"unused": 100}),
        feeds={"x": 10, "late": 50},
        outputs=("y",),
    )
    assert exact_curve(schedule) == safe_curve(schedule) == [17, 10 + 50 + 7 + 3, 7 + 3 + 100]


def test_a_copy_is_safe_for_the_whole_life_of_its_value() -> None:
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 20}),
        send("p", 0, 1, 20),
        compute("b", 0, ("p",), {"q": 4}),
        compute("c", 1, ("p",), {"y": 8}),
        compute("d", 0, ("q",), {"z": 1}),
        feeds={"x": 10},
        outputs=("z",),
    )
    # Exact: device 0 drops p after b, device 1 has it from the send on.
    assert exact_curve(schedule) == [30, 20, 24, 4, 5]
    assert exact_curve(schedule, 1) == [0, 20, 20, 28, 0]
    # Safe: both parts from a to c, the last use anywhere.
    assert safe_curve(schedule) == [30, 20, 24, 24, 5]
    assert safe_curve(schedule, 1) == [20, 20, 20, 28, 0]
    assert peak_bytes(schedule)[1] == MemoryPeak(42, 0, 42, "c")


def collective(kind: CommKind, value: str, result: str) -> Task:
    """Of both devices, with a result of 20 bytes on each."""
    comm = Comm(0, kind, (0, 1), value, result, "int8")
    reads = tuple((device, key(value, device)) for device in range(2))
    writes = tuple((device, key(result, device), 20) for device in range(2))
    return Task(result, {0: 1.0, 1: 1.0}, reads, writes, comm=comm)


@pytest.mark.parametrize(
    ("kind", "curve"),
    [
        (CommKind.ALL_REDUCE, [20, 40, 20 + 1, 20 + 5]),  # sums a copy, which is its result
        (CommKind.ALL_GATHER, [20, 40, 20 + 20 + 1, 20 + 20 + 5]),
        (CommKind.SLICE, [20, 40, 20 + 1, 20 + 5]),  # on its way is nothing
    ],
)
def test_operands_are_held_until_a_collective_is_waited_for(
    kind: CommKind, curve: list[int]
) -> None:
    schedule = tasks(
        compute("a", 0, (), {"p": 20}),
        collective(kind, "p", "s"),
        compute("b", 0, (), {"q": 1}),
        compute("c", 0, ("s",), {"y": 5}),
        outputs=("y",),
    )
    assert exact_curve(schedule) == curve


@pytest.mark.parametrize("kind", [CommKind.ALL_REDUCE, CommKind.ALL_GATHER])
def test_a_part_is_taken_when_what_brought_the_whole_is_waited_for(kind: CommKind) -> None:
    schedule = tasks(
        compute("a", 0, (), {"p": 20}),
        collective(kind, "p", "s"),
        collective(CommKind.SLICE, "s", "t"),
        compute("b", 0, (), {"q": 1}),
        compute("c", 0, ("t",), {"y": 5}),
        compute("d", 0, (), {"z": 2}),
        outputs=("y",),
    )
    own = 20 if kind is CommKind.ALL_GATHER else 0  # whose operand is held until the part is taken
    assert exact_curve(schedule) == [20, 40, own + 40, own + 41, own + 45, 5 + 2]


def test_an_alias_has_no_bytes_and_keeps_its_root() -> None:
    alias = Task(
        "alias",
        {},
        ((0, key("p")),),
        (),
        aliases=(((0, key("p", 1)), (0, key("p"))),),
    )
    reader = compute("c", 0, ("r",), {"y": 5})
    reader = replace(reader, reads=(*reader.reads, (0, key("p", 1))))
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 20}),
        alias,
        compute("b", 0, ("p",), {"r": 30}),
        reader,
        feeds={"x": 10},
        outputs=("y",),
    )
    assert exact_curve(schedule) == [30, 20, 50, 20 + 30 + 5]


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """x -> Relu (as a view) -> v -> Sub with itself -> y, and Add of v at the end."""
    monkeypatch.setattr(
        "partitioner.ir.ops.ROWS", {**ROWS, "Relu": OpRow(ROWS["Relu"].rule, view=True)}
    )
    types = {value: TensorType.of("float32", (25,)) for value in "xpvyz"}
    nodes = [
        Node("a", "Mul", ("x", "x"), ("p",)),
        Node("view", "Relu", ("p",), ("v",)),
        Node("b", "Sub", ("v", "v"), ("y",)),
        Node("c", "Add", ("v", "y"), ("z",)),
    ]
    return graph(nodes, types, ("x",), ("z",))


def test_a_view_has_no_bytes_and_keeps_its_operand(viewed: Graph) -> None:
    single = DeviceMesh.single(0)
    nodes = [placed(viewed, node.name, single) for node in viewed.nodes]
    schedule = scheduled(viewed, nodes, flat(1))
    assert [task.name for task in schedule.tasks] == ["a", "view", "b", "c"]
    assert exact_curve(schedule) == safe_curve(schedule) == [200, 100, 200, 300]


def test_a_view_of_a_resident_or_a_feed_costs_nothing(viewed: Graph) -> None:
    nodes = [placed(viewed, node.name, DeviceMesh.single(0)) for node in viewed.nodes]
    schedule = scheduled(viewed, nodes, flat(1))
    parts = [(device, key_of) for device, key_of, _ in schedule.tasks[0].writes]
    resident = replace(
        schedule, tasks=schedule.tasks[1:], feeds={}, residents=dict.fromkeys(parts, 100)
    )
    assert Peaks.of(resident).exact == {0: MemoryPeak(300, 100, 200, "c")}
    fed = replace(schedule, tasks=schedule.tasks[1:], feeds=dict.fromkeys(parts, 100))
    assert exact_curve(fed) == safe_curve(fed) == [100, 200, 300]


def test_a_device_loads_what_a_block_needs_while_the_one_before_it_runs() -> None:
    steps = [compute(f"n{at}", 0, (), {f"v{at}": 1}) for at in range(6)]
    schedule = replace(
        tasks(*steps, residents={"a": 10, "b": 20}),
        blocks={(0, 0): (0, 1), (0, 1): (2, 3), (0, 2): (4, 5), (1, 2): (4, 4)},
        loads={(0, key("a")): frozenset((0, 1)), (0, key("b")): frozenset((2,))},
    )
    spans = [
        (life.value, life.nbytes, life.first, life.last) for life in loaded_lifetimes(schedule)
    ]
    assert spans == [("a", 10, 0, 1), ("a", 10, 0, 3), ("b", 20, 2, 5)]


def test_shards_are_held_where_they_lie() -> None:
    types = {"x": TensorType.of("float32", (10,)), "y": TensorType.of("float32", (10,))}
    owner = graph([Node("a", "Relu", ("x",), ("y",))], types, ("x",), ("y",))
    node = placed(owner, "a", DeviceMesh.line(4, "tp"), {"b0": ("tp",)})  # 3, 3, 2, 2
    peaks = peak_bytes(scheduled(owner, [node], flat(4)))
    assert [peaks[device].bytes for device in range(4)] == [36, 36, 24, 24]  # with head-room


def test_nothing_runs() -> None:
    assert peak_bytes(tasks()) == {}
    assert peak_bytes(tasks(residents={"w": 5})) == {0: MemoryPeak(5, 5, 0, "")}


@given(seed=st.integers(0, 10**6), length=st.integers(1, 12))
def test_exact_never_exceeds_safe(seed: int, length: int) -> None:
    schedule = random_schedule(random.Random(seed), length)
    safe, exact = peak_bytes(schedule), Peaks.of(schedule).exact
    assert set(safe) == set(exact)
    for device, peak in exact.items():
        assert peak.bytes <= safe[device].bytes
        assert peak.bytes == peak.resident_bytes + peak.activation_bytes
    largest = max(nbytes for task in schedule.tasks for _, _, nbytes in task.writes)
    assert max(peak.bytes for peak in exact.values()) >= largest


def random_schedule(rng: random.Random, length: int) -> Schedule:
    """Nodes on two devices that read random earlier values, sent over where needed."""
    steps: list[Task] = []
    at: dict[str, set[int]] = {"x": {0}}
    for index in range(length):
        device = rng.randrange(2)
        reads = tuple(rng.sample(sorted(at), min(len(at), rng.randint(1, 2))))
        for value in reads:
            if device not in at[value]:
                steps.append(send(value, 1 - device, device, 10))
                at[value].add(device)
        steps.append(compute(f"n{index}", device, reads, {f"v{index}": rng.randint(1, 100)}))
        at[f"v{index}"] = {device}
    return tasks(*steps, feeds={"x": 10})
