"""Piper files whose nodes all differ, and whose graphs are wide: plans and their bounds."""

import copy
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from helpers.problems.piper_files import Json, Planned, all_plans, piper, price
from helpers.problems.wide_pipelines import WIDE, convolutional, one_device_a_stage, recurrent
from partitioner.cli.main import main
from partitioner.solver.formats.piper import _time_s, evaluate_plan, parse
from partitioner.solver.outcome import Infeasible
from partitioner.solver.stages.cut_orders import first_orders, random_order
from partitioner.solver.stages.graph import (
    Layout,
    PlannedStage,
    StageGraph,
    around,
    between,
    enumerate_downsets,
)
from partitioner.solver.stages.graph_search import (
    StagePlan,
    StageSeconds,
    bound_plans,
    first_ranges,
    least_cut,
    plan_stages,
    relax,
)
from partitioner.solver.stages.knapsack import pack
from partitioner.solver.work import Work

STAGES = "partitioner.solver.stages"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs have more downsets than are enumerated."""
    monkeypatch.setattr(f"{STAGES}.graph.MOST_DOWNSETS", 0)


def plan_of(graph: StageGraph) -> StagePlan | None:
    """A plan that the referee allows at its load; None if it is proven that there is none."""
    try:
        plan = plan_stages(graph, Work())
    except Infeasible as error:
        if error.proven:
            return None
        raise
    outcome = evaluate_plan(graph, plan.stages)
    assert not outcome.faults
    assert max(outcome.time_s) == pytest.approx(plan.load_s, rel=1e-12)
    return plan


def least(data: Json) -> float:
    return min(price(data, plan) for plan in all_plans(data))


@pytest.mark.parametrize("single", [1, 2, 12])
def test_packed_plans_are_as_good_as_any(single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where flights are taken in ranges, which are split as plans need them."""
    monkeypatch.setattr(f"{STAGES}.graph_search.SINGLE_FLIGHTS", single)
    fits = 0
    for seed in range(60):
        data = piper(seed)
        best, plan = least(data), plan_of(parse(data))
        if plan is None:
            assert math.isinf(best)
            continue
        assert plan.load_s == plan.bound_s == pytest.approx(best, rel=1e-12)
        assert plan.status == "optimal"
        fits += 1
    assert fits > 30


def with_third_way(data: Json, seed: int) -> Json:
    """The file with a way between the others, or smaller and slower, for some nodes."""
    rng, data = random.Random(seed), copy.deepcopy(data)
    for node in data["nodes"]:
        for ways in node["TMPCs"].values():
            way = copy.deepcopy(ways[rng.randrange(2)])
            way["id"] = "third"
            way["timePerSample"] += rng.choice((0.5, 1.0, 3.0))
            way["memoryUsageA"] = max(0.0, way["memoryUsageA"] - rng.choice((0.5, 1.0, 2.0)))
            ways.append(way)
    return data


def all_plans_of_three(data: Json) -> list[list[Planned]]:
    """Every plan, with the third way too."""
    plain = [
        plan for plan in all_plans(data) if {n for s in plan for n in s[0].values()} == {"plain"}
    ]
    plans = []
    for plan in plain:
        names = [v for configs, _, _ in plan for v in configs]
        for ways in itertools.product(("plain", "small", "third"), repeat=len(names)):
            of = dict(zip(names, ways, strict=True))
            plans.append([({v: of[v] for v in configs}, d, t) for configs, d, t in plan])
    return plans


@pytest.mark.slow
def test_nodes_of_three_ways_are_planned() -> None:
    thirds = fits = 0
    for seed in range(40):
        data = with_third_way(piper(seed), seed)
        best = min(price(data, plan) for plan in all_plans_of_three(data))
        plan = plan_of(parse(data))
        if plan is None:
            assert math.isinf(best)
            continue
        assert plan.load_s == plan.bound_s == pytest.approx(best, rel=1e-12)
        fits += 1
        thirds += any("third" in stage.configs.values() for stage in plan.stages)
    assert fits > 20
    assert thirds >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_wide_plans_and_bounds_beside_brute_force() -> None:
    """No bound is above the least load, no plan below; small graphs are cut as well as can be."""
    hit = fits = refuted = 0
    for seed in range(80):
        data = piper(seed)
        best = least(data)
        try:
            plan = plan_stages(parse(data), Work())
        except Infeasible as error:
            assert math.isinf(best)
            refuted += error.proven
            continue
        assert not evaluate_plan(parse(data), plan.stages).faults
        assert plan.bound_s <= best * (1 + 1e-12)
        assert plan.load_s >= best * (1 - 1e-12)
        assert plan.bound_s > 0.3 * best
        assert (plan.status == "optimal") == (plan.bound_s >= plan.load_s)
        fits += 1
        hit += math.isclose(plan.load_s, best, rel_tol=1e-9)
    assert fits > 40
    assert hit >= 0.95 * fits
    assert refuted > 3


def test_the_bound_holds_for_every_plan_of_several_stages() -> None:
    close = 0
    for seed in range(60):
        data = piper(seed)
        several = [price(data, plan) for plan in all_plans(data) if len(plan) > 1]
        best = min(several, default=math.inf)
        bound_s = bound_plans(parse(data), 1e3 if math.isinf(best) else best, Work())
        assert bound_s <= best * (1 + 1e-12)
        close += bound_s > 0.8 * best
    assert close > 5


def test_relaxations_hold_and_meet_but_for_one_step() -> None:
    instance = parse(recurrent(2, 4))
    downsets = enumerate_downsets(instance)
    assert downsets is not None
    layout = Layout(instance, downsets)
    for tensor, many in ((1, 1), (1, 8), (2, 3)):
        lower, upper = relax(layout, tensor, many)
        table = StageSeconds(layout, first_ranges(instance))
        for pair in range(len(lower)):
            packed = table.refine(tensor, pair, many)
            if packed is None:
                assert math.isinf(lower[pair])
                assert math.isinf(upper[pair])
            else:
                assert lower[pair] <= packed.seconds * (1 + 1e-12)
                assert packed.seconds <= upper[pair] * (1 + 1e-12)


def test_moved_seconds_are_the_referees() -> None:
    instance = parse(recurrent(2, 3))
    downsets = enumerate_downsets(instance)
    assert downsets is not None
    table = StageSeconds(Layout(instance, downsets), [1])
    starts, stops = table.layout.pairs
    for (data, tensor), moved_s in zip(instance.degrees, table.moved_s, strict=True):
        for pair, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            nodes = table.layout.stage_nodes(start, stop)
            stage = PlannedStage(dict.fromkeys(nodes, "vanilla"), data, tensor)
            computed = sum(instance.nodes[v][tensor].configs[0].time_s for v in nodes)
            assert moved_s[pair] + computed / data == pytest.approx(_time_s(instance, stage))


@pytest.mark.slow
def test_a_convolutional_net_of_177_nodes_is_planned_exactly() -> None:
    """Each node differs, 752 downsets: the ways of its stages are more than can be counted."""
    data = one_device_a_stage(convolutional())
    plan = plan_of(parse(data))
    assert plan is not None
    assert len(data["nodes"]) == 177
    assert plan.load_s == plan.bound_s
    assert plan.status == "optimal"
    ways = [{*stage.configs.values()} for stage in plan.stages]
    assert any(len(names) == 2 for names in ways)


@pytest.mark.slow
def test_a_convolutional_net_on_16_devices_is_planned_exactly() -> None:
    """Memory is ample for most stages: ways that have more room than others are as fast."""
    plan = plan_of(parse(WIDE["on 16 devices"]()))
    assert plan is not None
    assert plan.load_s == plan.bound_s


@pytest.mark.slow
def test_a_recurrent_net_of_78_nodes_is_planned_with_a_bound() -> None:
    data = recurrent()
    instance = parse(data)
    assert len(data["nodes"]) == 78
    assert enumerate_downsets(instance) is None
    plan = plan_of(instance)
    assert plan is not None
    assert plan.bound_s > 0.88 * plan.load_s
    assert plan.status == "feasible"
    assert plan_stages(instance, Work()) == plan


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_cuts_along_orders_are_near_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all 495 downsets can be tried, too; the best is proven so by packing alone."""
    instance = parse(recurrent(4, 8, seed=seed, limit_gib=0.12))
    best = plan_of(instance)
    assert best is not None
    assert (best.status, best.bound_s) == ("optimal", best.load_s)
    monkeypatch.setattr(f"{STAGES}.graph.MOST_DOWNSETS", 0)
    plan = plan_of(instance)
    assert plan is not None
    assert plan.bound_s <= best.load_s * (1 + 1e-12)
    assert best.load_s * (1 - 1e-12) <= plan.load_s < 1.03 * best.load_s


@pytest.mark.parametrize("data", [recurrent(), recurrent(4, 8), convolutional(40)])
def test_the_clock_stops_a_search_with_a_plan(data: Json) -> None:
    """Also of graphs of few downsets, of whose cuts nothing is proven by then."""
    plan = plan_stages(parse(data), Work.within(0.0))
    assert plan.stages
    assert plan.status == "time_limit"
    assert 0 < plan.bound_s < plan.load_s


def test_packed_stages_are_what_pack_finds() -> None:
    instance = parse(recurrent(2, 3))
    downsets = enumerate_downsets(instance)
    assert downsets is not None
    table = StageSeconds(Layout(instance, downsets), [1, 2])
    last = len(table.layout.pairs[0]) - 1
    nodes = table.layout.stage_nodes(*(int(ends[last]) for ends in table.layout.pairs))
    things = [
        tuple(
            (c.time_s, 2 * c.flying_bytes + c.resident_bytes) for c in instance.nodes[v][1].configs
        )
        for v in sorted(nodes)
    ]
    assert table.refine(1, last, 2) == pack(things, instance.limit_bytes)


def test_orders_follow_the_edges() -> None:
    instance = parse(recurrent(3, 4))
    orders = first_orders(instance)
    assert len(orders) >= 2
    rng = random.Random(0)
    for order in [*orders, *(random_order(instance, rng) for _ in range(5))]:
        place = {v: at for at, v in enumerate(order)}
        assert place.keys() == instance.nodes.keys()
        assert all(place[u] < place[v] for u, v in instance.edges)


def test_neighbours_are_downsets_and_hold_the_ends() -> None:
    instance = parse(recurrent(3, 4))
    everything = enumerate_downsets(instance)
    assert everything is not None
    ends = [frozenset({0, 1}), frozenset({0, 1, 2, 4, 5})]
    order = first_orders(instance)[0]
    for found in (around(instance, ends, 20), between(ends, order)):
        assert set(found) <= set(everything)
        assert {frozenset(), *ends, frozenset(instance.nodes)} <= set(found)
    assert len(around(instance, ends, 20)) == 20
    assert set(around(instance, ends, 1000)) == set(everything)


def test_the_least_cut() -> None:
    data = recurrent(2, 2)
    assert least_cut(parse(data)) == min(
        sum(
            e["communicationCost"]
            for e in data["edges"]
            if (e["sourceId"] in part) != (e["destId"] in part)
        )
        for part in ({0}, {1}, {2}, {3}, {0, 1}, {0, 2}, {0, 3})
    )
    assert least_cut(parse(data | {"nodes": data["nodes"][:1], "edges": []})) == 0.0
    assert least_cut(parse(data | {"edges": data["edges"][:1]})) == 0.0


def test_wide_files_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = recurrent(5, 8, limit_gib=0.4)
    Path("p.json").write_text(json.dumps(data))
    assert main(["solve", "p.json", "-o", "s.json", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["solver"] == "orders / relaxation"
    assert facts["gap"] == pytest.approx(1 - facts["bound"] / facts["cost"])
    assert main(["evaluate", "p.json", "s.json"]) == 0
    assert capsys.readouterr().out.startswith(f"cost        {facts['cost']:.12g}\n")
    Path("p.json").write_text(json.dumps(data | {"maxMemoryPerDevice": 1.0}))
    assert main(["solve", "p.json"]) == 3
    assert "the memory of all devices together is short" in capsys.readouterr().out
