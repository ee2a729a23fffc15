"""Problems: the solver's referee and the cost model agree on every plan."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from helpers.plans.cost_cases import flat
from helpers.plans.whole_plans import build as graph_of
from helpers.plans.whole_plans import candidates, random_plan, weight
from helpers.problems.valid_problems import validate
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.torch.building.graph import module_graph
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.tracing.capture import capture, export_module
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.problem.build import Built, build
from partitioner.solver.referee import evaluate_choices
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.spaces import families

PAIR = DeviceMesh.line(2)
CLUSTERS = {"reference": resolve_cluster(None, 4), "slow": flat(4)}
FAMILIES = {str(family): family for family in families("auto", 4)}


def random_graph(seed: int) -> Graph:
    """Products, sums, views and joins over (6, 6) values; several outputs, one of them read on."""
    rng = np.random.default_rng(seed)
    values, nodes = ["x0", "x1"], []
    shapes = dict.fromkeys(values, (6, 6))
    for index in range(9):
        pick = [values[int(i)] for i in rng.integers(len(values), size=2)]
        op = str(rng.choice(["MatMul", "Weight", "Add", "Relu", "Identity", "Transpose", "Gemm"]))
        inputs = {
            "MatMul": pick,
            "Add": pick,
            "Gemm": [*pick, values[-1]],
            "Weight": [pick[0], "w"],
        }
        attrs = {"perm": (1, 0)} if op == "Transpose" else {}
        kind = "MatMul" if op == "Weight" else op
        result = f"v{index}"
        nodes.append(Node(f"n{index}", kind, tuple(inputs.get(op, pick[:1])), (result,), attrs))
        values.append(result)
        shapes[result] = (6, 6)
    outputs = ["v8", values[2 + int(rng.integers(8))]]
    return graph_of(nodes, shapes, ["x0", "x1"], outputs, {"w": weight(6, 6)})


def problem(graph: Graph, groups: Sequence[DeviceMesh], cluster: Cluster) -> Built:
    offered = candidates(graph, groups)
    homes = [DeviceMesh.single(mesh.devices[0]) for mesh in groups]
    meshes = list(dict.fromkeys((*groups, *homes)))
    prices = DeviceColumns(graph, Resharder(cluster))
    return build(graph, meshes, offered, prices)


def check(graph: Graph, built: Built, cluster: Cluster, seed: int) -> None:
    validate(built.problem)
    plan, chosen = random_plan(graph, built.candidates, np.random.default_rng(seed))
    assert built.node_plans(graph, chosen).keys() == plan.nodes.keys()
    ours = evaluate_choices(built.problem, chosen)
    theirs = evaluate(graph, plan, cluster)
    assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-9)
    for device, seconds in theirs.load_s.items():
        assert ours.load_s[device] == pytest.approx(seconds, rel=1e-9)
        assert ours.peak_bytes[device] >= theirs.peak[device].bytes


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_referees_agree_on_random_graphs(family: str, cluster: str) -> None:
    for seed in range(4):
        graph = random_graph(seed)
        built = problem(graph, FAMILIES[family].groups, CLUSTERS[cluster])
        for choice in range(4):
            check(graph, built, CLUSTERS[cluster], choice)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_the_referees_agree_on_models(name: str, family: str) -> None:
    sizes = {"tiny": {"size": 6}, "llama": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2}}
    graph = load_onnx(examples.build(name, **sizes[name])).graph
    built = problem(graph, FAMILIES[family].groups, CLUSTERS["slow"])
    for seed in range(2):
        check(graph, built, CLUSTERS["slow"], seed)


@pytest.mark.parametrize("fed", [False, True])
def test_zeros_of_a_bias_are_held_throughout(fed: bool) -> None:
    """A bias under a cut reduction is zeros on all devices but the first, from start to end."""
    nodes = [
        Node("fc", "Gemm", ("x", "w", "c"), ("h",)),
        Node("a", "MatMul", ("h", "v"), ("i",)),
        Node("b", "MatMul", ("i", "v"), ("y",)),
    ]
    shapes = dict.fromkeys(("x", "h", "i", "y", *("c" * fed)), (8, 8))
    weights = {"w": weight(8, 8), "v": weight(8, 8), **({} if fed else {"c": weight(8, 8)})}
    graph = graph_of(nodes, shapes, ["x", *("c" * fed)], ["y"], weights)
    cluster = CLUSTERS["slow"]
    built = problem(graph, (DeviceMesh.line(4),), cluster)
    for seed in range(40):
        check(graph, built, cluster, seed)


def test_a_reshard_for_two_consumers_is_one_item() -> None:
    nodes = [
        Node("mm", "MatMul", ("x", "w"), ("h",)),
        Node("p", "Relu", ("h",), ("yp",)),
        Node("q", "Neg", ("h",), ("yq",)),
    ]
    shapes = dict.fromkeys(("x", "h", "yp", "yq"), (4, 4))
    graph = graph_of(nodes, shapes, ["x"], ["yp", "yq"], {"w": weight(4, 4)})
    built = problem(graph, (PAIR,), CLUSTERS["slow"])
    names = graph.order
    to_p, to_q = (next(e for e in built.problem.edges if e.v == names[n]) for n in "pq")
    assert to_p.items == to_q.items
    assert any(built.problem.items[i].load_s[0] > 0 for ids in to_p.items.values() for i in ids)


def test_a_value_read_twice_by_a_node_has_an_edge_a_slot() -> None:
    nodes = [Node("act", "Relu", ("x",), ("h",)), Node("mm", "MatMul", ("h", "h"), ("y",))]
    graph = graph_of(nodes, dict.fromkeys("xhy", (4, 4)), ["x"], ["y"])
    built = problem(graph, (PAIR,), CLUSTERS["slow"])
    assert len(built.problem.edges) == 2


class Layers(nn.Sequential):
    """Layers and a loss, whose activations may be kept for the backward pass or made again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).square().mean()
        return loss


def test_what_is_kept_for_a_node_that_takes_either_is_held_between_the_uses() -> None:
    """From behind the last other use to the node before: there the value itself is counted."""
    module = Layers(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.GELU())))
    args = (torch.zeros(2, 4),)
    captured = capture(module, export_module(module, args, {}), DECOMPOSITIONS, training=True)
    graph = module_graph(captured, "layers").offered
    own = strategies(graph, Rules.of(graph), PAIR)
    built = build(graph, [PAIR], own, DeviceColumns(graph, Resharder(CLUSTERS["slow"])))
    rows = ((node, row_of(node)) for node in graph.nodes)
    takers = [node for node, row in rows if row is not None and row.either]
    compared = 0
    for taker in takers:
        at = graph.order[taker.name]
        kept = {i for i, value in enumerate(built.values) if value == taker.outputs[0]}
        for edge in built.problem.edges:
            held = kept.intersection(i for items in edge.items.values() for i in items)
            if edge.v != at or not held:
                continue
            (value, *_) = graph.nodes[edge.u].writes
            others = [n for n in graph.consumers[value] if n not in takers]
            last = max([edge.u, *(graph.order[n.name] for n in others)])
            spans = {(built.problem.items[i].first, built.problem.items[i].last) for i in held}
            assert spans == {(last + 1, at - 1)}
            compared += 1
    assert compared > 0
