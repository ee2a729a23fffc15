"""Devices of unlike speed: larger shards, or more nodes, for the fast ones."""

from dataclasses import replace

import numpy as np
import pytest

import partitioner
from helpers.plans.searching import search
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.prices.compute import local_flops
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan, resolve
from partitioner.search.find_plan import find_plan
from partitioner.search.neighbourhood import Neighbourhood
from partitioner.search.outcome import NoCheaper, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.explicit import JointSpace
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.derive import Rules, device_shares, device_speeds

KIB = 2**10
IDEAL = resolve_cluster("4xideal")
FAST = IDEAL.devices[0]
SPEEDS = np.array([3.0, 3.0, 1.0, 1.0])


def slower(times: float, **figures: float) -> DeviceSpec:
    rates = {dtype: rate / times for dtype, rate in FAST.peak_flops_per_s.items()}
    return replace(FAST, name="slow", peak_flops_per_s=rates, **figures)  # type: ignore[arg-type]


#: Two fast devices and two slow ones, 3:1, free links.
MIXED = Cluster("mixed", (FAST, FAST, slower(3), slower(3)), IDEAL.levels)


def mlp(**sizes: int) -> Graph:
    return load_onnx(examples.build("mlp", **sizes)).graph


def flops(graph: Graph, plan: Plan) -> np.ndarray:
    """FLOPs by device."""
    done = np.zeros(4)
    for placed in resolve(graph, plan):
        for device, point in placed.mesh.coords():
            done[device] += local_flops(graph, placed, point)
    return done


def ideal_s(graph: Graph, cluster: Cluster = MIXED) -> float:
    """Total work over total speed, in seconds."""
    speeds = device_speeds(graph, Rules.of(graph), cluster)
    assert speeds is not None
    return 1 / sum(speeds.values())


def test_one_speed_a_device_for_the_whole_graph() -> None:
    graph = mlp(layers=3, hidden=64)
    rules = Rules.of(graph)
    speeds = device_speeds(graph, rules, MIXED)
    assert speeds is not None
    alone = search(graph, resolve_cluster("1xideal"), Request()).evaluation.step_s
    np.testing.assert_allclose([speeds[d] * alone for d in range(4)], SPEEDS / 3)
    assert device_speeds(graph, rules, IDEAL) is None
    timeless = replace(FAST, peak_flops_per_s={"float32": float("inf")})
    mixed = replace(MIXED, devices=(FAST, timeless, FAST, FAST))
    assert device_speeds(graph, rules, mixed) is None


@pytest.mark.parametrize("hidden", [1024, 1000])
def test_an_intra_plan_takes_total_work_over_total_speed(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = mlp(layers=4, hidden=hidden, batch=64)
    request = Request(strategy="intra", time_limit_s=100)  # a bound is to be proven
    outcome = search(graph, MIXED, request)
    assert outcome.evaluation.step_s < 1.02 * ideal_s(graph)
    done = flops(graph, outcome.plan)
    np.testing.assert_allclose(done / done.sum(), SPEEDS / SPEEDS.sum(), rtol=0.02)
    monkeypatch.setattr("partitioner.search.spaces.explicit.device_shares", lambda *_: ())
    balanced = search(graph, MIXED, request)
    assert balanced.plan.certificate is not None
    assert outcome.evaluation.step_s < 0.55 * balanced.plan.certificate.bound


def test_an_inter_plan_gives_fast_devices_more() -> None:
    graph = mlp(layers=16, hidden=256)
    outcome = search(graph, MIXED, Request(strategy="inter", time_limit_s=10))
    assert {placed.mesh.size() for placed in resolve(graph, outcome.plan)} == {1}
    loads = outcome.evaluation.load_s
    assert max(loads.values()) < 1.01 * min(loads.values())
    done = flops(graph, outcome.plan)
    np.testing.assert_allclose(done / done.sum(), SPEEDS / SPEEDS.sum(), rtol=0.01)


LLAMA = {"layers": 1, "hidden": 64, "heads": 8, "kv_heads": 8, "seq": 5, "vocab": 96}


@pytest.mark.parametrize(
    ("name", "sizes", "mesh"),
    [
        ("mlp", {"layers": 3, "hidden": 100, "batch": 6}, {"tp": 4}),
        ("mlp", {"layers": 3, "hidden": 100, "batch": 6}, {"dp": 2, "tp": 2}),
        ("llama", LLAMA, {"tp": 4}),
    ],
)
def test_the_programs_of_an_uneven_plan_are_the_whole_model(
    name: str, sizes: dict[str, int], mesh: dict[str, int]
) -> None:
    result = partitioner.compile(
        examples.build(name, **sizes),
        devices=4,
        cluster=MIXED,
        strategy="intra",
        mesh=mesh,
        time_limit_s=10,
    )
    done = flops(result.graph, result.plan)
    assert done[:2].min() > 2 * done[2:].max()
    assert result.verify().equal


@pytest.mark.slow
def test_a_cut_by_speed_is_not_taken_where_it_does_not_fit() -> None:
    """Weights of 1 MiB, cut 3:3:1:1 or evenly: two rows of input are too few to be cut."""
    model = examples.build("mlp", layers=4, hidden=256, batch=2)
    parts = {}
    for limit in (480 * KIB, 320 * KIB):
        result = partitioner.compile(
            model, devices=4, cluster=MIXED, strategy="intra", memory=limit, time_limit_s=10
        )
        assert result.verify().equal
        assert max(result.summary["peak_bytes"]) <= limit
        done = flops(result.graph, result.plan)
        parts[limit] = done / done.sum()
    np.testing.assert_allclose(parts[480 * KIB], SPEEDS / 8)
    np.testing.assert_allclose(parts[320 * KIB], np.full(4, 0.25), atol=0.05)


def test_a_cut_by_speed_fits_where_a_balanced_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow devices have room for 200 KiB each: less than a quarter of the weights."""
    small = slower(3, memory_bytes=200 * KIB)
    cluster = replace(MIXED, devices=(FAST, FAST, small, small))
    graph = mlp(layers=4, hidden=256, batch=2)
    request = Request(strategy="intra", time_limit_s=10)
    outcome = search(graph, cluster, request)
    assert outcome.evaluation.fits
    assert outcome.evaluation.step_s < 1.01 * ideal_s(graph, cluster)
    monkeypatch.setattr("partitioner.search.spaces.explicit.device_shares", lambda *_: ())
    with pytest.raises(Infeasible):
        search(graph, cluster, request)


def test_a_balanced_plan_is_told_of_the_cuts_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp(layers=2, hidden=64, batch=1)
    with monkeypatch.context() as without:
        without.setattr("partitioner.search.spaces.explicit.device_shares", lambda *_: ())
        plan = search(graph, MIXED, Request(strategy="intra", time_limit_s=10)).plan
    offered = Neighbourhood(graph, plan, MIXED).alternatives(graph.nodes[0])
    sizes = {layout.sizes() for entry in offered[1:] for layout in entry.placed.layouts.values()}
    assert offered[0].chosen
    assert {layout.sizes() for layout in offered[0].placed.layouts.values()} == {(16,) * 4}
    assert (24, 24, 8, 8) in sizes


MB = 10**6
#: Of one speed, with memories of 24 and 10 MB.
CARDS = replace(
    resolve_cluster("2xideal"),
    devices=(replace(FAST, memory_bytes=24 * MB), replace(FAST, memory_bytes=10 * MB)),
)


def test_shares_by_memory_are_offered_where_memory_may_bind() -> None:
    graph = mlp(layers=4, hidden=1300, batch=2)
    usual, between, by_memory = device_shares(graph, Rules.of(graph), CARDS)
    assert usual == {0: 0.5, 1: 0.5}
    np.testing.assert_allclose([by_memory[0], by_memory[1]], [24 / 34, 10 / 34])
    np.testing.assert_allclose(between[0], (0.5 + 24 / 34) / 2)
    (speeds,) = device_shares(graph, Rules.of(graph), replace(CARDS, devices=MIXED.devices[1:3]))
    assert speeds[0] == pytest.approx(3 * speeds[1])
    ample = tuple(replace(FAST, memory_bytes=10**9 + i) for i in range(2))
    (equal,) = device_shares(graph, Rules.of(graph), replace(CARDS, devices=ample))
    assert equal[0] == equal[1]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_model_that_fits_in_parts_by_memory_has_a_plan(devices: int) -> None:
    """27 MB of weights on 24 and 10 MB (and 4 MB): halves or thirds do not fit."""
    spare = replace(FAST, memory_bytes=4 * MB)
    specs = (*CARDS.devices, spare)[:devices]
    cluster = replace(
        CARDS,
        devices=specs,
        levels=(replace(CARDS.levels[0], size=devices),),
    )
    model = examples.build("mlp", layers=4, hidden=1300, batch=2)
    result = partitioner.compile(model, cluster=cluster, strategy="intra", time_limit_s=20)
    assert all(
        peak <= spec.memory_bytes
        for peak, spec in zip(result.summary["peak_bytes"], specs, strict=True)
    )
    assert min(result.summary["peak_bytes"]) > 2 * MB
    assert result.verify().equal


def test_a_refusal_on_unlike_devices_claims_no_more_than_was_searched() -> None:
    """45 MB of weights on 24 and 10 MB: whole nodes are proven not to fit, cut ones are not."""
    graph = mlp(layers=4, hidden=1680, batch=2)
    with pytest.raises(Infeasible, match="no plan was found that fits"):
        search(graph, CARDS, Request(strategy="intra", time_limit_s=10))
    with pytest.raises(Infeasible, match="no plan fits"):
        search(graph, CARDS, Request(strategy="inter", time_limit_s=10))


def test_a_device_that_holds_the_model_alone_is_known_where_the_clock_ends_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = mlp(layers=3, hidden=63)  # two devices would have 32 and 31 of it
    whole = sum(type_.nbytes for type_ in graph.types.values())
    small = replace(FAST, name="small", memory_bytes=whole // 8)
    pair = (small, replace(FAST, memory_bytes=2 * whole))
    cluster = Cluster("pair", pair, resolve_cluster("2xideal").levels)

    def searched(self: JointSpace, *_: object) -> SpaceResult:
        error = Infeasible("not searched", proven=False)
        return SpaceResult(bound=0.0, failed=((self.family, error),))

    monkeypatch.setattr(JointSpace, "search", searched)
    outcome = search(graph, cluster, Request())
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert outcome.plan.kind == "single"
    assert {device for group in outcome.plan.groups for device in group.devices} == {1}
    assert (certificate.bound, certificate.status) == (0.0, "feasible")
    with pytest.raises(Infeasible, match="not searched"):
        search(graph, cluster, Request(strategy="intra"))
    asked = Request()
    cheaper = replace(Budget.of(asked), best_s=certificate.cost / 2)
    with pytest.raises(NoCheaper):
        find_plan(graph, cluster, asked, cheaper)
