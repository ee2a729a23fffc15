"""Objectives, pins to devices, places and plans kept in part, on more devices than have columns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.expert_models import ListedNet
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, Plan


class Layers(nn.Module):
    """Linear layers, which return their loss in training."""

    def __init__(self, *, loss: bool, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x**2).mean() if self.loss else x


@cache
def mlp() -> onnx.ModelProto:
    return examples.build("mlp", layers=4, hidden=512, batch=1024)


def planned(setting: str, **options: Any) -> Compiled:
    """Plan a small model for 72 devices."""
    fixed: dict[str, Any] = {"cluster": "9x8xh100", "plan_only": True, **options}
    if setting == "onnx":
        onnx_program: Compiled = partitioner.compile(mlp(), None, **fixed)
        return onnx_program
    with torch.device("meta"):
        module, example = Layers(loss=setting == "training"), torch.ones(1152, 256)
    program: Compiled = partitioner.compile(
        module, example, training=setting == "training", **fixed
    )
    return program


def devices_of(program: Compiled, *parts: str) -> set[tuple[int, ...]]:
    """The devices of all nodes whose names have these parts."""
    plan = program.plan
    nodes = {name: node for name, node in plan.nodes.items() if any(p in name for p in parts)}
    assert nodes
    return {plan.groups[node.group].devices for node in nodes.values()}


@pytest.mark.parametrize("setting", ["onnx", "inference", "training"])
def test_pins_to_devices_hold_on_any_number_of_devices(setting: str) -> None:
    first, last = ("layer0.", "layer2.") if setting == "onnx" else ("/layers/0/", "/layers/3/")
    group = tuple(range(8, 16))
    pins = [{"nodes": [f"{first}*"], "device": 1}, {"nodes": [f"{last}*"], "devices": [*group]}]
    program = planned(setting, constraints={"pin": pins})
    assert devices_of(program, first) == {(1,)}
    assert devices_of(program, last) == {group}
    assert program.evaluation.fits_exactly
    certificate = program.plan.certificate
    assert certificate is not None
    assert 0 < certificate.bound < certificate.cost


def test_what_is_written_in_place_is_where_its_buffer_is() -> None:
    """A pin of the weight alone takes its update along, and the other way round."""
    node = "/layers/1/weight"
    program = planned("training", constraints={"pin": [{"nodes": [node], "devices": [4, 5]}]})
    graph, plan = program.graph, program.plan
    updates = [
        other.name
        for other in graph.nodes
        if (row := row_of(other)) is not None
        and row.in_place is not None
        and other.inputs[row.in_place] in graph.by_name[node].outputs
    ]
    assert updates
    assert devices_of(program, node) >= {(4, 5)}
    for name in (node, *updates):
        assert plan.groups[plan.nodes[name].group].devices == (4, 5)
    back = planned("training", constraints={"pin": [{"nodes": [*updates], "devices": [4, 5]}]})
    assert back.plan.groups[back.plan.nodes[node].group].devices == (4, 5)
    apart = [{"nodes": [node], "device": 0}, {"nodes": [*updates], "device": 1}]
    text = f"no strategy for '{updates[0]}' .* on device 1 beside the nodes of the same buffer"
    with pytest.raises(partitioner.PartitionerError, match=text):
        planned("training", constraints={"pin": apart})


@pytest.mark.parametrize(
    ("options", "space"),
    [({"mesh": {"dp": 72}}, r"intra \(dp=72\)"), ({"strategy": "inter"}, "inter .one device.")],
    ids=["mesh", "inter"],
)
def test_pins_to_some_devices_contradict_one_mesh_of_all(
    options: dict[str, Any], space: str
) -> None:
    """As on few devices: each operator is on all of them, or on one."""
    pins = {"pin": [{"nodes": ["/layers/1/*"], "devices": [2, 3]}]}
    with pytest.raises(partitioner.PartitionerError, match=f"pin 1 leaves no .* in {space}"):
        planned("inference", constraints=pins, **options)


def test_free_nodes_go_where_pinned_ones_are_if_that_is_cheaper() -> None:
    """Activations between two pinned layers do not go over all devices and back."""
    pins = [{"nodes": [f"/layers/{n}/*"], "device": n // 2} for n in range(4)]
    program = planned("training", constraints={"pin": pins})
    assert program.evaluation.devices_used == 2


def test_pins_that_no_strategy_honours_are_named() -> None:
    pins = [
        {"nodes": ["/layers/0/*"], "device": 1},
        {"tensor": "layers.0.weight", "dim": 0},
    ]
    text = r"pin 2 leaves no strategy for '/layers/0/weight' \(partitioner::state\) on device 1"
    with pytest.raises(partitioner.PartitionerError, match=text):
        planned("training", constraints={"pin": pins})


def in_part(plan: Plan, prefix: str) -> Plan:
    """The decisions of a plan on some nodes, without its certificate."""
    nodes = {name: node for name, node in plan.nodes.items() if prefix in name}
    return replace(plan, nodes=nodes, certificate=None)


def cuts(plan: Plan, name: str) -> tuple[object, NodePlan]:
    node = plan.nodes[name]
    return plan.groups[node.group], replace(node, group=0)


@pytest.mark.parametrize("setting", ["onnx", "inference", "training"])
def test_a_plan_is_kept_in_part_on_any_number_of_devices(setting: str) -> None:
    whole = planned(setting, mesh={"dp": 9, "tp": 8}).plan
    part = in_part(whole, "layer1" if setting == "onnx" else "/layers/1/")
    program = planned(setting, constraints=part)
    for name in part.nodes:
        assert cuts(program.plan, name) == cuts(whole, name)
    assert program.plan.nodes.keys() == whole.nodes.keys()
    assert program.evaluation.fits_exactly
    least = planned(setting, mesh={"dp": 9, "tp": 8}).evaluation.step_s
    assert program.evaluation.step_s <= 1.5 * least


def test_experts_in_lists_lie_apart_above_64_devices() -> None:
    module = ListedNet(experts=8)
    example = torch.randn(72, 8), torch.randint(5, (72,))
    program = partitioner.compile(
        module,
        example,
        training=True,
        cluster="9x8xh100",
        parallel="ep+dp",
        mesh={"dp": 9, "ep": 8},
        plan_only=True,
    )
    for expert in range(8):
        (held,) = devices_of(program, f"/experts/{expert}/")
        assert held == tuple(range(expert, 72, 8))


@pytest.mark.parametrize("setting", ["onnx", "inference", "training"])
def test_latency_is_planned_on_any_number_of_devices(setting: str) -> None:
    usual = planned(setting)
    quick = planned(setting, objective="latency")
    assert quick.evaluation.latency_s <= usual.evaluation.latency_s * (1 + 1e-9)
    certificate = quick.plan.certificate
    assert certificate is not None
    assert certificate.objective == "latency"
    assert 0 < certificate.bound <= certificate.cost == quick.evaluation.latency_s


def test_a_request_waits_for_no_other_stage_where_latency_counts() -> None:
    """Stages give requests a short step; the same operators take longer in all of them."""
    model = examples.build("mlp", layers=8, hidden=64, batch=64)
    usual = partitioner.compile(model, cluster="9x8xh100", plan_only=True, gap=0.0)
    quick = partitioner.compile(model, cluster="9x8xh100", plan_only=True, objective="latency")
    assert quick.evaluation.latency_s < usual.evaluation.latency_s
    assert usual.evaluation.step_s < quick.evaluation.step_s


@pytest.mark.parametrize("setting", ["onnx", "inference", "training"])
def test_memory_is_planned_on_any_number_of_devices(setting: str) -> None:
    usual = planned(setting)
    small = planned(setting, objective="memory")
    most = max(small.evaluation.held_bytes.values())
    assert most < 0.8 * max(usual.evaluation.held_bytes.values())
    certificate = small.plan.certificate
    assert certificate is not None
    assert 0 < certificate.bound <= certificate.cost == most
