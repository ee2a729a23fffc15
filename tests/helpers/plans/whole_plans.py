"""Hand-made and random plans of small graphs, run on all simulated ranks against the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from helpers.onnx_files import onnx_models
from partitioner.api.lowering import lower
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place, resolve
from partitioner.ir.program import Programs
from partitioner.ir.rule import Cut, Rule
from partitioner.ir.types import TensorType
from partitioner.strategies.derive import Rules, strategies

Where = DeviceMesh | int  #: A group, or one device.
Decision = tuple[Where, Mapping[str, str]] | Where  #: With its cuts as text, if any.


def build(
    nodes: Sequence[Node],
    types: Mapping[str, tuple[int, ...] | TensorType],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
) -> Graph:
    """A graph; shapes are float32 types; constants bring their own."""
    weights = {name: Constant.of(array) for name, array in (constants or {}).items()}
    kinds = {name: constant.type for name, constant in weights.items()}
    for name, kind in types.items():
        kinds[name] = kind if isinstance(kind, TensorType) else TensorType.of("float32", kind)
    return Graph("hand", tuple(inputs), tuple(outputs), tuple(nodes), kinds, weights, {"": 17})


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers, so that float32 sums are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def hand_plan(graph: Graph, **decisions: Decision) -> Plan:
    """A plan by node name, in graph order; ``_`` is for the nodes that are not named."""
    groups: dict[DeviceMesh, int] = {}
    nodes = {}
    for node in graph.nodes:
        decision = decisions[node.name] if node.name in decisions else decisions["_"]
        where, cuts = decision if isinstance(decision, tuple) else (decision, {})
        mesh = where if isinstance(where, DeviceMesh) else DeviceMesh.single(where)
        parsed = {name: Cut.parse(text) for name, text in cuts.items()}
        nodes[node.name] = NodePlan(groups.setdefault(mesh, len(groups)), parsed)
    return Plan(graph.digest, {}, tuple(groups), nodes)


def tasks_of(graph: Graph, plan: Plan, ranks: int, cluster: Cluster | None = None) -> Schedule:
    """The schedule of a plan; default: on the reference accelerators."""
    return schedule(graph, resolve(graph, plan), cluster or resolve_cluster(None, ranks))


def lowered(graph: Graph, plan: Plan, ranks: int, cluster: Cluster | None = None) -> Programs:
    """Its rank programs (checked)."""
    return lower(graph, tasks_of(graph, plan, ranks, cluster), ranks)


def assert_equal_to_whole(
    graph: Graph,
    plan: Plan,
    ranks: int,
    *,
    tolerance: float = 0.0,
    seed: int = 0,
    cluster: Cluster | None = None,
) -> Programs:
    """Run all ranks and ONNX Runtime on the whole graph; `tolerance` is relative to the largest."""
    programs = lowered(graph, plan, ranks, cluster)
    inputs = {
        name: np.round(3 * array) if array.dtype.kind == "f" else array
        for name, array in random_inputs(graph, seed).items()
    }
    outputs = run_lockstep(emit_models(programs, graph), inputs, optimization="disable")
    whole = onnx_models.run(onnx_models.to_proto(graph), inputs)
    for name, expected in zip(graph.outputs, whole, strict=True):
        assert outputs[name].shape == expected.shape
        assert outputs[name].dtype == expected.dtype
        most = np.abs(expected).max(initial=0) if expected.dtype.kind == "f" else 0
        np.testing.assert_allclose(outputs[name], expected, rtol=0, atol=tolerance * most)
    return programs


def candidates(graph: Graph, groups: Sequence[DeviceMesh]) -> dict[str, tuple[PlacedNode, ...]]:
    """Strategies of every node on all groups; ops without a rule on each group's first device."""
    rules = Rules.of(graph)
    by_mesh = [strategies(graph, rules, mesh) for mesh in groups]
    homes = [DeviceMesh.single(mesh.devices[0]) for mesh in groups]
    return {
        node.name: tuple(placed for options in by_mesh for placed in options[node.name])
        or tuple(place(graph, node, home, {}, None) for home in homes)
        for node in graph.nodes
    }


def random_plan(
    graph: Graph, offered: Mapping[str, Sequence[PlacedNode]], rng: np.random.Generator
) -> tuple[Plan, tuple[int, ...]]:
    """A plan of one random strategy a node, which writes stored values in place; the indices."""
    chosen, homes = list[int](), dict[str, Placement]()
    for node in graph.nodes:
        options, slot = offered[node.name], row_of(node).in_place
        home = None if slot is None else homes.get(node.inputs[slot])
        fit = [i for i, p in enumerate(options) if home is None or p.ins[slot or 0] == home]
        chosen.append(fit[int(rng.integers(len(fit)))])
        homes.update(options[chosen[-1]].results())
    groups: dict[DeviceMesh, int] = {}
    nodes = {}
    for node, pick in zip(graph.nodes, chosen, strict=True):
        placed = offered[node.name][pick]
        cuts = {name: Cut.of(layout, placed.mesh) for name, layout in placed.layouts.items()}
        nodes[node.name] = NodePlan(groups.setdefault(placed.mesh, len(groups)), cuts)
    return Plan(graph.digest, {}, tuple(groups), nodes), tuple(chosen)


def rule(graph: Graph, name: str) -> Rule:
    """The rule of a node that has one."""
    rule = rule_of(graph, graph.by_name[name])
    assert isinstance(rule, Rule), rule
    return rule
