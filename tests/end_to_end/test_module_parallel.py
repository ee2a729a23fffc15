"""Forced kinds of parallelism: what they store and communicate, and that gradients are equal."""

import collections
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import partitioner
from helpers.modules.small_gpt import small_gpt
from helpers.plans.cost_cases import SLOW
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.parallel_jobs import JOBS
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.schedule import buckets
from partitioner.ir.errors import OptionError
from partitioner.ir.program import CommKind
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.spaces import SearchError

KINDS = [
    ("dp", 2, None),
    pytest.param("zero1", 2, None, marks=pytest.mark.slow),  # the same row as zero2
    ("zero2", 2, None),
    ("zero3", 2, None),
    ("tp", 2, None),
    ("dp+tp", 4, {"dp": 2, "tp": 2}),
    pytest.param("zero3+tp", 4, {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
]


def of_own(kind: str | None, devices: int, mesh: tuple[tuple[str, int], ...] = ()) -> ModuleProgram:
    """A program of the small GPT; no test has it but the caller, which may have changed limits."""
    model, batch = small_gpt()
    program = partitioner.compile(
        model,
        batch,
        devices=devices,
        training=True,
        parallel=kind,
        mesh=dict(mesh) or None,
        time_limit_s=2 if len(mesh) > 1 else 10,  # a mesh of two axes takes all the time there is
    )
    assert isinstance(program, ModuleProgram)
    return program


_compiled = cache(of_own)


def compiled(kind: str | None, devices: int, mesh: dict[str, int] | None) -> ModuleProgram:
    """Each one once a process."""
    return _compiled(kind, devices, tuple((mesh or {}).items()))


def stored_axes(program: ModuleProgram) -> dict[str, set[str]]:
    """Axes that cut each parameter at rest."""
    return {
        name: set(program.programs.homes[value].placement.sharding.axes)
        for name, value in program.traced.stored.items()
    }


def kinds_of(program: ModuleProgram) -> collections.Counter[str]:
    return collections.Counter(str(comm.kind) for comm in program.programs.ranks[0].comms)


def reduces_each_gradient_once(program: ModuleProgram) -> None:
    assert set().union(*stored_axes(program).values()) == set()
    parameters = len(list(program.whole.parameters()))
    comms = kinds_of(program)
    # Beside the gradients: the loss's sum and count. Logits are gathered for the caller.
    assert parameters <= comms["all_reduce"] <= parameters + 4
    assert comms["reduce_scatter"] == 0


def places(program: ModuleProgram, which: str, *words: str) -> list[int]:
    """Where operators stand in a pass of rank 0."""
    nodes = [str(node.target) for node in program.rank(0, which).graph.nodes]
    return [place for place, target in enumerate(nodes) if any(word in target for word in words)]


def test_gradients_travel_while_the_backward_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)  # all of this model would go in one bucket
    program = of_own("dp", 2)
    products = places(program, "backward", "aten.mm")
    sums = places(program, "backward", "all_reduce")
    waits = places(program, "backward", "wait_tensor")
    early = [place for place in sums if products[0] < place < products[-1]]
    assert early
    # one wait before the products is for the count of the loss; gradients have theirs at the end
    assert not [place for place in waits if products[0] < place < products[-1]]
    assert len([place for place in waits if place > products[-1]]) >= len(early)


def test_parameters_are_gathered_ahead_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    program = of_own("zero3", 2)
    sent = places(program, "forward", "all_gather")
    waits = places(program, "forward", "wait_tensor")
    products = places(program, "forward", "mm.default")
    beside = [
        product
        for product in products
        if sum(start < product for start in sent) > sum(wait < product for wait in waits)
    ]
    assert len(beside) > len(products) / 2  # with a gather on its way


def test_rows_are_gathered_and_scattered_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    program = of_own("zero3", 2)
    homes = (program.programs.homes[value].placement for value in program.traced.stored.values())
    assert all(home.sharding.dims[0].axes == ("dp",) for home in homes)
    assert places(program, "forward", "all_gather")
    assert places(program, "backward", "reduce_scatter")
    assert not places(program, "forward", "aten.cat") + places(program, "backward", "aten.cat")


def test_a_part_of_a_sum_is_taken_once_the_pass_ends() -> None:
    """Where a reduce-scatter is slow, gradients are summed together, and a copy of a part is kept.

    What waits for the first of them would part them from the others.
    """
    link = LinkLevel("link", 2, 1e9, 1e-6, scatter_bytes_per_s=1e6)
    model, batch = small_gpt()
    program = partitioner.compile(
        *(model, batch),
        cluster=Cluster("slow to scatter", (SLOW,) * 2, (link,)),
        training=True,
        parallel="zero3",
        time_limit_s=10,
    )
    assert isinstance(program, ModuleProgram)
    comms, parameters = kinds_of(program), len(list(model.parameters()))
    assert min(comms["all_reduce"], comms["slice"]) > parameters / 2
    assert len(places(program, "backward", "all_reduce")) < parameters / 4
    assert len(places(program, "backward", "aten.clone")) > parameters / 2
    loss, _ = model(*batch)
    loss.backward()
    _, gradients = program.gradients(*batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


def stores_shards_and_scatters_gradients(three: ModuleProgram) -> None:
    two = compiled("zero2", 2, None)
    for program in (two, three):
        assert all(axes == {"dp"} for axes in stored_axes(program).values())
        assert kinds_of(program)["reduce_scatter"] == len(list(program.whole.parameters()))
    assert kinds_of(three)["all_gather"] > kinds_of(two)["all_gather"]
    held = [max(p.evaluation.peak[d].bytes for d in (0, 1)) for p in (three, two)]
    assert held[0] < held[1]


def has_two_sums_a_layer_and_pass(program: ModuleProgram) -> None:
    """Megatron's: one after attention and one after the MLP, forward and backward."""
    axes = stored_axes(program)
    assert all(axes[f"blocks.0.{name}.weight"] == {"tp"} for name in ("q", "k", "v", "o", "up"))
    assert kinds_of(program)["all_reduce"] <= 8


#: What else is true of a kind.
CHECKS = {
    "dp": reduces_each_gradient_once,
    "zero3": stores_shards_and_scatters_gradients,
    "tp": has_two_sums_a_layer_and_pass,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "devices", "mesh"), KINDS)
def test_gradients_equal_one_process(kind: str, devices: int, mesh: dict[str, int] | None) -> None:
    program = compiled(kind, devices, mesh)
    model, batch = small_gpt()
    loss, logits = model(*batch)
    loss.backward()
    (found, seen), gradients = program.gradients(*batch)
    torch.testing.assert_close(found, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen, logits, atol=1e-5, rtol=1e-5)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)
    if kind in CHECKS:
        CHECKS[kind](program)


class Regression(nn.Module):
    """Every loss that compares elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Loss."""
        found = self.layer(x)
        losses = [
            functional.mse_loss(found, y),
            functional.l1_loss(found, y),
            functional.smooth_l1_loss(found, y, beta=0.5),
            functional.huber_loss(found, y, delta=0.5),
            functional.soft_margin_loss(found, y),
            functional.binary_cross_entropy_with_logits(found, y),
            functional.binary_cross_entropy(found.sigmoid(), y.sigmoid()),
        ]
        return torch.stack(losses).sum()


@pytest.mark.parametrize("devices", [2, 3])
def test_statistics_of_a_norm_are_summed_once_and_not_cut(devices: int) -> None:
    """They no longer depend on the batch, so that nothing is gained by cutting them."""
    torch.manual_seed(0)
    norms = 2
    net = nn.Sequential(
        *(layer for _ in range(norms) for layer in (nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))),
        nn.ReLU(),
    )

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    program = partitioner.compile(
        Summed(), torch.randn(6, 6, 9, 7), devices=devices, training=True, parallel="dp"
    )
    comms = [task.comm for task in program.schedule.tasks if task.comm is not None]
    assert {comm.kind for comm in comms} <= {CommKind.ALL_REDUCE}
    assert sum(comm.source.startswith("batch_norm_sums") for comm in comms) == norms
    assert program.verify()


def test_losses_over_elements_are_cut_with_the_batch() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.randn(8, 8)
    program = partitioner.compile(Regression(), batch, devices=2, training=True, parallel="dp")
    assert program.verify()


def test_unknown_kinds_and_meshes_are_refused() -> None:
    model, batch = small_gpt()

    def compile_with(**options: object) -> None:
        partitioner.compile(model, batch, training=True, **options)  # type: ignore[arg-type]

    with pytest.raises(SearchError, match="'zero9' is not one of dp, zero1, zero2, zero3, tp"):
        compile_with(devices=2, parallel="zero9")
    with pytest.raises(SearchError, match="dp and zero3 need the same mesh axis, dp"):
        compile_with(devices=4, parallel="dp+zero3", mesh={"dp": 2, "tp": 2})
    with pytest.raises(SearchError, match="of at least two devices each: 3 devices have none"):
        compile_with(devices=3, parallel="dp+tp")
    with pytest.raises(
        OptionError, match="'zero1' in inference: it cuts optimizer state, and there"
    ):
        partitioner.compile(model, batch, devices=2, parallel="zero1")
    with pytest.raises(
        ConstraintError, match=r"the batch \(dim 0 of 'ids' and dim 0 of 'labels'\) has 8"
    ):
        compile_with(devices=9, parallel="dp")
    with pytest.raises(OptionError, match="'lbfgs' is not one of adamw"):
        compile_with(devices=2, optimizer="lbfgs")


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_train_to_the_same_weights(run_job: RunJob, job: str) -> None:
    run_job("kinds/parallel_jobs.py", job)
