"""Folding: what the folded problem says of a choice is what the whole one says of it unfolded."""

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.modules.small_gpt import small_gpt
from helpers.problems.valid_problems import validate
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.problem.build import Built, build
from partitioner.problem.folding import Folded, fold
from partitioner.solver.problem import SolverError
from partitioner.solver.referee import evaluate_choices
from partitioner.strategies.derive import Rules, strategies

CLUSTER = resolve_cluster("1x4xh100")
MESHES = [DeviceMesh.line(4, "tp"), DeviceMesh.of({"dp": 2, "tp": 2})]


def graph_of(name: str, **options: int) -> Graph:
    return load_onnx(examples.build(name, **options)).graph


def folded(graph: Graph) -> Folded:
    return fold(graph, Rules.of(graph))


def problem_of(graph: Graph, mesh: DeviceMesh) -> Built:
    rules = Rules.of(graph)
    prices = DeviceColumns(graph, Resharder(CLUSTER))
    return build(graph, (mesh,), strategies(graph, rules, mesh), prices)


def stack(layers: int, skip: int | None = None, *, every: bool = True) -> Graph:
    """MatMul, Relu, Tanh and Add `layers` times.

    Args:
        layers: How many.
        skip: A layer that reads the first one's result too.
        every: Whether each layer's result is an output, not only the last one's.
    """
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("MatMul", [f"s{i - 1}" if i else "x", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"]))
        nodes.append(helper.make_node("Tanh", [f"r{i}"], [f"t{i}"]))
        other = "s0" if i == skip else f"m{i}"
        nodes.append(helper.make_node("Add", [f"t{i}", other], [f"s{i}"]))
    outputs = [f"s{i}" for i in range(layers)] if every else [f"s{layers - 1}"]
    ones = np.ones((8, 8), np.float32)
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 8))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 8)) for name in outputs],
        [numpy_helper.from_array(ones, f"w{i}") for i in range(layers)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return load_onnx(model).graph


CASES = [
    ("mlp", {"layers": 9, "hidden": 64, "batch": 16}),
    ("llama", {"layers": 7, "hidden": 64}),
]


@pytest.mark.parametrize(
    ("name", "options", "mesh"),
    [
        pytest.param(
            *case,
            mesh,
            id=f"{case[0]}-{mesh}",
            # two axes are seen by the other model, and by a graph for training
            marks=pytest.mark.slow if case[0] == "llama" and len(mesh.axes) > 1 else (),
        )
        for case in CASES
        for mesh in MESHES
    ],
)
def test_a_choice_costs_the_same_folded_and_whole(
    name: str, options: dict[str, int], mesh: DeviceMesh
) -> None:
    graph = graph_of(name, **options)
    small = folded(graph)
    assert small.runs
    check_equal(small, mesh, tries=6)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_outputs_of_every_block_are_counted(mesh: DeviceMesh) -> None:
    small = folded(stack(9))
    assert small.runs
    check_equal(small, mesh, tries=6)


def check_equal(small: Folded, mesh: DeviceMesh, tries: int) -> None:
    tied = small.tie(problem_of(small.graph, mesh)).problem
    validate(tied)
    whole = problem_of(small.whole, mesh).problem
    rng = random.Random(7)
    seen = 0
    for _ in range(20 * tries):
        chosen = [rng.randrange(len(choices)) for choices in tied.nodes]
        for run in small.short:
            for block in small.tied:
                for one, other in zip(run.block(1), run.block(block), strict=True):
                    chosen[other] = chosen[one]
        try:
            cheap = evaluate_choices(tied, chosen)
        except SolverError:
            continue  # a forbidden pair
        dear = evaluate_choices(whole, [chosen[place] for place in small.places])
        assert cheap.load_s == pytest.approx(dear.load_s, rel=1e-9)
        assert cheap.peak_bytes == pytest.approx(dear.peak_bytes, rel=1e-9)
        seen += 1
        if seen == tries:
            return
    raise AssertionError(f"{seen} choices were allowed")


def test_the_folded_graph_does_not_grow_with_the_layers() -> None:
    sizes = {
        layers: len(folded(graph_of("llama", layers=layers, hidden=64)).graph.nodes)
        for layers in (8, 12, 16)
    }
    assert len(set(sizes.values())) == 1, sizes


def test_layers_that_draw_other_random_numbers_are_alike() -> None:
    def nodes(dropout: float) -> tuple[int, int]:
        model, inputs = small_gpt(6, dropout=dropout)
        graph = trace_module(model, Example.of(inputs), ModuleOptions(training=True)).graph
        return len(graph.nodes), len(folded(graph).graph.nodes)

    (plain, short), (drawn, short_drawn) = nodes(0.0), nodes(0.1)
    assert drawn > plain
    assert short < plain / 1.4
    assert short_drawn < drawn / 1.4


def test_every_node_has_a_stand_in_of_its_kind() -> None:
    small = folded(graph_of("llama", layers=8, hidden=64))
    assert len(small.places) == len(small.whole.nodes)
    for node, place in zip(small.whole.nodes, small.places, strict=True):
        assert small.graph.nodes[place].op == node.op
    assert str(small).endswith("alike")


@pytest.mark.parametrize("every", [True, False])
def test_a_run_ends_where_a_block_reads_an_older_one(every: bool) -> None:
    plain, skipped = folded(stack(14, every=every)), folded(stack(14, skip=4, every=every))
    assert plain.runs
    assert plain.runs[0].count >= 12
    assert skipped.runs
    assert skipped.runs[0].start >= 4 * 4


def test_nothing_is_folded_where_nothing_repeats() -> None:
    graph = graph_of("mlp", layers=2, hidden=16, batch=4)
    small = folded(graph)
    assert not small.runs
    assert small.graph is graph
    assert str(small) == ""
