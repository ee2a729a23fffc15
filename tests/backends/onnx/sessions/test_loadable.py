"""Rank files that stock ONNX Runtime does not load are found when they are written."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from helpers.onnx_files import onnx_models as om
from partitioner import examples
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.sessions.whole import check_loadable

MODEL = examples.build("mlp", layers=2, hidden=64, batch=4)


def write(folder: Path, *models: onnx.ModelProto) -> None:
    for rank, model in enumerate(models):
        (folder / f"rank{rank}.onnx").write_bytes(model.SerializeToString())


def mistyped() -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    del model.graph.value_info[:]
    first = model.graph.node[0].output[0]
    info = helper.make_tensor_value_info(first, TensorProto.UINT8, ())
    model.graph.value_info.append(info)
    return model


def test_files_that_load_pass(tmp_path: Path) -> None:
    write(tmp_path, MODEL, MODEL)
    check_loadable(tmp_path, 2, MODEL)


def test_a_file_that_does_not_load_is_named(tmp_path: Path) -> None:
    write(tmp_path, MODEL, mistyped())
    message = r"rank1\.onnx: ONNX Runtime loads the whole model, but not this rank: .*uint8"
    with pytest.raises(BackendError, match=message):
        check_loadable(tmp_path, 2, MODEL)


def test_no_more_is_asked_than_of_the_whole_model(tmp_path: Path) -> None:
    twirl = helper.make_node("Twirl", ["x"], ["y"], domain="acme")
    types = {"x": ("float32", [2])}, {"y": ("float32", [2])}
    custom = om.model([twirl], *types, domains=["acme"])
    write(tmp_path, custom)
    check_loadable(tmp_path, 1, custom)


def test_weights_are_not_read(tmp_path: Path) -> None:
    """External data that is not there does not matter."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(64, 64))
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="no.weights")
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = om.model([product], {"x": ("float32", [2, 64])}, {"y": ("float32", [2, 64])})
    model.graph.initializer.append(weight)
    write(tmp_path, model)
    check_loadable(tmp_path, 1, model)
