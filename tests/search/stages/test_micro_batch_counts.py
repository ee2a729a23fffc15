"""Numbers of micro-batches that are tried, and plans that a known one makes needless."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.executors import PYTORCH
from partitioner.examples import build, llama
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.search.outcome import NoCheaper, Outcome
from partitioner.search.request import Budget, Request, StageClock
from partitioner.search.stages.micro_batch_counts import (
    COUNTS,
    BatchBytes,
    CountSearch,
    LeastStep,
    Traces,
    Trial,
    usual_trials,
)
from partitioner.search.stages.pipelines import find_pipeline
from partitioner.search.ways.model_graphs import ModelGraphs
from partitioner.search.ways.parts import InStages, Parts
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.spaces import SearchError


def test_on_few_devices_the_usual_numbers_are_tried_with_stages_of_all_sizes() -> None:
    trials = usual_trials(24, resolve_cluster("4xh100"), Request())
    assert trials == (Trial(1), Trial(2), Trial(4), Trial(8), Trial(12))
    assert usual_trials(24, resolve_cluster("4xh100"), Request(micro_batches=6)) == (Trial(6),)


@pytest.mark.parametrize(
    ("batch", "cluster", "mesh", "expected"),
    [
        # Each of 8 nodes of a stage keeps a sample of each of 8 micro-batches, ...
        (64, "16x8xh100", None, {8: (64,), 16: (32,), 32: (16,), 64: (8,)}),
        (64, "16x8xh100", {"pp": 4}, {16: (32,)}),
        (64, "16x8xh100", {"pp": 4, "dp": 4, "tp": 8}, {16: (32,)}),
        # four micro-batches for each stage fill a pipeline, ...
        (4096, "16x8xh100", None, {8: (64,), 16: (32,), 32: (16,), 64: (8,)}),
        # a short batch has few, ...
        (16, "16x8xh100", None, {2: (64,), 4: (32,), 8: (16,), 16: (8,)}),
        (1, "4x8xh100", None, {1: (16, 8)}),
        (15, "3x8xh100", None, {15: (8,)}),
        # and where there are no nodes, stages are of any size.
        (64, "24xcpu", None, {4: (12,), 8: (8, 6), 16: (4, 3), 32: (2,), 64: (1,)}),
    ],
)
def test_on_many_devices_each_size_of_a_stage_has_a_number_of_its_own(
    batch: int, cluster: str, mesh: Mapping[str, int] | None, expected: Mapping[int, tuple[int]]
) -> None:
    trials = usual_trials(batch, resolve_cluster(cluster), Request(mesh=mesh))
    assert {trial.count: trial.sizes for trial in trials} == expected


def test_a_number_that_is_asked_for_has_stages_whose_nodes_can_share_the_batch() -> None:
    cluster = resolve_cluster("16x8xh100")
    assert usual_trials(64, cluster, Request(micro_batches=16)) == (Trial(16, (8, 16, 32)),)
    assert usual_trials(64, cluster, Request(micro_batches=64)) == (Trial(64, (8,)),)


class Stack(nn.Module):
    """Square layers and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("fitting", [{4}, {4, 8}, {16}, {2, 4}, {8, 16, 32}, {32}, set()])
@pytest.mark.parametrize("impossible", [set(), {32}, {16, 32}])
def test_fewest_finds_a_number_that_fits_where_others_do_not(
    fitting: set[int], impossible: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch of 32 on 4 devices: with one sample on each, one sample, or the last possible."""
    planned: list[int] = []

    def plan(search: CountSearch, count: int, *_: object) -> bool:
        planned.append(count)
        if count in impossible:
            search.impossible[count] = ConstraintError("ranks outnumber rows")
        return count in fitting - impossible

    monkeypatch.setattr(CountSearch, "_plan", plan)
    monkeypatch.setattr(CountSearch, "best", property(lambda _: planned))
    best = SimpleNamespace(evaluation=SimpleNamespace(step_s=1.0))
    request = Request()
    search = CountSearch(lambda _: (), resolve_cluster("4xh100"), request, Budget.of(request))
    search.outcomes = defaultdict(lambda: best)  # type: ignore[assignment]
    found = search.fewest([2, 4, 8, 16, 32])
    possible = fitting - impossible
    held = {2, 4, 8} | {max({2, 4, 8, 16, 32} - impossible)}
    assert (found is not None) == bool(possible & held)


def test_fewest_looks_beside_the_number_that_comes_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def plan(search: CountSearch, count: int, *_: object) -> bool:
        planned.append(count)
        search.refused[count] = Infeasible("short", bytes_short=abs(count - 20.0))
        return count == 16

    monkeypatch.setattr(CountSearch, "_plan", plan)
    monkeypatch.setattr(CountSearch, "best", property(lambda _: planned))
    best = SimpleNamespace(evaluation=SimpleNamespace(step_s=1.0))
    request, cluster = Request(), resolve_cluster("4xh100")
    search = CountSearch(lambda _: (), cluster, request, Budget.of(request))
    search.outcomes = defaultdict(lambda: best)  # type: ignore[assignment]
    assert search.fewest([2, 4, 8, 16, 32, 64]) is not None
    assert 16 in planned


MIB = 2**20


def tried(
    monkeypatch: pytest.MonkeyPatch,
    held: BatchBytes,
    memory: int,
    devices: int,
    short: int,
    fits: int,
    sizes: tuple[int, ...] | None = None,
) -> list[int]:
    """The numbers that are tried where `fits` fits, and all others are short of so many MiB."""
    planned: list[int] = []

    def plan(search: CountSearch, count: int, *_: object) -> bool:
        planned.append(count)
        search.refused[count] = Infeasible("short", bytes_short=short * MIB)
        return count == fits

    monkeypatch.setattr(CountSearch, "_plan", plan)
    monkeypatch.setattr(CountSearch, "best", property(lambda _: planned))
    monkeypatch.setattr(CountSearch, "_cost", lambda *_: 1.0)
    request, cluster = Request(), resolve_cluster(f"{devices}xh100").with_memory(memory * MIB)
    budget = Budget.of(request)
    search = CountSearch(lambda _: (), cluster, request, budget, sizes, held=lambda: held)
    search.fewest([1, 2, 4, 8, 16, 32, 64])
    return planned


@pytest.mark.parametrize(
    ("sizes", "moving", "first"),
    [
        (None, 100, 1),  # 4 devices share 25 MiB each
        (None, 800, 2),  # 100 MiB each, of two micro-batches
        ((4,), 1700, 4),
        ((1, 2), 100, 1),  # each holds as many micro-batches as there are stages
        ((1, 2), 800, 8),
        ((1, 2), 1700, 16),
        ((1, 2), 9000, 64),
    ],
)
def test_fewest_begins_with_the_number_whose_bytes_the_devices_have(
    sizes: tuple[int, ...] | None, moving: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of devices of 150 MiB, which keep 25 MiB each."""
    held = BatchBytes(100 * MIB, moving * MIB)
    assert tried(monkeypatch, held, 150, 4, 0, first, sizes)[0] == first


@pytest.mark.parametrize(("short", "then"), [(1, 8), (60, 16), (90, 64)])
def test_fewest_goes_on_with_what_makes_up_for_the_bytes_that_are_short(
    short: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = BatchBytes(100 * MIB, 400 * MIB)
    assert tried(monkeypatch, held, 200, 1, short, then)[:2] == [4, then]


def test_fewest_of_no_numbers_is_none() -> None:
    request = Request()
    search = CountSearch(lambda _: (), resolve_cluster("1xh100"), request, Budget.of(request))
    assert search.fewest([]) is None


@pytest.mark.parametrize(("left_s", "expected"), [(1.0, True), (9.0, False)])
def test_no_number_is_begun_whose_trace_takes_what_is_left(left_s: float, expected: bool) -> None:
    request, cluster = Request(), resolve_cluster("4xh100")
    budget = replace(Budget.of(request).anew(left_s), best_s=1.0)
    traces = Traces(5.0, is_there=lambda count: count == 2)
    search = CountSearch(lambda _: (), cluster, request, budget, traces=traces)
    assert [search._is_late(2), search._is_late(4)] == [False, expected]
    assert budget.work.stopped == expected


def test_seconds_are_kept_once_for_the_trace_that_confirms_guesses() -> None:
    request, cluster = Request(), resolve_cluster("4xh100")
    budget = Budget.of(request).anew(20.0)
    traces = Traces(5.0, is_guessed=lambda count: count > 2)
    search = CountSearch(lambda _: (), cluster, request, budget, traces=traces)
    before = budget.work.deadline
    for count in (1, 2, 4, 8):
        search._keep_for_trace(count)
    assert before - budget.work.deadline == 5.0


@pytest.mark.parametrize(
    ("costs", "tried"),
    [
        ({1: 1.1, 2: 1.0, 4: 1.3, 8: 0.5}, [1, 2, 4]),  # rises, far above the best
        ({1: 1.1, 2: 1.0, 4: 1.1, 8: 0.5}, [1, 2, 4, 8]),
        ({1: 2.0, 2: 1.9, 4: 1.5, 8: 1.4}, [1, 2, 4, 8]),  # falls
        ({1: None, 2: 1.9, 4: None, 8: 1.4}, [1, 2, 4, 8]),
    ],
)
def test_numbers_end_where_steps_get_far_longer(
    costs: Mapping[int, float | None], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def plan(search: CountSearch, count: int, *_: object) -> bool:
        planned.append(count)
        if costs[count] is not None:
            figures = SimpleNamespace(step_s=costs[count])
            search.outcomes[count] = SimpleNamespace(evaluation=figures)  # type: ignore[assignment]
        return costs[count] is not None

    monkeypatch.setattr(CountSearch, "_plan", plan)
    monkeypatch.setattr(CountSearch, "best", property(lambda _: planned))
    request, cluster = Request(), resolve_cluster("4xh100")
    budget = replace(Budget.of(request), best_s=1.05)
    search = CountSearch(lambda _: (), cluster, request, budget, least=lambda count: count / 10)
    search.all([Trial(count) for count in costs])
    assert planned == tried
    assert {n: error.bound for n, error in search.slower.items()} == {
        n: n / 10 for n in costs if n not in tried
    }


def test_each_number_has_steps_whatever_those_before_it_took() -> None:
    budgets: list[Budget] = []

    def find(
        _graph: Graph, _cluster: object, _request: object, budget: Budget, *_: object
    ) -> Outcome:
        budgets.append(budget)
        raise Infeasible("short")

    request, cluster = Request(), resolve_cluster("4xh100")
    graph = load_onnx(build("tiny")).graph
    search = CountSearch(lambda _: (graph,), cluster, request, Budget.of(request), find=find)
    search.budget.work.spend(search.budget.work.steps)
    assert not search._plan(2)
    assert [budget.work.left for budget in budgets] == [search.budget.work.steps / COUNTS]
    assert budgets[0].work.left_s == pytest.approx(search.budget.work.left_s / 2, rel=0.01)


def test_the_whole_batch_on_one_mesh_is_no_number_of_micro_batches() -> None:
    request, cluster = Request(), resolve_cluster("4xh100")
    asked = CountSearch(lambda _: (), cluster, request, Budget.of(request), (1, 2, 4))
    beside = replace(asked, least=lambda _count: 0.0)
    assert [(asked._sizes(n), beside._sizes(n)) for n in (1, 2)] == [
        ((1, 2, 4), (1, 2)),
        ((1, 2, 4), (1, 2, 4)),
    ]


def _in_stages(bound: Callable[[int], float] | None) -> InStages:
    request, cluster, silent = Request(), resolve_cluster("4xh100"), StageClock(lambda _: None)
    graphs = SimpleNamespace(
        is_there=lambda _count: True,
        is_guessed=lambda _count: False,
        last_in=lambda _count: None,
        even_counts=lambda: (1, 2, 4),
    )
    model = cast("ModelGraphs", graphs)
    parts = Parts(model, cluster, request, silent, lambda: BatchBytes(0, 0))
    return InStages(parts, (1, 2, 4), bound=bound)


def test_micro_batches_on_one_mesh_are_searched_once() -> None:
    """Where nothing else fits, they are a way of their own."""
    budget = Budget.of(Request())
    known = replace(budget, best_s=1.0)
    weighed, asked = _in_stages(lambda _count: 0.0), _in_stages(None)
    assert weighed._counts(budget).sizes == (1, 2)
    assert weighed._counts(known).sizes == asked._counts(budget).sizes == (1, 2, 4)


@pytest.mark.parametrize(("spent", "goes_on"), [(0.01, False), (0.5, True)])
def test_stages_go_on_where_their_steps_or_the_clock_ended(
    spent: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Found:
        more: object = "more"

    def best(_: InStages, budget: Budget) -> Found:
        budget.work.spend(spent * budget.work.steps)
        return Found()

    monkeypatch.setattr(InStages, "_best", best)
    monkeypatch.setattr(InStages, "_named", lambda _, outcome, _known: outcome)
    outcome = _in_stages(lambda _count: 0.0).search(Budget.of(Request()))
    assert (outcome.more is not None) == goes_on


def test_a_plan_of_one_kind_is_not_proven_to_be_the_best_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = load_onnx(build("tiny")).graph
    request, cluster = Request(time_limit_s=5), resolve_cluster("4xh100")
    before = find_pipeline(graph, cluster, request, Budget.of(request), 2)
    certificate = before.plan.certificate
    assert certificate is not None

    def certified(cost: float, bound: float) -> Outcome:
        proof = replace(certificate, cost=cost, bound=bound, status="optimal")
        return replace(before, plan=replace(before.plan, certificate=proof))

    monkeypatch.setattr(InStages, "_named", lambda _, outcome, _known: outcome)
    monkeypatch.setattr(InStages, "_of_kinds", lambda *_, **__: certified(2.0, 2.0))
    monkeypatch.setattr(CountSearch, "all", lambda *_: before)
    for bound, status in ((1.0, "feasible"), (2.0, "optimal")):
        stages, budget = _in_stages(lambda _count: 0.0), Budget.of(request)
        proof = stages._go_on(certified(3.0, bound), 4.0, budget).plan.certificate
        assert proof is not None
        assert (proof.cost, proof.bound, proof.status) == (2.0, bound, status)


@pytest.mark.parametrize("refusal", [ConstraintError, PipelineScheduleError, Infeasible])
def test_stages_go_on_where_fewer_micro_batches_are_impossible(
    refusal: type[PartitionerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def every(_: CountSearch, trials: tuple[Trial, ...]) -> Outcome:
        tried.extend(trial.count for trial in trials)
        if tried[-1] == 1:
            raise refusal("not in one micro-batch")
        return better

    request = Request(time_limit_s=5)
    before = find_pipeline(
        load_onnx(build("tiny")).graph, resolve_cluster("4xh100"), request, Budget.of(request), 2
    )
    better = replace(before, notes=("gone on",))
    offered = cast("Graph", SimpleNamespace(optional={"copy"}))
    monkeypatch.setattr(InStages, "_named", lambda _, outcome, _known: outcome)
    monkeypatch.setattr(InStages, "_of_kinds", lambda *_, **__: None)
    monkeypatch.setattr(CountSearch, "all", every)
    stages = _in_stages(lambda _count: 0.0)
    found = stages._go_on(replace(before, of=offered), 4.0, Budget.of(request))
    assert tried == [1, 2]
    assert found.notes == better.notes


def test_each_kind_is_tried_in_stages_of_the_size_of_its_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On many devices a number of micro-batches is of stages of some sizes alone."""
    tried: list[tuple[str | None, object, object, Trial]] = []

    def every(search: CountSearch, trials: tuple[Trial, ...]) -> None:
        tried.append((search.request.parallel, search.request.mesh, search.sizes, *trials))
        raise Infeasible("short")

    monkeypatch.setattr(CountSearch, "all", every)
    monkeypatch.setattr(InStages, "trials", (Trial(2), Trial(4, (1, 2)), Trial(8, (4,))))
    stages, budget = _in_stages(lambda _count: 0.0), Budget.of(Request())
    assert stages._of_kinds(budget, (1, 2, 4), is_short=False) is None
    assert tried == [
        (f"pp+{kind}", {"pp": 2, kind: 2}, (2,), Trial(count))
        for kind in ("tp", "dp")
        for count in (2, 4)
    ]


@pytest.mark.slow
def test_a_stream_runs_in_micro_batches_where_memory_is_short() -> None:
    """At once its plan is slower than through stages, which hold less of a micro-batch."""
    model = llama.build(layers=4, hidden=512, batch=8)
    alone = partitioner.compile(model, cluster="1xh100", plan_only=True)
    memory = max(alone.evaluation.needed_bytes.values()) // 4
    options: Any = {"cluster": "4xh100", "memory": memory, "plan_only": True}
    auto = partitioner.compile(model, time_limit_s=30, **options)
    asked = partitioner.compile(model, time_limit_s=30, micro_batches=2, **options)
    assert auto.plan.micro_batches == 2
    assert auto.evaluation.step_s <= asked.evaluation.step_s * 1.001
    assert any("micro-batches" in note for note in auto.summary["notes"])


@pytest.mark.slow
def test_a_search_ends_early_where_a_known_plan_is_not_beaten() -> None:
    program = partitioner.compile(
        Stack(4, 32), torch.randn(8, 32), devices=2, training=True, parallel="pp", micro_batches=4
    )
    assert isinstance(program, ModuleProgram)
    graph, cluster, request = program.graph, program.cluster, Request(parallel="pp")
    certificate = program.plan.certificate
    assert certificate is not None
    for best_s in (0.99 * certificate.bound, 0.5 * certificate.cost):
        budget = replace(Budget.of(request), best_s=best_s)
        with pytest.raises(NoCheaper, match="4 micro-batches") as caught:
            find_pipeline(graph, cluster, request, budget, 4)
        assert 0 < caught.value.bound <= certificate.cost
    budget = replace(Budget.of(request), best_s=math.nextafter(certificate.cost, math.inf))
    assert find_pipeline(graph, cluster, request, budget, 4).evaluation.step_s <= certificate.cost


@pytest.mark.slow
def test_stages_are_weighed_against_one_mesh_on_several_nodes_if_asked_for() -> None:
    with torch.device("meta"):
        module, batch = Stack(2, 256), torch.zeros(96, 256)
    notes = []
    for micro_batches in ("auto", None):
        program = partitioner.compile(
            *(module, batch),
            cluster="3x8xh100",
            training=True,
            time_limit_s=5,
            micro_batches=micro_batches,
        )
        assert isinstance(program, ModuleProgram)
        assert program.plan.pipeline is None
        notes.append([note for note in program.summary["notes"] if "not in stages" in note])
    (note,) = notes[0]
    assert note.startswith("not in stages: none of these plans is below ")
    assert not notes[1]


def test_a_mesh_of_stages_alone_leaves_their_devices_to_the_search() -> None:
    options = {"training": True, "micro_batches": 4, "schedule": "1f1b", "time_limit_s": 5}
    batch = torch.randn(8, 32)
    program = partitioner.compile(Stack(4, 32), batch, devices=4, mesh={"pp": 2}, **options)
    assert {mesh.devices for mesh in program.plan.groups} == {(0, 1), (2, 3)}
    with pytest.raises(SearchError, match=r"mesh pp\(3\) = 3 != 4 devices"):
        partitioner.compile(Stack(4, 32), batch, devices=4, mesh={"pp": 3}, **options)


class Loss(nn.Sequential):
    """Layers and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x).square().mean()
        return result


def mlp(width: int) -> nn.Module:
    return Loss(*(nn.Linear(width, width) for _ in range(3)))


def staged(module: nn.Module, batch: object, cluster: str, count: int) -> ModuleProgram:
    program = partitioner.compile(
        module,
        batch,
        cluster=cluster,
        training=True,
        parallel="pp",
        micro_batches=count,
        time_limit_s=60.0,
    )
    assert isinstance(program, ModuleProgram)
    return program


def bound_s(module: nn.Module, batch: object, cluster: str, count: int) -> float:
    whole = partitioner.compile(module, batch, devices=1, training=True)
    assert isinstance(whole, ModuleProgram)
    devices = resolve_cluster(cluster).run_by(PYTORCH, training=True)
    return LeastStep(whole.traced.uncut, devices, most=1, waits=True).seconds(count)


@pytest.mark.parametrize(
    ("cluster", "width", "least"),
    [
        ("2xh100", 16, 0.3),
        pytest.param("2xh100", 2048, 0.3, marks=pytest.mark.slow),
        pytest.param("4xcpu", 256, 0.15, marks=pytest.mark.slow),
    ],
)
def test_no_step_is_below_the_bound(cluster: str, width: int, least: float) -> None:
    batch = (torch.zeros(8, width),)
    for count in (1, 4):
        cost_s = staged(mlp(width), batch, cluster, count).cost
        assert least * cost_s < bound_s(mlp(width), batch, cluster, count) <= cost_s


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 8])
def test_no_step_of_a_gpt_is_below_the_bound(count: int) -> None:
    module, batch = small_gpt(2)
    cost_s = staged(module, batch, "2xa100", count).cost
    assert 0 < bound_s(module, batch, "2xa100", count) <= cost_s


def test_launches_are_paid_for_each_micro_batch() -> None:
    module, batch = mlp(16), (torch.zeros(8, 16),)
    program = partitioner.compile(module, batch, cluster="2xh100", training=True, strategy="intra")
    assert isinstance(program, ModuleProgram)
    least = LeastStep(program.traced.uncut, resolve_cluster("2xh100"), most=1, waits=True)
    one, four, eight = map(least.seconds, (1, 4, 8))
    assert one < four < eight
    assert eight == pytest.approx(2 * four, rel=0.1)
    cluster = resolve_cluster("4xh100")
    stream = LeastStep(program.traced.uncut, cluster, most=1, waits=False)
    assert stream.seconds(1) < LeastStep(stream.graph, cluster, most=1, waits=True).seconds(1)


def test_where_bytes_are_short_the_graph_with_offers_goes_first_and_beside_a_plan_alone() -> None:
    graph, request, cluster = load_onnx(build("tiny")).graph, Request(), resolve_cluster("2xh100")
    offered = replace(graph, name="offered")

    def order(*, is_short: bool, knows: bool) -> list[str]:
        search = CountSearch(lambda _: iter((graph, offered)), cluster, request, Budget.of(request))
        search.is_short = is_short
        if knows:
            search.outcomes[4] = find_pipeline(graph, cluster, request, Budget.of(request), 2)
        return [one.name for one in search._open_graphs(2, (1,))]

    assert order(is_short=False, knows=True) == [graph.name, "offered"]
    assert order(is_short=True, knows=False) == ["offered", graph.name]
    assert order(is_short=True, knows=True) == ["offered"]
