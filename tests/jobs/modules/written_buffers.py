"""Modules whose buffers are read and written in a step, on ranks of a gloo group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

import partitioner
from helpers.plans.staged import staged_plan
from partitioner.api.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import trace_micro_batch, trace_module
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan
from partitioner.rewrites.staging import changing_nodes


class Counted(nn.Module):
    """A layer weighed by its buffers before and after it writes them; two change places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, start in (("calls", 1.0), ("one", 0.3), ("other", 0.7)):
            self.register_buffer(name, torch.full((8,), start))

    def forward(self, x: Tensor) -> Tensor:
        """As large as its operand."""
        hidden = self.layer(x).tanh()
        before = (self.calls.clone() * 2).cos() + self.one.clone()
        scaled = (hidden * before).relu()
        self.calls += hidden.detach().mean(0)
        self.one, self.other = self.other, self.one
        return scaled * self.calls.clone().sin()


class Counting(nn.Module):
    """Three of them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Counted(), Counted(), Counted())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        return (self.layers(x) - y).square().mean()


def seeded() -> Counting:
    torch.manual_seed(0)
    return Counting().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(16, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


def by_layer(graph: Graph) -> dict[str, int]:
    """Two layers, and the last one with the loss."""
    first = "/layers/0/", "/layers/1/"
    return {node.name: int(not node.name.startswith(first)) for node in changing_nodes(graph)}


@cache
def recomputing(micro_batches: int) -> ModuleProgram:
    """The backward pass computes again what it can; the values are whole on both ranks."""
    example, options = Example(batch(0), {}), ModuleOptions(training=True)
    if micro_batches == 1:
        module = trace_module(seeded(), example, options)
    else:
        module = trace_micro_batch(seeded(), example, options, micro_batches)
    module = module.of(module.traced.offered.by_name)
    assert any(node.name.endswith("clone/again") for node in module.graph.nodes)
    cluster = resolve_cluster(None, 2)
    mesh = DeviceMesh.of({"dp": 2}, (0, 1))
    nodes = {node.name: NodePlan(0) for node in module.graph.nodes}
    plan = Plan(module.graph.digest, cluster.to_data(), (mesh,), nodes)
    if micro_batches > 1:
        plan = staged_plan(module.graph, [(0,), (1,)], "1f1b", micro_batches, by_layer)
    prices = evaluate(module.graph, plan, cluster)
    return ModuleProgram.of(ModuleModel(module, ModuleSource()), cluster, plan, prices, {})


@cache
def keeping() -> ModuleProgram:
    program = partitioner.compile(
        seeded(), batch(0), devices=2, training=True, parallel="dp", recompute=False
    )
    assert isinstance(program, ModuleProgram)
    return program


def trains(make: Callable[[], ModuleProgram], micro_batches: int) -> Callable[[int], None]:
    """Three steps beside one process: losses, gradients and buffers."""

    def run(_: int) -> None:
        module, plain = make().module(), copy.deepcopy(seeded())
        updates = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (module, plain)]
        for step in range(3):
            loss = module(*batch(step))
            loss.backward()
            expected = torch.zeros((), dtype=torch.float64)
            for part in zip(*(x.chunk(micro_batches) for x in batch(step)), strict=True):
                share = plain(*part) / micro_batches
                share.backward()
                expected += share.detach()
            torch.testing.assert_close(loss.detach(), expected)
            for update in updates:
                update.step()
                update.zero_grad()
            state, wanted = module.full_state_dict(), plain.state_dict()
            for name, tensor in wanted.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9, msg=name)

    return run
