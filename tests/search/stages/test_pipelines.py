"""Pipelines: cuts of a model into stages, for schedules, numbers of micro-batches and meshes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pipeline.generate import SCHEDULES, pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import to_csv
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.rewrites.staging import stages_of_all
from partitioner.search.outcome import Outcome
from partitioner.search.request import Budget, Request
from partitioner.search.stages import cut_search, pipelines
from partitioner.search.stages.cut_search import (
    EVALUATION_STEPS,
    Pipelines,
    PipelineSearch,
    staged_plan,
)
from partitioner.search.stages.figures import Floats, Ints, Sharding, StageFigures
from partitioner.search.stages.pipelines import GUESSES, first_sharding, uneven_cuts
from partitioner.search.stages.step_estimate import StepEstimate
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints


class Chain(nn.Module):
    """Layers of different widths, a head and a loss."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.back = nn.ModuleList(nn.Linear(width, 16) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.layers, self.back, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


class Counting(nn.Module):
    """A buffer that an early and a late layer read, and that every call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.ones(8))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)) * self.scale.clone()))
        h = self.layers[2](h)
        self.scale.mul_(0.9).add_(h.detach().abs().mean(0))
        return self.layers[3](torch.tanh(h)).square().mean()


WIDTHS = 64, 8, 16, 256, 8
BATCH = 12


def planned(
    module: nn.Module, width: int = 16, length: int = BATCH, **options: Any
) -> ModuleProgram:
    torch.manual_seed(0)
    batch = torch.randn(length, width)
    program = partitioner.compile(module, batch, training=True, **options)
    assert isinstance(program, ModuleProgram)
    return program


@pytest.fixture(scope="module")
def figures() -> StageFigures:
    """Those of the chain on four devices without launches and with free links."""
    graph = planned(Chain(*WIDTHS), devices=1).graph
    cluster = resolve_cluster("ideal", 4)
    decided = {node.name: NodePlan(0) for node in graph.nodes}
    plan = Plan(graph.digest, cluster.to_data(), (DeviceMesh.single(0),), decided)
    return StageFigures(Sharding(graph, plan), cluster)


def test_units_and_their_figures_are_those_of_all_nodes(figures: StageFigures) -> None:
    graph = figures.sharding.graph
    assert set(figures.unit_of) == set(graph.by_name)
    assert figures.loads.shape == (4, len(figures.units))
    assert (figures.loads.sum(1)[:3] > 0).all()
    plan = replace(figures.sharding.plan, pipeline=Pipeline("1f1b", 1))
    total = evaluate(graph, plan, figures.cluster)
    assert figures.loads.sum() == pytest.approx(total.load_s[0])


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_balanced_cuts_have_the_least_largest_load(figures: StageFigures, stages: int) -> None:
    sums = figures.load_sums[:3].sum(0)

    def largest(ends: tuple[int, ...]) -> float:
        return float(max(sums[b] - sums[a] for a, b in zip((0, *ends), ends, strict=False)))

    found = figures.balanced([0] * stages, range(stages))
    assert found is not None
    inner = [int(position) for position in figures.positions[1:-1]]
    every = [(*cut, len(figures.units)) for cut in combinations(inner, stages - 1)]
    assert largest(found) == pytest.approx(min(map(largest, every)))


def unlike(*speeds: float) -> Cluster:
    """Devices with free links, so many times as fast as those of the cluster named ideal."""
    ideal = resolve_cluster("ideal", len(speeds))
    devices = []
    for device, speed in zip(ideal.devices, speeds, strict=True):
        flops = {dtype: speed * rate for dtype, rate in device.peak_flops_per_s.items()}
        rate = speed * device.memory_bytes_per_s
        devices.append(replace(device, peak_flops_per_s=flops, memory_bytes_per_s=rate))
    return replace(ideal, devices=tuple(devices))


def test_balanced_cuts_count_the_seconds_of_the_devices_of_each_stage(
    figures: StageFigures,
) -> None:
    own = replace(figures, cluster=unlike(1, 1 / 4, 2))
    assert own.paces == pytest.approx([1, 4, 1 / 2])
    sums = figures.load_sums[:3].sum(0)

    def largest(ends: tuple[int, ...]) -> float:
        spans = zip((0, *ends), ends, own.paces, strict=False)
        return float(max((sums[b] - sums[a]) * pace for a, b, pace in spans))

    found = own.balanced([0] * 3, range(3))
    assert found is not None
    inner = [int(position) for position in own.positions[1:-1]]
    least = min(largest((*cut, len(own.units))) for cut in combinations(inner, 2))
    assert largest(found) == pytest.approx(least)
    equal = figures.balanced([0] * 3, range(3))
    assert equal is not None
    assert largest(equal) > 1.5 * least


def test_a_stage_on_a_device_without_seconds_may_be_too_large(figures: StageFigures) -> None:
    """What it computes again takes no seconds there, and may not save enough all the same."""
    own = replace(figures, cluster=unlike(1, np.inf))
    most = len(own.units) // 2

    def lost_s(at: Ints, need: Floats) -> Floats:
        return np.where(at[None, :] - at[:, None] > most, np.inf, np.zeros_like(need))

    found = own.balanced([1, 1], (0, 1), lost_s)
    assert found is not None
    assert found[0] <= most
    assert found[1] - found[0] <= most


@pytest.mark.parametrize("speeds", [(1, 1, 1 / 3), (1 / 3, 1, 1, 1), (1, 1, 1 / 5, 2, 2)])
def test_stages_of_several_sizes_take_the_seconds_of_their_slowest_device(
    speeds: tuple[float, ...],
) -> None:
    """Nothing is cut, so that each device of a stage runs all of its nodes."""
    graph, cluster = planned(Chain(*[16] * 13), devices=1).graph, unlike(*speeds)
    nodes = {node.name: NodePlan(0) for node in graph.nodes}
    of_size = {}
    for size in (1, 2):
        plan = Plan(graph.digest, cluster.to_data(), (DeviceMesh.line(size, "tp"),), nodes)
        of_size[size] = StageFigures(Sharding(graph, plan), cluster)
    sums = of_size[1].load_sums[:3].sum(0)
    cuts = [*uneven_cuts(of_size, len(cluster))]
    assert cuts
    for cut in cuts:
        loads, first = list[float](), 0
        for start, end, size in zip((0, *cut.ends), cut.ends, cut.sizes, strict=False):
            own = speeds[first : first + size]
            loads.append(float(sums[end] - sums[start]) * speeds[0] / min(own))
            first += size
        assert cut.load_s == pytest.approx(max(loads))


def schedules(lanes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in SCHEDULES:
        twice = name in ("interleaved", "zbv", "dualpipev")
        if name != "forward":
            yield name, textbook_lanes(name, lanes * (2 if twice else 1))


@pytest.mark.parametrize(("name", "lane_of"), tuple(schedules(3)))
def test_no_estimate_is_below_the_busiest_lane(
    figures: StageFigures, name: str, lane_of: tuple[int, ...]
) -> None:
    own = StageFigures(figures.sharding, resolve_cluster("3xcpu", 3), 6)
    estimate = StepEstimate(own, pipeline_schedule(name, lane_of, 6))
    cuts = combinations(range(1, len(own.units)), len(lane_of) - 1)
    rng = np.random.default_rng(0)
    shares = []
    for cut in islice(cuts, 0, None, 997 if len(lane_of) > 3 else 7):
        again = rng.random(len(lane_of)) * own.loads.sum()
        for more in (None, again):
            least, seconds = (
                f((*cut, len(own.units)), more) for f in (estimate.least_s, estimate.seconds)
            )
            assert 0 < least <= seconds
            shares.append(least / seconds)
    assert max(shares) > 0.7


@pytest.mark.parametrize("slow", [1, 1 / 3])
@pytest.mark.parametrize(("name", "lane_of"), tuple(schedules(2)))
def test_estimates_are_the_simulated_steps_where_links_are_free(
    figures: StageFigures, name: str, lane_of: tuple[int, ...], slow: float
) -> None:
    cluster = unlike(1, slow)
    own = StageFigures(figures.sharding, cluster, 4)
    estimate = StepEstimate(own, pipeline_schedule(name, lane_of, 4))
    ends = own.balanced([0] * len(lane_of), lane_of)
    assert ends is not None
    plan = _plan(own, ends, lane_of, name)
    simulated = evaluate(own.sharding.graph, plan, cluster)
    once = simulated.latency_s - estimate.seconds(ends)
    assert abs(once) <= 0.05 * simulated.latency_s, "updates run once a step"


def _plan(figures: StageFigures, ends: tuple[int, ...], lanes: tuple[int, ...], name: str) -> Plan:
    stage_of = {unit: sum(end <= index for end in ends) for index, unit in enumerate(figures.units)}
    stages = stages_of_all(figures.sharding.graph, stage_of)
    devices = [(lane,) for lane in lanes]
    shardings = [figures.sharding] * len(devices)
    return staged_plan(shardings, figures.cluster, stages, devices, name, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2, "parallel": "pp"},
        {"devices": 2, "parallel": "pp", "schedule": "zb1", "micro_batches": 4},
        pytest.param({"devices": 3, "parallel": "pp", "micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"devices": 4, "parallel": "pp+dp", "mesh": {"pp": 2, "dp": 2}, "micro_batches": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"devices": 4, "mesh": {"pp": 2, "tp": 2}, "micro_batches": 3}, marks=pytest.mark.slow
        ),
        {"devices": 2, "parallel": "dp", "micro_batches": 3},
        {"devices": 1, "micro_batches": 3},
    ],
    ids=str,
)
def test_plans_are_proven_and_their_costs_are_not_below_the_bound(options: dict[str, Any]) -> None:
    program = planned(Chain(*WIDTHS), cluster=None, **options)
    certificate = program.plan.certificate
    assert certificate is not None
    assert 0 < certificate.bound <= certificate.cost
    assert program.plan.pipeline is not None
    assert program.verify().equal
    assert Plan.from_json(program.plan.to_json()) == program.plan
    if "micro_batches" in options:
        assert program.plan.pipeline.micro_batches == options["micro_batches"]


@pytest.mark.slow
def test_left_out_the_schedule_and_the_number_of_micro_batches_are_searched() -> None:
    free = planned(Chain(*WIDTHS), devices=2, parallel="pp")
    for name in ("gpipe", "1f1b"):
        forced = planned(Chain(*WIDTHS), devices=2, parallel="pp", schedule=name, micro_batches=2)
        assert free.evaluation.step_s <= forced.evaluation.step_s * 1.0001


def test_a_file_gives_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(to_csv(pipeline_schedule("zb1", (0, 1), 3)))
    program = planned(Chain(*WIDTHS), devices=2, parallel="pp", schedule=str(path), micro_batches=3)
    assert program.plan.pipeline is not None
    assert isinstance(program.plan.pipeline.schedule, tuple)
    assert program.verify().equal


def test_pinned_submodules_make_the_stages_and_a_device_may_come_back() -> None:
    placement = {"layers.0": 0, "back.0": 0, "layers.1": 1, "back.3": 1, "layers.4": 0, "back.4": 0}
    program = planned(
        Chain(*WIDTHS), devices=2, micro_batches=3, constraints=Constraints.placed(placement)
    )
    plan = program.plan
    assert plan.pipeline is not None
    assert plan.stages == (0, 1, 2)
    assert [mesh.devices for mesh in plan.groups] == [(0,), (1,), (0,)]
    assert plan.kind == "pipeline"
    assert program.verify().equal


def test_pins_to_groups_place_stages_over_data_parallel_devices() -> None:
    groups = {"layers.0": (0, 1), "back.1": (0, 1), "layers.2": (2, 3), "back.4": [0, 1]}
    program = planned(
        Chain(*WIDTHS),
        devices=4,
        parallel="pp+dp",
        mesh={"pp": 2, "dp": 2},
        micro_batches=3,
        constraints=Constraints.placed(groups),
    )
    assert [mesh.devices for mesh in program.plan.groups] == [(0, 1), (2, 3), (0, 1)]
    assert program.verify().equal


@pytest.mark.parametrize(
    ("devices", "groups", "schedule"),
    [
        (3, {"layers.0": (0, 1), "layers.3": 2}, "zb1"),
        (6, {"layers.0": (0, 1, 2), "back.1": (3, 4), "layers.4": 5}, "1f1b"),
        (3, {"layers.0": (1, 2), "layers.2": 0, "layers.4": (1, 2)}, "gpipe"),
    ],
    ids=str,
)
def test_pinned_stages_may_be_of_several_sizes(
    devices: int, groups: dict[str, Any], schedule: str
) -> None:
    program = planned(
        Chain(*WIDTHS),
        cluster=resolve_cluster("ideal", devices),
        micro_batches=3,
        schedule=schedule,
        constraints=Constraints.placed(groups),
    )
    plan = program.plan
    assert plan.pipeline is not None
    wanted = [(group,) if isinstance(group, int) else group for group in groups.values()]
    assert [mesh.devices for mesh in plan.groups] == wanted
    assert program.evaluation.sharded_flops_share > 0, "groups of several devices share operators"
    assert plan.certificate is not None
    assert 0 < plan.certificate.bound <= plan.certificate.cost
    assert program.verify().equal


@pytest.mark.parametrize(
    ("groups", "options", "text"),
    [
        ({"layers.0": 0, "layers.2": (0, 1)}, {}, "groups of stages are the same or apart"),
        ({"layers.0": 2, "layers.1": (0, 1), "layers.4": (1,)}, {}, "0,1 and 1: groups of stages"),
        (
            {"layers.0": 0, "layers.2": (1, 2)},
            {"mesh": {"dp": 3}},
            "stages are pinned to groups of 1 and 2 devices: leave out the mesh",
        ),
    ],
    ids=str,
)
def test_groups_that_cannot_be_stages(
    groups: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    constraints = Constraints.placed(groups)
    with pytest.raises(PartitionerError, match=text):
        planned(Chain(*WIDTHS), devices=3, micro_batches=3, constraints=constraints, **options)


class Uneven(nn.Module):
    """Many operators of no size, then a large one: only the last is worth sharing."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x[:, :1]
        for _ in range(12):
            scale = torch.tanh(scale + 1)
        return self.wide(x * scale).square().mean()


def test_stages_of_several_sizes_are_searched_and_beat_equal_ones() -> None:
    options: dict[str, Any] = {"cluster": "3xh100", "launches": "native"}  # arithmetic decides
    program = planned(
        Uneven(), 2048, 8192, micro_batches=8, schedule="1f1b", recompute=False, **options
    )
    assert sorted({mesh.size() for mesh in program.plan.groups}) == [1, 2]
    assert program.plan.certificate is not None
    assert "stages of 1 and 2 devices" in program.plan.certificate.space


def test_a_sharding_is_searched_once_for_stages_of_one_size_and_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []
    find_plan = pipelines.find_plan

    def noted(graph: Graph, cluster: Cluster, *rest: Any) -> Outcome:
        searched.append(len(cluster))
        return find_plan(graph, cluster, *rest)

    monkeypatch.setattr(pipelines, "find_plan", noted)
    planned(Chain(16, 8), devices=4, micro_batches=2, schedule="1f1b", recompute=False)
    assert sorted(searched) == [1, 2, 4]


def test_a_buffer_that_every_micro_batch_writes_keeps_its_readers_in_one_stage() -> None:
    program = planned(Counting(), width=8, devices=2, parallel="pp", micro_batches=3)
    stages = {
        program.plan.groups[decision.group].devices
        for name, decision in program.plan.nodes.items()
        if "scale" in name
    }
    assert len(stages) == 1
    assert program.verify().equal
    with pytest.raises(PartitionerError, match="the next micro-batch would wait for"):
        planned(
            Counting(),
            width=8,
            devices=2,
            micro_batches=3,
            constraints=Constraints.placed({"layers.0": 0, "layers.2": 1}),
        )


@pytest.mark.parametrize("memory", ["118KB", pytest.param("125KB", marks=pytest.mark.slow)])
def test_memory_that_no_cut_keeps_is_refused_with_its_stage(memory: str) -> None:
    with pytest.raises(Infeasible) as refused:
        planned(
            Chain(*WIDTHS),
            devices=2,
            parallel="pp",
            micro_batches=3,
            memory=memory,
            time_limit_s=4,
        )
    error, text = refused.value, str(refused.value)
    found = re.search(
        r"^no plan was found that fits: in the nearest one found (\d+) bytes are short on device "
        r"(\d) at '/[^']+' of stage (\d) \((\d+) bytes held, limit (\d+): .* optimizer's state.*; "
        r"this is pipeline \w+ of 3 micro-batches",
        text,
    )
    assert found, text
    short, device, stage, held, limit = map(int, found.groups())
    assert (device, stage) == (error.device, device), "a textbook lane is its stage"
    assert held - limit == short == error.bytes_short


def test_a_refusal_says_that_the_clock_stopped_the_search() -> None:
    said: list[str] = []
    stopped = "bytes are short .*; the time limit stopped the search: with a longer one a plan may"
    with pytest.raises(Infeasible, match=stopped):
        planned(
            Chain(*WIDTHS),
            devices=2,
            parallel="pp",
            micro_batches=3,
            memory="118KB",
            time_limit_s=1e-3,
            progress=said.append,
        )
    assert not any("more micro-batches" in text for text in said)  # it would take as long again


def test_the_sharding_of_a_plan_that_is_kept_is_not_searched() -> None:
    options = {"devices": 4, "mesh": {"pp": 2, "dp": 2}, "parallel": "pp+dp", "micro_batches": 3}
    said: list[str] = []
    first = planned(Chain(*WIDTHS), progress=said.append, **options)
    assert any("searching intra (dp=2)" in text for text in said)
    said.clear()
    assert first.plan.pipeline is not None
    kept = {"devices": 4, "micro_batches": 3, "schedule": first.plan.pipeline.schedule}
    again = planned(Chain(*WIDTHS), progress=said.append, constraints=first.plan, **kept)
    assert again.plan.digest == first.plan.digest
    behind = said.index("planning what one would do instead")
    assert "cutting stages of 2 devices" in said[:behind]
    assert not any("searching intra" in text for text in said[:behind])


@pytest.mark.slow
def test_a_sharding_above_the_guessed_limit_may_still_be_cut() -> None:
    """The guess is of one mesh, and does not know that gradients stay with their stage."""
    options = {"devices": 2, "parallel": "pp", "micro_batches": 12, "recompute": False}
    roomy = planned(Chain(*WIDTHS), schedule="1f1b", **options)
    limit = max(peak.bytes for peak in roomy.evaluation.peak.values())
    assert planned(Chain(*WIDTHS), memory=limit, **options).evaluation.fits


@pytest.mark.slow
def test_values_are_computed_again_where_memory_is_short() -> None:
    options = {"length": 512, "devices": 1, "micro_batches": 2}
    roomy = planned(Chain(*(64,) * 6), recompute=False, **options)
    (peak,) = roomy.evaluation.peak.values()
    limit = peak.bytes - peak.activation_bytes // 5
    with pytest.raises(Infeasible):
        planned(Chain(*(64,) * 6), recompute=False, memory=limit, **options)
    tight = planned(Chain(*(64,) * 6), memory=limit, **options)
    assert tight.evaluation.fits
    assert len(tight.graph.nodes) != len(roomy.graph.nodes)
    assert tight.verify().equal


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "nope"}, "schedule 'nope' is not one of gpipe, 1f1b"),
        ({"schedule": "none.csv"}, "schedule none.csv: No such file"),
        ({"micro_batches": 0}, "micro_batches is 0, not 'auto' or a whole number"),
        ({"parallel": "pp", "strategy": "intra"}, "and parallel 'pp' gives each stage one device"),
        ({"parallel": "dp", "strategy": "inter", "micro_batches": 2}, "parallel shards operators"),
        (
            {"mesh": {"pp": 1}, "strategy": "inter", "micro_batches": 2},
            "strategy 'inter' places whole operators, and mesh {'pp': 1} has stages of 2 devices",
        ),
        ({"micro_batches": 3, "tune": 2, "cluster": "h100"}, "is not known to be it"),
        ({"parallel": "pp+dp"}, "wants a mesh of axes pp and dp, of at least two devices each"),
        ({"parallel": "pp", "mesh": {"dp": 2}}, "wants a mesh with an axis pp"),
        ({"parallel": "pp+xx", "mesh": {"pp": 2}}, "'xx' is not one of dp, zero1"),
    ],
    ids=str,
)
def test_options_that_have_no_meaning(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PartitionerError, match=text):
        planned(Chain(*WIDTHS), devices=2, **options)


def test_stages_of_joined_kinds_without_a_mesh_have_all_that_leave_each_kind_two_devices() -> None:
    assert Request(parallel="pp+tp").stage_sizes(8) == (2, 4)
    assert Request(parallel="pp+dp+tp").stage_sizes(8) == (4,)
    options = {"parallel": "pp+dp", "micro_batches": 2, "schedule": "1f1b", "recompute": False}
    program = planned(Chain(16, 8), devices=4, **options)
    assert {tuple(group.axes) for group in program.plan.groups} == {(("dp", 2),)}


def test_gradients_of_weights_that_are_cut_and_repeated_are_reduced_once_a_step() -> None:
    program = planned(
        Chain(*WIDTHS),
        devices=8,
        parallel="pp+dp+tp",
        mesh={"pp": 2, "dp": 2, "tp": 2},
        schedule="1f1b",
        micro_batches=3,
    )
    tasks = program.schedule
    updates = [
        task
        for task in tasks.tasks
        if task.placed is not None and task.placed.node.attrs.get("role") == "gradient"
    ]
    cut = [t for t in updates if t.placed is not None and t.placed.outs[0].sharding.axes]
    assert cut, "weights cut over tp"
    assert all(tasks.order.phases.is_once(task.phase) for task in updates)
    names = {task.name for task in updates}
    reductions = [t for t in tasks.tasks if t.comm is not None and t.comm.why in names]
    assert reductions
    assert all(tasks.times(task) == 1 for task in reductions)
    assert program.verify().equal


def test_schedules_are_simulated_best_first_and_none_is_once_the_work_is_done(
    figures: StageFigures,
) -> None:
    cluster = resolve_cluster("ideal", 2)
    own = StageFigures(figures.sharding, cluster, 4)
    names = "gpipe", "zb1", "1f1b"
    request = Request(time_limit_s=60)
    plenty, little = (replace(Budget.of(request), work=Work.within(60, n)) for n in (1e9, 1.0))
    free = PipelineSearch(own, Pipelines(4, names), plenty).search()
    short = PipelineSearch(own, Pipelines(4, names), little).search()
    assert len(short.plans) == 1
    assert [str(error) for _, error in short.failed if "not simulated" in str(error)]
    assert len(short.failed) == 2
    estimates = {
        name: StepEstimate(own, pipeline_schedule(name, (0, 1), 4)).seconds(
            own.balanced([0, 0], (0, 1)) or ()
        )
        for name in names
    }
    assert short.plans[0].plan.pipeline is not None
    assert short.plans[0].plan.pipeline.schedule == min(names, key=estimates.__getitem__)
    assert min(plan.evaluation.step_s for plan in free.plans) <= short.plans[0].evaluation.step_s


def test_a_schedule_that_does_not_fit_leaves_work_for_the_others(
    figures: StageFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate of the best schedule is within memory, and none of its plans is."""
    own = StageFigures(figures.sharding, resolve_cluster("ideal", 2), 4)
    names = "gpipe", "zb1", "1f1b"
    request = Request(time_limit_s=60)
    free = PipelineSearch(own, Pipelines(4, names), Budget.of(request)).search()
    pipelined = [plan.plan.pipeline for plan in free.plans if plan.plan.pipeline]
    best = pipelined[0].schedule
    simulated: list[object] = []

    def counted(graph: Graph, plan: Plan, cluster: Cluster, **options: Any) -> Evaluation:
        evaluation = evaluate(graph, plan, cluster, **options)
        assert plan.pipeline is not None
        simulated.append(plan.pipeline.schedule)
        if plan.pipeline.schedule != best:
            return evaluation
        return replace(evaluation, limit_bytes=dict.fromkeys(evaluation.limit_bytes, 1))

    monkeypatch.setattr(cut_search, "evaluate", counted)
    steps = 2.5 * EVALUATION_STEPS * len(own.sharding.graph.nodes)
    little = replace(Budget.of(request), work=Work.within(60, steps))
    short = PipelineSearch(own, Pipelines(4, names), little).search()
    assert simulated[0] == best
    assert len({*simulated}) == 3
    assert {plan.plan.pipeline.schedule for plan in short.plans if plan.plan.pipeline} == (
        {*names} - {best}
    )
    ((_, why),) = short.failed
    assert "bytes are short" in str(why), "it was simulated"


def test_a_plan_says_that_the_clock_stopped_stages_of_several_sizes(
    figures: StageFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: object, budget: Budget) -> None:
        budget.work.stop()
        raise Infeasible("none within the time limit")

    monkeypatch.setattr(pipelines._Spaces, "of_several_sizes", late)
    request, cluster = Request(time_limit_s=600, schedule="gpipe"), resolve_cluster("ideal", 3)
    budget = Budget.of(request)
    found = pipelines.find_pipeline(figures.sharding.graph, cluster, request, budget, 2, (1, 3))
    assert found.plan.certificate is not None
    assert found.plan.certificate.status == "time_limit"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1", "interleaved"])
@pytest.mark.parametrize("speeds", [(1, 1), (1, 1, 1), (1, 1 / 2), (1 / 3, 1, 1)])
def test_no_cut_is_simulated_below_the_bound_which_knows_that_stages_wait(
    figures: StageFigures, name: str, speeds: tuple[float, ...]
) -> None:
    lanes = len(speeds)
    own = StageFigures(figures.sharding, unlike(*speeds), 4)
    lane_of = textbook_lanes(name, lanes * (2 if name == "interleaved" else 1))
    bound = own.least_s(pipeline_schedule(name, lane_of, 4))
    end = len(own.units)
    inner = combinations(range(1, end, 1 if len(lane_of) == 2 else 3), len(lane_of) - 1)
    plans = (_plan(own, (*cut, end), lane_of, name) for cut in inner)
    steps = [evaluate(own.sharding.graph, plan, own.cluster).step_s for plan in plans]
    assert 0 < bound <= min(steps) * (1 + 1e-9)
    if name != "interleaved" and len({*speeds}) == 1:
        assert own.least_s() < bound, "stages wait"
    if name != "interleaved":
        assert min(steps) < (1.5 if len({*speeds}) == 1 else 3) * bound


def test_the_bound_of_pinned_groups_knows_which_devices_run_each_node(
    figures: StageFigures,
) -> None:
    """A node that runs on one device of its group is on a slow one in each lane of neighbours."""
    graph, cluster = figures.sharding.graph, unlike(1 / 10, 1, 1 / 10, 1)
    groups = DeviceMesh.single(0), DeviceMesh.line(2, "tp")
    nodes = {node.name: NodePlan(0) for node in graph.nodes}
    sharding = Sharding(graph, Plan(graph.digest, cluster.to_data(), groups, nodes))
    own = StageFigures(sharding, cluster, groups=((1, 2), (0, 3)))
    pinned = *[(1, 2)] * (len(own.units) - 1), (0, 3)
    ways = Pipelines(1, ("1f1b",), pinned)
    (plan,) = PipelineSearch(own, ways, Budget.of(Request())).search().plans
    assert 0 < own.least_s() <= plan.evaluation.step_s < replace(own, groups=()).least_s()


@dataclass(frozen=True)
class Figures:
    """Of nodes of these loads, and messages of one length."""

    between = StageFigures.between

    loads_s: tuple[float, ...]
    message_s: float = 0.0

    def on(self, _devices: Sequence[int]) -> Figures:
        return self

    @cached_property
    def positions(self) -> Ints:
        return np.arange(len(self.loads_s) + 1)

    @cached_property
    def load_sums(self) -> Floats:
        parts = np.zeros((4, len(self.loads_s) + 1))
        parts[0, 1:] = np.cumsum(self.loads_s)
        return parts

    @cached_property
    def messages(self) -> Floats:
        return np.full((2, len(self.loads_s) + 1), self.message_s)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("devices", [3, 5])
def test_cuts_into_stages_of_several_sizes_are_those_of_all_cuts_and_sizes(
    seed: int, devices: int
) -> None:
    draw = np.random.default_rng(seed)
    one = draw.uniform(0.1, 1, 7)
    of = {size: Figures(tuple(one / size**0.8), 0.05 * (seed % 3)) for size in (1, 2, 4)}

    def load(ends: tuple[int, ...], sizes: tuple[int, ...]) -> float:
        bounds = (0, *ends)
        return max(
            sum(of[size].loads_s[start:stop])
            + 2 * of[size].message_s * ((start > 0) + (stop < len(one)))
            for start, stop, size in zip(bounds, ends, sizes, strict=False)
        )

    cuts = {
        len(cut.sizes): cut for cut in uneven_cuts(cast("dict[int, StageFigures]", of), devices)
    }
    for count in range(1, devices + 1):
        every = [
            (load((*inner, len(one)), sizes), sizes)
            for inner in combinations(range(1, len(one)), count - 1)
            for sizes in product((1, 2, 4), repeat=count)
            if sum(sizes) == devices
        ]
        if not every:
            assert count not in cuts
            continue
        least, sizes = min(every)
        if count in cuts:
            cut = cuts[count]
            assert cut.load_s == pytest.approx(least) == pytest.approx(load(cut.ends, cut.sizes))
            assert len(cut.groups) == len(one)
            assert sum(cut.sizes) == devices
        else:
            assert any(len(set(s)) == 1 for value, s in every if value == pytest.approx(least)), (
                sizes
            )
    assert cuts


SHARDING = cast("Sharding", object())


class Tries:
    """Refuses all limits below one, each time short of fewer bytes than are missing."""

    def __init__(self, fits: int) -> None:
        self.fits, self.limits = fits, list[int]()

    def __call__(self, limit: int) -> Sharding:
        self.limits.append(limit)
        if limit < self.fits:
            short = min(40, self.fits - limit)
            raise Infeasible("short", device=1, name="mul", bytes_short=float(short))
        return SHARDING


@pytest.mark.parametrize(
    ("fits", "limits"), [(90, [100]), (130, [100, 130]), (170, [100, 140, 170])]
)
def test_a_guess_is_raised_by_the_bytes_that_are_short(fits: int, limits: list[int]) -> None:
    tries = Tries(fits)
    assert first_sharding(tries, 100, 300, is_guess=True) is SHARDING
    assert tries.limits == limits


def test_few_guesses_are_made_and_a_limit_that_is_none_is_tried_once() -> None:
    tries = Tries(1000)
    with pytest.raises(Infeasible, match=r"on device 1 at 'mul' \(220 bytes held, limit 150"):
        first_sharding(tries, 100, 150, is_guess=True)
    assert tries.limits == [100, 140, 180]
    assert len(tries.limits) == GUESSES
    with pytest.raises(Infeasible, match="short"):
        first_sharding(once := Tries(1000), 100, 150, is_guess=False)
    assert once.limits == [100]


def test_after_a_cut_that_is_short_the_nearest_sharding_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first sharding holds 200 bytes, and its cut is short of 50; none within 140 is found."""
    graph = planned(Chain(16, 16), devices=1).graph
    graph = replace(graph, optional=frozenset([graph.nodes[0].name]))
    limits: list[int] = []

    def sharded(_spaces: object, _budget: Budget, _size: int, limit: int) -> Sharding:
        limits.append(limit)
        if limit < 160:
            raise Infeasible("short", device=0, name="mul", bytes_short=20.0)
        plan = SimpleNamespace(held=min(limit, 200))
        return cast("Sharding", SimpleNamespace(graph=graph, plan=plan))

    def cut(figures: object, *_arguments: object, **_options: object) -> object:
        if figures == 200:
            raise Infeasible("short", bytes_short=50.0)
        return SimpleNamespace(search=lambda: figures)

    monkeypatch.setattr(pipelines._Spaces, "sharded_within", sharded)
    monkeypatch.setattr(pipelines, "limit_bytes", lambda *_: 200)
    monkeypatch.setattr(pipelines, "Offering", SimpleNamespace(of=lambda *_: None))
    monkeypatch.setattr(
        pipelines, "StageFigures", lambda sharding, *_, **_named: sharding.plan.held
    )
    monkeypatch.setattr(pipelines, "PipelineSearch", cut)

    def evaluated(_graph: Graph, placed: Any, *_of_step: object) -> object:
        return SimpleNamespace(held_bytes={0: placed.held})

    monkeypatch.setattr(pipelines, "resolve", lambda _graph, plan: plan)
    monkeypatch.setattr(pipelines, "evaluate_placed", evaluated)
    ways = cast("Pipelines", SimpleNamespace(groups=(), schedules=("1f1b",), micro_batches=4))
    budget = Budget.of(request := Request(time_limit_s=1))
    cluster = resolve_cluster("ideal", 4)
    held: object = pipelines._Spaces(graph, cluster, request, 4).of_size(budget, 2, ways)
    assert held == 160
    assert limits == [200, 140, 160]
