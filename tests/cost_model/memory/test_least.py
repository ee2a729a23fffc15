"""Bytes that any plan holds when a step ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import Loss, perceptron
from helpers.onnx_files import onnx_models as om
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.memory.least import LeastBytes
from partitioner.ir.graph import Graph
from partitioner.solver.outcome import Infeasible

SIZE, LAYERS, BATCH = 64, 3, 32
STORED = LAYERS * (SIZE * SIZE + SIZE) * 4


def graph_of(module: nn.Module, *, training: bool = False, **options: Any) -> Graph:
    result = partitioner.compile(module, torch.zeros(BATCH, SIZE), training=training, **options)
    graph: Graph = result.graph
    return graph


def least(graph: Graph, cluster: str) -> LeastBytes:
    return LeastBytes.of(graph, resolve_cluster(cluster, None))


def test_training_holds_gradients_and_what_the_step_takes_on_gpus() -> None:
    graph = graph_of(Loss(perceptron(LAYERS, SIZE)), training=True)
    kept = {"stored values": 3 * STORED, "gradients": STORED}  # with two moments each
    assert least(graph, "2xh100").parts == {**kept, "the optimizer's step": STORED}
    room = STORED // 2 - 2
    assert least(graph, "2xcpu").parts == {**kept, "head-room": room}
    assert least(graph, "2xcpu").bytes == 4 * STORED + room


def test_inference_holds_results_on_every_rank() -> None:
    graph = graph_of(perceptron(LAYERS, SIZE))
    parts = least(graph, "4xh100").parts
    assert parts == {"stored values": STORED, "results, whole on every rank": 4 * BATCH * SIZE * 4}


class Named(nn.Module):
    """Returns a stored value, an input, and two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * self.kept
        return self.kept[:8], y.t(), y.view(-1)


def test_results_that_share_memory_count_once() -> None:
    """What is stored counts on all ranks but one, which has it already."""
    parts = least(graph_of(Named()), "2xh100").parts
    assert parts["results, whole on every rank"] == 2 * BATCH * SIZE * 4 + 8 * 4


GIVEN = torch.zeros(BATCH, SIZE)


class Returned(nn.Module):
    """Returns its input or a stored value, or views of them."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.kept = of, nn.Parameter(torch.zeros(BATCH * SIZE))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        views = {
            "x": x,
            "x.view": x.view(-1),
            "kept": self.kept,
            "kept.view": self.kept.view(2, -1),
        }
        return (x, x.t()) if self.of == "both" else views[self.of]


@pytest.mark.parametrize("of", ["x", "x.view", "both", "kept", "kept.view"])
@pytest.mark.parametrize("devices", ["2xh100", "2xcpu"])
def test_ranks_return_what_they_were_given_whole_too(of: str, devices: str) -> None:
    options: dict[str, Any] = {"objective": "memory", "time_limit_s": 1.0}
    result = partitioner.compile(Returned(of), GIVEN, cluster=devices, **options)
    assert isinstance(result, partitioner.ModuleProgram)
    bound = least(result.graph, devices).bytes
    assert bound == 2 * GIVEN.nbytes <= sum(result.evaluation.needed_bytes.values())
    assert min(result.evaluation.needed_bytes.values()) >= GIVEN.nbytes


@pytest.mark.parametrize("of", ["x", "kept.view"])
def test_a_byte_less_than_what_each_rank_returns_is_refused_with_the_proof(of: str) -> None:
    options: dict[str, Any] = {"memory": GIVEN.nbytes - 1, "time_limit_s": 1.0}
    with pytest.raises(Infeasible, match="no plan fits: when a step ends, any holds") as refusal:
        partitioner.compile(Returned(of), GIVEN, cluster="2xh100", **options)
    assert refusal.value.proven


class Added(nn.Module):
    """Adds parameters whose gradients are one tensor, a view of it, and that of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(BATCH, SIZE))
        self.b = nn.Parameter(torch.zeros(BATCH, SIZE))
        self.flat = nn.Parameter(torch.zeros(BATCH * SIZE))
        self.summed = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.a + self.b + self.flat.view(BATCH, SIZE)
        return (y**2).sum() + self.summed.sum()


@pytest.mark.parametrize("devices", ["2xh100", "2xcpu"])
def test_gradients_that_share_memory_count_once(devices: str) -> None:
    x, options = torch.zeros(BATCH, SIZE), {"training": True, "optimizer": "adamw"}
    bound = least(graph_of(Added(), **options), devices)
    assert bound.parts["gradients"] == BATCH * SIZE * 4
    result = partitioner.compile(Added(), x, cluster=devices, objective="memory", **options)
    assert sum(result.evaluation.needed_bytes.values()) >= bound.bytes


def test_a_model_that_loads_blocks_is_known_to_hold_nothing() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    proto = om.model(nodes, {"x": ("float32", [4])}, {"y": ("float32", [4])})
    result = partitioner.compile(proto)
    assert LeastBytes.of(result.graph, result.cluster).bytes == 0


@pytest.mark.parametrize(
    ("training", "devices", "options"),
    [
        (True, "2xh100", {"parallel": "zero3"}),
        (True, "2xcpu", {"parallel": "pp", "micro_batches": 4}),
        (True, "2xh100", {"parallel": "tp", "micro_batches": 8, "objective": "memory"}),
        (True, "2xcpu", {"optimizer": "sgd", "strategy": "inter"}),
        (True, "2xh100", {"optimizer": "adagrad", "parallel": "zero2"}),
        (False, "2xcpu", {"parallel": "tp"}),
        (False, "2xh100", {"parallel": "pp", "micro_batches": 4}),
        (False, "2xh100", {"strategy": "copies"}),
        (False, "2xcpu", {"strategy": "intra", "micro_batches": 8, "objective": "memory"}),
    ],
    ids=str,
)
def test_no_plan_holds_less(training: bool, devices: str, options: dict[str, Any]) -> None:
    module, x = perceptron(LAYERS, SIZE), torch.zeros(BATCH, SIZE)
    module = Loss(module) if training else module
    kept = {"optimizer": options["optimizer"]} if "optimizer" in options else {}
    graph = graph_of(module, training=training, **kept)
    result = partitioner.compile(module, x, training=training, cluster=devices, **options)
    held = sum(result.evaluation.needed_bytes.values())
    assert held >= least(graph, devices).bytes


def test_devices_with_less_are_refused_with_a_proof() -> None:
    module, x = Loss(perceptron(LAYERS, SIZE)), torch.zeros(BATCH, SIZE)
    options: dict[str, Any] = {"memory": 5 * STORED // 2 - 1, "time_limit_s": 1.0}
    with pytest.raises(Infeasible, match="no plan fits: when a step ends, any holds") as refusal:
        partitioner.compile(module, x, training=True, devices=2, **options)
    assert refusal.value.proven
    assert "bytes are short on device" in str(refusal.value)
    assert "a plan may be found" not in str(refusal.value)
