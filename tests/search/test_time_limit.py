"""The clock ends a search of stages and of large meshes with what it has, and the plan says so."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import partitioner
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.torch.building.graph import module_graph
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.tracing.capture import capture, export_module
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.problem.folding import fold
from partitioner.search.find_plan import find_plan
from partitioner.search.levels.axis_sharder import AxisSharder, MeshPlan
from partitioner.search.levels.mesh_sharder import Sharder
from partitioner.search.outcome import OutOfTime
from partitioner.search.request import Budget, Request
from partitioner.search.stages.micro_batch_counts import CountSearch, Trial
from partitioner.search.stages.pipelines import find_pipeline
from partitioner.solver import work as work_module
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.derive import Rules


class Stack(nn.Module):
    """Square layers and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def graph_of(layers: int, width: int, batch: int) -> Graph:
    args = (torch.zeros(batch, width),)
    module = Stack(layers, width)
    captured = capture(module, export_module(module, args, {}), DECOMPOSITIONS, training=True)
    return module_graph(captured, "stack").offered


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Six layers of 96 for 12 samples, which offers to compute values again."""
    return graph_of(6, 96, 12)


def sharder_of(graph: Graph, micro_batches: int = 1) -> AxisSharder:
    cluster = resolve_cluster("2x3xh100")
    sharder = Sharder(fold(graph, Rules.of(graph)), cluster, micro_batches=micro_batches)
    return AxisSharder(sharder, Work.within(60))


MESH = DeviceMesh.of({"dp": 2, "tp": 3})


def stored_over(plan: MeshPlan) -> set[frozenset[str]]:
    """The axes over which the matrices are stored in parts."""
    states = [p for p in plan.best.picks if p.node.op == "partitioner::state"]
    results = [at for placed in states for _, at in placed.results()]
    return {at.sharding.axes for at in results if len(at.sharding.shape) == 2}


def test_parameters_are_whole_over_dp_in_the_first_plan_of_micro_batches(graph: Graph) -> None:
    """Each micro-batch would gather them; the plan of a whole batch stores them in parts."""
    (parts,) = sharder_of(graph).begin(MESH, 0.02)
    (whole,) = sharder_of(graph, micro_batches=4).begin(MESH, 0.02)
    assert stored_over(parts) == {frozenset({"dp", "tp"})}
    assert stored_over(whole) == {frozenset({"tp"})}


def test_a_first_plan_is_found_behind_the_time_limit(graph: Graph) -> None:
    """Without it a large cluster has no plan; others are left to the clock."""
    sharder = sharder_of(graph, micro_batches=4)
    sharder.work.deadline = 0.0
    (plan,) = sharder.begin(MESH, 0.02)
    assert plan.stands
    assert stored_over(plan) == {frozenset({"tp"})}
    assert sharder.begin(DeviceMesh.of({"dp": 3, "tp": 2}), 0.02)[0].sharded is None


@pytest.mark.parametrize(("batch", "by_axes"), [(12, True), (13, False)], ids=["even", "uneven"])
def test_a_named_mesh_keeps_its_constraints_behind_the_limit(batch: int, by_axes: bool) -> None:
    """Axes have no uneven parts in turn: the joint problem of both is made then."""
    graph, pin = graph_of(2, 96, batch), {"tensor": "relu", "dim": 0, "axis": "y"}
    asked = Request(mesh={"x": 2, "y": 3}, constraints=Constraints.of({"pin": [pin]}))
    late = Budget.of(asked).anew(0.0)
    outcome = find_plan(graph, resolve_cluster("6xh100"), asked.over(6).on(graph), late)
    assert ("mesh axes" in outcome.certificate.solver) == by_axes
    made = outcome.graph.producers["relu"].name
    assert any("y" in cut.axes for cut in outcome.plan.nodes[made].cuts.values())


def late_after(looks: int) -> Callable[[], float]:
    """A clock that stands for so many looks, and is past every limit then."""
    left = iter(range(looks))
    return lambda: 0.0 if next(left, None) is not None else math.inf


@pytest.mark.parametrize("looks", [0, 1, 7, 40])
def test_a_mesh_keeps_its_plan_when_the_clock_stops_its_improvement(
    graph: Graph, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharder = sharder_of(graph)
    plan = sharder.begin(MESH, 0.0)[0]
    first = plan.best
    monkeypatch.setattr(work_module, "now_s", late_after(looks))
    monkeypatch.setattr("partitioner.search.levels.mesh_sharder.LEAST_S", 1e-9)
    sharder.work.deadline = 1.0
    improved = sharder.improve(plan)
    assert improved.cost_s <= first.cost_s
    assert sharder.work.stopped
    if not looks:
        assert improved is first
    for node, placed in zip(sharder.graph.nodes, improved.picks, strict=True):
        whole = plan.placed(node, plan.picks[node.name][0])  # all are of one plan
        assert placed.absent or (whole is not None and whole.outs == placed.outs)


@pytest.mark.parametrize("budgeted", [True, False])
def test_sizes_of_stages_that_the_clock_does_not_reach_are_named(
    budgeted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cluster = graph_of(4, 32, 4), resolve_cluster("cpu", 2)
    request = Request(micro_batches=3, schedule="1f1b")
    budget = Budget.of(request)
    if not budgeted:
        monkeypatch.setattr(work_module, "now_s", lambda: math.inf)
    outcome = find_pipeline(graph, cluster, request, budget, 3)
    out_of_time = [error for _, error in outcome.failed if isinstance(error, OutOfTime)]
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert bool(out_of_time) is not budgeted
    assert (certificate.status == "time_limit") is not budgeted
    assert certificate.bound <= certificate.cost
    assert outcome.evaluation == evaluate(outcome.graph, outcome.plan, cluster)


def graphs_until(
    counts: list[int], monkeypatch: pytest.MonkeyPatch, last: int
) -> Callable[[int], Iterator[Graph]]:
    """Gives graphs of micro-batches, and is past the time limit from one number on."""

    def graphs(count: int) -> Iterator[Graph]:
        counts.append(count)
        if count == last:
            monkeypatch.setattr(work_module, "now_s", lambda: math.inf)
        yield graph_of(4, 32, 12 // count)

    return graphs


def test_numbers_of_micro_batches_end_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, request = resolve_cluster("cpu", 2), Request(schedule="1f1b", parallel="pp")
    tried: list[int] = []
    search = CountSearch(graphs_until(tried, monkeypatch, 3), cluster, request, Budget.of(request))
    outcome = search.all([Trial(2), Trial(3), Trial(4), Trial(6)])
    assert tried == [2, 3]
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert certificate.status == "time_limit"
    assert certificate.bound <= certificate.cost
    assert "6 micro-batches" not in certificate.space


def test_the_least_number_that_fits_is_not_looked_for_behind_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(schedule="1f1b", parallel="pp")
    cluster, tried = resolve_cluster("cpu", 2).with_memory(1000), list[int]()
    search = CountSearch(graphs_until(tried, monkeypatch, 2), cluster, request, Budget.of(request))
    assert search.fewest([2, 3, 4, 6, 12]) is None
    assert tried == [2]


def test_a_share_of_the_clock_that_is_not_gone_on_with_stops_the_whole_search() -> None:
    whole = Work.within(60)
    part = whole.share(2).of_the_clock(2)
    part.cut_off()
    assert part.stopped
    assert whole.stopped


@pytest.mark.slow
def test_a_plan_in_stages_keeps_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By levels, with offers: the clock goes on by steps, on a machine that is slow."""
    shown, spend = [0.0], Work.spend

    def spent(work: Work, steps: float) -> None:
        spend(work, steps)
        if work.parent is None:
            shown[0] += 8 * steps / work_module.STEPS_PER_S

    monkeypatch.setattr(Work, "spend", spent)
    monkeypatch.setattr(work_module, "now_s", lambda: shown[0])
    whole = Budget.of
    # The trace, whose seconds are of the machine's clock, takes nothing of the limit.
    monkeypatch.setattr(Budget, "of", lambda request, say, _begun_s=0.0: whole(request, say))
    with torch.device("meta"):
        module = Stack(12, 256)
    program = partitioner.compile(
        module,
        torch.zeros(64, 256),
        cluster="2x8xh100",
        training=True,
        mesh={"pp": 2, "dp": 2, "tp": 4},
        micro_batches=8,
        recompute=True,
        time_limit_s=16,
    )
    assert program.plan.certificate is not None
    assert program.plan.certificate.status == "time_limit"
    assert 16 <= shown[0] < 1.2 * 16
