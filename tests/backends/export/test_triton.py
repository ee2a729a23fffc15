"""Repositories of Triton: models that its ensemble wires compute the model; faults are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.placed import emit_placed
from helpers.onnx_files.triton_repositories import (
    RepositoryError,
    check_triton,
    config_of,
    model_file,
)
from helpers.plans import rank_programs as hand
from partitioner.backends.export.triton import write_triton
from partitioner.backends.onnx.files.emit import emit
from partitioner.backends.onnx.files.parts import read_ranks
from partitioner.ir.errors import OptionError

X = ("float32", (4, 48))
WEIGHT = np.random.default_rng(0).standard_normal((48, 48)).astype(np.float32) / 8
NODES = [
    helper.make_node("MatMul", ["x", "w"], ["stem"], name="stem"),
    helper.make_node("Relu", ["stem"], ["left"], name="left"),
    helper.make_node("Mul", ["stem", "scale"], ["right"], name="right"),
    helper.make_node("Add", ["left", "right"], ["y"], name="sum"),
]
PLACES = {"stem": 0, "left": 0, "right": 1, "sum": 0}


def model(**outputs: om.Values) -> onnx.ModelProto:
    inputs = {"x": X, "scale": ("float32", ())}
    return om.model(NODES, inputs, {"y": X, "right": X, **outputs}, {"w": WEIGHT})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    ranks, folder = tmp_path / "ranks", tmp_path / "repository"
    ranks.mkdir()
    folder.mkdir()
    emit_placed(model(), PLACES, ranks)
    write_triton(read_ranks(ranks), folder, on_gpu=[True, False])
    return folder


def test_an_ensemble_computes_the_model(repository: Path) -> None:
    check_triton(repository)
    assert sorted(path.name for path in repository.rglob("*.weights")) == ["model.weights"]
    assert sorted(path.name for path in repository.iterdir()) == [
        "ensemble",
        "rank0_phase0",
        "rank0_phase2",
        "rank1_phase1",
    ]
    x = np.random.default_rng(1).standard_normal((4, 48)).astype(np.float32)
    known = {"x": x, "scale": np.full(1, 2, np.float32)}
    for step in config_of(repository / "ensemble").ensemble_scheduling.step:
        session = ort.InferenceSession(model_file(repository / step.model_name))
        fed = {entry.key: known[entry.value] for entry in step.input_map}
        for tensor in config_of(repository / step.model_name).input:
            assert fed[tensor.name].shape == tuple(tensor.dims)
            if tensor.HasField("reshape"):
                fed[tensor.name] = fed[tensor.name].reshape(tuple(tensor.reshape.shape))
        names = [entry.key for entry in step.output_map]
        made = dict(zip(names, session.run(names, fed), strict=True))
        known |= {entry.value: made[entry.key] for entry in step.output_map}
    expected = om.run(model(), {"x": x, "scale": np.array(2, np.float32)})
    for name, array in zip(("y", "right"), expected, strict=True):
        np.testing.assert_array_equal(known[name], array)


def test_models_run_where_the_plan_has_them(repository: Path) -> None:
    text = (repository / "rank0_phase2" / "config.pbtxt").read_text()
    assert "max_batch_size: 0\n" in text
    assert "kind: KIND_GPU\n  gpus: 0\n" in text
    text = (repository / "rank1_phase1" / "config.pbtxt").read_text()
    assert "kind: KIND_CPU" in text
    assert "gpus" not in text
    assert 'name: "scale"\n  data_type: TYPE_FP32\n  dims: 1\n  reshape {\n  }' in text


@pytest.mark.parametrize(
    ("folder", "old", "new", "why"),
    [
        ("rank1_phase1", "dims: 4", "dims: 5", "rank1_phase1: its configuration is not of its"),
        ("rank1_phase1", "TYPE_FP32", "TYPE_INT8", "rank1_phase1: its configuration is not of its"),
        ("rank1_phase1", '"rank1_phase1"', '"other"', "rank1_phase1: the configuration is of 'o"),
        ("ensemble", 'value: "stem"', 'value: "no"', "'stem' is not there"),
        ("ensemble", 'value: "right"', 'value: "left"', "rank1_phase1: 'left' is made twice"),
        ("ensemble", 'key: "stem"', 'key: "no"', "rank0_phase0: .* are mapped, not what it has"),
        ("ensemble", 'name: "y"', 'name: "z"', "no model makes output 'z' of its type"),
    ],
)
def test_the_checker_finds_faults(
    folder: str, old: str, new: str, why: str, repository: Path
) -> None:
    path = repository / folder / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RepositoryError, match=why):
        check_triton(repository)


@pytest.mark.parametrize("make", [hand.tensor_parallel, hand.all_gather, hand.scatter])
def test_cut_operators_are_refused(make: Callable[[], hand.Case], tmp_path: Path) -> None:
    case = make()
    emit(case.programs, case.graph, tmp_path)
    with pytest.raises(OptionError, match="the plan cuts operators: ") as error:
        write_triton(read_ranks(tmp_path), tmp_path / "out", on_gpu=[True] * 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "inputs", "why"),
    [
        (NODES[:1], {"x": ("bfloat16", (4, 48))}, "'x' is bfloat16, which Triton passes to no"),
        (
            [helper.make_node("RandomNormal", [], ["y"], name="y", shape=[2], seed=1.0)],
            {},
            "the part of rank 0 that begins with 'y' reads no value",
        ),
        ([helper.make_node("Identity", ["x"], ["y"], name="y")], {"x": X}, ""),
    ],
)
def test_what_an_ensemble_cannot_pass_is_refused(
    nodes: list[onnx.NodeProto], inputs: om.Values, why: str, tmp_path: Path
) -> None:
    weights = {"w": WEIGHT.astype("bfloat16")} if "bfloat16" in str(inputs) else {}
    out = nodes[-1].output[0]
    kind = inputs.get("x", ("float32", (2,)))
    made = om.model(nodes, inputs, {out: kind}, weights)
    emit_placed(made, {node.name: 0 for node in nodes}, tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    if not why:
        write_triton(read_ranks(tmp_path), folder, on_gpu=[True])
        check_triton(folder)
        return
    with pytest.raises(OptionError, match=re.escape(why)):
        write_triton(read_ranks(tmp_path), folder, on_gpu=[True])
