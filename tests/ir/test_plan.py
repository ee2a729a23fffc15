"""Plans: canonical JSON and back, and every way in which one may not fit its graph."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from helpers.plans.cost_cases import chain_graph, graph, matmul_graph
from partitioner.ir.graph import Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import (
    Certificate,
    NodePlan,
    Pipeline,
    Plan,
    PlanError,
    place,
    place_cuts,
    resolve,
)
from partitioner.ir.rule import Cut
from partitioner.ir.types import TensorType

PAIR = DeviceMesh.line(2, "tp")
GRAPH = matmul_graph()
CERTIFICATE = Certificate(
    "throughput", 2.0, 1.5, "feasible", "intra", "HiGHS 1", "all", 7, "a as b"
)
Edit = Callable[[dict[str, Any]], object]


def plan(
    cuts: Mapping[str, str] | None = None, group: int = 0, mesh: DeviceMesh = PAIR, **changes: Any
) -> Plan:
    node = NodePlan(group, {name: Cut.parse(text) for name, text in (cuts or {}).items()})
    return replace(Plan(GRAPH.digest, {"name": "any"}, (mesh,), {"mm": node}), **changes)


HOSTILE = plan(nodes={'a"\n\x1b[31m\u2028': NodePlan(0)})
GRID = DeviceMesh.of({"dp": 2, "tp": 2}, (3, 1, 0, 2))


@pytest.mark.parametrize(
    "made",
    [
        plan(),
        plan({"m": "tp"}, certificate=CERTIFICATE),
        plan({"n": "dp:200,56", "m": "tp"}, mesh=GRID),
        plan({"k": "dp*tp:1,2,3,4|10,20,30,58"}, mesh=GRID),
        plan(groups=(DeviceMesh.single(3), PAIR), cluster={"b": [1.5, {"a": 2}], "a": "text"}),
        plan(nodes={}),
        HOSTILE,
    ],
    ids=range(7),
)
def test_json_and_back(made: Plan) -> None:
    text = made.to_json()
    again = Plan.from_json(text)
    assert again == made
    assert again.to_json() == text
    assert text.isascii()
    assert len(json.loads(text)["nodes"]) == len(made.nodes)


def test_a_plan_of_whole_batches_is_of_one_stage() -> None:
    whole = plan(groups=(DeviceMesh.single(3), PAIR))
    assert whole.stages == (0, 0)
    assert set(whole.stage_devices[0]) == {3, *PAIR.devices}
    staged = replace(whole, pipeline=Pipeline("1f1b", 4), stages=(1, 0))
    turned = replace(staged, groups=staged.groups[::-1], stages=staged.stages[::-1])
    assert turned.stage_devices == staged.stage_devices


def test_the_text_is_fixed() -> None:
    """A change here is a new `PLAN_VERSION`, or breaks stored plans."""
    text = plan({"n": "tp", "m": "dp:32,32"}, mesh=GRID, graph_digest="d").to_json()
    assert text == (
        '{\n "version": 1,\n "graph_digest": "d",\n "cluster": {\n  "name": "any"\n },\n'
        ' "certificate": null,\n "groups": [\n  {\n   "axes": {\n    "dp": 2,\n    "tp": 2\n   },\n'
        '   "devices": [\n    3,\n    1,\n    0,\n    2\n   ]\n  }\n ],\n'
        ' "nodes": {\n  "mm": {"cuts": {"m": "dp:32,32", "n": "tp"}, "group": 0}\n }\n}\n'
    )


def test_the_digest_is_of_the_decisions() -> None:
    made = plan({"m": "tp"}, certificate=CERTIFICATE)
    assert made.digest == plan({"m": "tp"}).digest == Plan.from_json(made.to_json()).digest
    others = (plan(), plan({"m": "tp"}, cluster={}), plan({"m": "tp"}, graph_digest="other"))
    assert len({made.digest, *(other.digest for other in others)}) == 4


def test_the_order_of_nodes_is_kept() -> None:
    names = ["b", "c", "a"]
    made = plan(nodes={name: NodePlan(0) for name in names})
    assert list(Plan.from_json(made.to_json()).nodes) == names


@pytest.mark.parametrize(
    ("cost", "bound", "gap"), [(2.0, 1.5, 0.25), (0.0, 0.0, 0.0), (1.0, 1.1, 0.0)]
)
def test_gap(cost: float, bound: float, gap: float) -> None:
    assert math.isclose(replace(CERTIFICATE, cost=cost, bound=bound).gap, gap)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan is not JSON: "),
        ("[" * 10**5, "plan is not JSON: "),
        ("[]", "plan version is None, this program reads 1"),
        ('{"version": 2}', "plan version is 2, this program reads 1"),
        ('{"version": 1}', "plan is malformed: it has no 'groups'"),
    ],
    ids=["empty", "deep", "list", "version", "bare"],
)
def test_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("graph_digest"), "it has no 'graph_digest'"),
        (lambda d: d.update(graph_digest=7), "graph_digest"),
        (lambda d: d.update(cluster=7), "cluster"),
        (lambda d: d.update(nodes=[]), "AttributeError"),
        (lambda d: d["nodes"].update(mm={}), "it has no 'group'"),
        (lambda d: d["nodes"].update(mm={"group": "x"}), "group 'x'"),
        (lambda d: d["nodes"].update(mm={"group": 0.5}), "group 0.5"),
        (lambda d: d["nodes"]["mm"].update(cuts=["m"]), "AttributeError"),
        (lambda d: d["nodes"]["mm"].update(cuts={"m": 3}), "AttributeError"),
        (lambda d: d["nodes"]["mm"].update(cuts={"m": "tp:x"}), "cut 'tp:x' is not like 'tp'"),
        (lambda d: d["groups"][0].update(devices=[0]), r"mesh tp\(2\) != 1 devices"),
        (lambda d: d.update(groups=[7]), "TypeError"),
        (lambda d: d["groups"][0].update(devices=[0, -1]), "devices -1 is not a whole number"),
        (lambda d: d["groups"][0].update(devices=["a", "b"]), "devices 'a' is not a whole number"),
        (lambda d: d["groups"][0].update(axes={"tp": 2.0}), "axes {'tp': 2.0}"),
        (lambda d: d["certificate"].update(more=1), "TypeError .*'more'"),
        (lambda d: d["certificate"].pop("cost"), "it has no 'cost'"),
        (lambda d: d["certificate"].pop("status"), "it has no 'status'"),
        (lambda d: d["certificate"].update(cost="1"), "cost '1'"),
        (lambda d: d["certificate"].update(cost=-1.0), "cost -1.0 is not a finite number"),
        (lambda d: d["certificate"].update(cost=math.nan), "cost nan is not a finite number"),
        (lambda d: d["certificate"].update(cost=10**400), "cost 10+ is not a finite number"),
        (lambda d: d["certificate"].update(bound=2.5), "bound 2.5 is above cost 2.0"),
        (lambda d: d["certificate"].update(gap=0.0), r"gap 0.0 is not .*, which is 0.25"),
        (lambda d: d["certificate"].update(status="best"), "status 'best' is not one of optimal"),
        (lambda d: d["certificate"].update(objective="speed"), "objective 'speed' is not one of"),
        (lambda d: d["certificate"].update(space=7), "space 7"),
        (lambda d: d["certificate"].update(folded=None), "folded None"),
        (lambda d: d["certificate"].update(seed="0"), "seed '0'"),
        (lambda d: d["certificate"].update(seed=-1), "seed -1 is not a whole number"),
    ],
)
def test_a_malformed_field(edit: Edit, message: str) -> None:
    data = json.loads(plan({"m": "tp"}, certificate=CERTIFICATE).to_json())
    edit(data)
    with pytest.raises(PlanError, match=f"plan is malformed: .*{message}"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plan(graph_digest="f" * 64), r"digest f{12}\.\.\., this one has \w{12}\.\.\."),
        (plan(nodes={}), r"'mm'"),
        (plan(nodes={"mm": NodePlan(0), "no": NodePlan(0)}), r"unknown nodes \['no'\]"),
        (plan(group=1), r"'mm' is on group 1; the plan has 1"),
        (plan(group=-1), r"'mm' is on group -1; the plan has 1"),
        (plan({"z": "tp"}), r"'mm' \(MatMul\) has no factor 'z'; it has .*m"),
        (plan({"m": "dp"}), r"'mm' \(MatMul\): cut dp names axis 'dp'"),
        (plan({"m": "tp:1,2"}), r"'mm' .*cut tp:1,2 does not fit size 64 over 2 parts"),
        (plan({"m": "tp", "n": "tp"}), r"'mm' .*an axis cuts two factors"),
        (
            plan({"n": "tp:256,0"}),
            r"'mm' \(MatMul\): dim 1 of 'w' \(256\) is cut into parts of 256,0 over tp; every",
        ),
        (plan({"k": "dp*tp:1,0,100,27"}, mesh=GRID), r"dim 1 of 'x' .* of 1,0,100,27 over dp\*tp"),
    ],
    ids=range(11),
)
def test_a_plan_that_does_not_fit(made: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(GRAPH, made)


def test_the_order_must_follow_the_data() -> None:
    chain = chain_graph(2)
    nodes = {name: NodePlan(0) for name in ("relu1", "relu0")}
    wrong = Plan(chain.digest, {}, (PAIR,), nodes)
    with pytest.raises(PlanError, match="plan runs 'relu1' before 'v1' is made"):
        resolve(chain, wrong)


def test_an_op_without_a_rule_is_whole_on_one_device() -> None:
    kind = TensorType.of("float32", (4,))
    custom = Node("odd", "custom::Op", ("x", ""), ("", "y"), captures=("w",))
    owner = graph([custom], {"x": kind, "y": kind, "w": kind}, ("x", "w"), ("y",))
    for mesh, cuts in ((PAIR, {}), (DeviceMesh.single(0), {"a": DimLayout.whole(4)})):
        with pytest.raises(PlanError, match=r"'odd' \(custom::Op\) has no rule and must be whole"):
            place(owner, custom, mesh, cuts, None)
    alone = Plan(owner.digest, {}, (DeviceMesh.single(3),), {"odd": NodePlan(0)})
    (placed,) = resolve(owner, alone)
    assert placed.rule is None
    assert [name for name, _ in placed.operands()] == ["x", "w"]
    assert [(name, at.mesh.devices) for name, at in placed.results()] == [("y", (3,))]


def test_placements_follow_from_the_cut() -> None:
    (placed,) = resolve(GRAPH, plan({"k": "tp"}))
    shown = [str(at.sharding) for _, at in (*placed.operands(), *placed.results())]
    assert shown == ["[-, tp]", "[tp, -]", "[-, -] partial(sum:tp)"]


COPIES = DeviceMesh.of({"copies": 2, "tp": 2})


def copied(second: DeviceMesh, **changes: Any) -> Plan:
    """The plan of a chain of which each operator has a mesh of its own."""
    chain = chain_graph(2)
    nodes = {"relu0": NodePlan(0), "relu1": NodePlan(1)}
    return replace(Plan(chain.digest, {}, (COPIES, second), nodes), **changes)


def test_a_cut_that_leaves_a_device_nothing_is_none() -> None:
    """Of a matrix of 3 rows on 4 devices, as of the last micro-batch."""
    mesh, cuts = DeviceMesh.line(4), {"m": Cut(("x",))}
    few, many = matmul_graph(3, 8, 4), matmul_graph(4, 8, 4)
    (node,) = many.nodes
    assert place_cuts(many, node, rule_of(many, node), mesh, cuts).layouts["m"].sizes() == (1,) * 4
    (node,) = few.nodes
    with pytest.raises(PlanError, match="is cut into parts of 1,1,1,0 over x"):
        place_cuts(few, node, rule_of(few, node), mesh, cuts)


def test_whole_copies_are_a_kind_of_plan() -> None:
    made = copied(DeviceMesh.of({"copies": 2}, (1, 3)))
    assert made.kind == "copies"
    assert Plan.from_json(made.to_json()) == made
    assert [at.mesh for at in resolve(chain_graph(2), made)] == [*made.groups]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (copied(DeviceMesh.single(0)), "'relu1' is on device 0, without a part in each of the 2"),
        (
            copied(DeviceMesh.of({"copies": 3}, (0, 2, 4))),
            "'relu0' is on copies=2 .*, without a part in each of the 3 whole copies",
        ),
        (
            copied(DeviceMesh.of({"copies": 2}, (2, 0))),
            "device [02] is in several of the 2 whole copies",
        ),
        (
            plan({"m": "copies"}, mesh=COPIES),
            "'mm' is cut over 'copies', whose copies are whole",
        ),
        (
            plan(mesh=COPIES, pipeline=Pipeline("forward", 2)),
            "whole copies serve whole requests: no training and no micro-batches",
        ),
    ],
)
def test_copies_that_are_not_whole_are_refused(made: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(GRAPH if "mm" in made.nodes else chain_graph(2), made)


@pytest.mark.parametrize(
    ("group", "cut", "message"),
    [
        (
            1,
            {},
            r"'update' writes 'w' as .* on 2,3, which lies as .* on 0,1: give both nodes one group",
        ),
        (0, {"d0": Cut(("tp",))}, r"'update' writes 'w' as .*, which lies as .* the same cuts"),
    ],
)
def test_a_stored_value_is_written_where_it_lies(
    group: int, cut: Mapping[str, Cut], message: str
) -> None:
    type_ = TensorType.of("float32", (8, 4))
    nodes = [
        Node("w", "partitioner::state", (), ("w",)),
        Node("relu", "aten::relu", ("x",), ("y",)),
        Node("update", "partitioner::update", ("y", "w"), ("next",)),
    ]
    trained = graph(nodes, dict.fromkeys(("x", "w", "y", "next"), type_), ("x",), ("next",))
    groups = PAIR, DeviceMesh.of({"tp": 2}, (2, 3))
    whole = dict.fromkeys(("w", "relu", "update"), NodePlan(0))
    made = Plan(trained.digest, {"name": "any"}, groups, whole)
    assert len(resolve(trained, made)) == 3
    with pytest.raises(PlanError, match=message):
        resolve(trained, replace(made, nodes={**whole, "update": NodePlan(group, cut)}))
