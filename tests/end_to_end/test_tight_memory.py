"""Models on devices that hardly hold them: a plan that runs within the limit, or a refusal."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import Loss
from helpers.modules.tight_models import ACTIVATIONS, Tight, tight
from helpers.plans.staged import on_trace, staged, staged_plan, traced
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.memory.lifetimes import exact_lifetimes
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import Plan, resolve
from partitioner.rewrites.graph_writer import chosen
from partitioner.rewrites.staging import changing_nodes
from partitioner.search.stages import cut_search
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError

WIDTH, ROWS = 16, 8


class Two(nn.Module):
    """Two linear layers with an activation, whose backward pass may read its own result."""

    def __init__(self, width: int = WIDTH, activation: str = "relu") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activation(self.a(x))).square().mean()


def planned(
    module: nn.Module, rows: int, width: int, devices: int = 2, **options: Any
) -> ModuleProgram:
    torch.manual_seed(0)
    program = partitioner.compile(
        module, (torch.randn(rows, width),), devices, training=True, cluster="ideal", **options
    )
    assert isinstance(program, ModuleProgram)
    return program


def in_a_v(count: int, activation: str) -> tuple[TracedModule, Plan]:
    """Stages a, activation, b, loss on lanes 0, 1, 1, 0, of which the last computes b again.

    So it takes the activation's result, which is made on lane 1, and two phases of lane 1 read what
    it takes: the weight gradients of b, in stage 2, and the backward pass of the activation, in
    stage 1. Neither waits for the other one.
    """
    torch.manual_seed(0)
    module, batch = Two(activation=activation).double(), torch.randn(ROWS, WIDTH).double()
    trace = traced(module, (batch,), count)
    graph = chosen(trace.traced.offered, {"/b/bias/backward", "/b/addmm/again"})

    def stages(graph: Graph) -> dict[str, int]:
        names = [node.name for node in changing_nodes(graph)]
        return dict(zip(names, (0, 1, 2, 3, 3), strict=True))

    lanes = [(0,), (1,), (1,), (0,)]
    return trace.on(graph), staged_plan(graph, lanes, "zbv", count, stages)


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "softmax", "tanh"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_value_is_fetched_for_the_first_phase_that_reads_it(count: int, activation: str) -> None:
    trace, plan = in_a_v(count, activation)
    program = on_trace(trace, plan)
    batch = torch.randn(ROWS, WIDTH).double()
    loss, gradients = program.gradients(batch)
    expected = program.whole(batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in program.whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def scheduled(trace: TracedModule, plan: Plan) -> Schedule:
    placed, cluster = resolve(trace.graph, plan), on_trace(trace, plan).cluster
    return schedule(trace.graph, placed, cluster, pipeline=plan.pipeline)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_value_is_held_until_the_last_phase_in_the_order_of_the_device(count: int) -> None:
    tasks = scheduled(*in_a_v(count, "relu"))
    runs = [phase for phase, _ in tasks.order.runs(1)]
    wanted = 1, "relu.backward"
    reads = ((task.phase, device, key[0]) for task in tasks.tasks for device, key in task.reads)
    readers = {phase for phase, *local in reads if tuple(local) == wanted}
    assert len(readers) == 2
    lives = StepLives.of(tasks, exact_lifetimes(tasks))
    phases = zip(lives.made.tolist(), lives.read.tolist(), strict=True)
    ((made, last),) = {
        of
        for life, of, kept in zip(lives.tensors, phases, lives.kept, strict=True)
        if kept and (life.device, life.value) == wanted
    }
    turns = {p: [turn for turn, run in enumerate(runs) if run == p] for p in (made, *readers)}
    for phase in readers:
        assert all(a <= b for a, b in zip(turns[made], turns[phase], strict=True))
    assert sum(turns[last]) == max(sum(turns[phase]) for phase in readers)


@pytest.mark.slow
def test_a_tight_training_is_refused_in_words() -> None:
    with pytest.raises(Infeasible, match=r"no plan .*fits: .* bytes are short on device"):
        planned(Two(256), 64, 256, memory=1_200_000, time_limit_s=2)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10_500, 11_000, 12_000])
def test_a_tight_pipeline_fits_and_is_right(limit: int) -> None:
    """Of 12,000 bytes the inputs of a step take 4,096: they lie in its caller's memory."""
    program = planned(Two(), 64, WIDTH, memory=limit, parallel="pp", recompute=True)
    assert max(program.evaluation.needed_bytes.values()) <= limit
    assert program.verify()


@pytest.mark.slow
def test_stages_that_cannot_run_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = cut_search.evaluate

    def of_some(graph: Graph, plan: Plan, *args: Any, **options: Any) -> Any:
        assert plan.pipeline is not None
        if len(set(plan.stages)) == 4:
            raise PhaseError("neither waits for the other")
        return evaluate(graph, plan, *args, **options)

    monkeypatch.setattr(cut_search, "evaluate", of_some)
    program = planned(Two(), 8, WIDTH, parallel="pp", micro_batches=2)
    assert program.plan.pipeline is not None
    assert len(set(program.plan.stages)) == 2
    with pytest.raises(Infeasible, match=r"no stages .* that can run: neither waits for the other"):
        planned(Two(), 8, WIDTH, schedule="zbv", micro_batches=2)


def test_gradients_of_one_micro_batch_are_held_once() -> None:
    width, batch = 128, torch.randn(8, 128)
    peaks = [
        max(
            staged(Two(width), (batch,), [(0,), (1,)], "1f1b", count).evaluation.held_bytes.values()
        )
        for count in (1, 2)
    ]
    layer = 4 * width * width  # its optimizer has two states, gradients have head-room
    assert 4.5 * layer < peaks[0] < 5 * layer
    assert peaks[1] > 6 * layer


class Equal(nn.Module):
    """Layers of equal size without biases."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def placed_whole(count: int, devices: int, optimizer: str, room: float, **options: Any) -> None:
    """Equal layers are placed, and so are names and views of their weights: beside them.

    Args:
        count: Layers.
        devices: Devices.
        optimizer: The optimizer.
        room: Bytes of a device, over those of its share of the layers.
        options: More options.
    """
    width, share = 64, -(-count // devices)
    # Two moments, and what a step computes of two of the weights.
    layer = (2.5 + (3 if optimizer == "adamw" else 0)) * 4 * width * width
    program = planned(
        Equal(count, width),
        4,
        width,
        devices=devices,
        strategy="inter",
        optimizer=optimizer,
        memory=int(room * share * layer) + 8 * 1024,
        **options,
    )
    at = {name: program.plan.groups[node.group] for name, node in program.plan.nodes.items()}
    stored: dict[str, str] = {}  # the weight whose memory a value is
    for node in program.graph.nodes:
        row = row_of(node)
        assert row is not None
        if row.stored:
            stored[node.outputs[0]] = node.name
        elif (row.view or row.again) and node.inputs[0] in stored:
            stored[node.outputs[0]] = stored[node.inputs[0]]
            assert at[node.name] == at[stored[node.inputs[0]]], node.name
        elif node.attrs.get("role") == "gradient":
            assert at[node.name] == at[stored[node.inputs[1]]]
    assert program.verify()


def test_three_layers_are_placed_on_four_devices() -> None:
    placed_whole(3, 4, "sgd", 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_layers_are_placed_on_any_number_of_devices(count: int, optimizer: str) -> None:
    for devices, room in ((2, 1.5), (count + 1, 1.1), (count + 2, 2.0)):
        placed_whole(count, devices, optimizer, room)


@pytest.mark.parametrize("strategy", ["inter", "auto"])
def test_a_placement_that_fits_is_found_behind_one_whose_optimizer_does_not(strategy: str) -> None:
    sizes = (64, 256, 128, 192, 64, 96, 32)
    layers = nn.Sequential(*(nn.Linear(one, two) for one, two in itertools.pairwise(sizes)))
    options: Any = {"strategy": strategy, "training": True, "time_limit_s": 10}
    batch = torch.randn(4, 64)
    alone = partitioner.compile(Loss(layers), (batch,), cluster="1xcpu", **options).evaluation
    # a step of AdamW takes more than the tensors that the search counts
    assert alone.executor_peak[0].bytes > 1_800_000 > alone.held_bytes[0]
    program = partitioner.compile(
        Loss(layers), (batch,), cluster="2xcpu", memory=1_750_000, **options
    )
    assert max(program.evaluation.needed_bytes.values()) <= 1_750_000
    assert program.verify()


def check(seed: int) -> bool:
    """Plan a drawn model within its limit, and run it; whether there is a plan."""
    case: Tight = tight(seed)
    whole = partitioner.compile(copy.deepcopy(case.module), case.example, 1, **case.options)
    limit = case.limit(max(whole.evaluation.needed_bytes.values()))
    options = {**case.options, **case.way, "memory": limit, "time_limit_s": 5}
    try:
        program = partitioner.compile(case.module, case.example, case.devices, **options)
    except (ConstraintError, FrontendError, Infeasible, OptionError, PipelineScheduleError):
        return False
    needed = program.evaluation.needed_bytes
    assert max(needed.values()) <= limit, f"seed {seed}: {needed} above {limit}"
    assert program.verify(), f"seed {seed}: {case.way} within {limit} bytes"
    return True


# Of these hardly a half leave room for the way that is drawn.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_limits_between_what_fits_nothing_and_what_fits_whole(seed: int) -> None:
    check(seed)
