"""Verification: equal means equal, and a planted fault is found and named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files.rank_files import save_edited
from partitioner import examples
from partitioner.api.verify.compare import TOLERANCE, VerificationError, compare
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.local import run_local
from partitioner.cli.main import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An mlp cut over two devices, on disk with its weights inside the rank files."""
    onnx.save(examples.build("mlp", hidden=16), tmp_path / "mlp.onnx")
    result = partitioner.compile(
        tmp_path / "mlp.onnx", devices=2, strategy="inter", cluster="2xideal"
    )
    return result.save(tmp_path / "out")


def _spoil(path: Path, name: str) -> None:
    """Change one element of one weight of a rank file."""
    model = onnx.load(path)
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] += 1
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    save_edited(model, path)


def _holder(folder: Path, name: str) -> Path:
    ranks = sorted(folder.glob("rank*.onnx"))
    return next(r for r in ranks if name in {t.name for t in onnx.load(r).graph.initializer})


@pytest.mark.parametrize("layer", [0, 2])
def test_a_wrong_weight_is_found_and_the_first_tensor_named(saved: Path, layer: int) -> None:
    assert partitioner.load(saved).verify_written(saved).equal
    result = partitioner.load(saved)
    node = [node for node in result.graph.nodes if node.op in ("Gemm", "MatMul")][layer]
    weight = next(value for value in node.inputs if value in result.graph.constants)
    _spoil(_holder(saved, weight), weight)
    verification = partitioner.load(saved).verify_written(saved)
    assert not verification.equal
    assert verification.first is not None
    assert verification.first.tensor.name == node.outputs[0]
    assert repr(node.name) in verification.first.node
    home = result.programs.homes[node.outputs[0]]
    assert verification.first.ranks == home.placement.mesh.devices
    assert verification.first.placement == str(home.placement)


def test_the_command_says_so_and_exits_1(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(saved)]) == 0
    assert "equal: 2 ranks" in capsys.readouterr().out
    result = partitioner.load(saved)
    weight = next(v for v in result.graph.nodes[0].inputs if v in result.graph.constants)
    _spoil(_holder(saved, weight), weight)
    assert main(["verify", str(saved)]) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT" in said
    assert "first tensor that differs" in said


def test_compare_by_type() -> None:
    floats = np.array([1.0, 100.0], np.float32)
    assert compare("x", floats, floats.copy()).identical
    assert compare("x", floats + np.float32(1e-3), floats).equal
    assert not compare("x", floats + np.float32(1), floats).equal
    whole = np.array([1, 2], np.int64)
    assert not compare("i", whole + 1, whole).equal
    assert compare("i", whole + 1, whole).words == f"{whole.size} elements differ"
    assert compare("b", np.array([True]), np.array([False])).words == "1 element differs"
    assert not compare("i", whole.astype(np.int32), whole).equal
    large = np.array([2**60], np.int64)
    assert not compare("i", large + 1, large).equal
    nan = np.array([np.nan, 1], np.float32)
    assert compare("n", nan, nan.copy()).equal
    assert not compare("n", np.array([0, 1], np.float32), nan).equal
    assert not compare("n", np.array([np.inf, 1], np.float32), floats).equal


def test_results_are_as_exact_as_what_they_are_computed_from() -> None:
    """Sums of float16 in another order, given as float32."""
    random = np.random.default_rng(0)
    weights = [(random.standard_normal((96, 96)) / 8).astype(np.float16) for _ in range(3)]
    nodes = [helper.make_node("Cast", ["x"], ["half0"], to=onnx.TensorProto.FLOAT16)]
    nodes += [helper.make_node("MatMul", [f"half{i}", f"w{i}"], [f"half{i + 1}"]) for i in range(3)]
    nodes.append(helper.make_node("Cast", ["half3"], ["y"], to=onnx.TensorProto.FLOAT))
    of_type = onnx.TensorProto.FLOAT, [6, 96]
    graph = helper.make_graph(
        nodes,
        "halves",
        [helper.make_tensor_value_info("x", *of_type)],
        [helper.make_tensor_value_info("y", *of_type)],
        [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    result = partitioner.compile(model, devices=3, cluster="ideal", parallel="tp")
    verification = result.verify()
    assert verification.equal, str(verification)
    assert not verification.outputs[0].identical
    assert verification.outputs[0].tolerance == TOLERANCE["float16"]


def test_too_little_memory_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.api.verify.compare.free_bytes", lambda: 1000)
    with pytest.raises(VerificationError, match=r"needs about .* are free"):
        partitioner.load(saved).verify_written(saved)


def test_rank_files_of_two_plans_are_refused(saved: Path) -> None:
    other = saved.parent / "other"
    partitioner.compile(
        saved.parent / "mlp.onnx", devices=2, strategy="intra", cluster="2xideal"
    ).save(other)
    (saved / "rank1.onnx").write_bytes((other / "rank1.onnx").read_bytes())
    assert main(["verify", str(saved)]) == 1
    with pytest.raises(
        BackendError, match=r"rank1\.onnx is not of the plan that rank0\.onnx is of"
    ):
        run_local(saved, {"x": np.zeros((8, 16), np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_both_sides_run_with_as_many_threads(threads: int, zoo: Callable[[str], Path]) -> None:
    """DenseNet's last layer has other bits with one thread than with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = partitioner.compile(zoo("densenet121"), devices=1)
        assert all(output.identical for output in result.verify(seed=1).outputs)
    finally:
        torch.set_num_threads(before)
