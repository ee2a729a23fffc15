"""Blocks in training: a step in blocks gives what the whole module gives, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from unets import UNet

import partitioner
from partitioner.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.blocks import Blocks
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.problem.decode import planned_on
from partitioner.search.training_blocks import Parts
from partitioner.solver import Infeasible
from partitioner.strategies.block_graph import block_graph
from partitioner.strategies.stretch_layout import BlockError


class Loss(nn.Module):
    """A net whose loss is the mean over pixels, or of one image's class."""

    def __init__(self, net: nn.Module, kind: str = "pixels") -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        scores = self.net(x)
        if self.kind == "squares":
            return functional.mse_loss(scores, torch.zeros_like(scores))
        return functional.cross_entropy(scores, y, ignore_index=1)


class Twice(nn.Module):
    """Convolutions that share their weights, a mask of integers, and a value read from far away."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of four classes."""
        h = functional.leaky_relu(self.enter(x), 0.1)
        far = self.mix(h)
        far = self.mix(far.tanh()) * (h > 0).to(torch.int64)
        return functional.silu(self.mix(far)) + h


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Conv2d(4, 3, 1))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "pools": chain(
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=1),
        nn.Dropout(0.3),
        nn.AvgPool2d(2, 1, padding=1),
    ),
    "grown": chain(
        nn.ELU(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 4, 3, stride=3),
    ),
    "frozen": chain(nn.BatchNorm2d(4).eval(), nn.GELU(), nn.Conv2d(4, 4, 5, groups=2)),
    "twice": lambda: nn.Sequential(Twice(), nn.Conv2d(4, 3, 1)),
    "unet": lambda: UNet(4, 2).eval(),
}

#: Dims that are cut, with the number of parts of each.
Cut = tuple[tuple[int, ...], int]


def in_blocks(
    module: nn.Module, example: tuple[Tensor, ...], cut: Cut, *borders: float
) -> ModuleProgram:
    """A program of one device whose passes run in blocks, between borders as shares of the nodes.

    Without borders, all of it is one part.
    """
    whole = partitioner.compile(module, example, devices=1, training=True)
    parts = Parts(whole.graph, whole.cluster)
    at = [0, *(round(share * parts.turn) for share in borders), parts.turn]
    first, later = [], []
    for start, stop in zip(at, at[1:], strict=False):
        spans = [(start, stop), parts.span(start, stop)]
        seeds = [parts.largest(*span) or "" for span in spans]
        forward, backward = parts.stretches(spans, seeds, *cut)
        first.append(forward)
        later.append(backward)
    blocks = Blocks((*first, *reversed(later)))
    graph = block_graph(whole.graph, blocks)
    decided = {node.name: NodePlan(0, {}) for node in graph.nodes}
    _, plan = planned_on(graph, whole.cluster, (DeviceMesh.single(0),), decided)
    plan = replace(plan, blocks=blocks)
    model = ModuleModel(whole.model.module.on(graph), whole.model.source)
    return ModuleProgram.of(
        model, whole.cluster, plan, evaluate(graph, plan, whole.cluster), {}
    )


def images(*sizes: int) -> tuple[Tensor, ...]:
    """A batch of one image; the classes are given when the scores' size is known."""
    torch.manual_seed(1)
    return (torch.randn(1, 3, *sizes),)


def example_of(net: nn.Module, *sizes: int) -> tuple[Tensor, ...]:
    x = torch.randn(1, 3, *sizes, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        scores = copy.deepcopy(net)(x)
    return x, torch.randint(3, (1, *scores.shape[2:]), generator=torch.Generator().manual_seed(2)) % scores.shape[1]


def check(program: ModuleProgram, blocks: int) -> None:
    found = program.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5
    assert len(set(program.graph.blocks.values())) == blocks


@pytest.mark.parametrize("cut", [((2,), 2), ((3,), 3), ((2,), 5), ((2, 3), 2)])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_in_blocks_is_that_of_the_whole(form: str, cut: Cut) -> None:
    """Rows, columns and tiles of an image of odd sizes; all of both passes is one part."""
    torch.manual_seed(0)
    net = FORMS[form]()
    program = in_blocks(Loss(net), example_of(net, 41, 38), cut)
    check(program, 2 * cut[1] ** len(cut[0]))
