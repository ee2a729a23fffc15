"""Models of opsets below 7 are converted by ONNX's version converter."""

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files import onnx_models as om
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx

DATA = Path(onnx.backend.test.__file__).parent / "data"


def layer(opset: int) -> onnx.ModelProto:
    """A linear layer whose bias is added in the form of opset 6 and older."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Add", ["r", "b"], ["y"], broadcast=1),
    ]
    weights = {"w": rng.random((4, 5), np.float32), "b": rng.random(5, np.float32)}
    types = {"x": ("float32", [3, 4])}, {"y": ("float32", [3, 5])}
    return om.model(nodes, *types, weights, opset=opset)


def test_a_model_of_opset_6() -> None:
    proto = layer(6)
    traced = load_onnx(proto)
    assert traced.graph.opsets == {"": 7}
    assert traced.notes == ("opset 6 was converted to 7",)
    x = np.random.default_rng(1).random((3, 4), np.float32)
    (y,) = om.assert_same(traced, {"x": x})
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    np.testing.assert_allclose(y, np.maximum(x @ weights["w"], 0) + weights["b"], rtol=1e-5)
    compiled = partitioner.compile(proto, devices=2, strategy="intra", cluster="2xideal")
    assert compiled.verify().equal


def test_what_the_converter_does_not_take_is_refused() -> None:
    """ONNX infers no shape through Relu-1, which the converter of Add needs."""
    message = (
        r"opset 5 is older than 7, and ONNX's version converter does not convert it: .*; export"
    )
    with pytest.raises(FrontendError, match=message):
        load_onnx(layer(5))


def test_weights_outside_an_old_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.onnx"
    onnx.save(layer(6), path, save_as_external_data=True, location="w", size_threshold=0)
    with pytest.raises(FrontendError, match=r"opset 6 is older than 7, .* not keep external data"):
        load_onnx(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_slope_by_channel(channels: int) -> None:
    """Where the last dim has as many elements, a wrong broadcast would go unnoticed."""
    slope = np.arange(1, channels + 1, dtype=np.float32)
    nodes = [helper.make_node("PRelu", ["x", "s"], ["y"])]
    types = {"x": ("float32", [2, 3, 4, 3])}, {"y": ("float32", None)}
    traced = load_onnx(om.model(nodes, *types, {"s": slope}, opset=6))
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 3), np.float32)
    (y,) = om.assert_same(traced, {"x": x})
    np.testing.assert_array_equal(y, np.where(x < 0, x * slope[:, None, None], x))


@pytest.mark.slow
def test_onnx_s_own_models_of_opset_6() -> None:
    loaded, refused = 0, {}
    for path in sorted(DATA.glob("*/*/model.onnx")):
        opsets = [o.version for o in onnx.load(path).opset_import if not o.domain]
        if max(opsets, default=7) < 7:
            try:
                load_onnx(path)
                loaded += 1
            except FrontendError as error:
                refused[path.parent.name] = str(error)
    assert loaded > 100
    assert not refused
