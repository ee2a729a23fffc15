"""Models whose inputs and outputs are of element types that NumPy lacks."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import partitioner
from partitioner.api.verify.compare import compare
from partitioner.backends.errors import BackendError
from partitioner.cli.main import main
from partitioner.frontends.inputs import random_inputs

RNG = np.random.default_rng(5)
W = RNG.standard_normal((8, 16)).astype(np.float32)
X = RNG.standard_normal((4, 8)).astype(np.float32)
SMALL = {
    "BFLOAT16": ml_dtypes.bfloat16,
    "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn,
    "FLOAT8E5M2": ml_dtypes.float8_e5m2,
}


def model(dtype: str) -> onnx.ModelProto:
    """Cast to float32, MatMul, Cast back: ONNX Runtime has CPU kernels for these."""
    number = TensorProto.DataType.Value(dtype)
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["wide", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=number),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", number, [4, 8])],
        [helper.make_tensor_value_info("y", number, [4, 16])],
        [numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def expected(dtype: str) -> np.ndarray:
    return (X.astype(SMALL[dtype]).astype(np.float32) @ W).astype(SMALL[dtype])


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("mesh", [None, {"tp": 2}])
def test_verify_and_run(dtype: str, mesh: dict[str, int] | None) -> None:
    strategy = "inter" if mesh is None else "intra"
    result = partitioner.compile(
        model(dtype), devices=2, cluster="ideal", strategy=strategy, mesh=mesh
    )
    assert result.verify().equal
    found = result.run({"x": X.astype(SMALL[dtype])})["y"]
    assert found.dtype == SMALL[dtype]
    assert compare("y", found, expected(dtype)).equal


@pytest.fixture(scope="module", params=["BFLOAT16", "FLOAT8E4M3FN"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    onnx.save(model(request.param), folder / "small.onnx")
    result = partitioner.compile(folder / "small.onnx", devices=2, cluster="ideal", mesh={"tp": 2})
    return result.save(folder / request.param)


@pytest.mark.parametrize(
    ("saved", "raw"), [("BFLOAT16", False), ("FLOAT8E4M3FN", True)], indirect=["saved"]
)
def test_files_hold_float32_or_raw_bytes(
    saved: Path, raw: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype = saved.name
    given, got = saved.parent / "in.npz", saved.parent / "out.npz"
    np.savez(given, x=X.astype(SMALL[dtype]) if raw else X)
    assert main(["run", str(saved), "--inputs", str(given), "--outputs", str(got)]) == 0
    with np.load(got) as outputs:
        y = outputs["y"]
    assert y.dtype == np.float32
    assert compare("y", y.astype(SMALL[dtype]), expected(dtype)).equal
    assert f"y: {np.dtype(SMALL[dtype])}[4, 16]" in capsys.readouterr().out


def test_files_of_another_type_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = saved.parent / "in.npz"
    np.savez(given, x=X.astype(np.float64))
    assert main(["run", str(saved), "--inputs", str(given)]) == 1
    assert "input 'x' holds float64 elements, not" in capsys.readouterr().err


def test_the_command_verifies(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(saved)]) == 0
    assert "equal: 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["INT4", "UINT4"])
def test_four_bits_are_refused_by_name(dtype: str) -> None:
    result = partitioner.compile(model(dtype), devices=2, cluster="ideal")
    refusal = f"'[xy]' holds {dtype.lower()} elements, which cannot be passed in or out of a run"
    with pytest.raises(BackendError, match=f"input {refusal}"):
        result.verify()
    with pytest.raises(BackendError, match=f"put {refusal}"):
        result.run(random_inputs(result.graph, 0))


def test_float8_differs_by_at_most_a_unit_in_the_last_place() -> None:
    whole = np.array([448, 416, 1], ml_dtypes.float8_e4m3fn)
    near = np.array([416, 416, 1], ml_dtypes.float8_e4m3fn)
    far = np.array([320, 416, 1], ml_dtypes.float8_e4m3fn)
    assert compare("y", near, whole).equal
    assert not compare("y", far, whole).equal
