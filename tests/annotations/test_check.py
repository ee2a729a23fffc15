"""Every rule of the validator, each broken alone."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, NodeDeviceConfigurationProto, ShardingSpecProto, helper

from helpers.drawn import drawn_plans
from partitioner.annotations.report import check_annotations
from partitioner.annotations.write import annotated_model
from partitioner.frontends.errors import FrontendError

Break = Callable[[ModelProto], object]


@pytest.fixture
def model() -> ModelProto:
    """Two stages: on devices 0, 1 cut by "n", then on 2, 3 cut by "m"; 4 devices."""
    result = drawn_plans.hybrid()
    return annotated_model(result.model.traced, result.schedule, result.cluster)[0]


def lines(model: ModelProto) -> list[str]:
    return [str(problem) for problem in check_annotations(model).problems]


def at(model: ModelProto, node: int = 0) -> NodeDeviceConfigurationProto:
    return model.graph.node[node].device_configurations[0]


def spec(model: ModelProto, tensor: str, node: int = 0) -> ShardingSpecProto:
    return next(s for s in at(model, node).sharding_spec if s.tensor_name == tensor)


def weight(model: ModelProto) -> ShardingSpecProto:
    """8 x 8, dim 1 in 2 shards on devices 0 and 1."""
    return spec(model, "layer0.weight")


def part(model: ModelProto) -> onnx.SimpleShardedDimProto:
    return weight(model).sharded_dim[0].simple_sharding[0]


def group(model: ModelProto) -> onnx.IntIntListEntryProto:
    """Devices 0 and 1, of "x"."""
    return spec(model, "x").index_to_device_group_map[0]


def rename(model: ModelProto) -> None:
    weight(model).tensor_name = "y"


W = "node 'layer0.out', tensor 'layer0.weight': "
X = "node 'layer0.out', tensor 'x': "
BROKEN: list[tuple[Break, str]] = [
    (lambda m: setattr(m, "ir_version", 10), "model: IR version 10 has no annotations; it must"),
    (lambda m: m.configuration.add(name="", num_devices=1), "model: a configuration has no name"),
    (
        lambda m: m.configuration.append(m.configuration[0]),
        "model: two configurations are called 'partitioner'",
    ),
    (
        lambda m: m.configuration.add(name="none"),
        "model: configuration 'none' has 0 devices; at least 1 is needed",
    ),
    (
        lambda m: m.configuration[0].device.append("one more"),
        "model: configuration 'partitioner' names 5 devices, num_devices is 4",
    ),
    (
        lambda m: setattr(at(m), "configuration_id", "gone"),
        "node 'layer0.out': configuration 'gone' is not one of the model",
    ),
    (
        lambda m: m.graph.node[0].device_configurations.append(at(m)),
        "node 'layer0.out': configuration 'partitioner' is given 2 times",
    ),
    (lambda m: setattr(at(m), "pipeline_stage", -1), "node 'layer0.out': pipeline stage -1 is"),
    (
        lambda m: setattr(at(m), "pipeline_stage", 2),
        "node 'layer0.relu', tensor 'layer0.out': is made in pipeline stage 2 by 'layer0.out', ",
    ),
    (rename, "node 'layer0.out', tensor 'y': is neither an input nor an output of the node"),
    (lambda m: at(m).sharding_spec.append(weight(m)), W + "has 2 sharding specs; one is possible"),
    (lambda m: weight(m).ClearField("device"), W + "names no device"),
    (lambda m: weight(m).device.append(2), W + "2 shards for 3 entries of device"),
    (lambda m: weight(m).device.__setitem__(1, 0), W + "device 0 is named 2 times"),
    (lambda m: weight(m).device.__setitem__(1, 4), W + "device 4 is not in 0 .. 3"),
    (lambda m: weight(m).device.__setitem__(1, -7), W + "group -7 is not in index_to_device_group"),
    (lambda m: group(m).value.append(9), X + "device 9 is not in 0 .. 3"),
    (lambda m: group(m).ClearField("value"), X + "group -1 is empty"),
    (lambda m: group(m).value.append(-1), X + "group -1 holds -1; a group holds devices"),
    (
        lambda m: spec(m, "x").index_to_device_group_map.append(group(m)),
        X + "group -1 is given 2 times",
    ),
    (lambda m: weight(m).sharded_dim[0].ClearField("axis"), W + "a sharded dim has no axis"),
    (lambda m: setattr(weight(m).sharded_dim[0], "axis", 2), W + "axis 2 is not in -2 .. 1"),
    (lambda m: setattr(weight(m).sharded_dim[0], "axis", -3), W + "axis -3 is not in -2 .. 1"),
    (
        lambda m: weight(m).sharded_dim.add(axis=-1).simple_sharding.add(num_shards=1),
        W + "axis 1 is given 2 times",
    ),
    (
        lambda m: weight(m).sharded_dim[0].ClearField("simple_sharding"),
        W + "axis 1: has no simple_sharding",
    ),
    (lambda m: part(m).ClearField("num_shards"), W + "axis 1: is cut into 0 shards; at least 1"),
    (lambda m: setattr(part(m), "num_shards", 4), W + "4 shards for 2 entries of device"),
    (
        lambda m: setattr(part(m), "dim_value", 6),
        W + "axis 1: has 6 elements in the spec and 8 in the tensor",
    ),
    (lambda m: setattr(part(m), "num_shards", 16), W + "axis 1: is 16 shards of 8 elements"),
    (
        lambda m: setattr(part(m), "dim_param", "n"),
        W + "axis 1: is called 'n', but its size is 8",
    ),
    (
        lambda m: weight(m).sharded_dim[0].simple_sharding.add(num_shards=1),
        W + "axis 1: has several parts, of which each must give its size",
    ),
    (lambda m: m.graph.node[0].input.append("nowhere"), "model: "),
    (lambda m: m.graph.node[0].ClearField("op_type"), "model: "),
]


@pytest.mark.parametrize(("break_it", "line"), BROKEN, ids=[line[-40:] for _, line in BROKEN])
def test_each_fault_is_found(model: ModelProto, break_it: Break, line: str) -> None:
    assert lines(model) == []
    break_it(model)
    assert any(text.startswith(line) for text in lines(model)), lines(model)
    assert all("\n" not in text for text in lines(model))


def test_shards_without_a_size_are_compared_with_the_tensor(model: ModelProto) -> None:
    part(model).ClearField("dim_value")
    assert lines(model) == []
    part(model).num_shards = 16
    weight(model).device[:] = [0, 1]
    assert f"{W}axis 1: is 16 shards of 8 elements" in lines(model)


def test_stages_are_followed_through_nodes_without_one(model: ModelProto) -> None:
    at(model).pipeline_stage = 2
    at(model, 1).ClearField("pipeline_stage")
    (line,) = lines(model)
    assert line == (
        "node 'y', tensor 'layer0.relu': is made in pipeline stage 2 by 'layer0.out', "
        "but read in stage 1"
    )


def test_plain_replication_and_negative_axes_are_valid(model: ModelProto) -> None:
    """`device` without cut dims: the whole tensor on each of them."""
    x = spec(model, "x")
    del x.index_to_device_group_map[:]
    x.device[:] = [0, 1]
    weight(model).sharded_dim[0].axis = -1
    assert lines(model) == []


def test_annotations_inside_subgraphs_are_checked() -> None:
    inner = helper.make_node("Relu", ["x"], ["r"], name="inner")
    inner.device_configurations.add(configuration_id="gone")
    value = {n: helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (2,)) for n in "xry"}
    body = helper.make_graph([inner], "body", [], [value["r"]])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)
    flag = helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, ())
    graph = helper.make_graph([node], "g", [value["x"], flag], [value["y"]])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, ir_version=11, opset_imports=opset)
    assert lines(model) == ["node 'inner': configuration 'gone' is not one of the model"] * 2


def test_a_model_without_annotations_is_no_annotated_model() -> None:
    assert lines(drawn_plans.mlp()) == ["model: no node has multi-device annotations"]


def test_the_result_as_text(model: ModelProto) -> None:
    assert str(check_annotations(model)) == "ok: 3 nodes annotated for 4 devices"
    at(model).configuration_id = "gone"
    text = "node 'layer0.out': configuration 'gone' is not one of the model"
    assert str(check_annotations(model)) == text


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with pytest.raises(FrontendError, match="not an ONNX model"):
        check_annotations(tmp_path / "junk.onnx")
    with pytest.raises(FrontendError, match="cannot be read"):
        check_annotations(tmp_path / "none.onnx")
