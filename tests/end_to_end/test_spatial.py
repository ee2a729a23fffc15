"""Images cut along height and width: every pixel is the whole image's, in training too."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.nn import functional

import partitioner
from partitioner.compiled.base import Compiled
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import NodePlan
from partitioner.ir.program import Comm
from partitioner.ir.rule import Cut, Rule
from partitioner.strategies.constraints import Constraints, Pin

MESHES = ({"tp": 2}, {"tp": 3}, {"tp": 5}, {"dp": 2, "tp": 3})


class UNet(nn.Module):
    """Two levels down and up again, with skips; one input of odd parts at each level."""

    def __init__(self, up: str) -> None:
        super().__init__()
        self.a, self.b = self.block(3, 4), self.block(4, 8)
        self.c = nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        self.rise = [self.grow(16, 8, up), self.grow(8, 4, up)]
        self.ups = nn.ModuleList(self.rise)
        self.d, self.e = self.block(16, 8), self.block(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, (5, 3), padding=(2, 1)),
        )

    @staticmethod
    def grow(before: int, after: int, up: str) -> nn.Module:
        if not up:
            return nn.ConvTranspose2d(before, after, 2, stride=2)
        return nn.Sequential(nn.Upsample(scale_factor=2, mode=up), nn.Conv2d(before, after, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(functional.max_pool2d(a, 2))
        c = functional.relu(self.c(functional.avg_pool2d(b, 3, 2, 1, count_include_pad=False)))
        d = self.d(torch.cat([self.ups[0](c), b], 1))
        return self.out(self.e(torch.cat([self.ups[1](d), a], 1)))


class Classifier(nn.Module):
    """The layers of a small ResNet, on an image of odd sizes; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.same = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.down, self.skip = nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(6, 8, 1, 2)
        self.classes = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        x = x + functional.relu(self.norms[1](self.same(x)))
        x = functional.avg_pool2d(
            functional.relu(self.down(x) + self.skip(x)), 3, 1, 1, count_include_pad=False
        )
        return functional.cross_entropy(self.classes(x.mean((2, 3))), torch.tensor([3]))


class Volumes(nn.Module):
    """A net of 3-D convolutions and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, (3, 2, 3), stride=(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.max_pool3d(functional.relu(self.a(x)), 2, 1))


def pins(graph: Graph, mesh: Mapping[str, int], dims: Mapping[str, int]) -> Constraints:
    """Cuts the results of all windows: over each axis a dim, where each part has two or more."""
    rules = rules_of(graph)
    cut = []
    for node in graph.nodes:
        rule = rules[node.name]
        if not isinstance(rule, Rule) or not rule.windows:
            continue
        for axis, dim in dims.items():
            results = [value for value in node.writes if graph.types[value].rank > dim]
            slid = {name for _, name in rule.windows}
            for value in results:
                dims_of = rule.results[node.outputs.index(value)]
                assert dims_of is not None
                names = {name for term in dims_of[dim] for name in term}
                if names & slid and graph.types[value].shape[dim] >= 2 * mesh[axis]:
                    cut.append(Pin("image", tensor=value, dim=dim, axis=axis, side="made"))
    assert len(cut) > 1
    return Constraints(tuple(cut))


def check(mesh: Mapping[str, int], dims: Mapping[str, int], model: Any, **options: Any) -> Compiled:
    """Compile with the image cut, and compare all ranks with the whole model."""
    training = {key: options[key] for key in ("example_inputs", "training") if key in options}
    graph = partitioner.compile(model, devices=1, **training).graph
    count = int(np.prod([*mesh.values()]))
    compiled = partitioner.compile(
        model,
        mesh=mesh,
        cluster=f"{count}xideal",
        strategy="intra",
        constraints=pins(graph, mesh, dims),
        time_limit_s=5,
        **options,
    )
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    worst = max(output.error for output in found.outputs)
    assert worst <= 1e-5, str(found)
    return compiled


def axes(mesh: Mapping[str, int], first: int = 2) -> Mapping[str, int]:
    """Over one axis the last dim but one of an image, over two also the last."""
    return {axis: first + place for place, axis in enumerate(mesh)}


@pytest.mark.parametrize("up", ["", "nearest", "bilinear"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_unet(mesh: Mapping[str, int], up: str) -> None:
    torch.manual_seed(0)
    check(mesh, axes(mesh), UNet(up).eval(), example_inputs=(torch.randn(1, 3, 36, 28),))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("up", ["", "nearest", "bilinear"])
def test_unet_in_onnx(
    mesh: Mapping[str, int], up: str, exported_unet: Callable[[str], Path]
) -> None:
    check(mesh, axes(mesh), exported_unet(up))


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_volumes(mesh: Mapping[str, int]) -> None:
    torch.manual_seed(0)
    example = (torch.randn(1, 2, 9, 8, 11),)
    check(mesh, axes(mesh), Volumes().eval(), example_inputs=example)
    check(mesh, axes(mesh, 4), Volumes().eval(), example_inputs=example)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_training(mesh: Mapping[str, int]) -> None:
    """The loss and all gradients."""
    torch.manual_seed(0)
    example = (torch.randn(1, 3, 61, 50),)
    check(mesh, axes(mesh), Classifier().train(), example_inputs=example, training=True)


@pytest.fixture(scope="module")
def exported_unet(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The U-Net as an ONNX file, made once a way to grow."""
    folder, made = tmp_path_factory.mktemp("unet"), dict[str, Path]()

    def export(up: str) -> Path:
        if up not in made:
            torch.manual_seed(0)
            made[up] = folder / f"unet-{up}.onnx"
            example = (torch.randn(1, 3, 36, 28),)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter's own
                torch.onnx.export(UNet(up).eval(), example, made[up], dynamo=False)
        return made[up]

    return export


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (5, 1), (3, 2), (7, 1)])
def test_the_bytes_of_a_halo(ranks: int, kernel: int, dilation: int, tmp_path: Path) -> None:
    """Each of the n - 1 borders is crossed by (k - 1) d rows of c w elements of 4 bytes."""
    height, width, channels = 48, 10, 2
    reach = (kernel - 1) * dilation // 2
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="a"),
        helper.make_node(
            *("Conv", ["a", "w"], ["y"]),
            name="y",
            pads=[reach, 0, reach, 0],
            dilations=[dilation, 1],
        ),
    ]
    weights = {"w": np.ones((2, channels, kernel, 1), np.float32)}
    shape = [1, channels, height, width]
    model = onnx_models.model(nodes, {"x": ("float32", shape)}, {"y": ("float32", shape)}, weights)
    path = tmp_path / "halo.onnx"
    path.write_bytes(model.SerializeToString())
    rows = [Pin("rows", tensor=value, dim=2, side="made") for value in ("a", "y")]
    compiled = partitioner.compile(
        path,
        mesh={"tp": ranks},
        cluster=f"{ranks}xideal",
        strategy="intra",
        constraints=Constraints(tuple(rows)),
    )
    assert compiled.verify(seed=0).equal
    assert 4 * sent(compiled) == (ranks - 1) * (kernel - 1) * dilation * channels * width * 4


def sent(compiled: Compiled) -> int:
    """Elements that ranks send each other."""
    comms = {
        id(step): step
        for program in compiled.programs.ranks
        for step in program.steps
        if isinstance(step, Comm)
    }
    return sum(t.numel for c in comms.values() for t in c.transfers if t.source != t.target)


def test_parts_that_overlap_replace_an_exchange(tmp_path: Path) -> None:
    """A plan by hand: the rows that two ranks need of the first result are computed by both."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="a", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], name="b"),
        helper.make_node("Conv", ["b", "w"], ["c"], name="c", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["y"], name="y"),
    ]
    weights = {"w": np.ones((2, 2, 3, 3), np.float32) / 9}
    tensor = ("float32", [1, 2, 9, 5])
    path = tmp_path / "chain.onnx"
    path.write_bytes(
        onnx_models.model(nodes, {"x": tensor}, {"y": tensor}, weights).SerializeToString()
    )
    rows = tuple(Pin("rows", tensor=value, dim=2, side="made") for value in "abcy")
    options: dict[str, Any] = {"mesh": {"tp": 3}, "cluster": "3xideal", "strategy": "intra"}
    compiled = partitioner.compile(path, constraints=Constraints(rows), **options)
    assert sent(compiled) == 4 * 2 * 5  # a row each way over two borders, of two channels
    plan = compiled.plan
    decisions = dict(plan.nodes)
    for name in ("a", "b"):
        (factor,) = plan.nodes[name].cuts
        cut = Cut.parse("tp:0..4,2..7,5..9")
        decisions[name] = NodePlan(plan.nodes[name].group, {factor: cut})
    by_hand = replace(plan, nodes=decisions, certificate=None)
    overlapping = partitioner.compile(path, constraints=by_hand, **options)
    assert overlapping.plan.nodes["b"].cuts == decisions["b"].cuts
    assert sent(overlapping) == 0
    assert overlapping.verify(seed=0).equal
    overlapping.save(tmp_path / "saved")
    assert partitioner.load(tmp_path / "saved").verify(seed=0).equal
