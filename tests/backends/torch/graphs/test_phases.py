"""Steps of micro-batches, all ranks in one process, against plain gradient accumulation."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from helpers.modules.staged_models import (
    Added,
    Batch,
    Detached,
    Model,
    Plain,
    Tied,
    Towers,
    UNet,
    seeded,
)
from helpers.plans.staged import (
    Devices,
    Stages,
    accumulated,
    on_trace,
    staged,
    staged_plan,
    tensors,
    traced_and_cut,
)
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.eager import add, add_product
from partitioner.backends.torch.graphs.micro_batches import MicroBatches
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.rewrites.staging import changing_nodes

LANES: dict[str, Devices] = {
    "gpipe": [(0,), (1,)],
    "1f1b": [(0,), (1,)],
    "zb1": [(0,), (1,)],
    "interleaved": [(0,), (1,), (0,), (1,)],
    "zbv": [(0,), (1,), (1,), (0,)],
    "dualpipev": [(0,), (1,), (1,), (0,)],
}


class Normed(nn.Module):
    """Gradients of its norm's weights are partial where its batch is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.down(self.norm(self.up(x)))
        return nn.functional.mse_loss(outputs, y)


@cache
def traced(
    kind: Model, size: int, micro_batches: int, parallel: str, devices: int
) -> tuple[TracedModule, Plan | None]:
    """A trace, which schedules and stages share, with the cuts of stages of so many devices."""
    return traced_and_cut(seeded(kind), kind.batch(0, size), micro_batches, parallel, devices)


def planned(
    kind: Model,
    devices: Devices,
    schedule: str,
    micro_batches: int = 4,
    size: int = 8,
    parallel: str = "",
    stages: Stages | None = None,
) -> ModuleProgram:
    """A module on a plan in stages, with its first weights and buffers."""
    trace, cuts = traced(kind, size, micro_batches, parallel, len(devices[0]))
    trace.module.load_state_dict(seeded(kind).state_dict())
    plan = staged_plan(trace.graph, devices, schedule, micro_batches, stages, cuts)
    return on_trace(trace, plan)


def check(program: ModuleProgram, kind: Model, batch: Batch, micro_batches: int) -> None:
    """Results, gradients and buffers of a step are those of gradient accumulation."""
    plain = seeded(kind)
    result, gradients = program.gradients(*batch)
    expected = accumulated(plain, batch, micro_batches)
    for one, other in zip(tensors(result), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(program.whole.get_buffer(name), buffer)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("kind", [Tied, UNet, Towers, Plain])
def test_a_step_is_gradient_accumulation(kind: Model, name: str) -> None:
    batch = kind.batch(0)
    check(planned(kind, LANES[name], name), kind, batch, 4)


@pytest.mark.parametrize("kind", [Tied, UNet])
@pytest.mark.parametrize("devices", [[(0,), (1,), (0,)], [(0,), (1,), (2,), (3,)], [(0,)]])
def test_any_lanes(kind: Model, devices: Devices) -> None:
    batch = kind.batch(1)
    check(planned(kind, devices, "1f1b"), kind, batch, 4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Tied, UNet, Towers, Plain])
@pytest.mark.parametrize("parallel", ["dp", "tp", "zero3"])
def test_stages_of_two_devices(kind: Model, parallel: str) -> None:
    batch = kind.batch(2)
    devices = [(0, 1), (2, 3)]
    for schedule in ("1f1b", "zb1"):
        check(planned(kind, devices, schedule, 2, parallel=parallel), kind, batch, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_a_parameter_whose_gradient_is_made_in_another_stage(schedule: str) -> None:
    batch = Detached.batch(3)
    check(planned(Detached, [(0,), (1,)], schedule), Detached, batch, 4)


@pytest.mark.parametrize(("schedule", "parallel"), [("1f1b", ""), ("zb1", "dp")])
def test_a_parameter_that_is_added_to_the_loss(schedule: str, parallel: str) -> None:
    """Its gradient is that of the loss, which each micro-batch has of its own."""
    batch, devices = Added.batch(0), [(0, 1), (2, 3)] if parallel else [(0,), (1,)]
    check(planned(Added, devices, schedule, parallel=parallel), Added, batch, 4)


@pytest.mark.parametrize("parallel", ["", "dp", "tp"])
def test_a_cut_inside_of_the_loss(parallel: str) -> None:
    def stages(graph: Graph) -> dict[str, int]:
        names = [node.name for node in changing_nodes(graph)]
        return {name: int(at >= names.index("/masked_fill")) for at, name in enumerate(names)}

    batch, devices = Plain.batch(0), [(0, 1), (2, 3)] if parallel else [(0,), (1,)]
    program = planned(Plain, devices, "zb1", parallel=parallel, stages=stages)
    check(program, Plain, batch, 4)


def test_dropout_is_drawn_for_each_micro_batch_wherever_it_is() -> None:
    batch = Tied.batch(0)
    alone = staged(seeded(Tied, dropout=0.4), batch, [(0,)], "gpipe", 4)
    apart = staged(seeded(Tied, dropout=0.4), batch, [(0,), (1,)], "zb1", 4)
    losses = []
    for program in (alone, apart):
        loss, gradients = program.gradients(*batch, seed=7)
        losses.append([loss, *gradients.values()])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other)
    again, _ = apart.gradients(*batch, seed=8)
    assert again != losses[0][0]


def test_micro_batches_of_a_step_draw_other_masks() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.drop = nn.Parameter(torch.ones(6)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.drop(x * self.weight)
            return y.mean(), y

    x = torch.ones(8, 6)
    _, scores = staged(Masked(), (x,), [(0,)], "gpipe", 4).gradients(x)[0]
    rows = {tuple(part.flatten().tolist()) for part in scores.chunk(4)}
    assert len(rows) == 4


def test_inference_in_micro_batches() -> None:
    batch = UNet.batch(0)
    module = seeded(UNet).eval()
    program = staged(module, batch, [(0,), (1,)], "forward", 4, training=False)
    for one, other in zip(tensors(program(*batch)), tensors(module(*batch)), strict=True):
        torch.testing.assert_close(one, other)
    assert program.verify().equal


@pytest.mark.parametrize("kind", [Tied, UNet, Plain])
def test_verify(kind: Model) -> None:
    verification = planned(kind, [(0,), (1,)], "zb1").verify()
    assert verification.equal
    assert any(output.name.startswith("grad:") for output in verification.outputs)


def test_a_result_that_is_neither_of_the_batch_nor_a_mean_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x).mean(), self.layer.weight.square()

    with pytest.raises(BackendError, match=r"micro_batches=4: the module's result .* neither as"):
        staged(Whole().double(), Plain.batch(0)[:1], [(0,), (1,)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parallel", ["", "dp"])
@pytest.mark.parametrize("kind", [Tied, UNet, Towers, Plain])
def test_the_last_micro_batch_may_be_smaller(kind: Model, parallel: str) -> None:
    batch = kind.batch(0, 14)
    devices = [(0, 1), (2, 3)] if parallel else [(0,), (1,)]
    program = planned(kind, devices, "zb1", size=14, parallel=parallel)
    micro = program.model.module.micro
    assert micro is not None
    assert micro.sizes == (4, 4, 4, 2)
    check(program, kind, batch, 4)
    if not parallel:
        assert program.verify().equal


@pytest.mark.slow
def test_a_smaller_last_micro_batch_draws_its_own_masks() -> None:
    batch = Tied.batch(0, 14)
    losses = [
        staged(seeded(Tied, dropout=0.4), batch, devices, "1f1b", 4).gradients(*batch, seed=3)[0]
        for devices in ([(0,)], [(0,), (1,)])
    ]
    torch.testing.assert_close(*losses)


def test_a_batch_of_fewer_micro_batches_is_refused() -> None:
    with pytest.raises(BackendError, match=r"micro_batches=4: the batch of 5 has 3 parts of 2 or "):
        staged(seeded(Plain), Plain.batch(0, 5), [(0,), (1,)], "1f1b", 4)


def test_a_last_micro_batch_of_fewer_samples_than_parts_is_computed_whole() -> None:
    batch = Plain.batch(0, 7)
    program = staged(seeded(Plain), batch, [(0, 1), (2, 3)], "1f1b", 4, parallel="dp")
    assert program.model.module.micro is not None
    assert program.model.module.micro.sizes == (2, 2, 2, 1)
    check(program, Plain, batch, 4)
    assert program.verify().equal


def test_a_smaller_last_micro_batch_whose_sums_are_whole_among_partial_ones_is_refused() -> None:
    batch = torch.ones(7, 4), torch.ones(7, 4)
    program = staged(Normed(), batch, [(0, 1), (2, 3)], "1f1b", 4, parallel="dp")
    with pytest.raises(BackendError, match=r"the last micro-batch, .* keeps other values"):
        program.verify()


def test_no_batch_is_refused() -> None:
    with pytest.raises(BackendError, match="no argument of the call has a batch dim"):
        staged(nn.Identity(), (torch.ones(()),), [(0,)])


def test_arguments_that_are_no_batch_go_to_all_micro_batches() -> None:
    micro = MicroBatches((2, 2), frozenset({"x"}), frozenset())
    x, table = torch.arange(4), torch.arange(3)
    parts = micro.parts({"x": x, "table": table})
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(part["table"] is table for part in parts)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_values_that_the_end_of_a_step_reads_are_not_kept_by_micro_batch(schedule: str) -> None:
    program = planned(Plain, [(0, 1), (2, 3)], schedule, parallel="dp")
    for phases in program.ranks.all_ranks.ranks:
        at_end = [g.arguments for p, g in phases.graphs.items() if phases.is_once(p)]
        summed = {name for arguments in at_end for name in arguments} & phases.summed
        assert summed
        assert summed <= {name for names in phases.adds.values() for name in names}


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_passes_add_gradients_to_their_sums(schedule: str) -> None:
    """All of them, those of weights in their products of matrices."""
    program = planned(Plain, [(0, 1), (2, 3)], schedule, parallel="dp")
    for phases in program.ranks.all_ranks.ranks:
        added = [name for of in phases.adds.values() for name in of]
        assert sorted(added) == sorted(phases.summed)
        passes = [phases.eager(phase) for phase in phases.graphs]
        calls = [node.target for one in passes for node in one.graph.nodes]
        weights = [name for name in phases.summed if len(phases.types[name].shape) == 2]
        assert calls.count(add_product) == len(weights) > 0
        assert calls.count(add) == len(phases.summed) - len(weights)
