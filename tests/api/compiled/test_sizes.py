"""ONNX plans that take requests of other sizes than the planned ones."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files import gpt
from partitioner.api.compiled.base import KEPT_SIZES, Compiled
from partitioner.backends.errors import BackendError
from partitioner.cli.main import main

Arrays = dict[str, np.ndarray]
BATCH = 8
PLANS: list[dict[str, Any]] = [
    {"parallel": "tp", "devices": 2},
    {"parallel": "tp", "devices": 3},
    {"parallel": "dp", "devices": 2},
    {"parallel": "dp", "devices": 3},
    {"strategy": "inter", "devices": 2},
    {"parallel": "pp", "devices": 2, "micro_batches": 4},
    {"parallel": "pp", "devices": 3, "micro_batches": 2},
]


def convnet() -> onnx.ModelProto:
    """Convolutions, a pool, a Reshape by the batch's size, layers, a softmax over channels."""
    rng = np.random.default_rng(0)
    weights: Arrays = {
        "w0": rng.normal(size=(6, 3, 3, 3)).astype(np.float32),
        "w1": rng.normal(size=(6, 6, 3, 3)).astype(np.float32),
        "w2": rng.normal(size=(96, 6)).astype(np.float32),
        "zero": np.array([0], np.int64),
        "rest": np.array([96], np.int64),
    }
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], name="first", **pads),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w1"], ["c"], name="second", **pads),
        helper.make_node("MaxPool", ["c"], ["d"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Shape", ["d"], ["shape"], name="shape"),
        helper.make_node("Gather", ["shape", "zero"], ["batch"], name="batch"),
        helper.make_node("Concat", ["batch", "rest"], ["flat"], name="flat", axis=0),
        helper.make_node("Reshape", ["d", "flat"], ["e"], name="reshape"),
        helper.make_node("MatMul", ["e", "w2"], ["f"], name="matmul"),
        helper.make_node("Softmax", ["f"], ["y"], name="softmax"),
    ]
    graph = helper.make_graph(
        nodes,
        "convnet",
        [helper.make_tensor_value_info("x", 1, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 6])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def images(batch: int) -> Arrays:
    return {"x": np.random.default_rng(batch).normal(size=(batch, 3, 8, 8)).astype(np.float32)}


def tokens(past: int) -> Arrays:
    """The inputs of a call of the small GPT behind so many tokens."""
    rng = np.random.default_rng(past)
    caches = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    return {
        "input_ids": rng.integers(0, gpt.VOCABULARY, (1, 1)),
        "position_ids": np.full((1, 1), past),
        "attention_mask": np.ones((1, past + 1), np.int64),
        **{name: rng.normal(size=(1, 4, past, 8)).astype(np.float32) for name in caches},
    }


def assert_whole(model: onnx.ModelProto, given: Arrays, results: Arrays) -> None:
    """The results are those of ONNX Runtime on the whole model."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    for name, whole in zip(names, session.run(None, given), strict=True):
        assert results[name].shape == whole.shape
        np.testing.assert_allclose(results[name], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_batches_up_to_the_planned_one(plan: dict[str, Any]) -> None:
    model = convnet()
    program = partitioner.compile(model, cluster="ideal", dims={"n": BATCH}, cache=False, **plan)
    for batch in range(1, BATCH + 1):
        assert_whole(model, images(batch), program.run(images(batch)))
        sized = program.of_sizes({"x": (batch, 3, 8, 8)})
        assert sized.verify(symbolic=True)
        assert {n: p.group for n, p in sized.plan.nodes.items()} == {
            n: p.group for n, p in program.plan.nodes.items()
        }


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[4], {**PLANS[5], "micro_batches": 1}], ids=str)
def test_lengths_of_a_decoder(plan: dict[str, Any]) -> None:
    """Its masks, and the sizes that it computes with, are those of the length."""
    model = gpt.gpt("grown")
    program = partitioner.compile(model, cluster="ideal", dims={"past": 6}, cache=False, **plan)
    for past in (1, 5, 6, 15):
        assert_whole(model, tokens(past), program.run(tokens(past)))
        assert program.verify(inputs=tokens(past))


@pytest.fixture(scope="module")
def program() -> Compiled:
    return partitioner.compile(
        convnet(), devices=2, parallel="dp", cluster="ideal", dims={"n": BATCH}, cache=False
    )


def test_few_programs_are_kept(program: Compiled) -> None:
    first = program.of_sizes({"x": (1, 3, 8, 8)})
    assert program.of_sizes({"x": [1, 3, 8, 8]}) is first
    assert program.of_sizes({"x": (BATCH, 3, 8, 8)}) is program
    gone = weakref.ref(first.ranks)
    del first
    for batch in range(9, 9 + KEPT_SIZES):
        program.run(images(batch))
    gc.collect()
    assert gone() is None
    kept = weakref.ref(program.of_sizes({"x": (12, 3, 8, 8)}).ranks)
    program.close()
    gc.collect()
    assert kept() is None


def test_what_does_not_fit_is_refused(program: Compiled) -> None:
    planned = r"input 'x' has shape \(2, 3, 9, 8\), not \(8, 3, 8, 8\) as planned: "
    with pytest.raises(BackendError, match=planned + ".*fixes it to 8"):
        program.of_sizes({"x": (2, 3, 9, 8)})
    with pytest.raises(BackendError, match=planned):
        program.run({"x": np.zeros((2, 3, 9, 8), np.float32)})
    with pytest.raises(BackendError, match="there is no input 'y', only x"):
        program.of_sizes({"y": (2, 3)})
    with pytest.raises(BackendError, match="'x' has shape"):
        program.run({"x": np.zeros((2, 3), np.float32)})
    with pytest.raises(BackendError, match="'x' holds float64 elements"):
        program.run({"x": np.zeros((2, 3, 8, 8))})


def test_a_module_is_compiled_for_its_sizes() -> None:
    module = torch.nn.Linear(4, 4).eval()
    program = partitioner.compile(module, torch.ones(4, 4), 2, parallel="tp", cache=False)
    (name,) = program.model.input_types
    with pytest.raises(BackendError, match=r"as planned: compile the module for it"):
        program.run({name: np.ones((2, 4), np.float32)})


def test_saved_plans_take_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "convnet.onnx", str(tmp_path / "p")
    onnx.save(convnet(), path)
    planned = ["--dim", f"n={BATCH}", "--devices", "2", "--parallel", "dp", "--cluster", "ideal"]
    assert main([str(path), *planned, "-q", "-o", folder]) == 0
    np.savez(tmp_path / "in.npz", x=images(3)["x"])
    out = tmp_path / "out.npz"
    given = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(out)]
    assert main(["run", folder, "--shape", "x=3,3,8,8", *given]) == 0
    with np.load(out) as results:
        assert_whole(convnet(), images(3), dict(results))
    assert "y: float32[3, 6]" in capsys.readouterr().out
    assert main(["run", folder, "--shape", "x=2,3,9,8"]) == 1
    assert main(["run", folder, "--shape", "x=2,3,8,8", "--profile"]) == 2
