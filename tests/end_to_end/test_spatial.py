"""Images cut along height and width: every pixel is the whole image's, in training too."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn

import partitioner
from helpers.modules.image_nets import Classifier, Grown, Planes, UNet, Volumes
from helpers.onnx_files import onnx_models
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.spatial_jobs import JOBS
from jobs.kinds.spatial_jobs import Loss as Weighted
from partitioner.api.compiled.base import Compiled
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import NodePlan
from partitioner.ir.program import Comm
from partitioner.ir.rule import Cut, Rule
from partitioner.strategies.constraints import Constraints, Pin

MESHES = (
    pytest.param({"tp": 2}, marks=pytest.mark.sweep),
    {"tp": 3},
    {"tp": 5},
    pytest.param({"dp": 2, "tp": 3}, marks=pytest.mark.slow),
)

TWO_AXES = pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow)


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


@pytest.mark.one_in(2)
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


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 3}, TWO_AXES], ids=str)
def test_volumes(mesh: Mapping[str, int]) -> None:
    torch.manual_seed(0)
    example = (torch.randn(1, 2, 9, 8, 11),)
    check(mesh, axes(mesh), Volumes().eval(), example_inputs=example)
    last = axes(mesh, 5 - len(mesh))
    check(mesh, last, Volumes().eval(), example_inputs=example)


@pytest.mark.parametrize(
    "mesh", [pytest.param({"tp": 2}, marks=pytest.mark.slow), {"tp": 3}, TWO_AXES], ids=str
)
def test_training(mesh: Mapping[str, int]) -> None:
    """The loss and all gradients."""
    torch.manual_seed(0)
    example = (torch.randn(1, 3, 61, 50),)
    check(mesh, axes(mesh), Classifier().train(), example_inputs=example, training=True)


@pytest.mark.parametrize("mesh", [{"h": 3}, {"w": 2}], ids=str)
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_training_by_name(mesh: Mapping[str, int], memory_format: str) -> None:
    """`parallel="spatial"`: indices of maxima count in whole planes, norms in whole groups."""
    torch.manual_seed(0)
    form = getattr(torch, memory_format)
    for net, shape in ((Planes(), (1, 4, 18, 12)), (Grown(), (1, 2, 7, 9))):
        compiled = partitioner.compile(
            net.to(memory_format=form),
            example_inputs=(torch.randn(shape).contiguous(memory_format=form),),
            cluster=f"{np.prod([*mesh.values()])}xideal",
            parallel="spatial",
            mesh=mesh,
            training=True,
            time_limit_s=3,
        )
        found = compiled.verify(seed=1)
        assert found.equal, str(found)
        assert max(output.error for output in found.outputs) <= 1e-5, str(found)


class Signal(nn.Module):
    """A convolution and a pool along one dim, which PyTorch traces as an image of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.MaxPool1d(3, 2), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def test_an_axis_without_a_dim_cuts_the_first_that_is_long_enough() -> None:
    compiled = partitioner.compile(
        *(Signal().double(), (torch.randn(1, 2, 23, dtype=torch.float64),)),
        cluster="3xideal",
        parallel="spatial",
        training=True,
    )
    cut = [node.op for node in compiled.graph.nodes if compiled.plan.nodes[node.name].cuts]
    assert {"aten::convolution", "partitioner::convolution_grad_weight"} <= {*cut}
    found = compiled.verify(seed=1)
    assert found.equal, str(found)


@pytest.mark.parametrize(
    ("make", "size"), [(nn.ConvTranspose1d, (17,)), (nn.ConvTranspose3d, (5, 4, 6))]
)
@pytest.mark.parametrize("training", [False, True])
def test_a_transposed_convolution_of_a_point_with_more_positions(
    make: Callable[..., nn.Module], size: tuple[int, ...], training: bool
) -> None:
    """One stride and one point: what is added behind the last element is read from none."""
    torch.manual_seed(0)
    net = make(2, 4, 1, dilation=2, output_padding=1, groups=2).double()
    module = Weighted(net) if training else net
    compiled = partitioner.compile(
        *(module, (torch.randn(1, 2, *size, dtype=torch.float64),)),
        cluster="3xideal",
        parallel="spatial",
        mesh={"w": 3},
        training=training,
    )
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    assert all(node.cuts for node in compiled.plan.nodes.values() if node.cuts or not training)


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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"h": 2}, {"w": 3}, {"h": 2, "w": 2}], ids=str)
def test_resnet_50(mesh: Mapping[str, int], zoo: Callable[[str], Path]) -> None:
    ranks = int(np.prod([*mesh.values()]))
    compiled = partitioner.compile(
        zoo("resnet50"),
        devices=ranks,
        parallel="spatial",
        mesh=mesh,
        gap=0.2,
        time_limit_s=5,
    )
    cut = [name for name, node in compiled.plan.nodes.items() if node.cuts]
    assert len(cut) > 0.9 * len(compiled.plan.nodes)
    found = compiled.verify(seed=0, optimization="disable")  # others fold norms into convolutions
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_train_to_the_same_weights(run_job: RunJob, job: str) -> None:
    run_job("kinds/spatial_jobs.py", job)


@pytest.mark.parametrize(
    ("size", "memory"),
    [pytest.param(4096, "900MiB", marks=pytest.mark.slow), (512, "14MiB")],
)
def test_an_image_that_no_device_holds_whole(size: int, memory: str) -> None:
    """Four devices hold a quarter each, with halos; the smaller one is run too."""
    torch.manual_seed(0)
    net = UNet("bilinear").eval()
    example = (torch.empty(1, 3, size, size) if size > 512 else torch.randn(1, 3, size, size),)
    compiled = partitioner.compile(
        net, example, devices=4, memory=memory, parallel="spatial", mesh={"h": 4}, time_limit_s=10
    )
    whole = partitioner.compile(net, example, devices=1)
    assert max(whole.summary["peak_bytes"]) > compiled.evaluation.limit_bytes[0]
    assert compiled.evaluation.fits
    assert max(compiled.summary["peak_bytes"]) < 0.4 * max(whole.summary["peak_bytes"])
    if size <= 512:
        found = compiled.verify(seed=0)
        assert found.equal, str(found)
        assert max(output.error for output in found.outputs) <= 1e-5
