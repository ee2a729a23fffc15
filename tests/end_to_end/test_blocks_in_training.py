"""Blocks in training: a step in blocks gives what the whole module gives, or is refused."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import partitioner
from helpers.modules.trained_images import Loss, apart, normed_unet, plain_unet, vgg
from helpers.modules.unets import UNet
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.block_jobs import JOBS
from partitioner.api.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.plan import NodePlan
from partitioner.problem.build import planned_on
from partitioner.rewrites.block_graph import block_graph, traced_blocks
from partitioner.search.blocks.shared import Shared
from partitioner.search.blocks.training import Parts
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Infeasible


class Twice(nn.Module):
    """Convolutions that share their weights, a mask of integers, and a value read from far away."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of four classes."""
        h = functional.leaky_relu(self.enter(x), 0.1)
        far = self.mix(h)
        far = self.mix(far.tanh()) * (h > 0).to(torch.int64)
        return functional.silu(self.mix(far)) + h


class Moved(nn.Module):
    """Adds a buffer of the image's size, which it then writes."""

    moved: Tensor

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.register_buffer("moved", torch.linspace(-1, 1, math.prod(sizes)).reshape(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        x = (x + self.moved).sigmoid()
        self.moved.mul_(0.5)
        return x


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
    "frozen": chain(
        nn.BatchNorm2d(4).eval(), nn.GELU(), Moved(41, 38), nn.Conv2d(4, 4, 5, groups=2)
    ),
    "twice": lambda: nn.Sequential(Twice(), nn.Conv2d(4, 3, 1)),
    "unet": lambda: UNet(4, 2).eval(),
}

SWEEP = pytest.mark.sweep
#: Dims that are cut, with the number of parts of each.
Cut = tuple[tuple[int, ...], int]


def example_of(net: nn.Module, *sizes: int) -> tuple[Tensor, Tensor]:
    """One image, and a class for each pixel of the scores."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, *sizes, generator=draw)
    with torch.no_grad():
        shape = copy.deepcopy(net)(x).shape
    return x, torch.randint(shape[1], (1, *shape[2:]), generator=draw)


def whole_of(module: nn.Module, example: tuple[Tensor, ...]) -> ModuleProgram:
    return partitioner.compile(module, example, devices=1, cluster="cpu", training=True)


def with_blocks(whole: ModuleProgram, blocks: Blocks) -> ModuleProgram:
    """The program of one device with stretches in blocks."""
    graph = block_graph(whole.graph, blocks)
    decided = {node.name: NodePlan(0, {}) for node in graph.nodes}
    _, plan = planned_on(graph, whole.cluster, (DeviceMesh.single(0),), decided)
    plan = replace(plan, blocks=blocks)
    model = ModuleModel(whole.model.module.on(graph), whole.model.source)
    cost = evaluate(graph, plan, whole.cluster)
    return ModuleProgram.of(model, whole.cluster, plan, cost, {})


def in_blocks(
    module: nn.Module, example: tuple[Tensor, ...], cut: Cut, *borders: float
) -> ModuleProgram:
    """Both passes of each part in blocks; parts end at borders, as shares of the forward nodes."""
    whole = whole_of(module, example)
    return with_blocks(whole, blocks_of(whole, cut, *borders))


def blocks_of(whole: ModuleProgram, cut: Cut, *borders: float) -> Blocks:
    """As `in_blocks`."""
    parts = Parts(whole.graph, whole.cluster)
    at = [0, *(round(share * parts.turn) for share in borders), parts.turn]
    first, later = [], []
    for start, stop in itertools.pairwise(at):
        spans = [(start, stop), parts.span(start, stop)]
        seeds = [parts.largest(*span) or "" for span in spans]
        forward, backward = parts.stretches(spans, seeds, *cut)
        first.append(forward)
        later.append(backward)
    return Blocks((*first, *reversed(later)))


def check(program: ModuleProgram, blocks: int) -> None:
    """Loss, gradients and buffers are those of the whole module, in so many blocks."""
    found = program.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5
    assert len(set(program.graph.blocks.values())) == blocks


@pytest.mark.parametrize(
    "cut",
    [((2,), 3), *(pytest.param(c, marks=SWEEP) for c in (((3,), 2), ((2,), 5), ((2, 3), 2)))],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_in_blocks_is_that_of_the_whole(form: str, cut: Cut) -> None:
    """Rows, columns and tiles of an image of odd sizes; all of both passes is one part."""
    torch.manual_seed(0)
    net = FORMS[form]()
    sizes = (42, 38) if form == "unet" else (41, 38)  # its pools halve, its skips must match
    program = in_blocks(Loss(net), example_of(net, *sizes), cut)
    check(program, 2 * cut[1] ** len(cut[0]))


def test_dropout_draws_the_same_elements_in_blocks() -> None:
    """Of pixels, and of channels of the whole image, which are drawn once."""
    net = nn.Sequential(FORMS["pools"](), nn.Dropout2d(0.4), nn.Conv2d(3, 3, 3))
    example = example_of(net, 31, 38)
    program = in_blocks(Loss(net), example, ((2, 3), 2))
    assert any(node.op == "partitioner::dropout_part" for node in program.graph.nodes)
    whole, parts = whole_of(Loss(net), example).gradients(*example), program.gradients(*example)
    for name, gradient in whole[1].items():
        allowed = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(parts[1][name], gradient, rtol=0, atol=allowed)
    found = program.verify(seed=1)
    assert found.equal, str(found)
    assert 0 < max(output.error for output in found.outputs) <= 1e-5  # with the whole program


@pytest.mark.parametrize(("form", "borders"), [("unet", (0.45,)), ("twice", (0.5, 0.75))])
def test_parts_keep_their_borders(form: str, borders: tuple[float, ...]) -> None:
    """Skips and shared weights go from one part to another; gradients of a border are whole."""
    torch.manual_seed(0)
    net = FORMS[form]()
    program = in_blocks(Loss(net), example_of(net, 42, 38), ((2,), 3), *borders)
    check(program, 6 * (1 + len(borders)))
    graph = program.graph
    later = graph.backward
    read = {value for node in graph.nodes if node.name in later for value in node.reads}
    kept = [
        value
        for node in graph.nodes
        if node.name not in later and node.op != "partitioner::state"
        for value in read.intersection(node.writes)
    ]
    # What a part hands on, a skip and what combines blocks (the sums of the loss); nothing inside.
    assert 0 < len(kept) <= 3 * len(borders) + 1


def test_a_batch_is_cut_too() -> None:
    """A mean over the batch, and classes of whole images."""
    net = nn.Sequential(FORMS["pools"](), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    example = torch.randn(5, 3, 17, 13), torch.randint(3, (5,))
    check(in_blocks(Loss(net), example, ((0,), 3)), 6)


class Residual(nn.Module):
    """Two branches with norms of their own, which nothing connects before their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4, affine=False),
        )
        self.side = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), nn.GroupNorm(2, 4))
        self.leave = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of three classes."""
        return self.leave((self.main(x) + self.side(x)).relu())


#: Nets with norms, and the rounds of both passes: in each as many as norms follow each other, and
#: one more; and one of each branch that nothing connects, such as the number of pixels that count.
NORMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "batch": (chain(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)), 5),
    "group": (chain(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, stride=2)), 5),
    "instance": (chain(nn.InstanceNorm2d(4, affine=True), nn.GELU(), nn.Dropout(0.3)), 5),
    "residual": (Residual, 8),
    "unet": (lambda: UNet(3, 2), 9),
}


@pytest.mark.parametrize(
    "cut", [((2,), 3), *(pytest.param(c, marks=SWEEP) for c in (((3,), 2), ((2, 3), 2)))]
)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=SWEEP if form == "unet" else ()) for form in NORMS]
)
def test_blocks_go_through_norms(form: str, cut: Cut) -> None:
    """Statistics of the whole image, and their gradients, are added up before they are read."""
    torch.manual_seed(0)
    make, rounds = NORMS[form]
    net = make()
    sizes = (42, 38) if form == "unet" else (41, 38)
    program = in_blocks(Loss(net), example_of(net, *sizes), cut)
    check(program, rounds * cut[1] ** len(cut[0]))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    meet = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("form", ["vgg", "frozen", "norms"])
def test_ten_steps_in_blocks_are_those_of_pytorch(form: str) -> None:
    """A class of one image; a buffer that each step writes and the backward pass rereads; norms."""
    torch.manual_seed(0)
    if form == "vgg":
        module, example = Loss(vgg(8, 8, 16)), (torch.randn(1, 3, 40, 36), torch.tensor([3]))
    else:
        net = (
            FORMS[form]() if form == "frozen" else Residual().to(memory_format=torch.channels_last)
        )
        module, example = Loss(net), example_of(net, 41, 38)
    program = in_blocks(module, example, ((2,), 3))
    assert apart(module, program.module(), example) <= 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("make", "share"), [(plain_unet, 0.4), (normed_unet, 0.5)])
def test_a_unet_is_trained_on_one_image_where_recomputation_does_not_fit(
    make: Callable[[int, int], nn.Module], share: float, tmp_path: Path
) -> None:
    """Ten steps of AdamW are equal; measured bytes are within the limit."""
    torch.manual_seed(0)
    module = Loss(make(4, 2))
    example = torch.randn(1, 3, 200, 136), torch.randint(2, (1, 200, 136))
    limit = int(share * whole_of(module, example).summary["peak_bytes"][0])
    options: dict[str, Any] = {"devices": 1, "cluster": "cpu", "training": True}
    program = partitioner.compile(module, example, memory=limit, time_limit_s=10, **options)
    assert program.plan.blocks
    assert program.summary["peak_bytes"][0] <= limit
    measured = program.profile(*example, steps=1).measured
    assert measured is not None
    assert 0 < (measured.ranks[0].peak_bytes or 0) <= limit
    # AdamW divides by gradients next to 0, of which rounding is a large part where norms are.
    assert apart(module, program.module(), example) <= (1e-5 if make is plain_unet else 1e-3)
    program.save(tmp_path / "out")
    again = partitioner.load(tmp_path / "out", module, example)
    assert again.plan == program.plan
    assert again.graph.digest == program.graph.digest


@pytest.mark.slow
def test_what_blocks_in_training_are_not_searched_with_is_named() -> None:
    module = Loss(chain(nn.ReLU())())
    example = torch.randn(1, 3, 20, 18), torch.randint(3, (1, 20, 18))
    options: dict[str, Any] = {"training": True, "memory": 20_000, "time_limit_s": 1}
    with pytest.raises(Infeasible, match=r"; blocks are not searched with recompute=False$"):
        partitioner.compile(module, example, recompute=False, **options)


@pytest.mark.slow
def test_nodes_that_are_placed_whole_are_trained_in_blocks() -> None:
    """They are in stages of one device, as of one micro-batch: the whole batch."""
    torch.manual_seed(0)
    module = Loss(vgg(8, 8))
    example = torch.randn(1, 3, 121, 87), torch.tensor([3])
    options: dict[str, Any] = {"cluster": "2xcpu", "training": True, "strategy": "inter"}
    whole = partitioner.compile(module, example, 2, **options)
    limit = int(0.6 * max(whole.summary["peak_bytes"]))
    program = partitioner.compile(module, example, 2, memory=limit, time_limit_s=30, **options)
    assert program.plan.blocks
    assert program.plan.micro_batches == 1
    assert {mesh.size() for mesh in program.plan.groups} == {1}
    assert max(program.summary["peak_bytes"]) <= limit
    assert program.verify(seed=1).equal
    peaks = [rank.peak_bytes or 0 for rank in program.profile(*example, steps=1).measured.ranks]
    assert max(peaks) <= limit
    assert max(program.summary["peak_bytes"]) == pytest.approx(max(peaks), rel=0.05)


def shared(
    module: nn.Module, example: tuple[Tensor, ...], cut: Cut, request: Request, devices: int
) -> tuple[ModuleProgram, ModuleProgram]:
    """The program of devices that share a step as a whole, and that in which it is in blocks."""
    whole = partitioner.compile(
        module,
        example,
        devices=devices,
        training=True,
        parallel=request.parallel,
        mesh=request.mesh,
    )
    blocks = blocks_of(whole, cut)
    traced = traced_blocks(whole.graph, blocks)
    sharing = Shared.of(whole.graph, devices, request)
    planned = sharing.plan(traced, whole.cluster, Budget.of(request))
    assert planned is not None
    plan = replace(planned[1], blocks=blocks)
    model = ModuleModel(whole.model.module.on(traced.graph), whole.model.source)
    cost = evaluate(traced.graph, plan, whole.cluster)
    return whole, ModuleProgram.of(model, whole.cluster, plan, cost, {})


DP = Request(parallel="dp")


@pytest.mark.parametrize(
    ("form", "asked", "devices", "batch"),
    [
        ("pools", DP, 2, 3),
        ("batch", DP, 3, 4),
        pytest.param("unet", DP, 3, 3, marks=SWEEP),
        pytest.param("group", DP, 2, 2, marks=SWEEP),
        pytest.param("twice", Request(parallel="zero3"), 2, 2, marks=pytest.mark.slow),
        pytest.param("pools", Request(parallel="zero1"), 2, 2, marks=SWEEP),
        pytest.param("batch", Request(parallel="zero2"), 3, 4, marks=pytest.mark.slow),
        pytest.param(
            *("grown", Request(parallel="spatial", mesh={"w": 2}), 2, 1), marks=pytest.mark.slow
        ),
        pytest.param("group", Request(parallel="spatial", mesh={"w": 3}), 3, 1, marks=SWEEP),
    ],
)
def test_devices_share_each_block(form: str, asked: Request, devices: int, batch: int) -> None:
    """Gradients are equal, and are added up over devices once: not once for each block."""
    torch.manual_seed(0)
    net = FORMS[form]() if form in FORMS else NORMS[form][0]()
    x, y = example_of(net, 42, 38) if form == "unet" else example_of(net, 41, 38)
    example = torch.randn(batch, *x.shape[1:]), y.expand(batch, *y.shape[1:]).contiguous()
    whole, program = shared(Loss(net), example, ((2,), 3), asked, devices)
    found = program.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5
    assert program.evaluation.devices_used == devices
    if asked.parallel == "dp" and form in FORMS:
        assert program.evaluation.sent_bytes == whole.evaluation.sent_bytes


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_that_share_blocks_train_to_the_same_weights(run_job: RunJob, job: str) -> None:
    run_job("kinds/block_jobs.py", job)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dp", "zero2"])
def test_each_of_two_devices_trains_its_image_within_its_limit(kind: str, tmp_path: Path) -> None:
    """Measured bytes of each rank; the saved plan is loaded again."""
    torch.manual_seed(0)
    module = Loss(vgg(8, 8))
    example = torch.randn(2, 3, 120, 88), torch.tensor([3, 5])
    limit = int(0.5 * whole_of(module, tuple(t[:1] for t in example)).summary["peak_bytes"][0])
    options: dict[str, Any] = {"devices": 2, "cluster": "cpu", "training": True, "parallel": kind}
    program = partitioner.compile(module, example, memory=limit, time_limit_s=5, **options)
    assert program.plan.blocks
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.space.startswith(f"{kind} over 2 devices, with ")
    assert 0 < certificate.bound <= certificate.cost
    assert max(program.summary["peak_bytes"]) <= limit
    measured = program.profile(*example, steps=1).measured
    assert measured is not None
    assert all(0 < (rank.peak_bytes or 0) <= limit for rank in measured.ranks)
    program.save(tmp_path / "out")
    again = partitioner.load(tmp_path / "out", module, example)
    assert again.plan == program.plan
    assert again.graph.digest == program.graph.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "batch", "why"),
    [
        ({"parallel": "dp"}, 2, r"dp over 2 devices, with \d+ runs of nodes in blocks"),
        pytest.param(
            *({}, 1, r"spatial over 2 devices, with \d+ runs of nodes in blocks"), marks=SWEEP
        ),
    ],
)
def test_a_refusal_says_which_blocks_were_searched(
    options: dict[str, Any], batch: int, why: str
) -> None:
    module = Loss(chain(nn.ReLU())())
    example = torch.randn(batch, 3, 20, 18), torch.randint(3, (batch, 20, 18))
    with pytest.raises(
        Infeasible,
        match=rf"; within the limit given, none in blocks was found \(searched: {why}\)"
        r"(; not searched within the time limit: micro-batches in blocks"
        r"|; within the limit given, none in blocks was found \(searched: \d micro-batches .*)?$",
    ):
        partitioner.compile(
            module, example, devices=2, training=True, memory=9_000, time_limit_s=1, **options
        )
