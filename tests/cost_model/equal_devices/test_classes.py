"""Classes of devices: figures of representatives are those of all devices, evaluated one by one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from helpers.plans.cost_cases import SLOW, flat, graph, matmul_graph
from helpers.plans.whole_plans import candidates, random_plan
from partitioner import examples
from partitioner.cost_model import evaluate as referee
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.equal_devices.classes import representatives
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.cost_model.schedule.task_list import UnequalWorkError, schedule
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import Pipeline, PlacedNode, place, resolve
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

FAST = replace(SLOW, name="fast", memory_bytes_per_s=4e9)
LEVELS = (LinkLevel("inner", 4, 1e9, 1e-6), LinkLevel("outer", 8, 1e8, 1e-5))
CLUSTERS = (
    flat(8),
    Cluster("levels", (SLOW,) * 8, LEVELS),
    Cluster("kinds", (SLOW,) * 4 + (FAST,) * 4, LEVELS),
)
LATE = DeviceMesh.of({"tp": 4}, (4, 5, 6, 7))
GROUPS = (
    (DeviceMesh.line(8, "tp"),),
    (DeviceMesh.of({"dp": 4, "tp": 2}),),
    (DeviceMesh.of({"dp": 2, "tp": 2}), LATE),
    (DeviceMesh.line(3, "tp"), DeviceMesh.single(5), LATE),
)
MODELS = {
    "even": ("mlp", {"layers": 3, "hidden": 16, "batch": 16}),
    "uneven": ("mlp", {"layers": 3, "hidden": 10, "batch": 9}),
    "llama": ("llama", {"layers": 1, "hidden": 32}),
}


def one_by_one(
    owner: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    pipeline: Pipeline | None = None,
    everywhere: frozenset[str] = frozenset(),
) -> referee.Evaluation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(referee, "representatives", lambda *_: dict(enumerate(range(len(cluster)))))
        patch.setattr(referee, "schedule", lambda *args, **_: schedule(*args))
        return referee.evaluate_placed(owner, placed, cluster, pipeline, everywhere)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: " ".join(map(str, groups)))
@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_every_device(name: str, groups: tuple[DeviceMesh, ...]) -> None:
    kind, options = MODELS[name]
    owner = load_onnx(examples.build(kind, **options)).graph
    offered, rng = candidates(owner, groups), np.random.default_rng(0)
    for turn in range(3):
        cluster = CLUSTERS[turn % len(CLUSTERS)]
        plan, _ = random_plan(owner, offered, rng)
        evaluation = referee.evaluate(owner, plan, cluster)
        assert evaluation == one_by_one(owner, resolve(owner, plan), cluster)


def test_an_even_cut_has_one_class_and_an_uneven_one_two() -> None:
    for size, expected in ((64, 1), (62, 2), (63, 2)):
        owner = matmul_graph(m=size)
        for mesh in (DeviceMesh.line(8, "tp"), DeviceMesh.of({"dp": 4, "tp": 2})):
            rule = rules_of(owner)["mm"]
            assert isinstance(rule, Rule)
            layout = DimLayout.even(size, mesh.names, mesh)
            placed = (place(owner, owner.nodes[0], mesh, {"m": layout}, rule),)
            first = representatives(owner, placed, flat(8), Resharder(flat(8)))
            assert len(set(first.values())) == expected
            assert referee.evaluate_placed(owner, placed, flat(8)) == one_by_one(
                owner, placed, flat(8)
            )


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("factor", ["", "m", "k"])
@pytest.mark.parametrize("devices", [2, 3])
def test_devices_that_bring_results_to_others_are_told_apart(
    devices: int, factor: str, cluster: Cluster
) -> None:
    """One of three sends the result to twice as many of the other five as the last one does."""
    owner, mesh = matmul_graph(), DeviceMesh.line(devices, "tp")
    rule, everywhere = rules_of(owner)["mm"], frozenset(owner.outputs)
    assert isinstance(rule, Rule)
    sizes = {factor: rule.factors[factor].size} if factor else {}
    layouts = {name: DimLayout.even(size, ("tp",), mesh) for name, size in sizes.items()}
    placed = (place(owner, owner.nodes[0], mesh, layouts, rule),)
    figures = referee.evaluate_placed(owner, placed, cluster, None, everywhere)
    assert figures == one_by_one(owner, placed, cluster, None, everywhere)


def cut_relus(
    *cuts: dict[str, tuple[str, ...]], mesh: DeviceMesh
) -> tuple[Graph, list[PlacedNode]]:
    """A chain of pointwise nodes on a matrix of 16 x 16, each cut so."""
    values = [f"v{index}" for index in range(len(cuts) + 1)]
    nodes = [Node(f"n{i}", "Relu", (values[i],), (values[i + 1],)) for i in range(len(cuts))]
    types = {value: TensorType.of("float32", (16, 16)) for value in values}
    owner = graph(nodes, types, (values[0],), (values[-1],))
    rules, placed = rules_of(owner), []
    for node, axes in zip(nodes, cuts, strict=True):
        rule = rules[node.name]
        assert isinstance(rule, Rule)
        layouts = {name: DimLayout.even(16, by, mesh) for name, by in axes.items()}
        placed.append(place(owner, node, mesh, layouts, rule))
    return owner, placed


def test_reshards_along_an_axis_keep_devices_in_one_class() -> None:
    mesh = DeviceMesh.of({"dp": 4, "tp": 2})
    owner, placed = cut_relus(
        {"b0": ("dp",)}, {"b0": ("dp",), "b1": ("tp",)}, {"b1": ("tp",)}, {}, mesh=mesh
    )
    first = representatives(owner, placed, CLUSTERS[1], Resharder(CLUSTERS[1]))
    assert set(first.values()) == {0}
    figures = referee.evaluate_placed(owner, placed, CLUSTERS[1])
    assert figures == one_by_one(owner, placed, CLUSTERS[1])
    assert sum(figures.sent_bytes.values()) > 0


def test_devices_of_two_kinds_wait_for_each_other() -> None:
    mesh = DeviceMesh.line(8, "tp")
    owner, placed = cut_relus({"b0": ("tp",)}, {"b1": ("tp",)}, {}, mesh=mesh)
    first = representatives(owner, placed, CLUSTERS[2], Resharder(CLUSTERS[2]))
    assert set(first.values()) == {0, 4}
    figures = referee.evaluate_placed(owner, placed, CLUSTERS[2])
    assert figures == one_by_one(owner, placed, CLUSTERS[2])


def test_of_each_class_in_a_communication_one_that_takes_part_is_evaluated() -> None:
    """Half of the devices, one in each row of the mesh, run a node more behind all reshards."""
    mesh = DeviceMesh.of({"dp": 4, "tp": 2})
    owner, placed = cut_relus({"b0": ("dp",)}, {"b1": ("dp",)}, mesh=mesh)
    aside = Node("aside", "Relu", ("w0",), ("w1",))
    types = {**owner.types, "w0": owner.types["v0"], "w1": owner.types["v0"]}
    both = graph([*owner.nodes, aside], types, ("v0", "w0"), ("v2", "w1"))
    rule = rules_of(both)["aside"]
    assert isinstance(rule, Rule)
    some = DeviceMesh.of({"tp": 4}, (0, 3, 4, 7))
    plan = (*placed, place(both, aside, some, {}, rule))
    first = representatives(both, plan, flat(8), Resharder(flat(8)))
    assert first == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 1, 7: 0}
    schedule(both, plan, flat(8), observed=frozenset(first.values()))  # none is shared in vain
    assert referee.evaluate_placed(both, plan, flat(8)) == one_by_one(both, plan, flat(8))


def test_one_that_is_busy_for_longer_keeps_all_from_being_shared() -> None:
    """Every other device does a node more before a reshard, so it may stand elsewhere in order."""
    cube = DeviceMesh.of({"a": 2, "b": 2, "c": 2})
    owner, placed = cut_relus({"b0": ("a",), "b1": ("b", "c")}, {"b1": ("b", "c")}, mesh=cube)
    aside = Node("aside", "Relu", ("w0",), ("w1",))
    types = {**owner.types, "w0": owner.types["v0"], "w1": owner.types["v0"]}
    nodes = [owner.nodes[0], aside, owner.nodes[1]]
    both = graph(nodes, types, ("v0", "w0"), ("v2", "w1"))
    rule = rules_of(both)["aside"]
    assert isinstance(rule, Rule)
    some = DeviceMesh.of({"tp": 4}, (0, 2, 4, 6))
    plan = (placed[0], place(both, aside, some, {}, rule), placed[1])
    first = representatives(both, plan, flat(8), Resharder(flat(8)))
    assert set(first.values()) == {0, 1}
    with pytest.raises(UnequalWorkError):
        schedule(both, plan, flat(8), observed=frozenset({0, 1}))
    assert referee.evaluate_placed(both, plan, flat(8)) == one_by_one(both, plan, flat(8))


@pytest.mark.parametrize("pipeline", [None, Pipeline("forward", 1)])
def test_results_that_every_device_gets_tell_devices_apart(pipeline: Pipeline | None) -> None:
    """The two devices of the last stage, equal otherwise, send the result to different stages."""
    meshes = DeviceMesh.single(0), DeviceMesh.single(1), DeviceMesh.of({"x": 2}, (2, 3))
    owner, _ = cut_relus({}, {}, {}, mesh=DeviceMesh.line(2, "x"))
    rules, placed = rules_of(owner), []
    for stage, (node, mesh) in enumerate(zip(owner.nodes, meshes, strict=True)):
        rule = rules[node.name]
        assert isinstance(rule, Rule)
        one = place(owner, node, mesh, {}, rule)
        placed.append(one if pipeline is None else replace(one, stage=stage))
    everywhere = frozenset(owner.outputs)
    first = representatives(owner, placed, flat(4), Resharder(flat(4)), everywhere)
    assert len(set(first.values())) == 4
    figures = referee.evaluate_placed(owner, placed, flat(4), pipeline, everywhere)
    assert figures == one_by_one(owner, placed, flat(4), pipeline, everywhere)
    assert sum(figures.sent_bytes.values()) > 0
