"""Plans for more devices than have a column each: stages of equal meshes, repeated blocks once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, cycle, islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import partitioner
from helpers.problems.stage_problems import checked
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan, resolve
from partitioner.problem.folding import Folded, fold
from partitioner.search.find_plan import find_plan
from partitioner.search.levels import stages
from partitioner.search.levels.axis_sharder import AxisSharder
from partitioner.search.levels.mesh_sharder import Sharder
from partitioner.search.levels.meshes import DevicePool, device_pools, layouts, sizes
from partitioner.search.levels.staged import SplitAxesSpace, StagesSpace, axes_meshes
from partitioner.search.levels.stages import Staged, StageSearch
from partitioner.search.request import Budget, Request
from partitioner.solver import work
from partitioner.solver.outcome import Infeasible
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.solver.stages.model import Pool, StageProblem, evaluate_cut
from partitioner.solver.work import Work
from partitioner.strategies.derive import Rules


def mlp(layers: int = 24, hidden: int = 1024, batch: int = 64) -> onnx.ModelProto:
    return examples.build("mlp", layers=layers, hidden=hidden, batch=batch)


def searched(graph: Graph, cluster: Cluster, strategy: str = "auto", gap: float = 0.01) -> Staged:
    budget = Budget.of(Request(time_limit_s=60, gap=gap))
    rules = Rules.of(graph)
    sharder = Sharder.of(graph, rules, cluster, budget)
    return StageSearch(sharder, layouts(cluster, strategy, None), budget).run()[0]


def plan_of(staged: Staged, cluster: Cluster) -> Plan:
    used, nodes = staged.decisions(staged.groups(cluster))
    return Plan(staged.folded.whole.digest, cluster.to_data(), used, nodes)


CASES = [
    ("mlp", {"layers": 24, "hidden": 1024, "batch": 64}, "4x8xh100", "auto"),
    ("mlp", {"layers": 24, "hidden": 1024, "batch": 64}, "32xideal", "intra"),
    ("mlp", {"layers": 40, "hidden": 512, "batch": 32}, "3x6xh100", "auto"),
    ("mlp", {"layers": 40, "hidden": 512, "batch": 32}, "4x8xh100", "inter"),
    ("llama", {"layers": 5, "hidden": 128}, "4x8xh100", "inter"),
]


@pytest.mark.parametrize(("name", "options", "spec", "strategy"), CASES)
def test_the_search_counts_no_less_than_the_referee(
    name: str, options: Mapping[str, int], spec: str, strategy: str
) -> None:
    graph = load_onnx(examples.build(name, **options)).graph
    cluster = resolve_cluster(spec)
    staged = searched(graph, cluster, strategy)
    exact = evaluate(graph, plan_of(staged, cluster), cluster)
    assert exact.step_s <= staged.cut.load_s * (1 + 1e-9)
    for option, mesh in zip(staged.options, staged.groups(cluster), strict=True):
        assert option.layout.mesh.size() == mesh.size()
        assert exact.compute_s[mesh.devices[0]] > 0
    assert exact.devices_used == sum(mesh.size() for mesh in staged.groups(cluster))
    assert staged.bound_s <= exact.step_s * (1 + 1e-9)


def test_the_whole_way_to_rank_files_is_equal_to_the_model() -> None:
    result = partitioner.compile(mlp(layers=12, hidden=32, batch=32), cluster="3x6xh100")
    assert result.evaluation.devices_used > 1
    assert result.evaluation == evaluate(result.graph, result.plan, result.cluster)
    assert result.verify()


def test_an_intra_plan_of_many_devices_is_equal_to_the_model() -> None:
    result = partitioner.compile(
        mlp(layers=8, hidden=64, batch=36), cluster="18xideal", strategy="intra"
    )
    assert result.evaluation.sharded_flops_share > 0.9
    assert result.verify()


@pytest.mark.slow
def test_more_devices_take_no_longer_stages() -> None:
    graph = load_onnx(mlp(layers=64, hidden=1024, batch=256)).graph
    steps = []
    for nodes in (4, 16, 64):
        cluster = resolve_cluster(f"{nodes}x8xh100")
        staged = searched(graph, cluster)
        steps.append(staged.cut.load_s)
        assert staged.bound_s <= staged.cut.load_s
    assert steps == sorted(steps, reverse=True)


def test_a_thousand_devices_get_a_plan_alone() -> None:
    result = partitioner.compile(mlp(layers=64, hidden=256, batch=64), cluster="128x8xh100")
    certificate = result.plan.certificate
    assert certificate is not None
    assert certificate.bound <= certificate.cost
    assert certificate.folded == "62 of 64 blocks of 2 nodes alike" or certificate.folded
    assert len(result.summary["load_s"]) == 1024
    assert any("1024 devices" in note for note in result.summary["notes"])
    with pytest.raises(partitioner.PartitionerError, match="made for up to 64 devices"):
        assert result.programs


@pytest.mark.slow
def test_memory_is_kept_stage_by_stage() -> None:
    graph = load_onnx(mlp(layers=32, hidden=1024, batch=32)).graph
    weights = 32 * 1024 * 1024 * 4
    cluster = resolve_cluster("4x8xh100").with_memory(weights // 8)
    staged = searched(graph, cluster)
    exact = evaluate(graph, plan_of(staged, cluster), cluster)
    assert exact.fits
    with pytest.raises(Infeasible):
        searched(graph, cluster.with_memory(weights // 200))


def two_kinds(fast: int, slow: int) -> Cluster:
    """Devices of two speeds on one switch."""
    base = resolve_cluster(f"{fast + slow}xh100")
    spec = base.devices[0]
    rates = {dtype: rate / 4 for dtype, rate in spec.peak_flops_per_s.items()}
    lazy = replace(
        spec,
        name="slow",
        peak_flops_per_s=rates,
        memory_bytes_per_s=spec.memory_bytes_per_s / 4,
        launch_s=spec.launch_s * 4,
    )
    return replace(base, name="mixed", devices=(spec,) * fast + (lazy,) * slow)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "batch", "limit"), [(192, 64, 314_208), (64, 48, 33_952)])
def test_stages_fit_with_what_they_send_and_receive(width: int, batch: int, limit: int) -> None:
    """The search does not count it: where the referee does, it is repeated within less memory."""
    tight = resolve_cluster("4x8xh100").with_memory(limit)
    result = partitioner.compile(mlp(12, width, batch), cluster=tight)
    assert result.evaluation.fits_exactly
    assert len(result.plan.groups) > 1


def chain(blocks: int, *, gives: bool, again: bool) -> onnx.ModelProto:
    """Layers whose results are outputs, if `gives`, with the input added at the end, if `again`."""
    size, nodes, weights, outputs = 32, [], [], []
    above = "x"
    for block in range(blocks):
        weight = np.full((size, size), 0.1, np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{block}"))
        nodes.append(helper.make_node("MatMul", [above, f"w{block}"], [f"m{block}"]))
        nodes.append(helper.make_node("Relu", [f"m{block}"], [f"r{block}"]))
        above = f"r{block}"
        outputs += [f"m{block}"] if gives else []
    nodes.append(helper.make_node("Add", [above, "x" if again else "m0"], ["y"]))
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, size))
        for name in ("x", "y", *outputs)
    }
    graph = helper.make_graph(
        nodes, "chain", [infos["x"]], [infos[name] for name in ("y", *outputs)], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def bridged(blocks: int) -> onnx.ModelProto:
    """Layers down, and layers up that add what those down gave."""
    size, nodes, above = 32, [], "x"
    for block in range(blocks):
        nodes.append(helper.make_node("MatMul", [above, f"w{block}"], [f"m{block}"]))
        nodes.append(helper.make_node("Relu", [f"m{block}"], [f"r{block}"]))
        above = f"r{block}"
    for block in reversed(range(blocks)):
        nodes.append(helper.make_node("Add", [above, f"r{block}"], [f"a{block}"]))
        nodes.append(helper.make_node("MatMul", [f"a{block}", f"v{block}"], [f"p{block}"]))
        nodes.append(helper.make_node("Tanh", [f"p{block}"], [f"t{block}"]))
        above = f"t{block}"
    weights = [
        numpy_helper.from_array(np.full((size, size), 0.1, np.float32), f"{kind}{block}")
        for kind in "wv"
        for block in range(blocks)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, size)) for name in ("x", "t0")
    )
    graph = helper.make_graph(nodes, "bridged", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def normed(blocks: int) -> onnx.ModelProto:
    """Layers with norms, of whose results the second is absent and the third an output."""
    size, nodes, above = 32, [], "x"
    weights = [numpy_helper.from_array(np.ones(size, np.float32), "scale")]
    for block in range(blocks):
        weight = np.full((size, size), 0.1, np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{block}"))
        nodes.append(helper.make_node("MatMul", [above, f"w{block}"], [f"m{block}"]))
        results = [f"y{block}", "", f"inverse{block}"]
        nodes.append(helper.make_node("LayerNormalization", [f"m{block}", "scale"], results))
        above = f"y{block}"
    given = {"x": size, above: size} | {f"inverse{block}": 1 for block in range(blocks)}
    x, *outputs = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, columns))
        for name, columns in given.items()
    )
    graph = helper.make_graph(nodes, "normed", [x], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(partial(chain, 10, gives=True, again=False), id="blocks give outputs"),
        pytest.param(partial(chain, 3, gives=False, again=True), id="the input is read at the end"),
        pytest.param(partial(chain, 12, gives=True, again=True), id="both"),
        pytest.param(partial(bridged, 12), id="blocks keep values for others"),
        pytest.param(partial(normed, 12), id="results are absent"),
    ],
)
def test_a_plan_is_found_within_what_the_best_one_needs(
    model: Callable[[], onnx.ModelProto],
) -> None:
    """A stage holds what all of its blocks give or keep, and the input as long as it is read."""
    free = resolve_cluster("4x8xh100")
    best = partitioner.compile(model(), cluster=free, plan_only=True).evaluation
    tight = free.with_memory(max(best.needed_bytes.values()))
    assert partitioner.compile(model(), cluster=tight, plan_only=True).evaluation.fits_exactly


def test_a_stage_passes_on_no_more_than_its_own_blocks_hold() -> None:
    """In inference other stages hold what the other blocks give."""
    graph = load_onnx(chain(10, gives=True, again=False)).graph
    sharder = Sharder(fold(graph, Rules.of(graph)), resolve_cluster("4x8xh100"))
    sharded = AxisSharder(sharder, Work.within(60)).begin(DeviceMesh.of({"tp": 4}), 0.05)[0].best
    items = [
        replace(item, bytes=(0.0,)) if index in sharded.built.resident else item
        for index, item in enumerate(sharded.tied.items)
    ]
    of_all = evaluate_choices(replace(sharded.tied, items=tuple(items)), sharded.solution.chosen)
    assert 0 < sharded.passing_bytes < of_all.peak_bytes[0]


def test_readers_of_a_constant_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number squared would take minutes for a scalar that 10,000 nodes read."""
    count, looked_at = 200, 0
    inner = stages._named

    def counted(*args: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return inner(*args)

    monkeypatch.setattr(stages, "_named", counted)
    names = [f"v{index}" for index in range(count)]
    ops = islice(cycle(["Add", "Sub", "Mul", "Add", "Mul", "Mul", "Sub"]), count)
    nodes = [
        helper.make_node(op, [above, "scalar"], [name])
        for op, above, name in zip(ops, ["x", *names], names, strict=False)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (8, 8)) for name in ("x", names[-1])
    )
    scalar = numpy_helper.from_array(np.full(1, 0.5, np.float32), "scalar")
    graph = load_onnx(
        helper.make_model(
            helper.make_graph(nodes, "scaled", [x], [y], [scalar]),
            opset_imports=[helper.make_opsetid("", 17)],
        )
    ).graph
    monkeypatch.setattr("partitioner.search.levels.mesh_sharder.fold", unfolded)
    staged = searched(graph, resolve_cluster("4x8xh100"), "inter", gap=0.9)
    assert len(graph.nodes) == count
    assert count <= looked_at <= 10 * count * len(staged.searched)


def unfolded(graph: Graph, _rules: Rules, _demands: Mapping[str, object]) -> Folded:
    """The graph as it is, as if nothing were repeated."""
    return Folded(graph, graph, (), (), tuple(range(len(graph.nodes))))


@pytest.mark.slow
def test_a_plan_that_fits_is_found_with_more_memory() -> None:
    """Plans that fit as the search counts do not as a session does: they are no reason to refuse.

    Within 40,000 bytes a session holds more than a search that is not repeated knows of.
    """
    graph, free = load_onnx(mlp(4, 64, 64)).graph, resolve_cluster("2x4xh100")
    rules, meshes = Rules.of(graph), layouts(free, "auto", None)
    step_s = []
    for memory_bytes in (36_000, 40_000, 44_000, 48_000):
        cluster, budget = free.with_memory(memory_bytes), Budget.of(Request())
        plan = StagesSpace(graph, rules, cluster, meshes).cheapest(budget)
        assert plan.evaluation.fits_exactly
        step_s.append(plan.evaluation.step_s)
    assert max(step_s) < 80e-6, "118 us, where layouts were not searched within memory"


@pytest.mark.slow
def test_faster_devices_get_more_work() -> None:
    cluster = two_kinds(12, 12)
    assert device_pools(cluster) == (DevicePool(0, 12), DevicePool(12, 12))
    graph = load_onnx(mlp(layers=80, hidden=2048, batch=512)).graph
    staged = searched(graph, cluster)
    figures = evaluate(graph, plan_of(staged, cluster), cluster)
    flops = [figures.compute_s[d] * (1 if d < 12 else 0.25) for d in range(24)]
    fast, slow = sum(flops[:12]), sum(flops[12:])
    assert slow > 0
    assert 2.5 < fast / slow < 5.5
    assert staged.bound_s <= figures.step_s


def test_stage_sizes_divide_one_another_and_lie_alike() -> None:
    for spec in ("3x8xh100", "128x8xh100", "5x6xh100", "24xh100"):
        cluster = resolve_cluster(spec)
        (pool,) = device_pools(cluster)
        devices = sizes(pool, cluster)
        assert devices[0] == 1
        assert devices[-1] == len(cluster)
        assert all(b % a == 0 for a, b in pairwise(devices))
    odd = resolve_cluster("3x8xh100")
    assert 6 not in sizes(DevicePool(0, 24), odd)
    assert sizes(DevicePool(4, 20), odd) == (1, 2, 4, 20)


@pytest.mark.parametrize("spec", ["4x8xh100", "32xideal"])
def test_the_cut_is_what_the_cutter_says(spec: str) -> None:
    cluster = resolve_cluster(spec)
    graph = load_onnx(mlp(layers=20, hidden=256, batch=32)).graph
    staged = searched(graph, cluster)
    options = tuple({id(o): o.stage for o in staged.options}.values())
    pool = Pool(len(cluster), float(cluster.devices[0].memory_bytes))
    problem = checked(StageProblem(options, pools=(pool,), in_flight=False))
    index = {id(option): k for k, option in enumerate(options)}
    stages = tuple(
        replace(stage, option=index[id(option.stage)])
        for stage, option in zip(staged.cut.stages, staged.options, strict=True)
    )
    outcome = evaluate_cut(problem, stages)
    assert not outcome.faults
    assert math.isclose(max(outcome.load_s), staged.cut.load_s)


def opaque_model() -> onnx.ModelProto:
    """Layers around an op that has no rule."""
    nodes, weights = [], []
    before = "x"
    for i in range(12):
        weights.append(numpy_helper.from_array(np.ones((64, 64), np.float32), f"w{i}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"]))
        before = f"r{i}"
        if i == 5:
            nodes.append(helper.make_node("Det", ["cube"], ["d"]))
            nodes.append(helper.make_node("Mul", [before, "d"], ["scaled"]))
            before = "scaled"
    graph = helper.make_graph(
        nodes,
        "opaque",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (36, 64)),
            helper.make_tensor_value_info("cube", TensorProto.FLOAT, (3, 3)),
        ],
        [helper.make_tensor_value_info(before, TensorProto.FLOAT, (36, 64))],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_ops_without_a_rule_stay_on_one_device() -> None:
    result = partitioner.compile(opaque_model(), cluster="18xideal", strategy="intra")
    whole = [group for group in result.plan.groups if not group.axes]
    assert len(whole) == 1
    assert result.verify()


def test_pins_hold_on_many_devices_of_several_kinds() -> None:
    """Stages have the devices of each kind, and a pinned layer its own."""
    pins = {"pin": [{"nodes": ["layer0.*"], "device": 70}, {"tensor": "layer2.weight", "dim": 1}]}
    cluster = two_kinds(40, 40)
    plan = partitioner.compile(mlp(4, 32, 80), cluster=cluster, constraints=pins).plan
    first = [node for name, node in plan.nodes.items() if name.startswith("layer0.")]
    assert {plan.groups[node.group].devices for node in first} == {(70,)}
    assert any(cut.axes for cut in plan.nodes["layer2.out"].cuts.values())


@pytest.mark.slow
def test_a_refusal_names_the_memory_at_which_a_plan_fits() -> None:
    model = mlp(layers=32, hidden=1024, batch=32)
    with pytest.raises(Infeasible, match="it fits with --memory") as caught:
        partitioner.compile(model, cluster="4x8xh100", memory="64KiB")
    way, *_ = caught.value.relaxations
    limit = int(way.split()[2])
    result = partitioner.compile(model, cluster="4x8xh100", memory=limit)
    assert max(result.evaluation.held_bytes.values()) <= limit
    less = partitioner.compile(model, cluster="4x8xh100", memory=limit * 3 // 4)
    assert less.plan.blocks.stretches  # which the refusal does not weigh


def test_one_stage_of_several_kinds_is_refused_by_name() -> None:
    with pytest.raises(partitioner.PartitionerError, match="--mesh on devices of several kinds"):
        partitioner.compile(mlp(4, 32, 24), cluster=two_kinds(12, 12), mesh={"tp": 24})


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster",
    [resolve_cluster("4x8xh100"), pytest.param(two_kinds(4, 20), marks=pytest.mark.slow)],
)
def test_what_would_fit_is_a_memory_that_fits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partitioner.search.ways.way.ONE_COUNT_S", 20.0)
    model = mlp(12, 64, 48)
    with pytest.raises(Infeasible, match=r"short .* it fits with --memory") as caught:
        partitioner.compile(model, cluster=cluster.with_memory(1_500))
    way = caught.value.relaxations[0]
    enough = int(way.split()[2])
    assert partitioner.compile(model, cluster=cluster.with_memory(enough)).evaluation.fits_exactly


def test_more_devices_than_an_objective_is_planned_for_are_no_way_out() -> None:
    with pytest.raises(Infeasible, match=r"it fits (in blocks )?with --memory"):
        partitioner.compile(
            mlp(12, 64, 48), devices=8, objective="memory", memory=1000, time_limit_s=30
        )


def test_lines_of_a_mesh_lie_alike_in_the_innermost_level() -> None:
    cluster = resolve_cluster("3x8xh100")
    meshes = [layout.mesh for layout in layouts(cluster, "auto", None)]
    minors = {mesh.axes[1][1] for mesh in meshes if len(mesh.axes) > 1}
    assert 3 not in minors
    assert {2, 4, 8} <= minors


def test_what_a_thousand_devices_hold_is_counted_once() -> None:
    graph = load_onnx(mlp(64, 256, 64)).graph
    cluster = resolve_cluster("128x8xh100")
    staged = searched(graph, cluster)
    figures = evaluate(graph, plan_of(staged, cluster), cluster)
    assert figures.held_bytes is figures.held_bytes
    assert figures.over_bytes is figures.over_bytes


@pytest.mark.slow
def test_three_axes_win_where_weights_must_be_cut_and_values_need_not_be_whole() -> None:
    """A chain of matrices on two nodes, cut four ways in a node: two by two sends less."""
    graph = load_onnx(examples.build("mlp", layers=16, hidden=2048, batch=8192)).graph
    tight = resolve_cluster("2x4xl4").with_memory(150_000_000)
    request = Request(time_limit_s=60)
    meshes = axes_meshes(tight, request)
    assert [len(layout.mesh.axes) for layout in meshes] == [2, 2, 3]
    costs = []
    for space in (meshes[:2], meshes):
        split = SplitAxesSpace(graph, Rules.of(graph), tight, space)
        (plan,) = split.search(Budget.of(request), ()).plans
        assert plan.solution.bound <= plan.evaluation.step_s == plan.solution.cost
        assert plan.evaluation.fits
        costs.append(plan.evaluation.step_s)
    assert plan.space.groups[0].axes == (("x", 2), ("y", 2), ("z", 2))
    assert costs[1] < 0.97 * costs[0]


@pytest.mark.parametrize("goal", ["throughput", "latency", "memory"])
def test_the_clock_ends_the_making_of_the_one_problem_of_a_named_mesh(
    goal: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are questions for the time here: the problem asks more often than its limit has."""
    asked = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(asked)))
    monkeypatch.setattr(work, "time", clock)
    graph, cluster = load_onnx(mlp(6, 96, 12)).graph, resolve_cluster("6xh100")
    request = Request(mesh={"x": 2, "y": 3}, objective=goal, time_limit_s=60)
    outcome = find_plan(graph, cluster, request.over(6), Budget.of(request))
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert certificate.status == "time_limit"
    assert outcome.plan.groups == (DeviceMesh.of({"x": 2, "y": 3}),)
    assert outcome.evaluation.fits_exactly
    assert certificate.bound <= certificate.cost


def test_a_named_mesh_on_which_nothing_is_known_to_fit_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = count()
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: float(next(asked))))
    graph, cluster = load_onnx(mlp(6, 96, 12)).graph, resolve_cluster("6xh100").with_memory(1000)
    request = Request(mesh={"x": 2, "y": 3}, time_limit_s=60)
    with pytest.raises(Infeasible) as refusal:
        find_plan(graph, cluster, request.over(6), Budget.of(request))
    assert not refusal.value.proven


def test_meshes_of_three_axes_are_searched_where_they_can_be() -> None:
    cluster = resolve_cluster("2x4xl4")
    assert axes_meshes(cluster, Request(mesh={"a": 2, "b": 2, "c": 2}))
    assert not axes_meshes(cluster, Request(mesh={"a": 2, "b": 4}))
    assert not axes_meshes(cluster, Request(objective="latency"))
    assert not axes_meshes(cluster, Request(strategy="inter"))
    assert not axes_meshes(resolve_cluster("4xl4"), Request())
    assert not axes_meshes(resolve_cluster("2x4xl4"), Request(mesh={"tp": 8}))
    shapes = [layout.mesh.axes for layout in layouts(resolve_cluster("4x8xl4"), "intra", None)]
    assert [axes for axes in shapes if len(axes) > 2] == [
        (("x", 4), ("y", 4), ("z", 2)),
        (("x", 4), ("y", 2), ("z", 4)),
    ]


@pytest.mark.slow
def test_a_mesh_of_three_axes_above_sixteen_devices_when_asked_for() -> None:
    model = examples.build("mlp", layers=6, hidden=64, batch=64)
    result = partitioner.compile(
        model, cluster="4x8xideal", mesh={"a": 4, "b": 2, "c": 4}, time_limit_s=30
    )
    assert [mesh.axes for mesh in result.plan.groups] == [(("a", 4), ("b", 2), ("c", 4))]
    certificate = result.plan.certificate
    assert certificate is not None
    assert certificate.bound <= certificate.cost
    nodes = resolve(result.graph, result.plan)
    cuts = (layout for placed in nodes for layout in placed.layouts.values())
    assert {axis for layout in cuts for axis in layout.axes} == {"a", "b", "c"}
    assert result.verify().equal
