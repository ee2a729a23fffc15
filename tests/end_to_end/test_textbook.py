"""The three textbook cases of memory: split inside, placed apart, both."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partitioner
from helpers.plans.searching import search
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.types import TensorType
from partitioner.search.request import Request
from partitioner.solver.outcome import Infeasible

GB = 10**9
LIMIT = 10 * GB


def _never() -> np.ndarray:
    raise AssertionError("planning must not read weights")


def _weight(shape: tuple[int, ...]) -> Constant:
    return Constant(TensorType.of("float32", shape), _never)


def _cluster(devices: int) -> Cluster:
    return resolve_cluster(f"{devices}xh100", devices).with_memory(LIMIT)


def _plan(graph: Graph, devices: int, strategy: str = "auto") -> Plan:
    outcome = search(graph, _cluster(devices), Request(strategy=strategy, time_limit_s=3))
    assert outcome.evaluation.fits
    return outcome.plan


def _one_operator() -> Graph:
    """y = x @ W with W of 16 GB."""
    inner, outer = 40_000, 100_000
    types = {
        "x": TensorType.of("float32", (1, inner)),
        "w": TensorType.of("float32", (inner, outer)),
        "y": TensorType.of("float32", (1, outer)),
    }
    node = Node("op", "MatMul", ("x", "w"), ("y",))
    weight = Constant(types["w"], _never)
    return Graph("one", ("x",), ("y",), (node,), types, {"w": weight}, {"": 17})


def _chain(op: str, weight: tuple[int, ...]) -> Graph:
    """Two operators, each over its own weight and an input, one result each."""
    types, nodes, constants = {"x": TensorType.of("float32", (1,))}, [], {}
    value = "x"
    for index in (0, 1):
        types[f"w{index}"] = TensorType.of("float32", weight)
        types[f"y{index}"] = TensorType.of("float32", (1,))
        constants[f"w{index}"] = _weight(weight)
        nodes.append(Node(f"op{index}", op, (value, f"w{index}"), (f"y{index}",)))
        value = f"y{index}"
    return Graph("chain", ("x",), (value,), tuple(nodes), types, constants, {"": 17, "custom": 1})


def _rows(batch: int) -> Graph:
    """Two ArgMax over a weight of `batch` rows of 9.9 GB: only the rows can be split."""
    width = int(9.9 * GB) // 4
    types, nodes, constants = {}, [], {}
    for index in (0, 1):
        types[f"w{index}"] = TensorType.of("float32", (batch, width))
        types[f"y{index}"] = TensorType.of("int64", (batch,))
        constants[f"w{index}"] = _weight((batch, width))
        attrs = {"axis": 1, "keepdims": 0}
        nodes.append(Node(f"op{index}", "ArgMax", (f"w{index}",), (f"y{index}",), attrs))
    return Graph("rows", (), ("y0", "y1"), tuple(nodes), types, constants, {"": 17})


def test_one_operator_too_big_is_split_inside() -> None:
    graph = _one_operator()
    plan = _plan(graph, 2)
    (placed,) = resolve(graph, plan)
    assert placed.mesh.size() == 2
    assert placed.layouts, "the operator is cut"
    with pytest.raises(Infeasible):
        _plan(graph, 2, "inter")
    with pytest.raises(Infeasible, match="short on device 0 at 'op'"):
        _plan(graph, 1)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_operators_are_placed_apart(count: int) -> None:
    graph = _chain("custom::Whole", (int(9.9 * GB) // 4,))
    for strategy in ("auto", "inter"):
        plan = _plan(graph, count, strategy)
        assert sorted(placed.mesh.devices for placed in resolve(graph, plan)) == [(0,), (1,)]
    with pytest.raises(Infeasible):
        _plan(graph, count, "intra")


class _Lookups(nn.Module):
    """Two lookups in `rows` tables each: of a table, only whole rows can be split off.

    In training without an optimizer's state a row takes 9.6 GB: weights, and with head-room
    gradients and the zeros that they are added to. Of several micro-batches a sum of gradients is
    held too, for which there is no room. Smaller ones, that are to run, have weights.
    """

    def __init__(self, rows: int, scale: int = 1) -> None:
        super().__init__()
        width, device = int(2.4 * GB) // 4 // scale, "meta" if scale == 1 else "cpu"
        torch.manual_seed(0)
        tables = (torch.randn(rows, width, device=device) for _ in range(2))
        self.tables = nn.ParameterList(map(nn.Parameter, tables))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for table in self.tables:
            x = torch.tanh(x * table.index_select(1, index).T)
        return x.square().mean()


def _trained(rows: int, devices: int, scale: int = 1, **options: Any) -> ModuleProgram:
    batch = torch.randn(4, rows), torch.zeros(4, dtype=torch.long)
    options |= {"optimizer": "sgd", "memory": LIMIT // scale}
    program = partitioner.compile(_Lookups(rows, scale), batch, devices, training=True, **options)
    assert isinstance(program, ModuleProgram)
    assert program.evaluation.fits_exactly
    return program


#: By so many times a model that is run is smaller than one that is planned.
SCALE = 10**5


@pytest.mark.slow
def test_one_operator_too_big_is_trained_in_parts() -> None:
    """Weights of 6.4 GB, and gradients with head-room: 16 GB."""
    big = nn.Sequential(nn.Linear(40_000, 40_000, bias=False, device="meta"), _Loss())
    batch, options = (torch.randn(4, 40_000, device="meta"),), {"optimizer": "sgd", "memory": LIMIT}
    program = partitioner.compile(big, batch, 2, training=True, **options)
    assert program.evaluation.fits
    assert 15 * GB < sum(program.evaluation.held_bytes.values()) < 20 * GB
    for refused in ({"devices": 2, "strategy": "inter"}, {"devices": 1}):
        with pytest.raises(Infeasible):
            partitioner.compile(big, batch, training=True, **options, **refused)


class _Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "inter"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_two_operators_are_trained_apart(devices: int, strategy: str) -> None:
    for scale in (1, SCALE):
        program = _trained(1, devices, scale, strategy=strategy)
        groups = program.plan.groups
        stored = {
            groups[program.plan.nodes[node.name].group].devices
            for node in program.graph.nodes
            if node.op == "partitioner::state"
        }
        whole = {(0,), (1,)}, {(0, 1), (2, 3)}  # two groups of two share the samples of each
        assert stored in whole[: 2 if (strategy, devices) == ("auto", 4) else 1]
        assert scale == 1 or program.verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"micro_batches": 1}, {"schedule": "1f1b"})
        ),
    ],
    ids=str,
)
def test_doubled_batch_on_four_devices_is_trained_in_two_groups_of_two(
    options: dict[str, Any],
) -> None:
    program = _trained(2, 4, **options)
    plan = program.plan
    assert plan.kind == ("pipeline" if options else "hybrid")
    assert [group.devices for group in plan.groups] == [(0, 1), (2, 3)]
    for placed in resolve(program.graph, plan):
        if placed.node.op == "aten::index_select":
            assert placed.layouts, "the operator is cut"


@pytest.mark.slow
def test_two_groups_of_two_train_as_the_whole_model_does() -> None:
    program = _trained(2, 4, SCALE)
    assert [group.devices for group in program.plan.groups] == [(0, 1), (2, 3)]
    assert program.verify()


@pytest.mark.slow
def test_a_sum_of_gradients_has_no_room() -> None:
    with pytest.raises(Infeasible, match="gradients"):
        _trained(2, 4, time_limit_s=3, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["intra", "inter"])
def test_doubled_batch_is_not_trained_in_one_group_nor_on_single_devices(strategy: str) -> None:
    with pytest.raises(Infeasible):
        _trained(2, 4, strategy=strategy, time_limit_s=1)


def test_doubled_batch_on_four_devices_is_hybrid() -> None:
    graph = _rows(2)
    plan = _plan(graph, 4)
    first, second = resolve(graph, plan)
    assert first.mesh.size() == second.mesh.size() == 2
    assert first.layouts
    assert second.layouts
    assert not set(first.mesh.devices) & set(second.mesh.devices)
    for strategy in ("intra", "inter"):
        with pytest.raises(Infeasible):
            _plan(graph, 4, strategy)
