"""Annotations agree with the plan; the annotated model is valid and computes the same."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, NodeProto, ShardingSpecProto, helper

import partitioner
from helpers.drawn import drawn_plans
from helpers.drawn.drawn_plans import GRID, PLANS, TP2, TP3, compiled, mlp
from partitioner import examples
from partitioner.annotations.report import check_annotations
from partitioner.annotations.write import (
    CONFIGURATION,
    Annotated,
    LeftOut,
    NotInStandardError,
    annotate,
    annotated_model,
    sharding_spec,
)
from partitioner.api.compiled.base import Compiled
from partitioner.foundations.files import FileError
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.types import Dim, TensorType


def annotated(result: Compiled) -> tuple[ModelProto, tuple[LeftOut, ...]]:
    return annotated_model(result.model.traced, result.schedule, result.cluster)


def written(result: Compiled, path: Path) -> Annotated:
    """The annotations in a file, valid by our own check."""
    annotated = annotate(
        result.model.traced, result.schedule, result.cluster, path, model_path=result.model.path
    )
    assert check_annotations(path).problems == ()
    return annotated


def annotated_elements(spec: ShardingSpecProto, shape: tuple[int, ...]) -> dict[int, list[int]]:
    """The elements of each device by the proposal's loops: shards row-major over the cut dims."""
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    cut = {dim.axis: list(dim.simple_sharding) for dim in spec.sharded_dim}
    factors = [
        [(part.dim_value, part.num_shards) for part in cut.get(axis, [])] or [(size, 1)]
        for axis, size in enumerate(shape)
    ]
    fine = whole.reshape([size for parts in factors for size, _ in parts])
    flat = [pair for parts in factors for pair in parts]
    elements: dict[int, list[int]] = {}
    shards = itertools.product(*(range(count) for _, count in flat))
    for entry, shard in zip(spec.device, shards, strict=True):
        block = tuple(
            slice(index * (size // count), (index + 1) * (size // count))
            for index, (size, count) in zip(shard, flat, strict=True)
        )
        for device in groups.get(entry, [entry]):
            elements[device] = sorted(fine[block].ravel().tolist())
    return elements


def planned_elements(at: Placement) -> dict[int, list[int]]:
    """The elements of each device, from the plan's own layouts."""
    shape = at.sharding.shape
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return {
        device: sorted(
            whole[np.ix_(*([i for s, n in dim for i in range(s, s + n)] for dim in dims))]
            .ravel()
            .tolist()
        )
        for device, dims in at.parts()
    }


def specs(node: NodeProto) -> dict[str, ShardingSpecProto]:
    (config,) = node.device_configurations
    return {spec.tensor_name: spec for spec in config.sharding_spec}


def elements(result: Compiled, model: ModelProto) -> Iterator[tuple[str, object, object]]:
    """Annotated values, with the elements of each device by the annotation and by the plan."""
    nodes = {node.name: node for node in model.graph.node}
    for task in result.schedule.tasks:
        if task.placed is not None:
            written_specs = specs(nodes[task.placed.node.name])
            for value, at in (*task.placed.operands(), *task.placed.results()):
                if value in written_specs:
                    yield (
                        value,
                        annotated_elements(written_specs[value], at.sharding.shape),
                        planned_elements(at),
                    )


def check_equal_outputs(result: Compiled, path: Path) -> None:
    feeds = random_inputs(result.graph, 0)
    whole = ort.InferenceSession(result.model.traced.whole.SerializeToString())
    for expected, output in zip(
        whole.run(None, feeds), ort.InferenceSession(path).run(None, feeds), strict=True
    ):
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("name", PLANS)
def test_specs_say_what_the_plan_does(name: str, tmp_path: Path) -> None:
    result = PLANS[name]()
    annotations = written(result, tmp_path / "a.onnx")
    model = onnx.load(tmp_path / "a.onnx")
    assert (annotations.nodes, annotations.devices) == (3, len(result.cluster.devices))
    triples = list(elements(result, model))
    assert len(triples) == 10 - len(annotations.left_out)
    for value, annotated_parts, planned_parts in triples:
        assert annotated_parts == planned_parts, value
    assert model.ir_version == 11
    check_equal_outputs(result, tmp_path / "a.onnx")


MODELS = {
    "llama": {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "seq": 8},
    "tiny": {},
}


@pytest.mark.parametrize("strategy", ["intra", "inter"])
@pytest.mark.parametrize("name", MODELS)
def test_real_plans(name: str, strategy: str, tmp_path: Path) -> None:
    model = examples.build(name, **MODELS[name])
    result = partitioner.compile(model, cluster="2xideal", strategy=strategy, time_limit_s=5)
    written(result, tmp_path / "a.onnx")
    assert (
        str(check_annotations(tmp_path / "a.onnx"))
        == f"ok: {len(result.graph.nodes)} nodes annotated for 2 devices"
    )
    triples = list(elements(result, onnx.load(tmp_path / "a.onnx")))
    assert triples
    for value, annotated_parts, planned_parts in triples:
        assert annotated_parts == planned_parts, value
    check_equal_outputs(result, tmp_path / "a.onnx")


def test_stages_are_those_of_the_schedule() -> None:
    model, _ = annotated(drawn_plans.hybrid())
    stages = [node.device_configurations[0].pipeline_stage for node in model.graph.node]
    assert stages == [0, 0, 1]
    model, _ = annotated(drawn_plans.intra())
    assert not any(n.device_configurations[0].HasField("pipeline_stage") for n in model.graph.node)


def test_the_models_own_content_is_not_touched() -> None:
    result = drawn_plans.hybrid()
    model, _ = annotated(result)
    for node in model.graph.node:
        node.ClearField("device_configurations")
    model.ClearField("configuration")
    model.ir_version = result.model.traced.whole.ir_version
    assert model == result.model.traced.whole


def test_annotating_again_replaces_ours_and_keeps_others() -> None:
    first, _ = annotated(drawn_plans.hybrid())
    first.configuration.add(name="other", num_devices=1)
    first.graph.node[0].device_configurations.add(configuration_id="other")
    again = compiled(first, 2, **{"layer0.out": 0, "layer0.relu": 0, "y": 1})
    model, _ = annotated(again)
    assert [(c.name, c.num_devices) for c in model.configuration] == [
        ("other", 1),
        (CONFIGURATION, 2),
    ]
    ids = [[c.configuration_id for c in n.device_configurations] for n in model.graph.node]
    assert ids == [["other", CONFIGURATION], [CONFIGURATION], [CONFIGURATION]]


def test_pending_sums_and_uneven_cuts_are_named() -> None:
    _, left_out = annotated(drawn_plans.intra())
    # the bias is a pending sum as well: its parts on all devices but one are zeros
    assert left_out == (
        LeftOut("y", "layer1.bias", "a pending sum over tp"),
        LeftOut("y", "y", "a pending sum over tp"),
    )
    _, left_out = annotated(compiled(mlp(), 3, _=TP3, **{"layer0.out": (TP3, {"n": "tp"})}))
    why = "cut tp of a dim of 8: not in equal blocks"
    assert [(item.node, item.why) for item in left_out] == [("layer0.out", why)] * 3


def test_left_out_lines_are_short() -> None:
    result = drawn_plans.intra()
    left_out = tuple(LeftOut(f"n{i}", "t", "a reason") for i in range(9))
    (line,) = Annotated(Path("a.onnx"), 3, len(result.cluster.devices), left_out).lines()
    assert line.endswith("'t' of 'n4' and 4 more: a reason")


def test_nodes_behind_identities_are_found() -> None:
    """Tracing removes Identity and gives the name of its result to its operand."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Identity", ["r"], ["y"], name="same"),
    ]
    value = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (4, 4)) for n in "xy"]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    opset = [helper.make_opsetid("", 17)]
    result = compiled(
        helper.make_model(graph, ir_version=8, opset_imports=opset), 2, relu=(TP2, {"b0": "tp"})
    )
    model, left_out = annotated(result)
    assert left_out == ()
    assert sorted(specs(model.graph.node[0])) == ["r", "x"]
    assert not model.graph.node[1].device_configurations


def test_functions_are_inlined() -> None:
    body = [helper.make_node("Relu", ["a"], ["b"], name="inner")]
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Twice", ["a"], ["b"], body, opset[:1])
    nodes = [
        helper.make_node("Twice", ["x"], ["r"], name="one", domain="own"),
        helper.make_node("Twice", ["r"], ["y"], name="two", domain="own"),
    ]
    value = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (4, 4)) for n in "xy"]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    whole = helper.make_model(graph, ir_version=8, opset_imports=opset, functions=[function])
    result = compiled(whole, 2, _=(TP2, {"b0": "tp"}))
    model, left_out = annotated(result)
    assert left_out == ()
    assert [node.op_type for node in model.graph.node] == ["Relu", "Relu"]
    assert all(node.device_configurations for node in model.graph.node)
    assert check_annotations(model).problems == ()


@pytest.mark.parametrize("place", ["beside", "above", "elsewhere"])
def test_external_weights_stay_valid(place: str, tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    onnx.save(mlp(hidden=64), source / "m.onnx", save_as_external_data=True, location="m.weights")
    result = compiled(source / "m.onnx", 2, _=0, y=1)
    target = {"beside": source, "above": tmp_path, "elsewhere": tmp_path / "out"}[place]
    target.mkdir(exist_ok=True)
    written(result, target / "a.onnx")
    runs_alike_from_disk(source / "m.onnx", target / "a.onnx")
    files = {path.name for path in target.iterdir() if path.is_file()} - {"m.onnx", "m.weights"}
    assert files == ({"a.onnx", "a.onnx.0.data"} if place == "elsewhere" else {"a.onnx"})


def runs_alike_from_disk(one: Path, other: Path) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 64), np.float32)}
    for a, b in zip(
        ort.InferenceSession(one).run(None, feeds),
        ort.InferenceSession(other).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_model_itself_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path)
    before = path.read_bytes()
    with pytest.raises(FileError, match="it is the model itself"):
        written(compiled(path, 2, _=0, y=1), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    ("layout", "mesh", "parts"),
    [
        (DimLayout.even(8, ("tp",), TP2), TP2, [(8, 2)]),
        (DimLayout.even(8, ("dp", "tp"), GRID), GRID, [(8, 4)]),
        (DimLayout.cut(("tp",), [(2, 2)] * 3), TP2, [(3, 1), (4, 2)]),  # a fused QKV projection
        (
            DimLayout.cut(("dp", "tp"), [(2, 2, 0, 0)] * 2 + [(0, 0, 2, 2)] * 2),
            GRID,
            [(4, 2), (4, 2)],
        ),
    ],
)
def test_cuts_of_factors(layout: DimLayout, mesh: DeviceMesh, parts: list[tuple[int, int]]) -> None:
    at = Placement(mesh, Sharding((layout,)))
    spec = sharding_spec("t", TensorType.of("float32", (layout.size,)), at)
    (dim,) = spec.sharded_dim
    assert [(part.dim_value, part.num_shards) for part in dim.simple_sharding] == parts
    assert annotated_elements(spec, (layout.size,)) == planned_elements(at)


@pytest.mark.parametrize(
    "segments", [[(48, 32)], [(5, 5), (2, 2)], [(1, 1, 0)], [(3, 1), (1, 3)]], ids=str
)
def test_cuts_that_are_not_even_have_no_words(segments: list[tuple[int, ...]]) -> None:
    layout = DimLayout.cut(("tp",), segments)
    at = Placement(TP3 if len(segments[0]) == 3 else TP2, Sharding((layout,)))
    with pytest.raises(NotInStandardError, match="not in equal blocks"):
        sharding_spec("t", TensorType.of("float32", (layout.size,)), at)


def test_the_proposals_mixed_example() -> None:
    """Split over one axis of the mesh, replicated over the other."""
    at = Placement(GRID, Sharding((DimLayout.even(2, ("dp",), GRID), DimLayout.whole(2))))
    spec = sharding_spec("t", TensorType.of("float32", (2, 2)), at)
    assert list(spec.device) == [-1, -2]
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    assert groups == {-1: [0, 1], -2: [2, 3]}


def test_symbols_of_inputs_are_kept() -> None:
    at = Placement(TP2, Sharding((DimLayout.even(4, ("tp",), TP2),)))
    spec = sharding_spec("t", TensorType("float32", (Dim(4, "batch"),)), at)
    assert spec.sharded_dim[0].simple_sharding[0].dim_param == "batch"


def test_a_model_with_symbols_keeps_them(tmp_path: Path) -> None:
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    (tmp_path / "pins.toml").write_text("[[pin]]\ntensor = 'x'\ndim = 0\n")
    result = partitioner.compile(
        model,
        cluster="2xideal",
        strategy="intra",
        dims={"batch": 4},
        constraints=tmp_path / "pins.toml",
    )
    written(result, tmp_path / "a.onnx")
    model = onnx.load(tmp_path / "a.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    (dim,) = specs(model.graph.node[0])["x"].sharded_dim
    assert [(part.dim_param, part.num_shards) for part in dim.simple_sharding] == [("batch", 2)]
