"""Models on devices that hardly hold them: a plan that runs within the limit, or a refusal."""

import copy
from typing import Any

import pytest
import torch
from staged import on_trace, staged_plan, traced
from tight_models import ACTIVATIONS, Tight, tight
from torch import Tensor, nn

import partitioner
from partitioner.compiled.module import ModuleProgram
from partitioner.cost_model.memory import StepLives, exact_lifetimes
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.offers import chosen
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline import PipelineScheduleError
from partitioner.ir.plan import Plan, resolve
from partitioner.search import pipelines
from partitioner.solver import Infeasible
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.staging import changing_nodes

WIDTH, ROWS = 16, 8


class Two(nn.Module):
    """Two linear layers with an activation, whose backward pass may read its own result."""

    def __init__(self, width: int = WIDTH, activation: str = "relu") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activation(self.a(x))).square().mean()


def planned(module: nn.Module, rows: int, width: int, **options: Any) -> ModuleProgram:
    torch.manual_seed(0)
    program = partitioner.compile(
        module, (torch.randn(rows, width),), devices=2, training=True, cluster="ideal", **options
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
    program = on_trace(trace, plan)
    return schedule(
        trace.graph, resolve(trace.graph, plan), program.cluster, pipeline=plan.pipeline
    )


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_value_is_held_until_the_last_phase_in_the_order_of_the_device(count: int) -> None:
    tasks = scheduled(*in_a_v(count, "relu"))
    assert tasks.order is not None
    runs = tasks.order.runs(1)
    readers = {
        t.phase for t in tasks.tasks for d, (v, _) in t.reads if (d, v) == (1, "relu.backward")
    }
    assert len(readers) == 2
    lives = StepLives.of(tasks, tasks.order, exact_lifetimes(tasks))
    (held,) = {
        phases for life, phases in lives.kept if (life.device, life.value) == (1, "relu.backward")
    }
    turns = {
        phase: [i for i, run in enumerate(runs) if run[0] == phase] for phase in {*held, *readers}
    }
    for phase in readers:
        assert all(a <= b for a, b in zip(turns[held[0]], turns[phase], strict=True))
    assert sum(turns[held[1]]) == max(sum(turns[phase]) for phase in readers)


def test_a_tight_training_is_refused_in_words() -> None:
    with pytest.raises(Infeasible, match="no plan fits: .* bytes are short on device"):
        planned(Two(256), 64, 256, memory=1_200_000, time_limit_s=2)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "needed"), [(7_000, 7_000), (9_000, 9_000), (12_000, 12_000)])
def test_a_tight_pipeline_fits_and_is_right(limit: int, needed: int) -> None:
    program = planned(Two(), 64, WIDTH, memory=limit, parallel="pp", recompute=True)
    assert max(program.evaluation.needed_bytes.values()) <= needed
    assert program.verify()


def test_stages_that_cannot_run_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = pipelines.evaluate

    def of_some(graph: Graph, plan: Plan, *args: Any, **options: Any) -> Any:
        assert plan.pipeline is not None
        if len(set(plan.pipeline.stages)) == 4:
            raise PhaseError("neither waits for the other")
        return evaluate(graph, plan, *args, **options)

    monkeypatch.setattr(pipelines, "evaluate", of_some)
    program = planned(Two(), 8, WIDTH, parallel="pp", micro_batches=2)
    assert program.plan.pipeline is not None
    assert len(set(program.plan.pipeline.stages)) == 2
    with pytest.raises(Infeasible, match="no stages .* that can run: neither waits for the other"):
        planned(Two(), 8, WIDTH, schedule="zbv", micro_batches=2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_gradients_of_one_micro_batch_are_held_once(optimizer: str) -> None:
    width = 128
    program = planned(Two(width), 8, width, parallel="pp", micro_batches=1, optimizer=optimizer)
    apart = planned(Two(width), 8, width, strategy="inter", optimizer=optimizer, memory=450_000)
    layer = 4 * width * width
    state = 2 if optimizer == "adamw" else 0
    for evaluation in (program.evaluation, apart.evaluation):
        held = max(evaluation.held_bytes.values())  # weights, state, and gradients with head-room
        assert (2.5 + state) * layer < held < (2.7 + state) * layer
    sums = planned(Two(width), 8, width, parallel="pp", micro_batches=2, optimizer=optimizer)
    assert max(sums.evaluation.held_bytes.values()) > (3.9 + state) * layer


def check(seed: int) -> bool:
    """Plan a drawn model within its limit, and run it; whether there is a plan."""
    case: Tight = tight(seed)
    whole = partitioner.compile(copy.deepcopy(case.module), case.example, 1, **case.options)
    limit = case.limit(max(whole.evaluation.needed_bytes.values()))
    options = {**case.options, **case.way, "memory": limit, "time_limit_s": 5}
    try:
        program = partitioner.compile(case.module, case.example, case.devices, **options)
    except (ConstraintError, Infeasible, OptionError, PipelineScheduleError):
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
